"""The two queues between lanes: media waiting for the tower, sequences waiting for the decoder.

Each has one worker task on the engine's loop. It takes what is waiting, forms a batch within a budget, runs it on a lane
and wakes the owners. While a batch runs the next one gathers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mmprefill.encoders import vision
from mmprefill.encoders.families import Family
from mmprefill.pipeline.kv_cache import LayerPlan
from mmprefill.pipeline.prefill import Chunk, Prefill, run_step
from mmprefill.streams import Encoded, Lane
from mmprefill.types import Prepared

Item = TypeVar("Item")
Done = TypeVar("Done")


@dataclass(eq=False)  # found by identity: items hold tensors
class Waiting(Generic[Item, Done]):
    """An item in a queue and the future of whoever waits for it."""

    item: Item
    future: asyncio.Future[Done]


class _Worker:
    """One task that runs while there is something to do."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    @property
    def workers(self) -> set[asyncio.Task[None]]:
        """The running task, if any."""
        return {self._task} if self._task else set()

    def wake(self) -> None:
        """Look at the queue again; starts the task on first use."""
        self._wake.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    def stop(self) -> None:
        """End the task."""
        if self._task:
            self._task.cancel()

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while await self._turn():
                pass

    async def _turn(self) -> bool:
        raise AssertionError("each queue has its own turn")


class VisionQueue(_Worker):
    """Media of all requests, encoded in micro-batches of patches."""

    def __init__(self, family: Family, lane: Lane, budget: int) -> None:
        super().__init__()
        self._family, self._lane, self._budget = family, lane, budget
        self._waiting: list[Waiting[vision.MediaInputs, Encoded[Any]]] = []

    async def encode(self, prepared: Prepared) -> dict[str, Encoded[Any]]:
        """Feature outputs of a request's media, by medium; empty for text only, or where the model encodes by itself."""
        if not self._family.takes_encoded:
            return {}
        inputs = list(vision.media_inputs(self._family, prepared))
        waiting = [Waiting(each, asyncio.get_running_loop().create_future()) for each in inputs]
        self._waiting += waiting
        self.wake()
        try:
            return {each.item.medium: await each.future for each in waiting}
        finally:
            self._waiting = [each for each in self._waiting if each not in waiting]

    async def _turn(self) -> bool:
        waiting = [each for each in self._waiting if not each.future.done()]
        if not waiting:
            return False
        indices = next(vision.micro_batches([each.item for each in waiting], self._budget))
        batch = [waiting[i] for i in indices]
        self._waiting = [each for each in self._waiting if each not in batch]
        await run_splitting(batch, self._encode)
        return True

    async def _encode(self, batch: Seq[Waiting[vision.MediaInputs, Encoded[Any]]]) -> None:
        encoded = await self._lane.run(vision.encode, self._family, [each.item for each in batch])
        for each, output in zip(batch, encoded.value, strict=True):
            resolve(each.future, Encoded(output, encoded.ready))


class PrefillQueue(_Worker):
    """Sequences of all requests, prefilled in packed steps of at most a budget of tokens."""

    def __init__(self, family: Family, plan: LayerPlan | None, lane: Lane, budget: int) -> None:
        super().__init__()
        self.plan = plan
        self._family, self._lane, self._budget = family, lane, budget
        self._waiting: list[Waiting[Prefill, Prefill]] = []
        self._upstream = 0

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """A sequence is on its way: steps wait for it, up to a full budget, rather than run half empty."""
        self._upstream += 1
        try:
            yield
        finally:
            self._upstream -= 1
            self.wake()

    async def run(self, merged: Encoded[Prefill]) -> Prefill:
        """Prefill one sequence to its end."""
        prefill = merged.take()
        waiting = Waiting(prefill, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self.wake()
        try:
            return await waiting.future
        finally:
            self._waiting = [each for each in self._waiting if each is not waiting]

    async def _turn(self) -> bool:
        assert self.plan is not None
        waiting = [each for each in self._waiting if not each.future.done()]
        ready = sum(each.item.sequence.length - each.item.kv.length for each in waiting)
        if not waiting or (self._upstream and ready < self._budget):
            return False
        await run_splitting(fit(waiting, self._budget), self._step)
        return True

    async def _step(self, batch: Seq[Waiting[Prefill, Prefill]]) -> None:
        chunks = [Chunk(each.item, each.item.sequence.length) for each in batch]
        assert self.plan is not None
        await self._lane.run(run_step, self._family, self.plan, chunks)
        for each in batch:
            if each.item.done:
                resolve(each.future, each.item)


def fit(waiting: Seq[Waiting[Prefill, Prefill]], budget: int) -> list[Waiting[Prefill, Prefill]]:
    """The first sequences that fit a budget of tokens together; the very first always, however long."""
    batch, tokens = list(waiting[:1]), waiting[0].item.sequence.length
    for each in waiting[1:]:
        if tokens + each.item.sequence.length <= budget:
            batch.append(each)
            tokens += each.item.sequence.length
    return batch


async def run_splitting(batch: Seq[Waiting[Any, Any]], run: Callable[[Seq[Waiting[Any, Any]]], Any]) -> None:
    """Run a batch; if it fails (out of memory, one bad item) run its halves, until the failing item stands alone."""
    try:
        await run(batch)
    except Exception as error:  # handed to the item's owner
        if len(batch) == 1:
            if not batch[0].future.done():
                batch[0].future.set_exception(error)
            return
        middle = len(batch) // 2
        await run_splitting(batch[:middle], run)
        await run_splitting(batch[middle:], run)


def resolve(future: asyncio.Future[Any], value: Any) -> None:
    """Set a result unless the owner left."""
    if not future.done():
        future.set_result(value)


