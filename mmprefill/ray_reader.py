"""The reader of a batch job on Ray, and what goes from it to the stages behind it. See `ray_job`.

Its process imports this file, which therefore takes neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmprefill.config import PrefillConfig
from mmprefill.job_plan import Group
from mmprefill.job_settings import JobSettings

Batch = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What engines are made of, on any machine; see `run_job`."""

    model: str | None
    config: PrefillConfig
    options: Mapping[str, Any]
    settings: JobSettings


class Gate:
    """An actor that lets only so many groups be under way, and knows the engines.

    Groups are counted, so that a reader that was lost and is run again by Ray passes where it did before.
    """

    def __init__(self, most: int) -> None:
        self._open, self._moved = most, asyncio.Condition()
        self._engines: list[Any] = []

    async def enter(self, number: int) -> None:
        """Wait until the group of this number may be read."""
        async with self._moved:
            await self._moved.wait_for(lambda: number < self._open)

    async def leave(self) -> None:
        """A group has landed."""
        async with self._moved:
            self._open += 1
            self._moved.notify_all()

    async def join(self, engine: Any) -> None:
        """An engine is there."""
        self._engines.append(engine)

    async def engines(self) -> list[Any]:
        """Those that ever were."""
        return self._engines


def read(_: Batch, plan: Any, folder: Path, gate: Any, engines: int) -> Iterator[Batch]:
    """The plan's groups, each when it may be; one for every engine at least, as a pool warns of having less."""
    ray, count = importlib.import_module("ray"), 0
    try:
        with chdir(folder):
            for group in ray.get(plan):
                ray.get(gate.enter.remote(count))
                yield batch_of(group)
                count += 1
    except Exception as error:
        yield batch_of(error)
    for _more in range(count, engines):
        yield batch_of(Group())


def batch_of(entry: Any) -> Batch:
    """What a stage gives on: a group, what was made of one, or why there is none."""
    column = np.empty(1, object)
    column[0] = entry
    return {"group": column}
