"""Going on from emitted KV token by token equals what transformers' generate and a fresh prefill give."""

import checkpoints
import pytest
import torch
from engines import open_prefiller

from mmprefill import Request
from mmprefill.pipeline.onward import Onward

FAMILIES = ["smolvlm", "qwen2_5_vl", "gemma3", "qwen3_5"]  # plain, M-RoPE, windows and two-way spans, generic


@pytest.fixture(scope="module", params=FAMILIES)
def prefiller(request):
    with open_prefiller(request.param) as opened:
        yield opened


def onward(prefiller, result, room):
    session = prefiller.session
    plan = session.route.plan
    return Onward(session.family, plan, result.emitted, result.next_token_logits, result.next_position, room)


def test_chosen_tokens_are_what_generate_gives(prefiller):
    result = prefiller.prefill("hello there", images=[checkpoints.picture(1)])
    before = [layer.keys.clone() for layer in result.cache.layers if getattr(layer, "keys", None) is not None]
    going = onward(prefiller, result, 8)
    ids = [prefiller.session.lane.call(going.choose) for _ in range(8)]
    expected = list(result.generate(8).token_ids)
    assert ids[: len(expected)] == expected
    after = [layer.keys for layer in result.cache.layers if getattr(layer, "keys", None) is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_appended_text_equals_a_prompt_that_had_it(prefiller):
    result = prefiller.prefill("hello there", images=[checkpoints.picture(1)], reuse=False)
    more = [5, 9, 7, 11]
    going = onward(prefiller, result, len(more))
    logits = prefiller.session.lane.call(going.append, more)
    whole = prefiller.prefill([*result.token_ids.tolist(), *more], images=[checkpoints.picture(1)], reuse=False)
    assert going.position == whole.next_position
    torch.testing.assert_close(logits, whole.next_token_logits, atol=1e-4, rtol=0)


def test_a_request_bounds_its_own_chunks():
    """`Request.chunk_tokens` cuts one request's prefill; the outcome is the same."""
    with open_prefiller("smolvlm") as prefiller:
        one = prefiller.prefill("hello " * 40, reuse=False)
        steps = prefiller._engine._driver.steps
        many = prefiller.prefill("hello " * 40, reuse=False, chunk_tokens=16)
        assert prefiller._engine._driver.steps - steps == -(-len(many.token_ids) // 16)
        torch.testing.assert_close(one.next_token_logits, many.next_token_logits, atol=1e-4, rtol=0)
    for wrong in (0, -1, 1.5, "8"):
        with pytest.raises(ValueError, match="chunk_tokens"):
            Request(prompt="x", chunk_tokens=wrong)
