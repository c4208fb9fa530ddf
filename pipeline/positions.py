"""Positions of a sequence: rows, slices per chunk, the next position, and where a chunk may end."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from mmprefill.pipeline.attention import evaluate
from mmprefill.types import MaskFunction


def next_position(positions: Tensor) -> int:
    """The position of the token after the prompt: one more than any so far (under M-RoPE not the token count)."""
    return int(positions.max()) + 1


def pack(parts: Seq[Tensor]) -> Tensor:
    """Positions of several chunks, each [1, n] or [P, 1, n], as one row [1, N] or [P, 1, N].

    Text-only sequences of an M-RoPE model have one row of positions and share it among all P.
    """
    rows = max((part.shape[0] for part in parts if part.dim() == 3), default=0)
    if rows:
        parts = [part if part.dim() == 3 else part[None].expand(rows, -1, -1) for part in parts]
    return torch.cat(list(parts), dim=-1)


def legal_edges(rules: Mapping[str, MaskFunction], length: int, device: torch.device, tile: int = 1024) -> Tensor:
    """Where a chunk may end: bool [T + 1], true at i when no token before i sees token i or later.

    A chunk that ended inside a two-way span would leave its first part blind for the rest of the span.
    """
    index = torch.arange(length, device=device)
    reach = torch.zeros(length, dtype=torch.long, device=device)
    for rule in rules.values():
        for start in range(0, length, tile):
            rows = index[start : start + tile, None]
            seen = evaluate(rule, rows, index[None])
            furthest = torch.where(seen, index[None], -1).amax(dim=1)
            reach[start : start + tile] = torch.maximum(reach[start : start + tile], furthest)
    edges = torch.ones(length + 1, dtype=torch.bool)
    edges[1:] = (reach.cummax(0).values <= index).cpu()
    return edges
