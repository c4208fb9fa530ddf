"""Real photographs go through every packed family and give what plain transformers gives."""

from pathlib import Path

import checkpoints
import engines
import pytest
import torch
from PIL import Image

from mmprefill import MediaLimits
from mmprefill.media import load_picture
from mmprefill.results import unwrap

PHOTOS = sorted((Path(__file__).resolve().parent.parent / "samples/photos").glob("*.jpg"))
FIRST = ("smolvlm", "qwen3_vl", "gemma3")
FEW = ("rocket", "cat_sideways", "photographer")  # wide and in colour, on its side, grey
QUESTION = "What is in this picture?"


def decoded(photo):
    return load_picture(photo, MediaLimits())


def test_the_photographs_cover_what_cameras_write():
    """Colour and grey, upright and on their side by EXIF; all decode to RGB, upright."""
    stored = {}
    for photo in PHOTOS:
        with Image.open(photo) as image:
            stored[photo.stem] = image.mode, image.size
    assert len(PHOTOS) >= 6
    assert {mode for mode, _ in stored.values()} == {"RGB", "L"}
    sideways = decoded(next(photo for photo in PHOTOS if photo.stem == "cat_sideways"))
    assert stored["cat_sideways"][1] == stored["cat"][1][::-1]
    assert (sideways.width, sideways.height) == stored["cat"][1]


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_photographs_equal_plain_transformers(family):
    """Several in one batch, of one family of each kind all: the next-token logits are those of a single forward each."""
    photos = [photo for photo in PHOTOS if family in FIRST or photo.stem in FEW]
    prefiller, (plain, processor) = engines.cold(family), engines.plain(family)
    assert prefiller.session.route.packed
    outcomes = prefiller.prefill_many({"prompt": QUESTION, "images": [photo]} for photo in photos)
    assert len(photos) >= 3
    for photo, result in zip(photos, map(unwrap, outcomes), strict=True):
        inputs = checkpoints.inputs_for(processor, [decoded(photo).to_pil(), QUESTION])
        assert result.token_ids.tolist() == inputs["input_ids"][0].tolist()
        with torch.inference_mode():
            expected = plain(**inputs).logits[0, -1]
        torch.testing.assert_close(result.next_token_logits, expected, atol=1e-4, rtol=0)
