"""What the lanes did and when, as a file for Perfetto or chrome://tracing: one row per lane.

    trace = Trace()
    engine = AsyncPrefiller(bundle, trace=trace)
    ...
    trace.write("run.trace.json")

Work is timed on the thread that runs it, so that waiting in a lane's queue is not part of it. On CUDA that is the time in
which the host launched the work; `record` takes device times where somebody measured them.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
_NOTHING = nullcontext()


class Recorder:
    """Keeps nothing: what the engine uses unless it is given a `Trace`."""

    enabled = False

    def span(self, lane: str, name: str, /, **args: Any) -> AbstractContextManager[None]:
        """The block is one bar in the row of the lane ("": of this thread); `args` are shown with it and go into JSON."""
        return _NOTHING

    def timed(self, lane: str, name: str, function: Callable[P, T], /, **args: Any) -> Callable[P, T]:
        """The function, recording each of its calls as a span on the thread that makes it."""
        return function

    def record(self, lane: str, name: str, start: float, end: float, /, **args: Any) -> None:
        """A bar from `start` to `end`, in seconds of `time.perf_counter`."""


OFF = Recorder()


@dataclass(frozen=True)
class Bar:
    """One thing that a lane did; times in seconds of `time.perf_counter`."""

    lane: str
    name: str
    start: float
    end: float
    args: dict[str, Any]


@dataclass
class Trace(Recorder):
    """Keeps every bar in memory until it is written. Safe to use from several threads.

    Args:
        limit: most bars kept; the oldest go first. None keeps all.
    """

    limit: int | None = 1_000_000
    bars: list[Bar] = field(default_factory=list)
    enabled = True

    def span(self, lane: str, name: str, /, **args: Any) -> AbstractContextManager[None]:
        """See `Recorder.span`; a block that raises is recorded too, with the error's name."""
        return self._span(lane, name, args)

    @contextmanager
    def _span(self, lane: str, name: str, args: dict[str, Any]) -> Iterator[None]:
        lane = lane or threading.current_thread().name
        started = time.perf_counter()
        try:
            yield
        except BaseException as error:
            args = {**args, "error": type(error).__name__}
            raise
        finally:
            self.record(lane, name, started, time.perf_counter(), **args)

    def timed(self, lane: str, name: str, function: Callable[P, T], /, **args: Any) -> Callable[P, T]:
        """See `Recorder.timed`."""

        def run(*positional: P.args, **named: P.kwargs) -> T:
            with self.span(lane, name, **args):
                return function(*positional, **named)

        return run

    def record(self, lane: str, name: str, start: float, end: float, /, **args: Any) -> None:
        """See `Recorder.record`."""
        self.bars.append(Bar(lane, name, start, end, args))
        if self.limit is not None and len(self.bars) > self.limit:
            del self.bars[: max(self.limit // 10, 1)]

    def write(self, path: str | Path) -> Path:
        """Write the trace as JSON, in one move. Returns the path."""
        path = Path(path)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"traceEvents": list(self.events()), "displayTimeUnit": "ms"}, file, default=str)
            Path(draft).replace(path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
        return path

    def events(self) -> Iterator[dict[str, Any]]:
        """In the Trace Event Format: rows named after the lanes, in the order of their first bar, and the bars."""
        bars = sorted(self.bars, key=lambda bar: (bar.start, -bar.end))
        numbers = itertools.count(1)
        rows: dict[str, int] = {}
        for bar in bars:
            if bar.lane not in rows:
                rows[bar.lane] = next(numbers)
                yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": rows[bar.lane], "args": {"name": bar.lane}}
        for bar in bars:
            yield {
                "ph": "X",
                "name": bar.name,
                "cat": "mmprefill",
                "pid": 1,
                "tid": rows[bar.lane],
                "ts": round((bar.start - bars[0].start) * 1e6, 3),
                "dur": round((bar.end - bar.start) * 1e6, 3),
                "args": bar.args,
            }
