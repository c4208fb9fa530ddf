"""`mmprefill eval`: how many questions of a dataset a model answers right, through our pipeline and through transformers.

A dataset is a JSONL file (or a folder with `questions.jsonl`) of `{"id", "kind", "images", "question", "answer"}`, with an
optional `"held_out"`; `samples/make_scenes.py` writes such folders. Answers are greedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mmprefill.answers import is_right
from mmprefill.errors import RequestError
from mmprefill.prefiller import Prefiller
from mmprefill.types import Generation, Request
from mmprefill.verify import attention

BATCH = 32  # requests prefilled and decoded together
_FIELDS = ("kind", "question", "answer")


@dataclass(frozen=True)
class Question:
    """One row of a dataset."""

    request: Request
    kind: str
    answer: str
    held_out: bool


@dataclass(frozen=True)
class Tally:
    """One line of the table: questions of a kind, and how many each system got right.

    Attributes:
        kind: the kind of question, "all", or "held-out pairs", which are in no other line.
        count: questions.
        right: right through our pipeline.
        plain: right through transformers; None if it was not asked.
        same: answers equal, token by token; None likewise.
    """

    kind: str
    count: int
    right: int
    plain: int | None = None
    same: int | None = None


@dataclass(frozen=True)
class Difference:
    """A question that our pipeline and transformers answer differently."""

    id: str
    ours: str
    theirs: str


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Questions of a dataset; picture paths are relative to its file.

    Raises:
        RequestError: naming the line that is not a question.
    """
    file = path / "questions.jsonl" if path.is_dir() else path
    with file.open(encoding="utf-8") as lines:  # unlike `splitlines` this ends a line at no separator inside a string
        return [_question(file, number, line) for number, line in enumerate(islice(lines, limit), 1)]


def _question(file: Path, number: int, line: str) -> Question:
    try:
        row = json.loads(line)
        kind, question, answer = (row[field] for field in _FIELDS)
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{file}, line {number}: not a question with {', '.join(_FIELDS)}: {error!r}") from error
    images = [file.parent / image for image in row.get("images", ())]
    request = Request(prompt=question, images=images, id=str(row.get("id", number)))
    return Question(request, kind, answer, bool(row.get("held_out")))


def answers_together(prefiller: Prefiller, questions: Seq[Question], new_tokens: int) -> Iterator[Generation]:
    """Our answers, prefilled and decoded in batches; a failed request is raised."""
    for start in range(0, len(questions), BATCH):
        batch = [question.request for question in questions[start : start + BATCH]]
        for answer in prefiller.generate_many(batch, new_tokens):
            if isinstance(answer, BaseException):
                raise answer
            yield answer


def answers_alone(prefiller: Prefiller, questions: Seq[Question], new_tokens: int) -> Iterator[Generation]:
    """Our answers, one request at a time."""
    for question in questions:
        yield prefiller.generate(question.request, new_tokens)


def plain_answers(prefiller: Prefiller, questions: Seq[Question], new_tokens: int) -> Iterator[Generation]:
    """transformers' own `generate` on the stock model and the same inputs, one request at a time."""
    with attention(prefiller.session.family.model, "sdpa"):
        for question in questions:
            prepared = prefiller.intake.prepare(question.request)
            ids = prefiller.session.lane.call(_generate, prefiller.session.family.model, prepared.inputs, new_tokens)
            yield Generation(ids, prefiller.session.text(ids))


def _generate(model: Any, inputs: dict[str, torch.Tensor], new_tokens: int) -> tuple[int, ...]:
    dtype = model.get_input_embeddings().weight.dtype
    placed = {
        k: v.to(model.device, dtype if v.is_floating_point() else None) for k, v in inputs.items() if k != "labels"
    }
    sequences = model.generate(**placed, do_sample=False, max_new_tokens=new_tokens)
    return tuple(sequences[0, inputs["input_ids"].shape[1] :].tolist())


def tally(
    questions: Seq[Question], ours: Seq[Generation], plain: Seq[Generation] | None = None
) -> tuple[list[Tally], list[Difference]]:
    """The table, kinds in alphabetical order, then all of them, then held-out pairs apart; and the answers that differ."""
    indices = range(len(questions))
    seen, held_out = ([i for i in indices if questions[i].held_out == apart] for apart in (False, True))
    groups = {
        kind: [i for i in seen if questions[i].kind == kind] for kind in sorted({questions[i].kind for i in seen})
    }
    groups |= {"all": seen} if seen else {}
    groups |= {"held-out pairs": held_out} if held_out else {}
    rows = [_tally(kind, chosen, questions, ours, plain) for kind, chosen in groups.items()]
    different = [i for i in indices if plain is not None and ours[i].token_ids != plain[i].token_ids]
    return rows, [Difference(questions[i].request.id, ours[i].text, plain[i].text) for i in different if plain]


def _tally(
    kind: str,
    chosen: Seq[int],
    questions: Seq[Question],
    ours: Seq[Generation],
    plain: Seq[Generation] | None,
) -> Tally:
    def right(answers: Seq[Generation]) -> int:
        return sum(is_right(questions[i].kind, answers[i].text, questions[i].answer) for i in chosen)

    if plain is None:
        return Tally(kind, len(chosen), right(ours))
    same = sum(ours[i].token_ids == plain[i].token_ids for i in chosen)
    return Tally(kind, len(chosen), right(ours), right(plain), same)
