"""Deadlines, back-pressure, out of memory, a lost device: the right requests fail, the rest go on."""

import asyncio
import contextlib
import gc
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import checkpoints
import pytest
import torch
import transformers
from engines import open_engine

from mmprefill import AsyncPrefiller, Prefiller, Request, models
from mmprefill.encoders import vision
from mmprefill.encoders.text import Intake
from mmprefill.errors import DeadlineError, EngineClosedError, ModelError, OutOfMemoryError, RequestError
from mmprefill.pipeline import driver, merge, prefill
from mmprefill.results import PrefillResult
from mmprefill.streams import Encoded, on_a_passing_thread


@pytest.fixture
def engine():
    engine = open_engine("smolvlm")
    yield engine
    engine.close()


def texts(count):
    return [Request(prompt=f"request number {i} " + "word " * i, id=f"r{i}", reuse=False) for i in range(count)]


def test_a_deadline_passes(engine, monkeypatch):
    """A request that is not done in time fails with its own error, and leaves nothing behind."""
    original = driver.run_step
    monkeypatch.setattr(driver, "run_step", lambda *args: time.sleep(0.2) or original(*args))

    async def run():
        late = engine.prefill(Request(prompt="late", deadline=0.05))
        return await asyncio.gather(late, engine.prefill("in time"), return_exceptions=True)

    late, good = asyncio.run(run())
    assert isinstance(late, DeadlineError)
    assert "0.05" in str(late)
    assert isinstance(good, PrefillResult)
    assert engine._driver.batcher.jobs == []


def test_deadlines_run_at_the_door(monkeypatch):
    """A request that is still not let in when its deadline passes fails then, not when its turn comes."""
    engine = open_engine("smolvlm", max_waiting=1)
    original = driver.run_step
    monkeypatch.setattr(driver, "run_step", lambda *args: time.sleep(1) or original(*args))

    async def run():
        first = asyncio.ensure_future(engine.prefill("first", reuse=False))
        await asyncio.sleep(0.05)
        with pytest.raises(DeadlineError):
            await engine.prefill(Request(prompt="late", deadline=0.05))
        assert not first.done()
        return await first

    assert isinstance(asyncio.run(run()), PrefillResult)
    engine.close()


def test_a_timeout_that_is_not_the_deadline(engine, monkeypatch):
    """Another TimeoutError than that of the deadline stays what it was."""

    def slow_disk(request):
        raise TimeoutError("the disk")

    monkeypatch.setattr(engine.intake, "prepare", slow_disk)
    with pytest.raises(TimeoutError, match="the disk"):
        asyncio.run(engine.prefill("x"))


def test_out_of_memory_splits_the_step(engine, monkeypatch):
    """A step that does not fit runs in halves; only a request that does not fit alone fails, by name."""
    original, sizes = driver.run_step, []

    def small_memory(family, plan, chunks):
        sizes.append(len(chunks))
        if sum(chunk.tokens for chunk in chunks) > 60:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return original(family, plan, chunks)

    monkeypatch.setattr(driver, "run_step", small_memory)
    outcomes = asyncio.run(engine.prefill_many([*texts(6), Request(prompt="word " * 100, id="huge")]))
    assert all(isinstance(outcome, PrefillResult) for outcome in outcomes[:6])
    assert isinstance(outcomes[6], OutOfMemoryError)
    assert "huge" in str(outcomes[6])
    assert max(sizes) > 1


def test_splitting_gives_the_same_result(engine, monkeypatch):
    """A step that failed half way and ran again has stored nothing twice."""
    requests = [Request(prompt=f"{i}", hidden_states=(-1,), reuse=False) for i in range(12)]
    expected = asyncio.run(engine.prefill_many(requests))
    original, failed = prefill.logits_of, []

    def fails_once(family, hidden):
        if not failed and hidden.shape[1] > 1:
            failed.append(True)
            raise RuntimeError("at the very end of a step")
        return original(family, hidden)

    monkeypatch.setattr(prefill, "logits_of", fails_once)
    outcomes = asyncio.run(engine.prefill_many(requests))
    assert failed
    for outcome, wanted in zip(outcomes, expected, strict=True):
        assert torch.allclose(outcome.next_token_logits, wanted.next_token_logits, atol=1e-4)
        assert torch.allclose(outcome.hidden_states[-1], wanted.hidden_states[-1], atol=1e-4)


def test_one_request_that_breaks_a_step_breaks_only_itself(engine, monkeypatch):
    """What fails while a step's results are taken apart leaves the others of the step as they were; they run again."""
    good = texts(4)
    expected = asyncio.run(engine.prefill_many(good))
    monkeypatch.setattr(engine._flow, "_check_layers", lambda request: None)
    bad = Request(prompt="bad", hidden_states=(99,), reuse=False)
    *outcomes, failed = asyncio.run(engine.prefill_many([*good, bad]))
    assert isinstance(failed, IndexError)
    for outcome, wanted in zip(outcomes, expected, strict=True):
        assert torch.allclose(outcome.next_token_logits, wanted.next_token_logits, atol=1e-4)


def test_layers_that_are_not_there(engine):
    """A layer that the model does not have is refused by name, with the range."""
    layers = engine.family.text_config.num_hidden_layers
    for layer in (layers + 1, -layers - 2):
        with pytest.raises(RequestError, match=rf"'deep'.*\[-{layers + 1}, {layers}\].*{layer}"):
            asyncio.run(engine.prefill(Request(prompt="x", id="deep", hidden_states=(layer,))))
    result = asyncio.run(engine.prefill(Request(prompt="x", hidden_states=(-layers - 1, layers))))
    assert set(result.hidden_states) == {-layers - 1, layers}


def test_a_lost_device_fails_everyone(engine, monkeypatch):
    """After a fatal error every waiter fails at once, and so does whoever comes later; the cause is attached."""
    fatal = torch.AcceleratorError("device-side assert")

    def dead(*_):
        time.sleep(0.02)
        raise fatal

    monkeypatch.setattr(driver, "run_step", dead)
    outcomes = asyncio.run(engine.prefill_many([*texts(4), Request(prompt="p", images=[checkpoints.picture(1)])]))
    assert all(isinstance(outcome, EngineClosedError) for outcome in outcomes), outcomes
    assert outcomes[0].__cause__ is fatal
    with pytest.raises(EngineClosedError, match="died"):
        asyncio.run(engine.prefill("later"))


def test_a_broken_order_fails_everyone(engine, monkeypatch):
    """When the choice of what to run itself fails, nobody is left waiting for it."""

    def broken(job, now):
        raise ZeroDivisionError("a broken order")

    monkeypatch.setattr(engine._driver.batcher, "order", broken)
    requests = [*texts(3), Request(prompt="p", images=[checkpoints.picture(1)])]
    outcomes = engine.submit(engine.prefill_many(requests)).result(20)
    assert all(isinstance(outcome, EngineClosedError) for outcome in outcomes), outcomes
    assert isinstance(outcomes[0].__cause__, ZeroDivisionError)


def test_the_door_holds_back(monkeypatch):
    """At most `max_waiting` requests are inside at once, and `admission_rate` a second come in."""
    engine = open_engine("smolvlm", max_waiting=2, admission_rate=40)
    inside, most, original = 0, 0, engine.intake.prepare

    def prepare(request):
        nonlocal inside, most
        inside, most = inside + 1, max(most, inside + 1)
        try:
            return original(request)
        finally:
            inside -= 1

    monkeypatch.setattr(engine.intake, "prepare", prepare)
    started = time.perf_counter()
    outcomes = asyncio.run(engine.prefill_many(texts(9)))
    engine.close()
    assert all(isinstance(outcome, PrefillResult) for outcome in outcomes)
    assert most <= 2
    assert time.perf_counter() - started >= 8 / 40


def test_closing_drains(engine):
    """What was admitted before `close` is finished by it."""

    async def run():
        tasks = [asyncio.ensure_future(engine.prefill(request)) for request in texts(5)]
        await asyncio.sleep(0.002)
        await engine.aclose()
        return await asyncio.gather(*tasks)

    assert all(isinstance(outcome, PrefillResult) for outcome in asyncio.run(run()))


def test_a_call_that_closing_overtakes(engine, monkeypatch):
    """A request that is being handed to the engine while another thread closes it is finished, not lost."""
    original, outcomes = asyncio.run_coroutine_threadsafe, []

    def slowly(coroutine, loop):
        if threading.current_thread() is caller:
            time.sleep(0.3)
        return original(coroutine, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", slowly)
    caller = threading.Thread(target=lambda: outcomes.append(engine.start("x").result(10)), daemon=True)
    caller.start()
    time.sleep(0.1)
    engine.close()
    caller.join(10)
    assert [type(outcome) for outcome in outcomes] == [PrefillResult]


def test_engines_that_share_a_bundle(engine):
    """Two engines on one loaded model take turns at it, and both are right."""
    other = AsyncPrefiller(engine.bundle)
    requests = [Request(prompt=f"{i}", images=[checkpoints.picture(i % 3)], reuse=False) for i in range(12)]
    expected = asyncio.run(engine.prefill_many(requests))

    async def both():
        return await asyncio.gather(*(each.prefill_many(requests) for _ in range(4) for each in (engine, other)))

    for outcomes in asyncio.run(both()):
        for outcome, wanted in zip(outcomes, expected, strict=True):
            assert torch.allclose(outcome.next_token_logits, wanted.next_token_logits, atol=1e-4)
    other.close()


def test_text_starts_before_the_pictures(engine, monkeypatch):
    """The decoder works on a long text before the tower has seen the pictures behind it."""
    order = []
    for module, name in ((driver, "run_step"), (vision, "encode")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, name=name, original=original: order.append(name) or original(*a))

    def message(i):
        text = {"type": "text", "text": "before the picture " * 60}
        return [{"role": "user", "content": [text, {"type": "image", "image": checkpoints.picture(i)}]}]

    asyncio.run(engine.prefill(message(1), reuse=False))  # the first one shows whether text stands alone
    first = list(order)
    order.clear()
    asyncio.run(engine.prefill(message(2), reuse=False))
    assert first == ["encode", "run_step"]
    assert order == ["run_step", "encode", "run_step"]


class SlowEvent:
    """Stands for a CUDA event: the host is ahead of the device, which ends its work when the test says so."""

    def __init__(self, gate):
        self.gate = gate

    def synchronize(self):
        assert self.gate.wait(20)
        if isinstance(self.gate.error, Exception):
            raise self.gate.error


@pytest.fixture
def behind(engine, monkeypatch):
    """The engine on a device that lags behind what is launched on it, until the gate is opened."""
    gate, original = threading.Event(), engine._lanes.prefill.run
    gate.error = None

    async def run(function, *args):
        done = await original(function, *args)
        launched = "run_step" in getattr(function, "__qualname__", "") or function is driver.run_step
        return Encoded(done.value, SlowEvent(gate)) if launched else done

    monkeypatch.setattr(engine._lanes.prefill, "run", run)
    monkeypatch.setattr(Encoded, "take", lambda self: self.value)
    yield gate
    gate.set()


def test_a_result_is_given_when_the_device_has_it(engine, behind):
    """Launching is not finishing; the engine's loop goes on meanwhile, and launches one step ahead, no more."""
    first = engine.start(Request(prompt="first", reuse=False))
    wait_for(lambda: engine._driver.steps == 1)
    rest = [engine.start(request) for request in texts(3)]
    wait_for(lambda: engine._driver.steps == 2)
    engine.submit(asyncio.sleep(0.1)).result(5)  # the loop is not held up
    assert not first.done()
    assert engine._driver.steps == 2
    behind.set()
    assert all(isinstance(each.result(20), PrefillResult) for each in [first, *rest])


def test_an_error_of_the_device_fails_everyone(engine, behind):
    """What a device reports after the launch reaches every waiter."""
    behind.error = torch.AcceleratorError("device-side assert")
    waiting = [engine.start(request) for request in texts(2)]
    wait_for(lambda: engine._driver.steps == 1)
    behind.set()
    for each in waiting:
        with pytest.raises(EngineClosedError, match="device-side assert"):
            each.result(20)


def wait_for(condition, seconds=20.0):
    ends = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < ends
        time.sleep(0.002)


def our_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("mmprefill")}


def test_an_engine_that_is_dropped_leaves_no_thread():
    """Nobody closed it: its threads end when it is collected, the lane's when the last result is; that one still works."""
    before = our_threads()
    with checkpoints.quiet():
        engine = Prefiller.from_pretrained(checkpoints.cached("smolvlm"))
    result = engine.prefill("what", images=[checkpoints.picture(1)])
    expected = result.generate(3)
    del engine
    assert ended(before, but=1)
    assert result.generate(3) == expected
    del result
    assert ended(before, but=0)


def ended(before, but):
    """Whether at most so many new threads are left, soon."""
    for _ in range(200):
        gc.collect()
        if len(our_threads() - before) <= but:
            return True
        time.sleep(0.05)
    return False


def test_closing_at_once(engine, monkeypatch):
    """`close(cancel=True)` fails what was admitted, wherever it is, instead of finishing it."""
    held = Held(monkeypatch, driver, "run_step")
    waiting = [engine.start(request) for request in (*texts(3), Request(prompt="p", images=[checkpoints.picture(1)]))]
    held.wait()
    closing = threading.Thread(target=engine.close, kwargs={"cancel": True})
    closing.start()
    wait_for(lambda: any(each.done() for each in waiting))
    held.go()
    closing.join(20)
    for each in waiting:
        with pytest.raises(EngineClosedError, match="closed before"):
            each.result(20)


def says_true(script):
    """In an interpreter of its own, which ends by itself."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.end_to_end
def test_a_forgotten_engine_does_not_keep_the_interpreter():
    """A script that never closes its engine, with requests under way, still ends."""
    script = (
        "from mmprefill import AsyncPrefiller\n"
        f"engine = AsyncPrefiller.from_pretrained({str(checkpoints.cached('smolvlm'))!r})\n"
        "waiting = [engine.start(f'request {i}') for i in range(20)]\n"
        "print(len(waiting[0].result().token_ids) > 0)\n"
    )
    says_true(script)


@pytest.mark.end_to_end
def test_a_request_under_way_when_the_main_thread_ends():
    """Another thread that waits for its last step still gets the result."""
    script = (
        "import threading, time\n"
        "from mmprefill import Prefiller\n"
        "from mmprefill.pipeline import driver\n"
        "step, begun = driver.run_step, threading.Event()\n"
        "driver.run_step = lambda *inputs: begun.set() or time.sleep(1) or step(*inputs)\n"
        f"prefiller = Prefiller.from_pretrained({str(checkpoints.cached('smolvlm'))!r})\n"
        "threading.Thread(target=lambda: print(len(prefiller.prefill('x').token_ids) > 0)).start()\n"
        "begun.wait()\n"
    )
    says_true(script)


class Held:
    """A function of the pipeline that waits, from its first call on, until it is let go."""

    def __init__(self, monkeypatch, module, name):
        self._reached, self._gate, original = threading.Event(), threading.Event(), getattr(module, name)

        def run(*args, **kwargs):
            self._reached.set()
            assert self._gate.wait(60)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, run)

    def wait(self):
        assert self._reached.wait(60)

    def go(self):
        self._gate.set()


async def settled(engine):
    """Until the engine's loop has nothing under way but its driver."""
    while rest := asyncio.all_tasks() - {asyncio.current_task()} - engine._driver.loops:
        await asyncio.gather(*rest, return_exceptions=True)


STAGES = {
    "intake": (Intake, "prepare"),
    "vision": (vision, "encode"),
    "merge": (merge, "merge"),
    "step": (driver, "run_step"),
}


@pytest.mark.parametrize("stage", ["door", *STAGES, "prefix"])
def test_leaving_at_any_stage(monkeypatch, stage):
    """A request cancelled at the door, in intake, tower, merge or step, or waiting for another's prefix, leaves nothing."""
    room = 1 if stage == "door" else 8
    engine = open_engine("smolvlm", max_waiting=room, prefix_bytes=0 if stage == "merge" else 2**20)
    held = Held(monkeypatch, *STAGES.get(stage, (driver, "run_step")))
    request = Request(
        prompt="a beginning that is shared by both of them, and longer than one block", images=[checkpoints.picture(1)]
    )
    first = engine.start(request)
    held.wait()
    leaver = engine.start(request) if stage in ("door", "prefix") else first
    engine.submit(asyncio.sleep(0.1)).result(20)
    assert leaver.cancel()
    held.go()
    engine.submit(settled(engine)).result(60)
    stores = engine._stores
    assert not engine._driver._active
    assert not engine._driver._tower
    assert not engine._driver._moving
    assert engine._driver.batcher.jobs == []
    assert not stores.encoder._flying
    assert engine._flow._door._value == room
    assert set(stores.prefix._wholes.values()) <= set(stores.prefix._kept)
    assert engine.start(request).result(60).next_token_logits.isfinite().all()
    engine.close()


def test_out_of_memory_in_the_tower(engine, monkeypatch):
    """A tower call that does not fit runs in halves; only a picture that does not fit alone fails its request."""
    original, sizes = vision.encode, []

    def small_memory(family, batch):
        sizes.append(len(batch))
        if len(batch) > 2 or any((item.tensors["pixel_values"] < -0.99).all() for item in batch):
            raise torch.OutOfMemoryError("tried to allocate too much")
        return original(family, batch)

    monkeypatch.setattr(vision, "encode", small_memory)
    pictures = [checkpoints.picture(i) for i in range(6)]
    pictures[3] = pictures[3].point(lambda _: 0)
    engine._lanes.prefill.submit(time.sleep, 0.3)
    outcomes = asyncio.run(engine.prefill_many([Request(prompt=f"{i}", images=[p]) for i, p in enumerate(pictures)]))
    assert [isinstance(outcome, OutOfMemoryError) for outcome in outcomes] == [i == 3 for i in range(6)]
    assert max(sizes) > 2


@pytest.mark.parametrize("family", ["smolvlm", "gemma3"])
def test_items_larger_than_every_budget(family):
    """Budgets of one token and one patch: pictures and two-way spans run alone, nobody waits for ever, nothing changes."""
    requests = [Request(prompt="larger", images=[checkpoints.picture(i)]) for i in range(2)]
    logits = []
    for sizes in ({}, {"step_tokens": 1, "vision_patches": 1}):
        engine = open_engine(family, prefix_bytes=0, **sizes)
        outcomes = engine.submit(engine.prefill_many(requests)).result(120)
        logits.append(torch.stack([outcome.next_token_logits for outcome in outcomes]))
        engine.close()
    assert (logits[0] - logits[1]).abs().max() <= 1e-4


def test_loading_ends_with_its_thread(monkeypatch):
    """The weights come by a thread of their own, and with it goes its OpenMP team; what it raises is raised here."""
    kind, seen = models.AutoModelForImageTextToText, []
    original = kind.from_pretrained

    def watched(*args, **kwargs):
        seen.append(threading.current_thread())
        return original(*args, **kwargs)

    monkeypatch.setattr(kind, "from_pretrained", watched)
    with checkpoints.quiet():
        models.load(checkpoints.cached("smolvlm"))
    (thread,) = seen
    thread.join(timeout=10)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
    with pytest.raises(ZeroDivisionError):
        on_a_passing_thread(divmod, 1, 0)


def test_an_error_of_a_passing_thread_keeps_nothing():
    """What a failed load had made goes with its error, not at the next collection."""

    class Half:
        pass

    made = []

    def fails():
        half = Half()
        made.append(weakref.ref(half))
        raise OSError("no more of it")

    gc.disable()
    try:
        with contextlib.suppress(OSError):
            on_a_passing_thread(fails)
        assert made[0]() is None
    finally:
        gc.enable()


def test_ctrl_c_while_loading_waits_for_its_end():
    """transformers patches torch while it loads: who tries again at once must not find it half patched."""
    ended = []

    def slow():
        time.sleep(0.5)
        ended.append(True)

    interrupt = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        on_a_passing_thread(slow)
    assert ended


def test_several_load_at_once():
    """Each gets its model whole, and the process is as it was."""
    before = transformers.PreTrainedModel.tie_weights
    with checkpoints.quiet(), ThreadPoolExecutor(3) as pool:
        folder = checkpoints.cached("smolvlm")
        bundles = [*pool.map(lambda _: models.load(folder, dtype="bf16"), range(3))]
    assert len({bundle.fingerprint for bundle in bundles}) == 1
    assert transformers.PreTrainedModel.tie_weights is before


def test_what_cannot_be_loaded(tmp_path):
    """Damaged weights are the checkpoint's fault; a dtype that there is not is the caller's, told before any work."""
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoints.cached("smolvlm"), folder)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    with checkpoints.quiet(), pytest.raises(ModelError, match="cannot load"):
        models.load(folder)
    with pytest.raises(ValueError, match="dtype must be one of"):
        models.load(tmp_path / "nowhere", dtype="int8")
