"""The benchmark's own parts: peers are named rightly, tables say what was measured, work is counted."""

import io
import json
import shutil
import sys
from collections import Counter
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import checkpoints
import pytest
import torch

from mmprefill import bench, bench_worker
from mmprefill.bench import Measured, Peer
from mmprefill.bench_workload import make_workload
from mmprefill.cli import main
from mmprefill.errors import MMPrefillError


def test_peers_are_named_with_their_interpreter():
    """NAME=PYTHON, with the folder that the peer reads where that is not the checkpoint."""
    assert Peer.parse(f"vllm={sys.executable}") == Peer("vllm", sys.executable)
    assert Peer.parse(f"openvino={sys.executable}@/a/b") == Peer("openvino", sys.executable, "/a/b")
    for wrong, said in (
        ("vllm", "NAME=PYTHON"),
        (f"llama={sys.executable}", "openvino"),
        ("vllm=/nowhere", "/nowhere"),
    ):
        with pytest.raises(ValueError, match=said):
            Peer.parse(wrong)


def test_the_table_has_ratios_and_ends_with_json():
    ours = Measured("mmprefill", "a", 300.0, 2.0, 0.5, 900, 400, (1.0,), 0.5, {"vision": 0.4}, {"linear": 0.75})
    theirs = Measured("transformers", "a", 200.0, 1.3, 0.7, 800, 400, (1.5,))
    lines = bench.as_lines([ours, theirs]).splitlines()
    assert not any("differently" in line for line in lines)
    assert "counted differently" in bench.as_lines([ours, replace(theirs, tokens=ours.tokens + 1)])
    assert lines[2].startswith("| different pictures | mmprefill | 300 | 1.54 | 50% |")
    assert "vision 400 ms; linear 75%" in "\n".join(lines)
    assert [row["system"] for row in json.loads(lines[-1])] == ["mmprefill", "transformers"]


def test_workers_count_work_and_time(tmp_path):
    """On a tiny checkpoint: both systems see the same tokens, work is counted, kinds of operation make up the whole."""
    sources = [tmp_path / "source.png"]
    checkpoints.picture(1, (320, 240)).save(sources[0])
    make_workload(tmp_path, sources, requests=2)
    rows, model = bench_worker.load_rows(tmp_path, "a", 2), str(checkpoints.cached("smolvlm"))
    with checkpoints.quiet():
        ours, more = bench_worker._mmprefill(model, "fp32", {})
        plain, count = bench_worker._transformers(model, "fp32", {})
        assert ours(rows, "x") == plain(rows, "x")
        assert count(rows)["work"] > 1e6
        told = more(rows)
    assert set(told["stages"]) >= {"intake", "vision", "prefill"}
    assert sum(told["kinds"].values()) == pytest.approx(1, abs=0.01)


@pytest.fixture
def run(monkeypatch):
    """What each run of the command had to work on: variant -> texts. Nothing is measured."""
    seen = []

    def compare(_, workload, *, variants, requests, **__):
        rows = json.loads((workload / "workload.json").read_text())
        seen.append({variant: [row["text"] for row in rows[variant][:requests]] for variant in variants})
        return [Measured("mmprefill", variant, 1, 1, 1, 1, 1, (1,)) for variant in variants]

    monkeypatch.setattr(bench, "compare", compare)
    return lambda *options: (main(["bench", "prefill", *options]), seen)


def test_a_made_up_workload_is_as_large_as_asked(run):
    """Every variant of it; fewer than usual are the first of the usual ones."""
    for options in (["--requests", "40"], [], ["--requests", "8"]):
        code, seen = run(*options)
        assert code == 0
    assert [{variant: len(texts) for variant, texts in each.items()} for each in seen] == [
        dict.fromkeys("abc", count) for count in (40, 32, 8)
    ]
    assert seen[2]["a"] == seen[1]["a"][:8]


def test_a_workload_with_too_few_requests_is_refused(run, tmp_path, capsys):
    """With how many there are; what it has is run where no number is asked for."""
    checkpoints.picture(1, (320, 240)).save(tmp_path / "source.png")
    folder = str(make_workload(tmp_path, [tmp_path / "source.png"], requests=3))
    assert run("--workload", folder, "--requests", "4")[0] == 2
    assert f"--workload {folder}: variant 'a' has 3 requests, fewer than the 4 asked for" in capsys.readouterr().err
    for options in ([], ["--requests", "3"]):
        code, seen = run("--workload", folder, *options)
        assert (code, [*map(len, seen.pop().values())]) == (0, [3, 3, 3])
    (tmp_path / "workload.json").write_text('{"a": [{"image": null, "text": "hello"}]}')
    assert run("--workload", folder)[0] == 2
    assert "variant 'b' has 0 requests, fewer than the 1 asked for" in capsys.readouterr().err
    (tmp_path / "workload.json").write_text("{")
    assert run("--workload", folder)[0] == 2
    assert "workload.json: no JSON" in capsys.readouterr().err


@pytest.fixture
def whole(tmp_path):
    """A checkpoint whose processor leaves pictures whole."""
    folder = shutil.copytree(checkpoints.cached("smolvlm"), tmp_path / "smolvlm")
    file = folder / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"]["do_image_splitting"] = False
    file.write_text(json.dumps(settings))
    return str(folder)


def test_split_cuts_pictures_for_every_system(whole, tmp_path):
    """Both see the same tokens, more of them than with pictures that are left whole."""
    checkpoints.picture(1, (320, 240)).save(tmp_path / "source.png")
    make_workload(tmp_path, [tmp_path / "source.png"], requests=2)
    rows, tokens = bench_worker.load_rows(tmp_path, "a", 2), []
    with checkpoints.quiet():
        for settings in ({}, bench.tiles(whole)):
            ours, _ = bench_worker._mmprefill(whole, "fp32", settings)
            plain, _ = bench_worker._transformers(whole, "fp32", settings)
            tokens += [ours(rows, "x"), plain(rows)]
    assert tokens[0] == tokens[1] < tokens[2] == tokens[3]


@contextmanager
def in_this_process(command, _):
    """A worker of what it would be started with, and with the orders of one repeat given beforehand."""
    said, orders = io.StringIO(), "run\n" * 3 if bench.RATE in command else "run\nquit\n"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        patch.setattr(sys, "stdin", io.StringIO(orders))
        bench_worker.main(*command[3:])
    yield bench._Worker(SimpleNamespace(stdin=io.StringIO(), stdout=iter(said.getvalue().splitlines())))


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
def test_split_reaches_the_processes(whole, tmp_path, monkeypatch):
    """Each counts as many tokens as with the setting in this process, more than without it; rows and table say so.

    One of them is a process: starting one takes longer than all that is asked of it.
    """
    process = bench._worker
    monkeypatch.setattr(
        bench, "_worker", lambda command, n: (process if "transformers" in command else in_this_process)(command, n)
    )
    monkeypatch.setattr(bench_worker, "gemm_gflops", lambda *_: 1.0)
    checkpoints.picture(1, (320, 240)).save(tmp_path / "source.png")
    make_workload(tmp_path, [tmp_path / "source.png"], requests=1)
    rows = bench_worker.load_rows(tmp_path, "a", 1)
    asked = {"variants": ["a"], "requests": 1, "repeats": 1, "dtype": "fp32", "threads": 1}
    with checkpoints.quiet():
        few, many = (bench_worker._transformers(whole, "fp32", each)[0](rows, "x") for each in ({}, bench.tiles(whole)))
    found = list(bench.compare(whole, tmp_path, split=True, **asked))
    assert [(row.system, row.split) for row in found] == [("mmprefill", True), ("transformers", True)]
    assert all(row.gflops and row.fraction for row in found)
    assert [few < row.tokens == many for row in found] == [True, True]
    assert "different pictures, split" in bench.as_lines(found)


def test_only_a_split_changes_the_processor(whole, tmp_path, monkeypatch):
    """Every process is told of it, or of nothing; rows say which."""
    started = []

    @contextmanager
    def worker(command, _):
        started.append(json.loads(command[-1]))
        measured = partial(
            Measured, tokens_per_s=1, requests_per_s=1, first_token_s=1, peak_rss_mb=1, gflops=1, seconds=()
        )
        yield SimpleNamespace(rates=[], rate=lambda: 1.0, run=lambda: None, work=0.0, measured=measured)

    monkeypatch.setattr(bench, "_worker", worker)
    with checkpoints.quiet():
        rows = [row for each in (False, True) for row in bench.compare(whole, tmp_path, variants=["a"], split=each)]
    assert [row.split for row in rows] == [False, False, True, True]
    assert ["split" in row.workload for row in rows] == [row.split for row in rows]
    assert started == [{}] * 3 + [bench.tiles(whole)] * 3


def test_a_repeat_is_measured_by_the_rate_on_both_sides_of_it(tmp_path, monkeypatch):
    """Turns rotate, and each goes with the mean of the rates before and after it."""
    told, workers = iter(range(1, 100, 2)), []

    @contextmanager
    def worker(command, _):
        measured = partial(
            Measured, tokens_per_s=1, requests_per_s=1, first_token_s=1, peak_rss_mb=1, gflops=1, seconds=()
        )
        parts = {"rates": [], "rate": lambda: next(told), "run": lambda: None, "work": 0.0, "measured": measured}
        workers.append(SimpleNamespace(**parts))
        yield workers[-1]

    monkeypatch.setattr(bench, "_worker", worker)
    list(bench.compare("a model", tmp_path, variants=["a"], repeats=2))
    assert [each.rates for each in workers] == [[2, 8], [4, 6], []]


def test_the_share_of_the_rate_is_the_median_of_the_repeats():
    worker = bench._Worker.__new__(bench._Worker)
    worker._repeats, worker.rates = [{"seconds": 2.0}, {"seconds": 4.0}, {"seconds": 1.0}], [1.0, 4.0, 2.0]
    assert worker.fraction(8e9) == 4.0  # of 4, 0.5 and 4


def test_a_processor_that_cannot_split_is_named():
    with checkpoints.quiet(), pytest.raises(ValueError, match=r"Qwen2VLImageProcessor.*do_image_splitting"):
        bench.tiles(str(checkpoints.cached("qwen2_vl")))


def test_the_rate_is_of_the_models_own_shapes():
    """Those of most weights, as the model has them; the head, which sees one row a request, is none of them."""
    model = checkpoints.cached("smolvlm")
    stock, _ = checkpoints.load(model)
    layers = {m for m in stock.modules() if isinstance(m, torch.nn.Linear)} - {stock.get_output_embeddings()}
    shapes = bench_worker.linear_shapes(str(model))
    assert 0 < len(shapes) <= 4
    assert set(shapes) <= {(m.in_features, m.out_features) for m in layers}
    held = Counter()
    for m in layers:
        held[m.in_features, m.out_features] += m.weight.numel()
    assert held[shapes[0]] == max(held.values())
    assert bench_worker.gemm_gflops(torch.float32, *shapes[0], rows=8) > 0


def test_a_worker_leaves_nothing_open():
    """Whether it answers or dies: it is gone afterwards, and so are its pipes."""
    with bench._worker([sys.executable, "-S", "-c", "print('{}', flush=True); input()"], 1) as worker:
        process = worker._process
    assert process.returncode is not None
    assert process.stdin.closed
    assert process.stdout.closed
    died = [sys.executable, "-S", "-c", "raise SystemExit(3)"]
    with pytest.raises(MMPrefillError, match="exit code 3"), bench._worker(died, 1):
        pass
