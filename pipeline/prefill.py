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
from mmprefill.pipeline.head import logits_of
from mmprefill.pipeline.kv_cache import LayerPlan, Piece, SequenceKV, StepCache
from mmprefill.pipeline.merge import decoder_arguments, extras_of
from mmprefill.types import Request, Sequence


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
    def start(cls, sequence: Sequence, tokens: int | None = None, together: int = 1) -> Prefill:
        """A sequence with nothing stored yet; `tokens` is the prompt's length where `sequence` is only its beginning.

        `together` is as in `SequenceKV`.
        """
        return cls(sequence, SequenceKV(tokens or sequence.length, together=together))

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

    @property
    def request(self) -> Request:
        """Whose chunk it is."""
        return self.prefill.sequence.prepared.request


def run_step(family: Family, plan: LayerPlan, chunks: Seq[Chunk]) -> None:
    """Prefill the chunks together; each sequence's KV grows, and those that end get their logits.

    The sequences change only when everything is computed: a step that failed, anywhere, can run again.
    """
    spans = [(chunk.prefill.sequence, chunk.start, chunk.end) for chunk in chunks]
    pieces = _pieces((chunk.prefill.kv, chunk.tokens, chunk.prefill.sequence.rules) for chunk in chunks)
    embeds = [sequence.embeds[:, start:end] for sequence, start, end in spans]
    output = forward(
        family,
        StepCache(pieces, plan),
        torch.cat(embeds, 1) if len(embeds) > 1 else embeds[0],
        pos.pack([sequence.positions[..., start:end] for sequence, start, end in spans]),
        pack_extras([(sequence.extras, start, end, sequence.length) for sequence, start, end in spans]),
        output_hidden_states=any(chunk.request.hidden_states for chunk in chunks),
    )
    logits = _logits(family, chunks, pieces, output.last_hidden_state)
    hidden = [_hidden(chunk, piece, output) for chunk, piece in zip(chunks, pieces, strict=True)]
    for chunk, part, states in zip(chunks, logits, hidden, strict=True):
        _keep(chunk, part, states)


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


def _logits(family: Family, chunks: Seq[Chunk], pieces: Seq[Piece], hidden: Tensor) -> list[Tensor]:
    """Per chunk the logits [n, V] that its request wants: of its last row if it ends here, of all where asked, or none."""
    rows = [_wanted_rows(chunk, piece) for chunk, piece in zip(chunks, pieces, strict=True)]
    chosen = torch.cat([hidden[:, part] for part in rows], 1)
    if not chosen.shape[1]:
        return [chosen[0]] * len(rows)
    logits = logits_of(family, chosen)[0]
    return [part.clone() for part in logits.split([part.stop - part.start for part in rows])]


def _wanted_rows(chunk: Chunk, piece: Piece) -> slice:
    stop = piece.start + piece.rows
    if chunk.request.all_logits:
        return slice(piece.start, stop)
    return slice(stop - 1 if chunk.end == chunk.prefill.kv.capacity else stop, stop)


def _hidden(chunk: Chunk, piece: Piece, output: Any) -> dict[int, Tensor]:
    rows = slice(piece.start, piece.start + piece.rows)
    return {
        layer: (output.last_hidden_state if layer == -1 else output.hidden_states[layer])[0, rows].clone()
        for layer in chunk.request.hidden_states
    }


def _keep(chunk: Chunk, logits: Tensor, hidden: Mapping[int, Tensor]) -> None:
    for layer, states in hidden.items():
        chunk.prefill.hidden.setdefault(layer, []).append(states)
    if len(logits):
        chunk.prefill.logits.append(logits)
    chunk.prefill.kv.length = chunk.end


def hidden_after(
    family: Family, plan: LayerPlan, parts: Seq[tuple[SequenceKV, Seq[int], int]], *, stored: bool
) -> Tensor:
    """Run more text tokens after stored prefixes, packed.

    Args:
        family: the loaded model.
        plan: its layers.
        parts: per sequence its KV, the token ids that follow, and the position of the first of them.
        stored: whether the new K and V are appended to the KV (which must have room).

    Returns:
        Hidden states [1, N, D] of the new tokens, one sequence's after the other's.
    """
    ids = torch.tensor([i for _, ids, _ in parts for i in ids], device=family.device)[None]
    columns = torch.cat([torch.arange(first, first + len(ids)) for _, ids, first in parts]).to(family.device)
    pieces = _pieces(((kv, len(ids), {}) for kv, ids, _ in parts), stored=stored)
    arguments = text_arguments(family, ids)
    embeds = arguments.pop("inputs_embeds")
    output = forward(family, StepCache(pieces, plan), embeds, columns[None], arguments)
    for piece in pieces:
        if stored:
            piece.kv.length += piece.rows
    hidden: Tensor = output.last_hidden_state
    return hidden


def text_arguments(family: Family, ids: Tensor) -> dict[str, Any]:
    """Embedding rows (and per-layer inputs) of text tokens [1, n], as the composite model makes them."""
    got = decoder_arguments(family, {"input_ids": ids})
    return {"inputs_embeds": got["inputs_embeds"], **extras_of(family, got)}
