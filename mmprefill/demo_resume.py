"""Conversations that go on from a KV file. Its pictures are not there to be prefilled again: further turns are appended."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import torch

from mmprefill.engine import AsyncPrefiller
from mmprefill.errors import ArtefactError
from mmprefill.pipeline.onward import Onward
from mmprefill.results import PrefillResult
from mmprefill.types import Request, Reuse


async def resumed(engine: AsyncPrefiller, file: Path) -> PrefillResult:
    """A KV file as a result.

    Raises:
        ArtefactError: if it is damaged or of another model; names the file without its folder.
    """
    try:
        result = await asyncio.to_thread(engine.resume, file)
    except ArtefactError as error:
        raise ArtefactError(str(error).replace(str(file), f"the file {file.name}")) from error
    result.reuse = Reuse(len(result.token_ids), len(result.media), "the KV file holds them all")
    return result


def described(result: PrefillResult) -> str:
    """What a KV file holds, for the reader."""
    holds = ", ".join(f"{count} {medium}" for medium, count in result.tokens.items())
    placeholders = set(result.session.family.placeholders.values())
    words = result.session.text([i for i in result.token_ids.tolist() if i not in placeholders]).split()
    said = " ".join(words)
    said = said if len(said) <= 160 else said[:159] + "…"
    return f"{len(result.token_ids)} tokens ({holds}); none of them was computed again. They say: {said}"


def onward(result: PrefillResult, room: int) -> Onward:
    """A copy of the result's KV that can grow."""
    session = result.session
    return Onward(
        session.family, session.route.plan, result.emitted, result.next_token_logits, result.next_position, room
    )


async def appended(engine: AsyncPrefiller, before: PrefillResult, answer: str, question: str, id: str) -> PrefillResult:
    """The result's KV with its answer and the next question run behind it.

    Raises:
        ValueError: if the template does not allow it, or the conversation gets too long.
    """
    started = time.perf_counter()
    ids = await asyncio.to_thread(_further, engine, answer, question)
    read = time.perf_counter()
    total, most = len(before.token_ids) + len(ids), engine.intake.context
    if total > most:
        raise ValueError(f"the conversation has {total} tokens; the model takes {most}")
    going = onward(before, len(ids))
    logits = (await engine.session.lane.run(going.append, ids)).take()
    places = torch.arange(before.next_position, going.position).expand(before.positions.shape[0], -1)
    return replace(
        before,
        id=id,
        token_ids=torch.cat([before.token_ids, torch.tensor(ids)]),
        positions=torch.cat([before.positions, places], -1),
        next_position=going.position,
        next_token_logits=logits,
        emitted=going.kv,
        hidden_states={},
        seconds={"intake": read - started, "prefill": time.perf_counter() - read},
        reuse=Reuse(len(before.token_ids), len(before.media), "the KV file and what was said since"),
    )


def _further(engine: AsyncPrefiller, answer: str, question: str) -> list[int]:
    """Tokens of an answer and the next question, as the template writes them behind a first question."""
    turns = [("user", "x"), ("assistant", answer), ("user", question)]
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    begun, whole = (
        engine.intake.prepare(Request(messages=part)).input_ids.tolist() for part in (messages[:1], messages)
    )
    if whole[: len(begun)] != begun:
        raise ValueError(
            "this model's chat template rewrites earlier turns, so that its KV cannot be continued by text"
        )
    ids: list[int] = whole[len(begun) :]
    return ids
