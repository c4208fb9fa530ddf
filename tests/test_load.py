"""The load benchmark runs, on a clock and on a live engine."""

import json
import runpy
import sys
from pathlib import Path

import checkpoints
import pytest

from mmprefill.pipeline.costs import Costs, Curve

LOAD = Path(__file__).resolve().parent.parent / "benchmarks" / "load.py"
COSTS = Costs(Curve.line(0.03, 0.00045), Curve.line(0.01, 0.00026))


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "costs.json").write_text(json.dumps({"costs": COSTS.as_dict()}))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["load.py", *map(str, arguments), "--costs", str(tmp_path / "costs.json")])
        with checkpoints.quiet():
            runpy.run_path(str(LOAD), run_name="__main__")
        *table, last = capsys.readouterr().out.strip().splitlines()
        return table, json.loads(last)

    return call


def test_simulated(run):
    """A table for each load with and without repeated content, and the same figures as JSON."""
    table, cells = run("simulate", "--requests", 300, "--loads", 0.7)
    assert len(cells) == 2
    assert {each["rows"]["loop"]["all"]["count"] for each in cells} == {300}
    assert sum(line.startswith("| default:") for line in table) == 2


def test_live(run):
    """Every request of a live run has its time to first token, beside what the simulator says."""
    table, (cell,) = run("live", checkpoints.cached("smolvlm"), "--requests", 8, "--dtype", "fp32")
    assert cell["rows"]["the engine, live"]["all"]["count"] == 8
    assert cell["rows"]["the engine, live"]["all"]["mean"] > 0
    assert any("simulated over live" in line for line in table)
