"""Where each picture's placeholder tokens lie in the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmprefill.encoders.families import Family
from mmprefill.streams import Encoded
from mmprefill.types import Prepared

Runs = tuple[tuple[int, int], ...]


def media_spans(family: Family, prepared: Prepared, encoded: Mapping[str, Encoded[Any]]) -> tuple[Runs, ...]:
    """Per media item the runs (start, end) of its placeholder tokens; empty runs where they cannot be told apart."""
    return tuple(item.runs for item in prepared.media)
