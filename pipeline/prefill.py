"""Runs one packed step through the language model; the only owner of the compute lane while it does.

A step takes chunks of several sequences as one row [1, N]: no padding, every linear layer sees one large matrix.
Attention keeps the sequences apart (`attention.py`), the step's cache object stores their K and V (`kv_cache.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmprefill.encoders.families import Family
from mmprefill.pipeline import positions as pos
from mmprefill.pipeline.attention import KEYWORD, masking, masks
from mmprefill.pipeline.extras import pack_extras
from mmprefill.pipeline.kv_cache import LayerPlan, Piece, SequenceKV, StepCache
from mmprefill.pipeline.merge import decoder_arguments, extras_of, logits_of
from mmprefill.types import Sequence


@dataclass(eq=False)
class Prefill:
    """One sequence on its way through the decoder.

    Attributes:
        sequence: what the decoder receives.
        kv: what it has stored so far; `kv.length` tokens are done.
        hidden: wanted hidden states, layer -> chunks of [n, D].
        logits: rows [n, V] of the last position, or of every chunk where all were asked.
    """

    sequence: Sequence
    kv: SequenceKV
    hidden: dict[int, list[Tensor]] = field(default_factory=dict)
    logits: list[Tensor] = field(default_factory=list)

    @classmethod
    def start(cls, sequence: Sequence, tokens: int | None = None) -> Prefill:
        """A sequence with nothing stored yet; `tokens` is the prompt's length where `sequence` is only its beginning."""
        return cls(sequence, SequenceKV(tokens or sequence.length))

    def continued(self, sequence: Sequence) -> Prefill:
        """The same request with its whole sequence, keeping the rows that its beginning has stored."""
        self.kv.length = sequence.legal_start(self.kv.length)
        return Prefill(sequence, self.kv)

    @property
    def done(self) -> bool:
        """Whether every token is stored."""
        return self.kv.length == self.kv.capacity


@dataclass(frozen=True)
class Chunk:
    """Tokens [prefill.kv.length, end) of one sequence, as part of a step."""

    prefill: Prefill
    end: int

    @property
    def start(self) -> int:
        """First token of the chunk."""
        return self.prefill.kv.length

    @property
    def tokens(self) -> int:
        """Tokens in the chunk."""
        return self.end - self.start


def run_step(family: Family, plan: LayerPlan, chunks: Seq[Chunk]) -> None:
    """Prefill the chunks together; each sequence's KV grows, and those that end get their logits."""
    spans = [(chunk.prefill.sequence, chunk.start, chunk.end) for chunk in chunks]
    pieces = _pieces((chunk.prefill.kv, chunk.tokens, chunk.prefill.sequence.rules) for chunk in chunks)
    layers = sorted({layer for chunk in chunks for layer in chunk.prefill.sequence.prepared.request.hidden_states})
    output = forward(
        family,
        StepCache(pieces, plan),
        torch.cat([seq.embeds[:, a:b] for seq, a, b in spans], 1) if len(spans) > 1 else _rows(*spans[0]),
        pos.pack([seq.positions[..., a:b] for seq, a, b in spans]),
        pack_extras([(seq.extras, a, b, seq.length) for seq, a, b in spans]),
        output_hidden_states=bool(layers),
    )
    for chunk, piece in zip(chunks, pieces, strict=True):
        _keep_hidden(chunk, piece, output)
        piece.kv.length += piece.rows
    _keep_logits(family, chunks, pieces, output.last_hidden_state)


def _rows(sequence: Sequence, start: int, end: int) -> Tensor:
    return sequence.embeds[:, start:end]


def _pieces(parts: Iterable[tuple[SequenceKV, int, Mapping[str, Any]]], *, stored: bool = True) -> list[Piece]:
    pieces, start = [], 0
    for kv, rows, rules in parts:
        pieces.append(Piece(start, rows, kv, rules, stored))
        start += rows
    return pieces


def forward(
    family: Family,
    step: StepCache,
    embeds: Tensor,
    positions: Tensor,
    extras: Mapping[str, Any],
    *,
    output_hidden_states: bool = False,
) -> Any:
    """One call of the stock decoder on a packed row: embeds [1, N, D], positions [1, N] or [P, 1, N]."""
    arguments = dict(extras, **{KEYWORD: step})
    if output_hidden_states:
        arguments["output_hidden_states"] = True
    with masks("skip") if masking() is None else nullcontext():
        return family.decoder(
            inputs_embeds=embeds, position_ids=positions, cache=step, use_cache=False, return_dict=True, **arguments
        )


def _keep_hidden(chunk: Chunk, piece: Piece, output: Any) -> None:
    rows = slice(piece.start, piece.start + piece.rows)
    for layer in chunk.prefill.sequence.prepared.request.hidden_states:
        states = output.last_hidden_state if layer == -1 else output.hidden_states[layer]
        chunk.prefill.hidden.setdefault(layer, []).append(states[0, rows].clone())


def _keep_logits(family: Family, chunks: Seq[Chunk], pieces: Seq[Piece], hidden: Tensor) -> None:
    """Logits of the last row of each sequence that ends here, or of all rows where asked; one call of the head."""
    wanted: list[tuple[Prefill, slice]] = []
    for chunk, piece in zip(chunks, pieces, strict=True):
        stop = piece.start + piece.rows
        if chunk.prefill.sequence.prepared.request.all_logits:
            wanted.append((chunk.prefill, slice(piece.start, stop)))
        elif chunk.prefill.done:
            wanted.append((chunk.prefill, slice(stop - 1, stop)))
    if not wanted:
        return
    logits = logits_of(family, torch.cat([hidden[:, rows] for _, rows in wanted], 1))[0]
    sizes = [rows.stop - rows.start for _, rows in wanted]
    for (prefill, _), part in zip(wanted, logits.split(sizes), strict=True):
        prefill.logits.append(part)


def continue_from(
    family: Family, plan: LayerPlan, parts: Seq[tuple[SequenceKV, Seq[int], int]], *, stored: bool
) -> list[Tensor]:
    """Run more text tokens after stored prefixes, packed.

    Args:
        family: the loaded model.
        plan: its layers.
        parts: per sequence its KV, the token ids that follow, and the position of the first of them.
        stored: whether the new K and V are appended to the KV (which must have room).

    Returns:
        Logits [n, V] in float32 after each of the n new tokens, per sequence.
    """
    sizes = [len(ids) for _, ids, _ in parts]
    ids = torch.tensor([i for _, ids, _ in parts for i in ids], device=family.device)[None]
    columns = torch.cat([torch.arange(first, first + len(ids)) for _, ids, first in parts]).to(family.device)
    pieces = _pieces(((kv, len(ids), {}) for kv, ids, _ in parts), stored=stored)
    arguments = text_arguments(family, ids)
    embeds = arguments.pop("inputs_embeds")
    output = forward(family, StepCache(pieces, plan), embeds, columns[None], arguments)
    for piece in pieces:
        if stored:
            piece.kv.length += piece.rows
    return list(logits_of(family, output.last_hidden_state)[0].split(sizes))


def text_arguments(family: Family, ids: Tensor) -> dict[str, Any]:
    """Embedding rows (and per-layer inputs) of text tokens [1, n], as the composite model makes them."""
    got = decoder_arguments(family, {"input_ids": ids})
    return {"inputs_embeds": got["inputs_embeds"], **extras_of(family, got)}
