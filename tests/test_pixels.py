"""Pictures that several requests show at once go through the image processor once, and come out as if alone."""

import copy
import gc
import pickle
import threading

import checkpoints
import engines
import pytest
import torch
from transformers import AutoProcessor

from mmprefill import PrefillConfig, Request
from mmprefill.encoders import families, pixels
from mmprefill.encoders.text import Intake
from mmprefill.results import unwrap


@pytest.mark.parametrize("family", [*checkpoints.FAMILIES, *checkpoints.GENERIC])
def test_shared_is_what_the_processor_returns(family):
    """Twice the same pictures: the same tensors, and equal in everything to the processor's own output."""
    processor = engines.plain(family)[1]
    stand_in = pixels.shared(processor).image_processor
    pictures = [[checkpoints.picture(1), checkpoints.picture(2)]]
    first, second = (stand_in(copy.deepcopy(pictures), return_tensors="pt") for _ in range(2))
    alone = processor.image_processor(pictures, return_tensors="pt")
    assert set(first) == set(second) == set(alone)
    for name, value in alone.items():
        if isinstance(value, torch.Tensor):
            assert first[name] is second[name]
            assert torch.equal(first[name], value)
        else:
            assert first[name] == second[name] == value


def test_nothing_is_shared_by_mistake():
    """Other pixels, another order and other arguments are computed anew; so is everything once nobody holds it."""
    with checkpoints.quiet():
        processor = AutoProcessor.from_pretrained(checkpoints.cached("qwen2_5_vl"))
    stand_in = pixels.shared(processor).image_processor
    one, two = checkpoints.picture(1), checkpoints.picture(2)
    first = stand_in([one, two], return_tensors="pt")
    for images, arguments in (([two, one], {}), ([one], {}), ([one, two], {"do_rescale": False})):
        assert stand_in(images, return_tensors="pt", **arguments)["pixel_values"] is not first["pixel_values"]
    first.pop("image_grid_thw")  # the user's own record, not ours
    assert "image_grid_thw" in stand_in([one, two], return_tensors="pt")
    del first
    gc.collect()
    assert not stand_in._outputs


def test_questions_about_one_picture_prepare_it_once(monkeypatch):
    """Of eight questions of one call only the first is resized, and counted; the answers are those of each alone."""
    requests = [Request(prompt=f"question {i}", images=[checkpoints.picture(1)]) for i in range(8)]
    with engines.open_prefiller("smolvlm", intake_threads=1) as prefiller:
        kind, calls = type(prefiller.session.bundle.processor.image_processor), []
        preprocess = kind.preprocess
        monkeypatch.setattr(kind, "preprocess", lambda *a, **k: (calls.append(1), preprocess(*a, **k))[1])
        prepare, through, done = prefiller.intake.prepare, [], threading.Event()

        def prepared(request):
            result = prepare(request)
            through.append(request)
            _ = len(through) == 8 and done.set()
            return result

        monkeypatch.setattr(prefiller.intake, "prepare", prepared)
        room, held = prefiller._engine._flow._room, []
        take = room.take
        monkeypatch.setattr(room, "take", lambda prepared: (take(prepared), held.append(room.held)))
        prefiller.session.lane.submit(done.wait, 60)  # the first is on its way until all are through the intake
        together = [unwrap(each) for each in prefiller.prefill_many(requests)]
        assert len(calls) == 1
        assert len(held) == 8
        assert held[7] < 1.1 * held[0]
        assert room.held == 0
        alone = prefiller.prefill(Request(prompt="question 3", images=[checkpoints.picture(1)], reuse=False, salt="x"))
    assert torch.allclose(together[3].next_token_logits, alone.next_token_logits, atol=1e-4)


@pytest.mark.parametrize("family", [*checkpoints.FAMILIES, *checkpoints.GENERIC])
def test_pictures_of_a_request_are_known_by_their_digest(family, monkeypatch):
    """The intake has hashed them when they were decoded; no processor brings other images than it was given."""
    model, processor = engines.plain(family)
    keys, unknown, key = [], [], pixels._key

    def seen(images, arguments):
        unknown.extend(image for image in pixels._flat(images) if not hasattr(image, pixels._MARK))
        keys.append(key(images, arguments))
        return keys[-1]

    monkeypatch.setattr(pixels, "_key", seen)
    taker = Intake(pixels.shared(processor), families.describe(model).placeholders, PrefillConfig(), 8192)
    pictures = [checkpoints.picture(1), checkpoints.picture(2)]
    first, again, swapped = (
        taker.prepare(Request(prompt="x", images=images)) for images in (pictures, pictures, pictures[::-1])
    )
    assert keys[0] == keys[1] != keys[2]
    assert not unknown
    for name, tensor in first.inputs.items():
        assert torch.equal(tensor, again.inputs[name])
    assert not torch.equal(first.inputs["pixel_values"], swapped.inputs["pixel_values"])


def test_what_is_made_of_a_marked_picture_is_not_marked():
    """Nor is a marked picture ever taken for an unmarked one, whatever its pixels."""
    picture = checkpoints.picture(1)
    before = pixels._key([picture], {})
    pixels.mark([picture], [b"0" * 32])
    assert pixels._key([picture], {}) != before
    for made in (picture.copy(), copy.copy(picture), copy.deepcopy(picture), picture.convert("RGB")):
        assert pixels._key([made], {}) == before


def test_it_can_be_copied():
    """As users copy a processor to change a setting of it, which an engine's own refuses; pickled it is still shared."""
    with checkpoints.quiet():
        plain = AutoProcessor.from_pretrained(checkpoints.cached("smolvlm"))
    processor = pixels.shared(plain)
    size = processor.image_processor.size
    for twin in (copy.deepcopy(processor).image_processor, copy.copy(processor.image_processor)):
        assert twin.size == size
        assert not hasattr(twin, "no_such_setting")
        twin.size = {"longest_edge": 7}
        assert type(twin) is type(plain.image_processor)
    with pytest.raises(AttributeError, match="give size to from_pretrained, in processor_kwargs, or set it on a copy"):
        processor.image_processor.size = {"longest_edge": 7}
    assert processor.image_processor.size == plain.image_processor.size == size
    assert isinstance(pickle.loads(pickle.dumps(processor)).image_processor, pixels.SharedPixels)
