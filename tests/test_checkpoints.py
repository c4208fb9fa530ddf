"""The test checkpoints are what they claim to be: real processors, pictures that matter, stock loading.

That loading raises no warning is held by `engines.plain`."""

import inspect

import checkpoints
import pytest
import torch
from engines import plain as loaded

ALL = [*checkpoints.FAMILIES, *checkpoints.GENERIC]
SIZES = [(64, 48), (80, 60), (64, 48), (96, 72), (40, 30)]  # one shape: PerceptionLM cannot batch others


def turn(count):
    parts = ["Compare"]
    for seed, size in enumerate(SIZES[:count]):
        parts += [checkpoints.picture(seed, size), f"with picture {seed}: 12 cats, a Straße."]
    return parts


def counts(family):
    return (1, 2, 5) if family.startswith("paligemma") else (0, 1, 2, 5)  # its processor demands a picture


def rows_of(family, model, inputs):
    """How many embedding rows the checkpoint's tower makes of these pictures."""
    known = inspect.signature(model.model.get_image_features).parameters
    features = model.model.get_image_features(
        **{name: value for name, value in inputs.items() if name in known}, return_dict=True
    )
    rows = features.deepstack_features[0][1] if family == "granite4_vision" else features.pooler_output
    return sum(part.reshape(-1, part.shape[-1]).shape[0] for part in ([rows] if torch.is_tensor(rows) else rows))


@pytest.mark.parametrize("family", ALL)
@torch.inference_mode()
def test_requests_run_and_placeholders_match_the_rows(family):
    """0, 1, 2 and 5 pictures between texts: the model runs, and each placeholder has one row."""
    model, processor = loaded(family)
    for count in counts(family):
        inputs = checkpoints.inputs_for(processor, turn(count))
        logits = model(**inputs).logits
        assert torch.isfinite(logits).all()
        assert 1 < logits.abs().max() < 8
        placeholders = int((inputs["input_ids"] == model.config.image_token_id).sum())
        assert placeholders == (rows_of(family, model, inputs) if count else 0)


@pytest.mark.parametrize("family", checkpoints.VIDEO)
@torch.inference_mode()
def test_a_video_beside_a_picture(family):
    """Videos pass processor and model, alone and beside a picture; the model takes their features precomputed."""
    model, processor = loaded(family)
    frames = [checkpoints.picture(seed) for seed in range(4)]
    if family != "glm4v":  # stock: frames have the picture's placeholder, so a picture beside them is miscounted
        both = checkpoints.inputs_for(processor, [turn(1)[1], "and", frames, "?"])
        assert torch.isfinite(model(**both).logits).all()
    inputs = checkpoints.inputs_for(processor, [frames, "What happens?"])
    known = inspect.signature(model.model.get_video_features).parameters
    features = model.model.get_video_features(
        **{name: value for name, value in inputs.items() if name in known}, return_dict=True
    )
    token = model.config.image_token_id if family == "glm4v" else model.config.video_token_id
    rows = sum(part.reshape(-1, part.shape[-1]).shape[0] for part in features.pooler_output)
    assert rows == int((inputs["input_ids"] == token).sum())
    logits = model(**inputs).logits
    del inputs["pixel_values_videos"]
    assert torch.equal(model(**inputs, mm_encoder_outputs={"video": features}).logits, logits)


@pytest.mark.parametrize("family", ALL)
def test_pictures_change_the_answer(family):
    assert checkpoints.picture_effect(*loaded(family)) > 0.05


@pytest.mark.parametrize("family", ALL)
@torch.inference_mode()
def test_generation_goes_on(family):
    """Sixteen greedy tokens neither stop early nor repeat one token."""
    model, processor = loaded(family)
    inputs = checkpoints.inputs_for(processor, turn(1))
    with checkpoints.quiet():
        tokens = model.generate(**inputs, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :]
    assert len(tokens) == 16
    assert len(set(tokens.tolist())) >= 4


@pytest.mark.parametrize("family", ALL)
def test_the_folder_is_plain_small_and_reproducible(family, tmp_path):
    """Only safetensors, JSON and a template; rebuilt byte for byte; under 3 MB."""
    cached = {file.name: file.read_bytes() for file in checkpoints.cached(family).iterdir()}
    rebuilt = {file.name: file.read_bytes() for file in checkpoints.build(family, tmp_path).iterdir()}
    assert {name.rsplit(".", 1)[-1] for name in cached} <= {"safetensors", "json", "jinja"}
    assert sum(map(len, cached.values())) < 3_000_000
    assert cached == rebuilt


@pytest.mark.parametrize("family", ALL)
def test_a_string_and_its_typed_part_render_alike(family):
    _, processor = loaded(family)
    if processor.chat_template is None:
        pytest.skip("no template, as published")
    typed = [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]
    plain = [{"role": "user", "content": "Hello there"}]
    assert processor.apply_chat_template(typed) == processor.apply_chat_template(plain)
    assert "Hello there" in processor.apply_chat_template(plain, add_generation_prompt=True)


@pytest.mark.parametrize("family", ALL)
def test_text_survives_the_tokenizer(family):
    """Placeholders are single special tokens; text with spaces, digits and rare characters comes back."""
    model, processor = loaded(family)
    tokenizer = processor.tokenizer
    text = "A  cat, 1234 Straßen\nand 猫 😀"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids).strip() == text
    assert tokenizer.added_tokens_decoder[model.config.image_token_id].special
    assert max(ids) < len(tokenizer) <= model.config.get_text_config().vocab_size
