"""How many pictures may be in memory between intake and merge."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from torch import Tensor

from mmprefill.types import Prepared


class Room:
    """What the tensors of requests with pictures may take between intake and merge; what several of them show counts once.

    Args:
        limit: bytes, beyond which nobody enters.
        doors: how many may be in the intake, where nobody knows yet what they will take: decoding and resizing hold
            several times that.
        plenty: bytes, from which on one at a time is enough: what is held keeps the tower busy for longer.
    """

    def __init__(self, limit: float, doors: int, plenty: float) -> None:
        self.limit, self.plenty, self.held, self.inside = limit, plenty, 0, 0
        self._users: Counter[tuple[int, int]] = Counter()  # of a tensor, by address and size
        self._doors, self._left = asyncio.Semaphore(doors), asyncio.Event()

    @asynccontextmanager
    async def entrance(self) -> AsyncIterator[None]:
        """Wait for a door, then for room."""
        async with self._doors:
            while self.held >= (min(self.plenty, self.limit) if self.inside else self.limit):
                self._left.clear()
                await self._left.wait()
            self.inside += 1
            try:
                yield
            finally:
                self.inside -= 1
                self._left.set()

    def take(self, prepared: Prepared) -> None:
        """Count a request's tensors."""
        for tensor in prepared.inputs.values():
            place = _place(tensor)
            self._users[place] += 1
            if self._users[place] == 1:
                self.held += tensor.nbytes

    def drop_pixels(self, prepared: Prepared) -> None:
        """The embeddings are made: nothing looks at the pixels any more."""
        for name in [name for name in prepared.inputs if name.startswith("pixel_")]:
            self._drop(prepared.inputs.pop(name))
        self._left.set()

    def leave(self, prepared: Prepared) -> None:
        """They are not needed any more."""
        for tensor in prepared.inputs.values():
            self._drop(tensor)
        self._left.set()

    def _drop(self, tensor: Tensor) -> None:
        place = _place(tensor)
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self.held -= tensor.nbytes


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes
