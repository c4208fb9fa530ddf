"""Charts of what ran and of what a plan says: files that open, and mistakes told before anything runs."""

import importlib.util
import json

import checkpoints
import pytest
from PIL import Image

from mmprefill import plots
from mmprefill.bench import Measured
from mmprefill.cli import main
from mmprefill.pipeline import calibrate
from mmprefill.pipeline.costs import Costs, Curve
from mmprefill.trace import Bar

# Not importorskip: that would import it wherever tests are collected.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")


@pytest.fixture
def smol():
    with checkpoints.quiet():
        yield str(checkpoints.cached("smolvlm"))


@pytest.mark.parametrize("name", ["t.png", "t.html"])
def test_run_draws_its_timeline(capsys, smol, tmp_path, name):
    """PNG opens as a picture; HTML is a page of its own whose drawing has a name, and text that is text."""
    checkpoints.picture(1).save(tmp_path / "a.png")
    code = main(["run", "hi", "--image", str(tmp_path / "a.png"), "--model", smol, "--plot", str(tmp_path / name)])
    assert code == 0
    assert name in capsys.readouterr().err
    if name.endswith("png"):
        with Image.open(tmp_path / name) as drawn:
            assert drawn.size[0] > 800
    else:
        page = (tmp_path / name).read_text()
        assert 'aria-label="What the lanes did"' in page
        assert "decoder" in page
        assert "<script" not in page


def test_plan_draws_memory_and_speed(capsys, smol, tmp_path, monkeypatch):
    """The chart and the JSON come from the same numbers."""
    costs = Costs(Curve.line(0.03, 0.00045), Curve.line(0.01, 0.00026))
    monkeypatch.setattr(calibrate, "costs_of", lambda *_, **__: costs)
    arguments = ["plan", smol, "--device-memory", "1GiB", "--json", "--plot", str(tmp_path / "p.html")]
    assert main(arguments) == 0
    budgets = json.loads(capsys.readouterr().out)["budgets"]
    assert f"step of {budgets['step_tokens']}" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(("name", "message"), [("t.pdf", ".png or .html"), ("missing/t.png", "no folder")])
def test_mistakes_are_told_first(capsys, smol, tmp_path, name, message):
    """Nothing is loaded for a file that cannot be drawn."""
    assert main(["run", "hi", "--model", smol, "--plot", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_ran():
    with pytest.raises(ValueError, match="nothing ran"):
        plots.timeline([])
    assert plots.timeline([Bar("decoder", "step", 1.0, 1.0, {})])


def test_bench_draws_each_system_under_the_roof():
    """A panel a workload; beside each bar its multiple of transformers'; a line where all of the matrix rate would be."""
    speeds = {"mmprefill": (300.0, 0.6), "transformers": (200.0, 0.4)}
    rows = [
        Measured(name, v, rate, 1, 1, 1, 1, (1.0,), part, split=True)
        for v in "ac"
        for name, (rate, part) in speeds.items()
    ]
    first, second = plots.throughput(rows).axes
    assert [first.get_title("left"), second.get_title("left")] == ["different pictures, split", "text only"]
    assert [text.get_text() for text in first.texts] == ["200, 1.00x, 40%", "300, 1.50x, 60%"]
    assert first.lines[0].get_xdata()[0] == pytest.approx(500)
