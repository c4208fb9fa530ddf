"""The bundled model: plain transformers loads it, it is small, holds no code, and its answers mean something."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmprefill import Prefiller, Request
from mmprefill.answers import is_right, normalise, objects, overlap

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "mmprefill" / "assets" / "shapes-vlm"
HELDOUT = ROOT / "samples" / "heldout"
WRONG_AT_MOST = 0.1  # these weights are right on 96 % of 2,300
RECORDS = [json.loads(line) for line in (HELDOUT / "questions.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def loaded():
    model = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32).eval()
    return model, AutoProcessor.from_pretrained(MODEL)


@torch.inference_mode()
def reply(loaded, messages, images):
    model, processor = loaded
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=prompt, images=images or None, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    return processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def user(text, pictures):
    return {"role": "user", "content": [*[{"type": "image"}] * pictures, {"type": "text", "text": text}]}


def pictures(record):
    return [Image.open(HELDOUT / name) for name in record["images"]]


def test_assets_hold_weights_of_at_most_12_mb_and_no_code():
    files = [f for f in MODEL.rglob("*") if f.is_file()]
    assert {f.suffix for f in files} <= {".json", ".safetensors", ".jinja", ".md"}
    assert sum(f.stat().st_size for f in files if f.suffix == ".safetensors") <= 12_000_000
    assert "auto_map" not in (MODEL / "config.json").read_text(encoding="utf-8")


def test_context_and_grouped_queries(loaded):
    config = loaded[0].config.get_text_config()
    assert config.max_position_embeddings >= 4096
    assert config.num_key_value_heads < config.num_attention_heads
    assert loaded[0].config.model_type == "perception_lm"


def test_pictures_are_resized_as_ever():
    """Values as torchvision's antialiased bicubic gives them, to half a level of 255: another backend differs (A24)."""
    y, x = np.mgrid[0:90, 0:130]
    picture = Image.fromarray(np.stack([x * 5 % 256, y * 7 % 256, (x + y) % 256], -1).astype(np.uint8))
    with Prefiller.from_pretrained(MODEL) as prefiller:
        prepared = prefiller.intake.prepare(Request(prompt="", images=[picture]))
    pixels = prepared.inputs["pixel_values"].float()[0, 0]
    wanted = {
        (0, 0): (-1.0, -1.0, -1.0),
        (20, 30): (0.373, -0.122, -0.6),
        (55, 111): (0.043, -0.584, 0.357),
        (111, 64): (-0.09, -0.129, 0.278),
    }
    for (row, column), colours in wanted.items():
        assert pixels[:, row, column].tolist() == pytest.approx(colours, abs=0.004)
    assert float(pixels.mean()) == pytest.approx(-0.11086, abs=1e-3)


def test_heldout_split_is_small_and_covers_every_kind():
    assert len(RECORDS) == 300
    assert {r["kind"] for r in RECORDS} == {
        *("colour", "shape", "size", "yes/no", "count", "relation", "digit", "letter", "compare", "describe", "text")
    }
    assert sum(f.stat().st_size for f in HELDOUT.rglob("*") if f.is_file()) < 3_000_000
    assert all((HELDOUT / name).is_file() for r in RECORDS for name in r["images"])


def test_answers_are_right(loaded):
    some = [r for r in RECORDS if not r["held_out"]][:60]
    wrong = []
    for r in some:
        answer = reply(loaded, [user(r["question"], len(r["images"]))], pictures(r))
        if not is_right(r["kind"], answer, r["answer"]):
            wrong.append((r["id"], answer, r["answer"]))
    assert len(wrong) <= WRONG_AT_MOST * len(some), wrong


def test_a_second_turn_is_answered_about_the_same_picture(loaded):
    record = next(r for r in RECORDS if r["kind"] == "digit")
    messages = [user("How many objects are there?", 1)]
    messages += [
        {"role": "assistant", "content": reply(loaded, messages, pictures(record))},
        user(record["question"], 0),
    ]
    assert normalise(reply(loaded, messages, pictures(record))) == record["answer"]


def test_any_text_has_tokens(loaded):
    tokenizer = loaded[1].tokenizer
    for text in ("Überraschung, naïve café 東京 🙂", "\t\n  x", "0123456789"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_scoring_takes_descriptions_as_multisets():
    assert is_right("describe", "A large red circle and the digit 4.", "digit 4, large red circle")
    assert not is_right("describe", "red circle", "red circle, red circle")
    assert is_right("colour", " Red.", "red")
    assert not is_right("colour", "dark red", "red")
    assert objects("a red circle, a red circle, and the digit 4")["red circle"] == 2
    assert overlap("red circle", "red circle, blue ring") == pytest.approx(2 / 3)
