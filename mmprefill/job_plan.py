"""What a job has still to do: the rows of its input that are not done yet, in groups for an engine.

    rows --> parts of N rows --> groups that share pictures and prompts
             (input order)       (so many at once)

A plan takes neither an engine nor the job's folder, only rows and what earlier runs have left, so that it can be gone
through wherever the input lies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mmprefill.errors import JobError
from mmprefill.job_rows import Columns, Row, affinity, failure
from mmprefill.job_settings import JobSettings
from mmprefill.job_state import Done, read_commit
from mmprefill.types import Prepared, Request

IN_FLIGHT = 3  # groups of an engine: one being read or written, two in the engine
Item = tuple[Row, Request | Prepared]


@dataclass(frozen=True)
class Group:
    """Rows for an engine, and their place in the output.

    Attributes:
        start: the first row of their part, counted among the rows of this job.
        stop: the row after the part's last.
        digest: of the part's rows, hex.
        number: tells the group's files from those of the part's other groups.
        last: whether the part is done with it.
        again: whether the part was done before; the rows are those that had failed.
        items: the rows, each as a request.
        failed: records of rows that failed before they came to an engine.
        skipped: rows before these that were done before.
    """

    start: int = 0
    stop: int = 0
    digest: str = ""
    number: int = 0
    last: bool = False
    again: bool = False
    items: Seq[Item] = ()
    failed: Seq[dict[str, Any]] = ()
    skipped: int = 0


@dataclass(frozen=True)
class _Part:
    """Rows that are committed together; `first` is the number of its first group, above 0 if it was done before."""

    start: int
    stop: int
    digest: str
    rows: Seq[Row] = ()
    first: int = 0
    again: bool = False


@dataclass(frozen=True)
class Plan:
    """The groups of a job in the order of its rows; can be pickled if `rows` can.

    Attributes:
        path: the job's folder.
        done: the parts that are done, in order.
        settings: the job's.
        rows: starts to read its rows.

    Raises:
        JobError: on the way, if the rows that were done are not those of the input.
    """

    path: Path
    done: Seq[Done]
    settings: JobSettings
    rows: Callable[[], Iterable[Row]]

    def __iter__(self) -> Iterator[Group]:
        skipped = 0
        for part in self._parts():
            skipped += part.stop - part.start - len(part.rows)
            for group in self._groups(part):
                yield replace(group, skipped=skipped)
                skipped = 0
        if skipped:
            yield Group(skipped=skipped)

    def _parts(self) -> Iterator[_Part]:
        """The rows between the parts that are done, and those parts with what is to be done again."""
        rows, at = iter(self.rows()), 0
        for done in self.done:
            yield from self._fresh(islice(rows, done.start - at), at)
            yield from self._before(islice(rows, done.stop - done.start), done)
            at = done.stop
        yield from self._fresh(rows, at)

    def _fresh(self, rows: Iterator[Row], at: int) -> Iterator[_Part]:
        while some := list(islice(rows, self.settings.part_rows)):
            yield _Part(at, at + len(some), _digest(some), some)
            at += len(some)

    def _before(self, rows: Iterator[Row], done: Done) -> Iterator[_Part]:
        again = self.settings.retry_failed and done.failed > 0
        commit = read_commit(self.path, done.start) if again else None
        if commit and commit.mark != done:  # a reader that was lost and is run again must not see other groups
            raise JobError(f"{self.path}: rows were done again while they were read; the same command goes on")
        failed = {each["index"] for each in commit.errors} if commit else set()
        digest, kept, count = hashlib.blake2b(digest_size=16), list[Row](), 0
        for row in rows:
            count += 1
            digest.update(row.digest)
            if row.index in failed:
                kept.append(row)
        if count < done.stop - done.start:
            if self.settings.limit is None:
                total = done.start + count
                raise JobError(f"{self.path}: the input has {total} rows, {self.done[-1].stop} were done before")
            yield _Part(done.start, done.start + count, "")
        elif digest.hexdigest() != done.digest:
            raise JobError(
                f"{self.path}: rows {done.start} to {done.stop - 1} of the input are not those that were done; "
                "use another folder for another input"
            )
        else:
            yield _Part(done.start, done.stop, done.digest, kept, commit.groups if commit else 0, again)

    def _groups(self, part: _Part) -> Iterator[Group]:
        """A part's rows for the engine, those that share pictures and prompts side by side."""
        if not part.rows:
            return
        asked = [(row, self._request(row)) for row in part.rows]
        failed = [failure(row, each) for row, each in asked if isinstance(each, Exception)]
        good = [(row, each) for row, each in asked if isinstance(each, Request)]
        good.sort(key=lambda item: affinity(item[1]))
        size = max(1, self.settings.window // IN_FLIGHT)
        cut = [good[i : i + size] for i in range(0, len(good), size)] or [[]]
        for number, items in enumerate(cut):
            yield Group(
                part.start, part.stop, part.digest, part.first + number, number == len(cut) - 1, part.again,
                items=items, failed=() if number else failed,
            )  # fmt: skip

    def _request(self, row: Row) -> Request | Exception:
        if row.error is not None:
            return row.error
        try:
            return Columns(self.settings).request(row)
        except ValueError as error:  # RequestError, or what `Request` itself says
            return error


def _digest(rows: Seq[Row]) -> str:
    return hashlib.blake2b(b"".join(row.digest for row in rows), digest_size=16).hexdigest()
