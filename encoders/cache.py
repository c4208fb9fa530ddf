"""Encoder outputs by content digest: the same picture is encoded once, also while it is still on its way.

Lives on the engine's loop and is only touched there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from mmprefill.encoders.items import nbytes
from mmprefill.streams import Encoded


@dataclass(eq=False)
class _Flight:
    """An encoding under way, and how many wait for it."""

    task: asyncio.Task[Encoded[Any]]
    waiters: int = 0


class EncoderCache:
    """Least recently used outputs up to a number of bytes, and the ones in flight.

    An output that somebody holds stays alive by being held; evicting only means that the next request encodes again.

    Args:
        limit: most bytes kept; 0 keeps none, and still shares what is in flight.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[bytes, Encoded[Any]] = OrderedDict()
        self._flying: dict[bytes, _Flight] = {}
        self.nbytes = 0

    async def get(
        self, key: bytes, encode: Callable[[], Coroutine[Any, Any, Encoded[Any]]]
    ) -> tuple[Encoded[Any], bool]:
        """The output for a key, and whether it was there or on its way; else `encode` is called, once for all who ask.

        A caller that leaves does not stop an encoding that others wait for; the last one to leave does.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key], True
        shared = key in self._flying
        if not shared:
            self._take_off(key, asyncio.ensure_future(encode()))
        flight = self._flying[key]
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task), shared
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                flight.task.cancel()
                self._flying.pop(key, None)

    def _take_off(self, key: bytes, task: asyncio.Task[Encoded[Any]]) -> None:
        self._flying[key] = _Flight(task)
        task.add_done_callback(lambda done: self._land(key, done))

    def _land(self, key: bytes, task: asyncio.Task[Encoded[Any]]) -> None:
        if key in self._flying and self._flying[key].task is task:
            del self._flying[key]
        if task.cancelled() or task.exception() is not None:
            return
        size = nbytes(task.result().value)
        if size > self._limit:
            return
        self._kept[key] = task.result()
        self.nbytes += size
        while self.nbytes > self._limit:
            _, oldest = self._kept.popitem(last=False)
            self.nbytes -= nbytes(oldest.value)
