"""`mmprefill eval` counts what is right, beside transformers, and lists what differs."""

import json

import checkpoints
import pytest

from mmprefill import Prefiller, evaluate
from mmprefill.cli import main
from mmprefill.errors import RequestError
from mmprefill.types import Generation


def write(folder, rows):
    (folder / "questions.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    checkpoints.picture(1).save(folder / "a.png")
    return folder


def row(i, kind="colour", answer="red", **more):
    return {"id": str(i), "kind": kind, "images": ["a.png"], "question": f"what {i}?", "answer": answer, **more}


def test_tally(tmp_path):
    """Rights are counted by kind and in all, apart for held-out pairs; descriptions match in any order and case."""
    rows = [row(0), row(1, answer="blue", held_out=True), row(2, kind="describe", answer="a red ring and a blue star")]
    questions = evaluate.read_questions(write(tmp_path, rows))
    ours = [Generation((1,), "Red."), Generation((2,), "green"), Generation((3,), "a blue star, a red ring")]
    plain = [Generation((1,), "Red."), Generation((9,), "blue"), Generation((3,), "a blue star, a red ring")]
    table, differences = evaluate.tally(questions, ours, plain)
    assert {line.kind: (line.count, line.right, line.plain, line.same) for line in table} == {
        "colour": (1, 1, 1, 1),
        "describe": (1, 1, 1, 1),
        "all": (2, 2, 2, 2),
        "held-out pairs": (1, 0, 1, 0),
    }
    assert [(each.id, each.ours, each.theirs) for each in differences] == [("1", "green", "blue")]


def test_our_answers_equal_transformers(tmp_path, capsys):
    """Batched and alone, the answers are those of transformers' own generate."""
    write(tmp_path, [row(i) for i in range(5)])
    options = ["--tokens", "6", "--json", "--dtype", "fp32", "--against", "transformers"]
    for extra in ([], ["--alone"]):
        with checkpoints.quiet():
            code = main(["eval", str(checkpoints.cached("smolvlm")), str(tmp_path), *options, *extra])
        report = json.loads(capsys.readouterr().out)
        assert code == 0
        assert report["differences"] == []
        assert report["rows"][-1]["same"] == report["rows"][-1]["count"] == 5


def test_a_line_that_is_no_question(tmp_path):
    """A bad line is named."""
    (tmp_path / "questions.jsonl").write_text('{"id": "1", "kind": "x"}')
    with pytest.raises(RequestError, match="line 1"):
        evaluate.read_questions(tmp_path)


@pytest.fixture
def prefiller():
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached("smolvlm")) as prefiller:
        yield prefiller


def test_a_broken_picture_is_raised(tmp_path, prefiller):
    """A question whose picture is missing stops the evaluation with its name."""
    write(tmp_path, [row(0)])
    (tmp_path / "a.png").unlink()
    with pytest.raises(RequestError, match="'0'"):
        list(evaluate.answers_together(prefiller, evaluate.read_questions(tmp_path), 4))


def test_lines_end_at_line_feeds_only(tmp_path):
    """A line separator inside a string (U+2028, U+0085) is part of the question, as JSON has it."""
    asked = "what\u2028is\u0085it\x1c?"
    row = {"kind": "count", "question": asked, "answer": "1", "images": []}
    (tmp_path / "questions.jsonl").write_text(
        json.dumps(row, ensure_ascii=False) + "\n" + json.dumps(row), encoding="utf-8"
    )
    assert [each.request.prompt for each in evaluate.read_questions(tmp_path)] == [asked, asked]
    assert len(evaluate.read_questions(tmp_path, 1)) == 1
