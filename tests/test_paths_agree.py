"""Chunked = packed = reused = started early = alone, over random prompts, pictures, chunk sizes and cache states."""

import asyncio
import functools

import checkpoints
import pytest
from engines import cold, open_prefiller
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmprefill import Request
from mmprefill.results import unwrap

FAMILIES = list(checkpoints.FAMILIES)
TEXTS = st.text("abcdefghij <>é\n", min_size=1, max_size=120)


OPEN = []


@functools.cache
def others(family):
    """Some that chunk, pack, reuse and start early in different ways."""
    settings = [
        {"chunk_tokens": 5, "step_tokens": 23, "early_tokens": 1, "policy": "shortest"},
        {"chunk_tokens": 17, "prefix_bytes": 150_000, "encoder_bytes": 20_000, "early_tokens": 8, "ageing": 0.01},
    ]
    engines = [open_prefiller(family, **each) for each in settings]
    OPEN.extend(engines)
    return engines


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    while OPEN:
        OPEN.pop().close()
    others.cache_clear()


@st.composite
def requests(draw):
    """Requests that often begin the same, with 0-3 of four pictures, in a random layout."""
    beginnings = draw(st.lists(TEXTS, min_size=1, max_size=2))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        parts = [draw(st.sampled_from(beginnings))]
        for _ in range(draw(st.integers(0, 3))):
            parts += [draw(st.integers(1, 4)), draw(TEXTS)]
        found.append(parts)
    return found


def request_of(prefiller, parts, **fields):
    picture = {"type": "image"}
    if prefiller.intake.has_template:
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {**picture, "image": checkpoints.picture(part)}
            for part in parts
        ]
        return Request(messages=[{"role": "user", "content": content}], **fields)
    numbers = [part for part in parts if isinstance(part, int)] or [1]
    text = " ".join(part for part in parts if isinstance(part, str))
    return Request(prompt=text, images=[checkpoints.picture(number) for number in numbers], **fields)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(batch=requests(), leave=st.sets(st.integers(0, 4)), delay=st.floats(0, 0.01))
def test_every_engine_agrees(family, batch, leave, delay):
    """Whatever is cancelled on the way, the rest has the logits and the KV that each request has alone."""
    alone = cold(family)
    expected = [alone.prefill(request_of(alone, parts)) for parts in batch]
    for prefiller in others(family):
        outcomes = asyncio.run(some_leave(prefiller, batch, leave, delay))
        for wanted, outcome in zip(expected, outcomes, strict=True):
            if isinstance(outcome, asyncio.CancelledError):
                continue
            got = unwrap(outcome)
            assert (got.next_token_logits - wanted.next_token_logits).abs().max() <= 1e-4
            for layer, pair in wanted.emitted.layers.items():
                for a, b in zip(pair, got.emitted.layers[layer], strict=True):
                    assert (a - b).abs().max() <= 1e-4
        driver, stores = prefiller._engine._driver, prefiller._engine._stores
        assert not driver._active
        assert not driver._tower
        assert driver.batcher.jobs == []
        assert not stores.encoder._flying


async def some_leave(prefiller, batch, leave, delay):
    engine = prefiller._engine
    tasks = [asyncio.ensure_future(engine.prefill(request_of(prefiller, parts))) for parts in batch]
    await asyncio.sleep(delay)
    for i in leave:
        if i < len(tasks):
            tasks[i].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.wrap_future(engine.submit(settled(engine)))
    return outcomes


async def settled(engine):
    """Until the engine's loop has nothing under way but its driver."""
    rest = asyncio.all_tasks() - {asyncio.current_task()} - engine._driver.loops
    await asyncio.gather(*rest, return_exceptions=True)
    await asyncio.sleep(0)
