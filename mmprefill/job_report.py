"""What people see of a batch job: a bar while it runs, plain lines where there is no terminal, a report at the end."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from mmprefill.job_output import Served
from mmprefill.report import human_bytes

STAGES_WIDTH = 40  # of the widest bar of the report


@dataclass
class JobReport:
    """How a job went.

    Attributes:
        out: its folder.
        ok: rows of this run that have their output.
        failed: rows of this run that failed; each has a line in the table of errors.
        skipped: rows that an earlier run had done, failed ones among them.
        failed_before: failed ones among those.
        tokens: prompt tokens.
        reused_tokens: of those, tokens whose KV came from another row.
        pictures: pictures shown.
        reused_pictures: of those, pictures that were encoded for another row.
        seconds: time that this run took.
        nbytes: bytes of output, earlier runs' included.
        stages: seconds by stage, summed over rows.
        errors: failed rows of this run by the class of their error.
        examples: the first message of each of those classes.
        stopped: why the job stopped before its end; empty where it did not.
    """

    out: Path
    ok: int = 0
    failed: int = 0
    skipped: int = 0
    failed_before: int = 0
    tokens: int = 0
    reused_tokens: int = 0
    pictures: int = 0
    reused_pictures: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    stopped: str = ""

    @property
    def exit_code(self) -> int:
        """0: every row, if any, has its output; 1: some failed, now or before; 3: stopped before the end."""
        if self.stopped:
            return 3
        return 1 if self.failed or self.failed_before else 0

    def add(self, served: Served) -> None:
        """Count a group of rows."""
        self.ok += len(served.records)
        self.failed += len(served.errors)
        for each in served.errors:
            self.errors[each["error"]] = self.errors.get(each["error"], 0) + 1
            self.examples.setdefault(each["error"], each["message"])
        for name in ("tokens", "reused_tokens", "pictures", "reused_pictures"):
            setattr(self, name, getattr(self, name) + getattr(served, name))
        for stage, seconds in served.seconds.items():
            self.stages[stage] = self.stages.get(stage, 0.0) + seconds

    def lines(self) -> list[str]:
        """The report as text."""
        rate = f"{(self.ok + self.failed) / self.seconds:.1f} rows/s, {self.tokens / self.seconds:.0f} tokens/s"
        lines = [
            f"{self.ok} ok, {self.failed} failed, {self.skipped} skipped (done before), in {self.seconds:.1f} s: {rate}",
            f"{self.tokens} tokens, {self.reused_tokens} of them reused; "
            f"{self.pictures} pictures, {self.reused_pictures} of them encoded for another row",
            *(f"  {count} x {name}: {self.examples.get(name, '')}" for name, count in most_common(self.errors)),
            *self._stage_lines(),
            f"{human_bytes(self.nbytes)} in {self.out}; the times as a picture in report.svg",
        ]
        return [*lines, f"stopped: {self.stopped}"] if self.stopped else lines

    def _stage_lines(self) -> list[str]:
        """Mean seconds of a row by stage, as bars; rows overlap, so the sum is more than the time that passed."""
        most = max(self.stages.values(), default=0)
        if not most or not self.ok:
            return []
        return [
            f"  {stage:9} {seconds / self.ok:8.3f} s a row {'█' * round(STAGES_WIDTH * seconds / most)}".rstrip()
            for stage, seconds in self.stages.items()
        ]


@dataclass(frozen=True)
class JobEstimate:
    """What a job would come to, from a few of its rows that were run.

    Attributes:
        rows: how many there are.
        sample: how the sampled rows went.
        tokens: prompt tokens of all rows.
        nbytes: bytes of the output.
        seconds: time.
    """

    rows: int
    sample: JobReport
    tokens: int
    nbytes: int
    seconds: float


def most_common(counts: dict[str, int]) -> list[tuple[str, int]]:
    """Names and counts, the most frequent first."""
    return sorted(counts.items(), key=lambda each: -each[1])


class Display:
    """Shows nothing: the base of the others."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the screen in order."""

    def update(self, report: JobReport, total: int | None) -> None:
        """Called after every group of rows."""


class Bar(Display):
    """A rich progress bar on standard error."""

    def __init__(self, console: Console) -> None:
        self._started, self._before = time.perf_counter(), 0
        self._bar = RichProgress(
            TextColumn("batch"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"),
            TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self._task = self._bar.add_task("batch", total=None, now="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def update(self, report: JobReport, total: int | None) -> None:
        """Move the bar."""
        done = report.ok + report.failed + report.skipped
        now = _now(report, time.perf_counter() - self._started)
        self._bar.update(self._task, completed=done, total=total, now=now)


class Lines(Display):
    """A line on standard error every so many seconds."""

    def __init__(self, console: Console, every: float = 10.0) -> None:
        self._console, self._every = console, every
        self._started = self._last = time.perf_counter()

    def update(self, report: JobReport, total: int | None) -> None:
        """Write the next line if it is time."""
        now = time.perf_counter()
        if now - self._last < self._every:
            return
        self._last = now
        done, served = report.ok + report.failed + report.skipped, report.ok + report.failed
        left = f", {(total - done) * (now - self._started) / served:.0f} s left" if total and served else ""
        of = f" of {total}" if total else ""
        self._console.print(f"mmprefill: {done}{of} rows, {_now(report, now - self._started)}{left}", highlight=False)


def _now(report: JobReport, seconds: float) -> str:
    hits = f", {100 * report.reused_pictures // report.pictures} % of pictures reused" if report.pictures else ""
    rows, tokens = (report.ok + report.failed) / seconds, report.tokens / seconds
    return f"{rows:.1f} rows/s, {tokens:.0f} tokens/s{hits}, {report.failed} failed"


def display(*, wanted: bool) -> Display:
    """What suits standard error; nothing where nothing is wanted."""
    if not wanted:
        return Display()
    console = Console(stderr=True)
    return Bar(console) if console.is_terminal else Lines(Console(stderr=True, width=160))


def show_report(report: JobReport, as_json: bool) -> None:
    """How a job went, on standard output; that there was nothing to do, on standard error."""
    if not (report.ok or report.failed or report.skipped or report.stopped):
        _say_no_rows()
    if as_json:
        print(json.dumps({**asdict(report), "exit_code": report.exit_code}, default=str))
    else:
        Console(width=160).print("\n".join(report.lines()), highlight=False, markup=False)


def _say_no_rows() -> None:
    print("mmprefill: no rows: the input is empty, or none of it is in this shard", file=sys.stderr)


def show_estimate(estimate: JobEstimate, as_json: bool) -> None:
    """What a job would come to, on standard output; that there is nothing to do, on standard error."""
    if not estimate.rows:
        _say_no_rows()
    if as_json:
        print(json.dumps(asdict(estimate), default=str))
        return
    sample = estimate.sample
    print(
        f"{estimate.rows} rows: about {estimate.tokens} tokens, {human_bytes(estimate.nbytes)}, {estimate.seconds:.0f} s"
    )
    print(f"from {sample.ok + sample.failed} rows that were run, {sample.failed} of which failed")
    for name, count in most_common(sample.errors):
        print(f"  {count} x {name}: {sample.examples[name]}")
