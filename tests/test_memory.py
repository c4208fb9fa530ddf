"""Calibration and plans: predicted bytes are the real ones, budgets fit, the cache survives damage."""

import ctypes
import gc
import itertools
import json
import os
import pickle
import threading
import weakref
from collections import deque

import checkpoints
import pytest
import torch
from engines import open_prefiller
from hypothesis import given, settings
from hypothesis import strategies as st

from mmprefill import PrefillConfig, Request, flow
from mmprefill.cli import main
from mmprefill.pipeline import calibrate, memory, merge
from mmprefill.pipeline.costs import Costs, Curve
from mmprefill.pipeline.footprint import Footprint, LayerBytes, footprint, peak
from mmprefill.pipeline.kv_cache import PAGED, LayerPlan, SequenceKV, together
from mmprefill.pipeline.prefill import Chunk, Prefill, run_step

MIB = 2**20
COSTS = Costs(Curve.line(0.03, 0.00045), Curve.line(0.01, 0.00026))


def bench_of(prefiller):
    return calibrate.Bench(prefiller.session.family, prefiller.session.route.plan, prefiller.intake)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_predicted_kv_is_the_real_one(family):
    """Bytes of a finished cache, from a few tokens of a model, equal those of prompts below and above any window."""
    with open_prefiller(family) as prefiller:
        needs = prefiller.session.lane.call(footprint, bench_of(prefiller))
        assert needs.weights > needs.token > 0
        assert needs.step_token > 0
        assert needs.patch > 0
        for request in (Request(prompt="short"), Request(prompt="a longer one " * 20, images=[checkpoints.picture(1)])):
            if not prefiller.intake.has_template and not request.images:
                continue
            result = prefiller.prefill(request)
            assert needs.kv_bytes(len(result.token_ids)) == result.kv_bytes
            assert needs.token * len(result.token_ids) == result.emitted.nbytes


@pytest.mark.parametrize(
    ("weights", "pictures", "prompts"),
    [(0, 32 * MIB, 32 * MIB), (1200 * MIB, 100 * MIB, 100 * MIB), (16 * 1024 * MIB, 256 * MIB, 512 * MIB)],
)
def test_stores_follow_the_size_of_the_model(weights, pictures, prompts):
    """A twelfth of the weights within bounds, where nobody chose; what somebody chose, be it nothing, holds."""
    assert memory.store_bytes(None, weights, memory.PICTURES) == pictures
    assert memory.store_bytes(None, weights, memory.PROMPTS) == prompts
    assert [memory.store_bytes(given, weights, memory.PROMPTS) for given in (0, 2**40)] == [0, 2**40]


def test_a_finished_request_lets_go_of_its_tensors(monkeypatch):
    """Pixels, rows and chunks are freed with the result, without the garbage collector."""
    alive, start = [], Prefill.start.__func__

    def noted(cls, *arguments, **named):
        prefill = start(cls, *arguments, **named)
        alive.extend(map(weakref.ref, (prefill, *prefill.sequence.prepared.inputs.values())))
        return prefill

    monkeypatch.setattr(Prefill, "start", classmethod(noted))
    with open_prefiller("smolvlm") as prefiller:
        gc.collect()
        gc.disable()
        try:
            results = prefiller.prefill_many(
                [Request(prompt="what is it", images=[checkpoints.picture(i)]) for i in (1, 2)]
            )
            held = list(alive)
            del results
            prefiller.prefill("something else")  # whoever holds what ran last holds this
            assert len(held) > 4
            assert not [ref for ref in held if ref() is not None]
        finally:
            gc.enable()


def test_memory_is_given_back_for_what_the_decoder_made_too(monkeypatch):
    """Once behind the intake and once behind the result, where both exceed what is let lie."""
    given = []
    monkeypatch.setattr(flow, "TIDY", 1)
    monkeypatch.setattr(memory, "give_back", lambda: given.append(1))
    with open_prefiller("smolvlm") as prefiller:
        given.clear()
        prefiller.prefill("a text")
    assert len(given) == 2


def test_a_waiting_request_has_let_go_of_its_pixels(monkeypatch):
    """From the merge on: what waits for a step holds its embeddings only, and leaves room for the next picture."""
    with open_prefiller("smolvlm") as prefiller:
        flow = prefiller._engine._flow
        prefill, seen, pixels, prepare = flow.driver.prefill, [], [], prefiller.intake.prepare

        def watched(request):
            prepared = prepare(request)
            pixels.extend(weakref.ref(t) for name, t in prepared.inputs.items() if name.startswith("pixel_"))
            return prepared

        monkeypatch.setattr(flow._intake, "prepare", watched)

        async def noted(active):
            gone = not [ref for ref in pixels if ref() is not None]
            seen.append((set(active.prefill.sequence.prepared.inputs), flow._room.held, gone))
            await prefill(active)

        monkeypatch.setattr(flow.driver, "prefill", noted)
        mine = prepare(Request(prompt="what is it", images=[checkpoints.picture(1)]))
        for request in (Request(prompt="look", images=[checkpoints.picture(2)]), mine):
            prefiller._engine.start(request).result()
        assert "pixel_values" in mine.inputs  # somebody else's stay
    assert len(seen) == 2
    assert pixels
    assert all(gone and names and not any("pixel" in name for name in names) for names, _, gone in seen)
    assert all(held < 4096 for _, held, _ in seen)


@pytest.mark.parametrize(
    ("kinds", "layers"), [(["full_attention"] * 30, 30), (["a", "b"] * 4, 1), (["full_attention"], 1)]
)
def test_kv_of_several_layers_is_allocated_at_once(kinds, layers):
    """Without a byte too many where all layers are alike, K and V of different widths included."""
    plan = LayerPlan(tuple(kinds))
    kv = SequenceKV(24, together=together(plan))
    for layer in range(len(kinds)):
        kv.write(layer, torch.full((1, 2, 24, 16), layer), torch.full((1, 2, 24, 8), -layer))
    assert together(plan) == layers
    assert kv.nbytes == len(kinds) * 2 * 24 * (16 + 8) * 8
    assert len(pickle.dumps(kv.layers)) < 1.2 * kv.nbytes + 2**14  # each tensor's own bytes, not its neighbours'
    assert all((kv.layers[i][0] == i).all() and (kv.layers[i][1] == -i).all() for i in range(len(kinds)))


class HeapInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in ["arena", "a", "b", "c", "d", "e", "f", "used", "free", "g"]]


def test_what_is_kept_of_steps_does_not_grow_the_heap():
    """Steps of several sequences with activations between their layers, the last results kept: free memory in the heaps
    does not come to half a gigabyte."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("this C library does not tell")
    libc.mallinfo2.restype = HeapInfo
    plan, kept, free = LayerPlan(("full_attention",) * 30), deque(maxlen=3), []

    def step():
        sequences = [SequenceKV(100, together=together(plan)) for _ in range(8)]
        hidden = torch.zeros(1, 800, 576)
        for layer in range(30):
            key, value = torch.zeros(1, 3, 800, 64).split([300, 500], 2)[0], torch.zeros(1, 3, 300, 64)
            for kv in sequences:
                kv.write(layer, key[:, :, :100], value[:, :, :100])
            gate = torch.zeros(1, 800, 1536)
            hidden = hidden + gate[..., :576]
        kept.append(sequences)

    def steps():  # in the heap of a thread of its own
        for _ in range(6):
            step()
            free.append(libc.mallinfo2().free)

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    assert free[-1] - free[0] < 2**27, free


def test_kv_with_pages_of_its_own_outlives_its_neighbours():
    plan = LayerPlan(("full_attention",) * 4)
    kv = SequenceKV(1024, together=together(plan))
    for layer in range(4):
        kv.write(layer, torch.full((1, 2, 1024, 16), float(layer)), torch.full((1, 2, 1024, 16), -float(layer)))
    key, value = kv.layers[2]
    assert kv.nbytes >= PAGED
    del kv
    gc.collect()
    assert (key == 2).all()
    assert (value == -2).all()


def test_the_generic_path_has_no_budgets():
    with open_prefiller("qwen3_5") as prefiller, pytest.raises(ValueError, match="generic path"):
        prefiller.session.lane.call(footprint, bench_of(prefiller))


@pytest.mark.parametrize("family", ["smolvlm", "gemma3", "qwen3_5"])
def test_calibration_is_quick_and_complete(family):
    """A tiny model of either path gives rising, positive costs."""
    with open_prefiller(family) as prefiller:
        costs = prefiller.session.lane.call(calibrate.measure, bench_of(prefiller), 1.0)
    assert costs.step(16) > 0
    assert costs.tower(100) > 0
    assert costs.intake(1) > costs.intake(0) > 0
    assert [s for _, s in costs.step.points] == sorted(s for _, s in costs.step.points)


def test_costs_are_measured_once(monkeypatch):
    """The second call reads what the first one stored; another thread count, a damaged file or `fresh` measure again."""
    measured = []
    monkeypatch.setattr(calibrate, "used_by_others", lambda: 0.0)
    monkeypatch.setattr(calibrate, "measure", lambda *_: measured.append(1) or COSTS)
    with open_prefiller("smolvlm") as prefiller:
        bench = bench_of(prefiller)
        assert calibrate.costs_of(bench) == calibrate.costs_of(bench) == COSTS
        assert len(measured) == 1
        path = calibrate.cache_path(calibrate.key_of(bench.family))
        for damage in (
            "",
            "{",
            "[]",
            '{"key": {}}',
            json.dumps({"key": calibrate.key_of(bench.family), "costs": {"step": 3}}),
        ):
            path.write_text(damage)
            assert calibrate.costs_of(bench) == COSTS
        assert len(measured) == 6
        calibrate.costs_of(bench, fresh=True)
        assert len(measured) == 7
        assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_what_a_busy_machine_measures_is_not_kept(monkeypatch):
    """Where others took processors from the measurement it is used, and said to be not worth keeping."""
    taken, said = itertools.count(0.0, 1000.0), []
    monkeypatch.setattr(calibrate, "measure", lambda *_: COSTS)
    monkeypatch.setattr(calibrate, "used_by_others", lambda: next(taken))
    with open_prefiller("smolvlm") as prefiller:
        assert calibrate.costs_of(bench_of(prefiller), say=said.append) == COSTS
        assert not calibrate.cache_path(calibrate.key_of(prefiller.session.family)).exists()
    assert "not keeping" in said[-1]


def test_others_are_whoever_is_not_us(tmp_path, monkeypatch):
    """Of the processors' 3 busy seconds (idle and waiting are none) one and a half were ours."""
    tick = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(f"cpu  {tick} 0 {tick} {50 * tick} {9 * tick} 0 0 {tick} 0 0\ncpu0 1 2 3\n")
    monkeypatch.setattr(calibrate, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "times", lambda: os.times_result((1.0, 0.5, 7.0, 7.0, 7.0)))
    assert calibrate.used_by_others() == pytest.approx(1.5)
    monkeypatch.setattr(calibrate, "STAT", tmp_path / "none")
    assert calibrate.used_by_others() == 0.0


def test_a_slow_machine_is_measured_in_time(monkeypatch):
    """Where everything takes longer than there is time for, the least is measured, once each."""
    clock = [0.0]
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock[0])

    def slow_step(bench, lengths):
        return lambda: clock.__setitem__(0, clock[0] + 0.02 * sum(lengths))

    monkeypatch.setattr(calibrate, "step_of", slow_step)
    with open_prefiller("smolvlm") as prefiller:
        steps = dict(calibrate._steps(bench_of(prefiller), 5.0))
    assert list(steps) == [16, 64, 256]
    assert clock[0] <= 0.02 * (3 * 16 + 64 + 256) + 0.01


def test_a_strange_curve_does_not_make_tiny_steps():
    """Measured beside others' work, 16 tokens may seem as fast as any: speed alone never asks for fewer than 256."""
    slow = Costs(Curve(((16, 0.1), (64, 7.0))), Curve(((100, 1.0), (200, 9.0))))
    budgets = memory.choose(Footprint(10**6, (LayerBytes(1000),), 1000, 100), slow, 10**9)
    assert budgets.step_tokens == budgets.vision_patches == 256


def test_chunks_cost_further_steps_and_reading_what_is_stored():
    costs = Costs(Curve.line(0.03, 0.0005), COSTS.tower, attention=1e-7, stored=1e-6)
    once = 0.03 + 0.0005 * 1000 + 1e-7 * 1000 * 1001 / 2
    assert costs.chunking(1000, 300) == pytest.approx((3 * 0.03 + 1e-6 * (300 + 600 + 900)) / once)
    assert costs.chunking(1000, 1000) == costs.chunking(1000, 4096) == 0


@given(st.floats(0, 1), st.floats(1e-6, 1e-3), st.floats(0, 1e-5))
def test_the_chosen_chunk_is_the_least_that_loses_little(fixed, per_token, stored):
    """A long prompt loses little in chunks as large as the step, and in smaller ones more if that was the reason."""
    costs = Costs(Curve.line(fixed, per_token), COSTS.tower, stored=stored)
    step, why = memory.step_tokens(costs)
    assert costs.chunking(memory.LONG, step) <= memory.LOSS
    if "a prompt of" in why:
        assert costs.chunking(memory.LONG, step // 2) > memory.LOSS


def test_chunks_are_chosen_for_a_prompt_that_the_model_takes():
    """A context below `LONG` bounds the prompt that the reasons speak of; a longer one does not make it longer."""
    needs = Footprint(10**6, (LayerBytes(1000),), 100, 10)
    costs = Costs(Curve.line(0.005, 1e-4), COSTS.tower)
    short, long = (memory.choose(needs, costs, 10**9, context=context) for context in (4096, 10**6))
    assert (short.step_tokens, long.step_tokens) == (2048, 4096)
    assert all("of 4096 tokens" in reason or ": 4096 tokens" in reason for reason in short.reasons[:2])
    assert all("8192 tokens" in reason for reason in long.reasons[:2])


def test_the_engine_takes_the_step_that_plan_prints(monkeypatch):
    """Both choose it for the longest prompt that the model takes."""
    monkeypatch.setattr(calibrate, "kept", lambda _: Costs(Curve.line(0.005, 1e-4), COSTS.tower))
    with open_prefiller("smolvlm") as prefiller:
        family = prefiller.session.family
    monkeypatch.setattr(family.text_config, "max_position_embeddings", 4096)
    assert flow._batcher(PrefillConfig(), family).step_tokens == 2048


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    calibrate.write(calibrate.cache_path({}), {}, COSTS)
    assert calibrate.read(calibrate.cache_path({}), {}) is None


def test_the_key_tells_models_threads_and_dtypes_apart():
    with open_prefiller("smolvlm") as one, open_prefiller("smolvlm", "bf16") as two, open_prefiller("gemma3") as three:
        keys = [calibrate.key_of(each.session.family) for each in (one, two, three)]
    assert len({json.dumps(key) for key in keys}) == 3
    assert len({calibrate.cache_path(key) for key in keys}) == 3


@settings(deadline=None)
@given(
    st.integers(1, 10**9), st.integers(0, 10**6), st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 10**11)
)
def test_a_budget_never_exceeds_its_memory(weights, token, step_token, patch, memory_bytes):
    needs = Footprint(weights, (LayerBytes(token), LayerBytes(token, 15)), step_token, patch)
    try:
        budgets = memory.choose(needs, COSTS, memory_bytes)
    except ValueError as error:
        assert "give at least" in str(error)
        return
    transient = budgets.step_tokens * step_token + budgets.vision_patches * patch
    assert budgets.used == weights + transient + budgets.kv_tokens * needs.token <= memory_bytes
    assert min(budgets.step_tokens, budgets.chunk_tokens, budgets.vision_patches) >= 1
    assert all(budgets.reasons)


def test_a_prompt_that_does_not_fit_is_refused_with_what_would():
    needs = Footprint(10**6, (LayerBytes(1000),), 100, 10)
    with pytest.raises(ValueError, match=r"100000 tokens needs .* hold \d+ tokens"):
        memory.choose(needs, COSTS, 3 * 10**6, tokens=100_000)


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * 2**30), ("800 MB", 800 * 10**6), ("1.5k", 1500), ("7", 7), ("2tib", 2 * 2**40)]
)
def test_sizes_are_read(text, size):
    assert memory.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "0", "12 parsecs"])
def test_strange_sizes_are_refused(text):
    with pytest.raises(ValueError, match="a size is a number"):
        memory.parse_bytes(text)


def test_peak_sees_what_is_held_at_once():
    """Three megabytes at once, though five were made."""

    def run():
        first, second = torch.ones(2**18), torch.ones(2**18)
        third = first + second
        del first, second
        return (third + 1).sum() + third.view(2, -1).sum()

    assert peak(torch.device("cpu"), run) == pytest.approx(3 * 2**20, abs=64)


def test_the_command_prints_and_explains(capsys):
    """`mmprefill plan`: text with reasons, JSON with the same figures, and a clear refusal."""
    folder = str(checkpoints.cached("smolvlm"))
    assert main(["plan", folder, "--tokens", "500", "--device-memory", "64MiB"]) == 0
    text = capsys.readouterr().out
    for expected in ("64.0 MiB given", "a token", "a patch", "tokens/s", "chunks of", "PrefillConfig("):
        assert expected in text
    assert main(["plan", folder, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["budgets"]["used"] <= record["budgets"]["memory"]
    assert main(["plan", folder, "--device-memory", "64KiB"]) == 2
    assert "give at least" in capsys.readouterr().err
    assert main(["plan", folder, "--tokens", "100000"]) == 2
    assert "--tokens 100000: the model's context is 8192 tokens" in capsys.readouterr().err


def test_transients_do_not_grow_with_the_square_of_the_prompt():
    """The last chunk of a prompt twice as long needs at most twice as much, and far less than one step over all (H2)."""

    def chunk(prefiller, tokens, size):
        family, plan = prefiller.session.family, prefiller.session.route.plan
        ids = calibrate.plain_ids(family, tokens)[0].tolist()
        started = Prefill.start(merge.merge(family, prefiller.intake.prepare(Request(input_ids=ids)), {}))
        while started.kv.length < tokens - size:
            run_step(family, plan, [Chunk(started, started.kv.length + size)])
        return peak(family.device, lambda: run_step(family, plan, [Chunk(started, tokens)]))

    with open_prefiller("smolvlm") as prefiller:
        short, long, whole = (
            prefiller.session.lane.call(chunk, prefiller, tokens, size)
            for tokens, size in ((1024, 128), (2048, 128), (2048, 2048))
        )
    assert long <= 2.1 * short
    assert long <= 0.35 * whole
