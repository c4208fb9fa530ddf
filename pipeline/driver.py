"""Runs what the batcher chooses on the lanes, and wakes the owners.

On CUDA the tower's lane and the decoder's lane each have a loop that asks the batcher for more. Where both are the same
lane there is one loop, which also lets every sequence between tower and decoder settle before it chooses: the merge takes
milliseconds, the next picture a quarter of a second.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from mmprefill.encoders import vision
from mmprefill.encoders.families import Family
from mmprefill.encoders.vision import MediaInputs
from mmprefill.errors import EngineClosedError, OutOfMemoryError
from mmprefill.metrics import SILENT, Observer
from mmprefill.pipeline.batcher import Batcher, Encode, Job, Picture, Step, Take
from mmprefill.pipeline.kv_cache import LayerPlan
from mmprefill.pipeline.prefill import Chunk, Prefill, run_step
from mmprefill.streams import Encoded, Lanes
from mmprefill.trace import OFF, Recorder

Work = Step | Encode
# Turns of the loop until an encoder output, or its failure, has gone all the way: future, cache, gather, request, and for
# a failed request back again to its other pictures. Then its merge is queued, or they wait no more.
_TURNS = 16
GATHER = 0.004  # seconds, a few texts' intake


@dataclass(eq=False)
class Active:
    """A request between intake and result.

    Attributes:
        id: the request's id.
        job: its side of the batcher.
        prefill: its sequence (or a beginning of it) and KV, once merged.
        finished: resolved when every token is stored.
        on_progress: called on the engine's loop after each of its chunks.
        moved: set when a step that it is part of ends.
    """

    id: str
    job: Job
    finished: asyncio.Future[None]
    prefill: Prefill | None = None
    on_progress: list[Callable[[], None]] = field(default_factory=list)
    moved: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Waiting:
    """A picture that waits for the tower, and the future of its output."""

    inputs: MediaInputs
    output: asyncio.Future[Encoded[Any]]


class Driver:
    """Everything between intake and result that runs on a lane.

    Args:
        family: the loaded model.
        plan: its layers; None on the generic path, where only pictures are driven.
        lanes: where to run.
        batcher: what to run.
        trace: told what each lane did, and when.
        observer: told of each tower call and each step.
    """

    def __init__(
        self,
        family: Family,
        plan: LayerPlan | None,
        lanes: Lanes,
        batcher: Batcher,
        trace: Recorder = OFF,
        observer: Observer = SILENT,
    ) -> None:
        self._family, self._plan, self._lanes, self.batcher = family, plan, lanes, batcher
        self._trace, self._observer = trace, observer
        self._shared = lanes.vision is lanes.prefill
        self._active: dict[Job, Active] = {}
        self._tower: dict[Picture, _Waiting] = {}
        self._moving: set[Active] = set()
        self._wake = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._landing: asyncio.Future[None] | None = None  # of the step that the device is at
        self._fatal: BaseException | None = None
        self._arriving: Counter[object] = Counter()  # requests in the intake, by call
        self._pace: float | None = None  # the least seconds that a step took for a token
        self.steps = 0

    # What a request's coroutine calls.

    @contextmanager
    def arriving(self, call: object | None) -> Iterator[None]:
        """Within the block a request is in the intake; siblings, those of the same call, may wait for it."""
        self._arriving[call] += 1
        try:
            yield
        finally:
            self._arriving[call] -= 1
            self._arriving += Counter()  # drops calls that are through
            self.wake()

    @asynccontextmanager
    async def admit(
        self, id: str, tokens: int, media: bool, priority: int, call: object | None = None
    ) -> AsyncIterator[Active]:
        """Within the block the request is the batcher's to schedule; leaving it, however, takes it out."""
        self._start()
        job = Job(tokens, time.perf_counter(), media=media, priority=priority, call=call)
        active = Active(id, job, asyncio.get_running_loop().create_future())
        self._active[job] = active
        self.batcher.add(job)
        try:
            yield active
        finally:
            del self._active[job]
            self._moving.discard(active)
            active.finished.cancel()
            active.on_progress.clear()  # they hold the request: a cycle, whose pixels only the garbage collector would free
            job.ready = 0
            if not job.pictures:  # else others wait for one of them: it leaves with the last
                self.batcher.remove(job)
            self.wake()

    async def encode(self, active: Active, inputs: MediaInputs) -> Encoded[Any]:
        """The feature output of one item, when the batcher's turn comes to it."""
        self._check()
        job, picture = active.job, Picture(inputs.patches, inputs.shape_key)
        waiting = _Waiting(inputs, asyncio.get_running_loop().create_future())
        self._tower[picture] = waiting
        job.pictures.append(picture)
        self.wake()
        try:
            return await waiting.output
        finally:
            del self._tower[picture]
            job.pictures.remove(picture)
            if job not in self._active and not job.pictures:
                self.batcher.remove(job)

    async def merge(self, active: Active, merge: Callable[[], Prefill]) -> Prefill:
        """Run a merge on the text lane, ahead of the driver's next choice."""
        self._check()
        self._moving.add(active)
        active.prefill = (
            await self._lanes.text.run(self._trace.timed("text", "merge", merge, request=active.id))
        ).take()
        return active.prefill

    async def prefill(self, active: Active) -> None:
        """Prefill the merged sequence to its end."""
        assert active.prefill is not None
        self._check()
        job = active.job
        job.done, job.ready = active.prefill.kv.length, job.tokens
        job.legal_end = active.prefill.sequence.legal_end
        job.chunk = active.prefill.sequence.prepared.request.chunk_tokens
        self._moving.discard(active)
        self.wake()
        await active.finished

    async def prefill_early(self, active: Active, merge: Callable[[], Prefill | None]) -> None:
        """Let the decoder start on a beginning of the prompt, in its turn, while the tower works on the rest."""
        begin = self._trace.timed("text", "merge the text", merge, request=active.id)
        active.prefill = (await self._lanes.text.run(begin)).take()
        if active.prefill is not None:
            active.job.chunk = active.prefill.sequence.prepared.request.chunk_tokens
            active.job.ready = active.prefill.sequence.length
            self.wake()

    async def pause(self, active: Active) -> None:
        """No further chunk of the request starts, and a running one ends."""
        active.job.ready = active.job.done
        while active.job.running:
            await active.moved.wait()

    def settled(self, active: Active) -> None:
        """A merged request waits for the tower again: the driver must not hold its choice for it."""
        self._moving.discard(active)
        self.wake()

    def wake(self) -> None:
        """Something changed: choose again."""
        self._wake.set()

    def stop(self) -> None:
        """End the loops."""
        for loop in self._loops:
            loop.cancel()

    @property
    def loops(self) -> set[asyncio.Task[None]]:
        """The driver's own tasks."""
        return set(self._loops)

    # The loops.

    def _start(self) -> None:
        self._check()
        if self._loops:
            return
        choices: list[Callable[[float], Work | None]] = (
            [self.batcher.next_work] if self._shared else [self.batcher.next_encode, self.batcher.next_step]
        )
        self._loops = [asyncio.create_task(self._drive(choose)) for choose in choices]

    async def _drive(self, choose: Callable[[float], Work | None]) -> None:
        def chosen() -> Work | None:
            return None if self._shared and self._moving else choose(time.perf_counter())

        try:
            while True:
                work = await self._filled(chosen)
                if work is None:
                    self._wake.clear()
                    await self._wake.wait()
                    await self._gather()
                elif isinstance(work, Encode):
                    await self._splitting(work.pictures, self._encode, self._fail_picture)
                    for _ in range(_TURNS):
                        await asyncio.sleep(0)
                else:
                    await self._splitting(work.takes, self._step, self._fail_take)
        except Exception as error:  # a mistake of ours: nobody shall wait for a loop that ended
            self.die(error)

    async def _filled(self, chosen: Callable[[], Work | None]) -> Work | None:
        """What is chosen, once siblings of a step with room have come that are on their way.

        No longer than starting another step would take: the lane is idle meanwhile, except for their merges.
        """
        work = chosen()
        if work is None or not self._lacks(work):
            return work
        until = time.perf_counter() + (GATHER if self._pace is None else self._pace * self.batcher.overhead)
        while (work is None or self._lacks(work)) and (left := until - time.perf_counter()) > 0:
            self._wake.clear()
            with suppress(TimeoutError):  # not `wait_for`, which can swallow a cancellation
                async with asyncio.timeout(left):
                    await self._wake.wait()
            work = chosen()
        return work

    def _lacks(self, work: Work) -> bool:
        """Whether a step has room and all who wait for it wait for others too, which are about to be ready."""
        if isinstance(work, Encode) or work.tokens >= self.batcher.step_tokens:
            return False
        jobs = [take.job for take in work.takes]
        merging = any(active.job.call is jobs[0].call for active in self._moving)
        return self.batcher.only_siblings(jobs) and (merging or self._arriving[jobs[0].call] > 0)

    async def _gather(self) -> None:
        """After idling, those who are about to leave the intake share the first step: a step of one short text takes a
        third of one with eight."""
        until = time.perf_counter() + GATHER
        while self._arriving and time.perf_counter() < until:
            await asyncio.sleep(GATHER / 8)

    async def _encode(self, pictures: Seq[tuple[Job, Picture]]) -> None:
        waiting = [(picture, self._tower[picture]) for _, picture in pictures if picture in self._tower]
        if not waiting:
            return
        for picture, _ in waiting:
            picture.running = True
        patches, started = sum(picture.patches for picture, _ in waiting), time.perf_counter()
        ids = [self._active[job].id for job, picture in pictures if picture in self._tower and job in self._active]
        encode = self._trace.timed(
            "vision", "encode", vision.encode, requests=ids, pictures=len(waiting), patches=patches
        )
        try:
            encoded = await self._lanes.vision.run(encode, self._family, [each.inputs for _, each in waiting])
        except BaseException:
            for picture, _ in waiting:
                picture.running = False
            raise
        for (_, each), output in zip(waiting, encoded.value, strict=True):
            _resolve(each.output, Encoded(output, encoded.ready))
        self._observer.encoded(
            pictures=len(waiting),
            patches=patches,
            budget=self.batcher.patches(shared=self._shared),
            seconds=time.perf_counter() - started,
        )

    async def _step(self, takes: Seq[Take]) -> None:
        assert self._plan is not None
        takes = [take for take in takes if take.job in self._active]  # cancelled while the step was forming
        if not takes:
            return
        actives = [self._active[take.job] for take in takes]
        chunks = [Chunk(a.prefill, t.end) for a, t in zip(actives, takes, strict=True) if a.prefill is not None]
        for active in actives:
            active.job.running = True
            active.moved.clear()
        tokens, started = sum(chunk.tokens for chunk in chunks), time.perf_counter()
        ids = [active.id for active in actives]
        run = self._trace.timed("decoder", "step", run_step, requests=ids, tokens=tokens)
        try:
            done = await self._lanes.prefill.run(run, self._family, self._plan, chunks)
        finally:
            for active in actives:
                active.job.running = False
                active.moved.set()
        self.steps += 1
        seconds = time.perf_counter() - started
        self._pace = min(seconds / tokens, self._pace or math.inf)
        self._observer.stepped(requests=len(ids), tokens=tokens, budget=self.batcher.step_tokens, seconds=seconds)
        self._observer.waiting(jobs=len(self._active), pictures=len(self._tower))
        # Whoever uses a result does so on the default stream: it waits for the step, and keeps the memory.
        Encoded([chunk.prefill for chunk in chunks if chunk.prefill.done], done.ready).take()
        for active, take in zip(actives, takes, strict=True):
            active.job.done = take.end
            for tell in active.on_progress:
                tell()
        await self._finish(done, [active for active in actives if active.job.remaining == 0])

    async def _finish(self, done: Encoded[None], actives: Seq[Active]) -> None:
        """Wake those that are complete when the device is; no more than one step is launched ahead of it."""
        before, self._landing = self._landing, None
        if done.ready is not None:
            self._landing = asyncio.ensure_future(self._land(done, actives))
        else:
            await self._land(done, actives)
        if before is not None:
            await before

    async def _land(self, done: Encoded[None], actives: Seq[Active]) -> None:
        try:
            await done.landed()
        except RuntimeError as error:  # what the device met while it ran; nothing can be said about any later step
            self.die(error)
        for active in actives:
            _resolve(active.finished, None)

    # Failures.

    async def _splitting(
        self, items: Seq[Any], run: Callable[[Seq[Any]], Awaitable[None]], fail: Callable[[Any, BaseException], None]
    ) -> None:
        """Run a batch; if it fails (out of memory, one bad item) run its halves, until the failing item stands alone."""
        try:
            await run(items)
        except Exception as error:  # handed to the item's owner
            if _is_fatal(error):
                self.die(error)
            elif len(items) == 1:
                fail(items[0], error)
            else:
                middle = len(items) // 2
                await self._splitting(items[:middle], run, fail)
                await self._splitting(items[middle:], run, fail)

    def _fail_picture(self, item: tuple[Job, Picture], error: BaseException) -> None:
        if item[1] in self._tower:
            _reject(self._tower[item[1]].output, _named(error, "a picture"))

    def _fail_take(self, take: Take, error: BaseException) -> None:
        if take.job in self._active:
            take.job.ready = 0
            _reject(self._active[take.job].finished, _named(error, f"request {self._active[take.job].id!r}"))

    def die(self, error: BaseException) -> None:
        """Nothing can run any more: fail every waiter at once, and whoever comes later."""
        self._fatal = error
        for waiting in self._tower.values():
            _reject(waiting.output, self._closed())
        for active in self._active.values():
            active.job.ready = 0
            _reject(active.finished, self._closed())

    def _check(self) -> None:
        if self._fatal is not None:
            raise self._closed()

    def _closed(self) -> EngineClosedError:
        if isinstance(self._fatal, EngineClosedError):
            return EngineClosedError(str(self._fatal))
        error = EngineClosedError(f"the engine died: {self._fatal}; start a new one")
        error.__cause__ = self._fatal
        return error


def _is_fatal(error: BaseException) -> bool:
    """Errors after which the device answers nothing any more."""
    accelerator: type[BaseException] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)
    return isinstance(error, accelerator) and not isinstance(error, torch.OutOfMemoryError)


def _named(error: BaseException, what: str) -> BaseException:
    """Out of memory, with what did not fit; other errors as they are."""
    memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
    if not memory:
        return error
    named = OutOfMemoryError(f"{what} does not fit in memory, even alone: {error}")
    named.__cause__ = error
    return named


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
