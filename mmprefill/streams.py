"""Lanes: the only file that names CUDA streams, events and the threads that launch on them.

A lane is a device, a CUDA stream and the one thread that launches on it. On a CPU every lane is the same lane: torch uses
all cores inside one thread, and a second one would only fight it.

    vision lane  ──encode──●ready──────encode──●ready────
                            ╲                   ╲           ● an event recorded behind the work it guards
    text lane    ─────────── merge ──●ready──── merge ──    ╲ `take`: the consumer's stream waits for the event;
                                      ╲                       the host never does
    prefill lane ────────────────────  step ─── step ──
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from mmprefill.errors import EngineClosedError

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class Encoded(Generic[T]):
    """A value made on a lane, with the event that says when its tensors are written (None on a CPU: they are)."""

    value: T
    ready: torch.cuda.Event | None = None

    def take(self) -> T:
        """The value, for use on the current stream: waits for the event there, and keeps the memory for that stream."""
        if self.ready is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.ready)
            for tensor in _tensors(self.value):
                tensor.record_stream(stream)  # else the allocator reuses it when its own stream is done with it
        return self.value

    async def landed(self) -> None:
        """Wait until the tensors are written, on a thread of the running loop: the loop itself goes on."""
        if self.ready is not None:
            await asyncio.to_thread(self.ready.synchronize)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))


class Lane:
    """Runs functions one after another on its own thread, without gradients, on its own stream.

    Args:
        name: of its thread.
        device: where it runs.
        lock: held during each call, where lanes of other engines use the same module.
    """

    def __init__(self, name: str, device: torch.device, lock: AbstractContextManager[Any] | None = None) -> None:
        self.name, self.device = name, device
        self._lock = lock or nullcontext()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"mmprefill-{name}")
        self._thread: int | None = None

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[Encoded[T]]:
        """Queue a call; the future holds its value and the event behind it.

        Raises:
            EngineClosedError: after `close`.
        """
        try:
            return self._pool.submit(lambda: self._run(function, *args, **kwargs))
        except RuntimeError as error:
            raise EngineClosedError("the engine is closed") from error

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Encoded[T]:
        """Await a call."""
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call and wait until its tensors are written; from the lane's own thread it runs in place."""
        if threading.get_ident() == self._thread:
            return function(*args, **kwargs)
        encoded = self.submit(function, *args, **kwargs).result()
        if encoded.ready is not None:
            encoded.ready.synchronize()
        return encoded.value

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._pool.shutdown(wait=True)

    def _run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Encoded[T]:
        self._thread = threading.get_ident()
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with self._lock, torch.no_grad(), on_stream:
            value = function(*args, **kwargs)
            if self._stream is None:
                return Encoded(value)
            event = torch.cuda.Event()
            event.record(self._stream)
            return Encoded(value, event)


@dataclass(frozen=True)
class Lanes:
    """The lanes of one engine."""

    vision: Lane
    text: Lane
    prefill: Lane

    @classmethod
    def on(cls, device: torch.device, lock: AbstractContextManager[Any] | None = None) -> Lanes:
        """One lane per stage on CUDA, one shared lane elsewhere; the lane of the decoder holds `lock` while it runs."""
        if device.type != "cuda":
            lane = Lane("compute", device, lock)
            return cls(lane, lane, lane)
        # Text, merge and decoder put stubs on the same module while they record: they share a thread, and so a stream.
        prefill = Lane("prefill", device, lock)
        return cls(Lane("vision", device), prefill, prefill)

    def close(self) -> None:
        """End every lane."""
        for lane in {self.vision, self.text, self.prefill}:
            lane.close()


def sent(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A host tensor on a device, in a dtype; to CUDA in the order of the current stream, which nobody waits for here."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device, dtype)
    # torch keeps pinned buffers, and gives one out again only behind the event of the copy that read it last: while one
    # is being read the next batch gets another.
    pinned = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


_thread_count_lock = threading.Lock()


def keep_to_one_core() -> None:
    """Initialiser of host threads: torch calls made on them stay single-threaded, those of other threads do not change.

    `torch.set_num_threads` sets this thread's OpenMP team and also the count that later threads start from; a
    short-lived thread puts the latter back.
    """
    with _thread_count_lock:
        count = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(count,))
        restore.start()
        restore.join()


def on_a_passing_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call on a thread that ends with it, and so does its OpenMP team.

    Teams of two threads are more than there are cores: GNU's runtime then puts them to sleep after every operation, and a
    lane's next one waits until its team is awake, a quarter of a short text's step. Ctrl-C waits for the call, whose
    patches of the process, say, are taken back when it ends; a second one does not.
    """
    done: Future[T] = Future()
    call = partial(copy_context().run, function, *args, **kwargs)
    thread = threading.Thread(target=_settle, args=(done, call), name="mmprefill-passing", daemon=True)
    thread.start()
    try:
        return done.result()
    finally:
        thread.join()
        del done, thread  # an error's traceback holds this frame: a cycle, with half a model in it


def _settle(done: Future[T], call: Callable[[], T]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:
        done.set_exception(error)
        del done  # as above
