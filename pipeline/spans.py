"""Where each picture's placeholder tokens lie in the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from itertools import accumulate
from typing import Any

from mmprefill.encoders.families import Family
from mmprefill.pipeline.merge import row_count
from mmprefill.streams import Encoded
from mmprefill.types import MediaItem, Prepared

Runs = tuple[tuple[int, int], ...]


def media_spans(family: Family, prepared: Prepared, encoded: Mapping[str, Encoded[Any]]) -> tuple[Runs, ...]:
    """Per media item the runs (start, end) of its placeholder tokens; empty runs where they cannot be told apart."""
    spans: list[Runs] = []
    for medium, token in family.placeholders.items():
        items = [item for item in prepared.media if item.medium == medium]
        if not items:
            continue
        places = (prepared.input_ids == token).nonzero()[:, 0].tolist()
        sizes = _rows_per_item(encoded.get(medium), items, len(places))
        ends = list(accumulate(sizes))
        spans += [_runs(places[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    return tuple(spans)


def _rows_per_item(encoded: Encoded[Any] | None, items: Seq[MediaItem], total: int) -> list[int]:
    """Rows of each item: the tower's entries where it has one per item, equal shares of equal pictures, else unknown (0)."""
    count = len(items)
    if count == 1:
        return [total]
    pooled = getattr(encoded.value, "pooler_output", None) if encoded else None
    if pooled is not None and len(pooled) == count and row_count(encoded.value if encoded else None) == total:
        return [int(entry.numel() // entry.shape[-1]) for entry in pooled]
    alike = len({(item.size, item.frames) for item in items}) == 1
    return [total // count] * count if alike and total % count == 0 else [0] * count


def _runs(places: list[int]) -> Runs:
    starts = [i for k, i in enumerate(places) if k == 0 or places[k - 1] != i - 1]
    ends = [i + 1 for k, i in enumerate(places) if k == len(places) - 1 or places[k + 1] != i + 1]
    return tuple(zip(starts, ends, strict=True))
