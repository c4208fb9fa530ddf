"""Scores of choices after prefilled prompts, many prompts together."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from mmprefill.encoders.messages import check_text
from mmprefill.pipeline import choices as pipeline
from mmprefill.types import Choice

if TYPE_CHECKING:
    from mmprefill.results import PrefillResult, Session


def token_ids(session: Session, choices: Seq[str]) -> list[tuple[int, ...]]:
    """Tokens of each choice, on its own and without special tokens.

    Raises:
        ValueError: for what is no list of strings, and for a choice without a token.
    """
    if isinstance(choices, str):
        raise ValueError(f"choices must be a list of strings, got one: {choices!r}")
    if not isinstance(choices, Iterable):
        raise ValueError(f"choices must be a list of strings, got {type(choices).__name__}")
    for number, choice in enumerate(choices, 1):
        if not isinstance(choice, str):
            raise ValueError(f"choice {number} must be a string, got {type(choice).__name__}")
        check_text(f"choice {number}", choice)
    found = [tuple(session.tokenizer(choice, add_special_tokens=False).input_ids) for choice in choices]
    for choice, ids in zip(choices, found, strict=True):
        if not ids:
            raise ValueError(f"a choice needs at least one token, got {choice!r}")
    return found


def score_together(results: Seq[PrefillResult], choices: Seq[str]) -> list[list[Choice]]:
    """Log-probability of each choice as the continuation of each prompt; the results are of one engine.

    Choices of one token cost nothing more: the results have the logits that answer them, and no lane is asked.
    """
    if not results:
        return []
    session = results[0].session
    ids = token_ids(session, choices)
    later: list[dict[tuple[int, ...], float]] = [{} for _ in results]
    if any(len(each) > 1 for each in ids):
        starts = [(result.emitted, result.next_position) for result in results]
        later = session.lane.call(pipeline.logprobs_after, session.family, session.route.plan, starts, ids)
    return [_choices(result, choices, ids, rest) for result, rest in zip(results, later, strict=True)]


def _choices(
    result: PrefillResult, choices: Seq[str], ids: Seq[tuple[int, ...]], later: dict[tuple[int, ...], float]
) -> list[Choice]:
    first = result.next_token_logits.log_softmax(-1)[[each[0] for each in ids]].tolist()
    return [
        Choice(text, each, (begun, *(later[each[:stop]] for stop in range(2, len(each) + 1))))
        for text, each, begun in zip(choices, ids, first, strict=True)
    ]
