"""Further arguments of a decoder (deepstack rows, per-layer inputs), cut with the chunk and packed with the step.

Two kinds occur. Tensors with a token axis ([1, T, ...]) are sliced like the embeddings; one that is a bool mask over the
tokens also says which tokens have rows in the others. Row tensors ([n_media, D], in lists or dicts by level) hold one
row per marked token; they are cut by counting marks.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

Part = tuple[Mapping[str, Any], int, int, int]  # extras of a sequence, start, end, its length


def pack_extras(parts: Seq[Part]) -> dict[str, Any]:
    """The extras of a step: each part cut to its chunk, joined in order; sequences without a name get zeros or no rows."""
    names = list(dict.fromkeys(name for extras, *_ in parts for name in extras))
    return {name: _join(name, parts) for name in names}


def _join(name: str, parts: Seq[Part]) -> Any:
    example, _, _, length = next(part for part in parts if name in part[0]) if parts else ({}, 0, 0, 0)
    value = example[name]
    if _is_token_axis(value, length):
        return torch.cat([_cut_tokens(part, name, value) for part in parts], 1)
    rows = [_cut_rows(part, name) for part in parts]
    return _join_rows(value, [row for row in rows if row is not None])


def _is_token_axis(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == (1, length)


def _cut_tokens(part: Part, name: str, like: Tensor) -> Tensor:
    extras, start, end, _ = part
    if name in extras:
        cut: Tensor = extras[name][:, start:end]
        return cut
    return like.new_zeros(1, end - start, *like.shape[2:])


def _marks(part: Part) -> Tensor:
    extras, _, _, length = part
    for value in extras.values():
        if _is_token_axis(value, length) and value.dtype == torch.bool:
            marks: Tensor = value.reshape(length, -1)[:, 0]
            return marks
    raise AssertionError("row extras come with a bool mask over the tokens")


def _cut_rows(part: Part, name: str) -> Any:
    extras, start, end, _ = part
    if name not in extras:
        return None
    marks = _marks(part)
    first, last = int(marks[:start].sum()), int(marks[:end].sum())
    return _map(lambda rows: rows.reshape(-1, rows.shape[-1])[first:last], extras[name])


def _map(function: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _map(function, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map(function, each) for each in value]
    return function(value)


def _join_rows(example: Any, rows: Seq[Any]) -> Any:
    if isinstance(example, Mapping):
        return {key: _join_rows(each, [row[key] for row in rows]) for key, each in example.items()}
    if isinstance(example, (list, tuple)):
        return [_join_rows(each, [row[i] for row in rows]) for i, each in enumerate(example)]
    return torch.cat(list(rows))
