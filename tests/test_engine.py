"""The engine: failures stay with their request, any loop may call it, and it ends cleanly."""

import asyncio
import contextlib
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import checkpoints
import engines
import pytest
import torch
from transformers import DynamicCache

from mmprefill import Prefiller, Rendered, Request, flow
from mmprefill.errors import EngineClosedError, MediaError, PromptTooLongError, RequestError
from mmprefill.metrics import Observer
from mmprefill.pipeline.driver import Driver
from mmprefill.results import PrefillResult, unwrap
from mmprefill.room import Room
from mmprefill.types import Prepared


@pytest.fixture
def prefiller():
    with engines.open_prefiller("smolvlm") as prefiller:
        yield prefiller


def test_one_bad_request_fails_alone(prefiller):
    """A broken picture, an over-long prompt and a wrong message fail in place; the rest come out as if alone."""
    good = Request(prompt="what is it?", images=[checkpoints.picture(1)])
    outcomes = prefiller.prefill_many(
        [
            good,
            Request(prompt="broken", images=[b"not a picture"]),
            Request(prompt="word " * 20_000),
            Request(messages=[{"role": "user", "content": [{"type": "sound"}]}]),
            Request(prompt="fine"),
        ]
    )
    assert [type(outcome) for outcome in outcomes[1:4]] == [MediaError, PromptTooLongError, RequestError]
    assert torch.allclose(unwrap(outcomes[0]).next_token_logits, prefiller.prefill(good).next_token_logits, atol=1e-4)
    assert isinstance(outcomes[4], PrefillResult)


def test_a_failing_item_does_not_take_its_batch_along(prefiller, monkeypatch):
    """When one picture of a vision micro-batch breaks the tower, only its request fails."""
    family = prefiller.session.family
    original = family.features["image"]

    def fragile(pixel_values, **arguments):
        if (pixel_values < -0.99).all(dim=(1, 2, 3, 4)).any():
            raise RuntimeError("the tower broke")
        return original(pixel_values=pixel_values, **arguments)

    monkeypatch.setitem(family.features, "image", fragile)
    black = checkpoints.picture(1).point(lambda _: 0)
    outcomes = prefiller.prefill_many(
        [Request(prompt="a", images=[checkpoints.picture(i) if i != 2 else black]) for i in range(4)]
    )
    assert [isinstance(outcome, MediaError) for outcome in outcomes] == [False, False, True, False]


def test_the_emitted_cache_belongs_to_its_user(prefiller):
    """Generating, and growing the handed-out cache, leave the stored KV bit-identical."""
    result = prefiller.prefill("keep me", images=[checkpoints.picture(2)])
    before = {layer: (k.clone(), v.clone()) for layer, (k, v) in result.emitted.layers.items()}
    first = result.generate(6)
    cache = result.cache
    assert isinstance(cache, DynamicCache)
    prefiller.session.family.model.generate(
        input_ids=torch.cat([result.token_ids, torch.tensor([first.token_ids[0]])])[None],
        cache=cache, max_new_tokens=4, do_sample=False,
    )  # fmt: skip
    assert result.generate(6) == first
    for layer, (k, v) in result.emitted.layers.items():
        assert torch.equal(k, before[layer][0])
        assert torch.equal(v, before[layer][1])


def test_generate_samples_like_transformers(prefiller):
    """Sampling arguments act from the first new token on: the same seed gives transformers' own tokens."""
    request = Request(prompt="sample", images=[checkpoints.picture(3)])
    result = prefiller.prefill(request)
    arguments = {"do_sample": True, "temperature": 0.7, "top_k": 20}
    torch.manual_seed(3)
    ours = result.generate(12, **arguments)
    torch.manual_seed(3)
    inputs = prefiller.intake.prepare(request).inputs
    theirs = prefiller.session.family.model.generate(**inputs, max_new_tokens=12, **arguments)
    assert list(ours.token_ids) == theirs[0, len(result.token_ids) :].tolist()


def test_blocking_inside_a_running_loop(prefiller):
    """The blocking prefiller works where a loop already runs, as in a notebook."""

    async def cell():
        return prefiller.prefill("from a notebook")

    assert isinstance(asyncio.run(cell()), PrefillResult)


def test_two_engines_and_two_loops():
    """Two engines in one process, one of them used from two threads with a loop each: equal results."""
    engine, other = engines.open_engine("smolvlm"), engines.open_prefiller("qwen2_5_vl")
    results = {}

    def use(name):
        results[name] = asyncio.run(engine.prefill("the same", images=[checkpoints.picture(1)])).next_token_logits

    threads = [threading.Thread(target=use, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    other.prefill("meanwhile")
    for thread in threads:
        thread.join()
    assert torch.allclose(results[0], results[1], atol=1e-5)
    other.close()
    asyncio.run(engine.aclose())


def test_closing_ends_every_thread():
    """After `close` no thread of the engine is left, later calls fail at once, and closing again is harmless."""
    before = set(threading.enumerate())
    with checkpoints.quiet():
        prefiller = Prefiller.from_pretrained(checkpoints.cached("smolvlm"))
    prefiller.prefill("one")
    prefiller.close()
    prefiller.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(EngineClosedError):
        prefiller.prefill("two")


def test_stream_keeps_order_and_draws_lazily(prefiller):
    """Results come in the order of the requests, drawn from an iterator while earlier ones run."""
    requests = (Request(prompt=f"number {i}", id=str(i)) for i in range(20))
    assert [unwrap(outcome).id for outcome in prefiller.stream(requests)] == [str(i) for i in range(20)]


@pytest.mark.parametrize("settings", [{}, {"max_waiting": 1}])
def test_an_iterator_may_wait_for_earlier_results(settings):
    """A dialogue: what is asked next depends on what came out, so nothing may wait for the next request to be drawn."""
    heard = []

    async def talk():
        async with engines.open_engine("smolvlm", **settings) as engine:
            answered = asyncio.Event()

            async def turns():
                for i in range(3):
                    yield Request(prompt=f"turn {i}", id=str(i))
                    await answered.wait()
                    answered.clear()
                raise LookupError("nothing more to say")

            async for outcome in engine.stream(turns()):
                heard.append(unwrap(outcome).id)
                answered.set()

    with pytest.raises(LookupError):
        asyncio.run(asyncio.wait_for(talk(), 30))
    assert heard == ["0", "1", "2"]


def test_leaving_an_awaited_stream_ends_its_iterator():
    """Where it pauses."""
    left = []

    async def pausing():
        try:
            yield "a request"
            await asyncio.sleep(60)
        finally:
            left.append("pausing")

    async def leave():
        async with engines.open_engine("smolvlm") as engine:
            results = engine.stream(pausing())
            assert isinstance(await anext(results), PrefillResult)
            await results.aclose()
            assert left == ["pausing"]

    asyncio.run(asyncio.wait_for(leave(), 30))


def test_cancelling_leaves_nothing_behind(prefiller):
    """A caller that leaves takes its request out of every queue."""
    engine = prefiller._engine

    async def leave():
        tasks = [
            asyncio.ensure_future(engine.prefill("gone", images=[checkpoints.picture(i, (300, 300))])) for i in range(8)
        ]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert any(isinstance(outcome, asyncio.CancelledError) for outcome in asyncio.run(leave()))
    prefiller.prefill("still alive")
    assert engine._driver.batcher.jobs == []
    assert not engine._driver._active
    assert not engine._driver._tower
    assert not engine._stores.encoder._flying


def test_an_observer_hears_of_everything():
    """Each request is announced and ends once, as finished or failed; tower calls and steps add up."""
    heard = []

    class Ear(Observer):
        def requested(self, request_id):
            heard.append(("requested", request_id))

        def finished(self, result):
            heard.append(("finished", result.id))

        def failed(self, request_id, error):
            heard.append(("failed", request_id))

        def encoded(self, *, pictures, **_):
            heard.append(("encoded", pictures))

        def stepped(self, *, tokens, **_):
            heard.append(("stepped", tokens))

    with checkpoints.quiet():
        prefiller = Prefiller.from_pretrained(checkpoints.cached("smolvlm"), observer=Ear())
    requests = [Request(prompt="a", id="a", images=[checkpoints.picture(1)]), Request(prompt="b", id="b", images=[b""])]
    good, _ = prefiller.prefill_many(requests)
    prefiller.close()
    assert [what for what, who in heard if who == "a"] == ["requested", "finished"]
    assert [what for what, who in heard if who == "b"] == ["requested", "failed"]
    assert sum(n for what, n in heard if what == "encoded") == 1
    assert sum(n for what, n in heard if what == "stepped") == len(good.token_ids)


def test_requests_say_what_they_are():
    """A request takes exactly one of prompt, messages and input_ids."""
    with pytest.raises(ValueError, match="exactly one"):
        Request(prompt="a", messages=[])
    with pytest.raises(ValueError, match="exactly one"):
        Request()
    assert Request(prompt=Rendered("<image>")).id != Request(prompt="x").id


def test_the_callers_loop_goes_on():
    """While large pictures are prepared and requests run, the caller's own loop keeps time (G1; `benchmarks/lag.py`)."""
    engine = engines.open_engine("smolvlm")
    lags = []

    async def ticker():
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.005)
            lags.append(time.perf_counter() - started - 0.005)

    async def run():
        clock = asyncio.ensure_future(ticker())
        await engine.prefill_many(
            [Request(prompt="x", images=[checkpoints.picture(i, (1024, 1024))]) for i in range(8)]
        )
        clock.cancel()

    asyncio.run(run())
    engine.close()
    assert sorted(lags)[len(lags) // 2] < 0.05


def test_pictures_are_taken_in_as_there_is_room(monkeypatch):
    """No further picture is prepared while those that are take more than they may; a text goes past them."""
    monkeypatch.setattr(flow, "SHARED_PIXELS", 1)
    with engines.open_prefiller("smolvlm", intake_threads=1) as prefiller:
        room, held = prefiller._engine._flow._room, []
        take, lane = room.take, prefiller.session.lane
        monkeypatch.setattr(room, "take", lambda prepared: (take(prepared), held.append(room.held))[0])
        pictures = [Request(prompt=f"see {i}", images=[checkpoints.picture(i)]) for i in range(4)]
        chat = [{"role": "user", "content": [{"type": "image", "image": checkpoints.picture(5)}]}]
        bad = Request(prompt="nothing there", images=["/no/such/file.png"])
        lane.submit(time.sleep, 0.2)
        outcomes = prefiller.prefill_many([*pictures[:2], bad, *pictures[2:], chat, "only text"])
        assert isinstance(outcomes.pop(2), MediaError)
        assert all(unwrap(each).next_token_logits.isfinite().all() for each in outcomes)
        assert len(held) == 5
        assert max(held) < 2 * min(held)
        assert room.held == 0


def test_two_pictures_are_in_the_intake_only_while_none_waits():
    """Each takes several times its tensors there; with enough of them ahead of the tower a second gains nobody time."""

    async def run():
        room, inside, most = Room(limit=8000, doors=2, plenty=1000), [], []

        async def enter(name):
            async with room.entrance():
                inside.append(name)
                most.append(len(inside))
                await asyncio.sleep(0.01)
                inside.remove(name)

        await asyncio.gather(*map(enter, range(4)))
        assert max(most) == 2
        waits = Prepared(Request(prompt="x"), {"pixel_values": torch.zeros(250)}, (), 0.0)
        room.take(waits)
        most.clear()
        await asyncio.gather(*map(enter, range(4)))
        assert most == [1] * 4
        room.leave(waits)
        assert room.held == 0

    asyncio.run(run())


class Steps(Observer):
    """Requests of each step."""

    def __init__(self):
        self.requests, self.heard = [], threading.Semaphore(0)

    def stepped(self, *, requests, **_):
        self.requests.append(requests)
        self.heard.release()


class Turns:
    """An engine that lets requests out of the intake one by one, or as they come if their id is "free".

    `overhead` are the tokens in whose time a step starts: so long a call's step with room waits for the others.
    """

    def __init__(self, overhead):
        self.steps = Steps()
        with checkpoints.quiet():
            self.prefiller = Prefiller.from_pretrained(checkpoints.cached("smolvlm"), observer=self.steps)
        self.prefiller.prefill("what a step takes is known from here on")
        self.steps.requests.clear()
        self.prefiller._engine._driver.batcher.overhead = overhead
        self._gate, self._prepare = threading.Semaphore(0), self.prefiller.intake.prepare
        self.prefiller.intake.prepare = self._gated

    def _gated(self, request):
        if request.id != "free":
            assert self._gate.acquire(timeout=60)
        return self._prepare(request)

    def let(self, count=1):
        self._gate.release(count)

    @contextlib.contextmanager
    def call(self, *texts, verb="prefill_many"):
        """The verb meanwhile, until all are through."""
        with ThreadPoolExecutor() as pool, self.prefiller:
            outcomes = pool.submit(lambda: list(getattr(self.prefiller, verb)(texts)))
            while self.prefiller._engine._driver._arriving.total() < len(texts):
                time.sleep(0.001)
            yield
            assert all(isinstance(each, PrefillResult) for each in outcomes.result(timeout=60))


@pytest.mark.parametrize("verb", ["prefill_many", "stream"])
def test_requests_that_come_together_share_a_step(verb):
    """Twelve texts of one call run in one step, however they trickle out of the intake."""
    turns = Turns(overhead=math.inf)
    with turns.call(*(f"text {i}" for i in range(12)), verb=verb):
        for _ in range(12):
            turns.let()
    assert turns.steps.requests == [12]


def test_a_call_waits_no_longer_than_a_step_takes_to_start():
    """Where steps cost nothing to start, each runs as its request leaves the intake, and the lane does not idle."""
    turns = Turns(overhead=0.0)
    with turns.call("one", "two"):
        turns.let()
        assert turns.steps.heard.acquire(timeout=60)  # the first prefill's
        assert turns.steps.heard.acquire(timeout=60)
        turns.let()
    assert turns.steps.requests == [1, 1]


def test_a_single_request_is_not_held_up_by_a_call():
    """While a call's step waits for a sibling that does not come, a request that came by itself is served."""
    turns = Turns(overhead=math.inf)
    with turns.call("one", "two"):
        turns.let()
        assert turns.prefiller._engine.start(Request(prompt="x", id="free")).result(timeout=60).id == "free"
        turns.let()
    assert sum(turns.steps.requests) == 3


def test_a_sibling_that_fails_in_the_intake_is_not_waited_for():
    """The step that waited for it runs at once."""
    turns = Turns(overhead=math.inf)
    with ThreadPoolExecutor() as pool, turns.prefiller:
        outcomes = pool.submit(turns.prefiller.prefill_many, ["good", Request(prompt="bad", images=[b""])])
        turns.let(2)
        good, bad = outcomes.result(timeout=60)
    assert isinstance(good, PrefillResult)
    assert isinstance(bad, MediaError)


@pytest.mark.parametrize("turns", range(4))
def test_gathering_ends_when_it_is_cancelled(turns):
    """Also in the turns of the loop in which somebody wakes it; a loop that went on would keep an engine from closing."""

    async def run():
        batcher = SimpleNamespace(overhead=60.0)
        driver = SimpleNamespace(_wake=asyncio.Event(), _pace=1.0, batcher=batcher, _lacks=lambda work: True)
        gathering = asyncio.ensure_future(Driver._filled(driver, lambda: "a step with room"))
        for _ in range(3):
            await asyncio.sleep(0)
        driver._wake.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        gathering.cancel()
        await asyncio.wait([gathering], timeout=1)
        assert gathering.cancelled()
        gathering.cancel()

    asyncio.run(run())
