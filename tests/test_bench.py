"""The benchmark's own parts: peers are named rightly, tables say what was measured, work is counted."""

import json
import sys

import checkpoints
import pytest

from mmprefill import bench, bench_worker
from mmprefill.bench import Measured, Peer


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
    assert "| mmprefill | 300 | 1.50 | 50% |" in lines[2]
    assert "vision 400 ms; linear 75%" in "\n".join(lines)
    assert [row["system"] for row in json.loads(lines[-1])] == ["mmprefill", "transformers"]


def test_workers_count_work_and_time(tmp_path):
    """On a tiny checkpoint: both systems see the same tokens, work is counted, kinds of operation make up the whole."""
    sources = [tmp_path / "source.png"]
    checkpoints.picture(1, (320, 240)).save(sources[0])
    bench.make_workload(tmp_path, sources, requests=2)
    rows, model = bench_worker.load_rows(tmp_path, "a", 2), str(checkpoints.cached("smolvlm"))
    with checkpoints.quiet():
        ours, more = bench_worker._mmprefill(model, "fp32")
        plain, count = bench_worker._transformers(model, "fp32")
        assert ours(rows, "x") == plain(rows, "x")
        assert count(rows)["work"] > 1e6
        told = more(rows)
    assert set(told["stages"]) >= {"intake", "vision", "prefill"}
    assert sum(told["kinds"].values()) == pytest.approx(1, abs=0.01)


def test_a_worker_leaves_nothing_open():
    """Whether it answers or dies: it is gone afterwards, and so are its pipes."""
    with bench._worker([sys.executable, "-S", "-c", "print('{}', flush=True); input()"], 1) as worker:
        process = worker._process
    assert process.returncode is not None
    assert process.stdin.closed
    assert process.stdout.closed
    died = [sys.executable, "-S", "-c", "raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match="exit code 3"), bench._worker(died, 1):
        pass
