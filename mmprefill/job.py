"""The batch job: rows of a dataset in, tables and KV artefacts out, in their order, whatever happens on the way.

    rows --> parts of N rows --> groups that share pictures and prompts --> engine --> records and files
             (input order)       (so many at once)                                    part by part, committed whole

Read and committed here on the caller's thread, so nothing needs a lock; groups are prefilled, scored and saved on
threads of their own, so that one is read, another prefilled and a third written at the same time. On Ray (`ray_job.py`)
only the commits are made here.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mmprefill.config import PrefillConfig
from mmprefill.files import write_atomically
from mmprefill.job_files import Input, count, find
from mmprefill.job_output import ERROR_COLUMNS, Budget, Served, StopJob, pieces, read_table, write_table
from mmprefill.job_plan import Group, Plan
from mmprefill.job_report import Display, JobEstimate, JobReport, display
from mmprefill.job_rows import Row, rows
from mmprefill.job_serve import Server, Workers, check_choices, describe
from mmprefill.job_settings import JobSettings
from mmprefill.job_state import JobFolder, read_commit, write_whole
from mmprefill.job_svg import stages_svg
from mmprefill.pipeline import memory
from mmprefill.prefiller import Prefiller

STATE = 4096  # bytes of a part's state, without its files and errors
SAMPLE = 16  # rows of a dry run
BATCH = 4096  # errors written at once


def run_job(
    inputs: str | Path | Seq[str | Path],
    out: str | Path,
    *,
    model: str | Path | None = None,
    prefiller: Prefiller | None = None,
    config: PrefillConfig | None = None,
    engine: str = "local",
    actors: int = 1,
    options: Mapping[str, Any] | None = None,
    progress: bool = False,
    **settings: Any,
) -> JobReport:
    """Prefill every row of a dataset and write what is wanted of it; goes on where an earlier run was ended.

    Args:
        inputs: JSONL, CSV or Parquet files, folders of pictures, Hugging Face datasets on disk or by
                their id on the hub; globs, fsspec paths.
        out: the folder for the output; with `shard`, a folder of the shard in it.
        model: folder or hub id; default: the bundled model.
        prefiller: an engine to use, instead of `model` and `config`.
        config: the engine's settings.
        engine: "local", or "ray": the same on Ray Data (extra `ray`), whose machines have to see `out` and the pictures.
        actors: engines on Ray, each with a model of its own and a device where there are any.
        options: further arguments of `Prefiller.from_pretrained`, such as `{"dtype": "bf16"}`.
        progress: show how it goes on standard error.
        settings: fields of `mmprefill.job_settings.JobSettings`, such as `emit=("topk", "kv")`.

    Raises:
        ValueError: for settings or inputs that make no sense.
        JobError: if the folder belongs to another job, or to this one with other settings, another model or input.
        OSError: if the input cannot be read or the output not be written; what is done stays.
    """
    chosen, sources = JobSettings(**settings), find(inputs)
    if engine not in ("local", "ray"):
        raise ValueError(f"engine must be 'local' or 'ray', got {engine!r}")
    if engine == "ray":
        if prefiller is not None:
            raise ValueError("the engine 'ray' loads its models itself: give a model, not a prefiller")
        return _run_on_ray(sources, Path(out), chosen, progress, (actors, model, config, options or {}, chosen))
    with _opened(model, prefiller, config, options or {}) as ours, display(wanted=progress) as shown:
        check_choices(ours.session, chosen)
        with closing(_begun(Path(out), sources, describe(ours.session, chosen), chosen)) as folder:
            job = _Job(folder, chosen, shown, count(sources, chosen))
            server = Server(ours, folder.path, chosen, job.budget)
            return job.run(partial(rows, sources, chosen), server)


def _run_on_ray(
    sources: Seq[Input], out: Path, chosen: JobSettings, progress: bool, what: tuple[Any, ...]
) -> JobReport:
    from mmprefill.ray_job import RayWorkers

    with (
        closing(RayWorkers(*what)) as workers,
        display(wanted=progress) as shown,
        closing(_begun(out, sources, workers.describe(), chosen)) as folder,
    ):
        return _Job(folder, chosen, shown, count(sources, chosen)).run(partial(rows, sources, chosen), workers)


def _begun(out: Path, sources: Seq[Input], about: Mapping[str, Any], settings: JobSettings) -> JobFolder:
    """The output folder; with a shard, one of its own in it."""
    path = out / f"shard-{settings.shard[0]}-of-{settings.shard[1]}" if settings.shard else out
    return JobFolder(path, {"inputs": [each.path for each in sources], **about})


def estimate_job(
    inputs: str | Path | Seq[str | Path],
    *,
    model: str | Path | None = None,
    prefiller: Prefiller | None = None,
    config: PrefillConfig | None = None,
    **settings: Any,
) -> JobEstimate:
    """Read all rows and run a few, taken evenly by chance; writes to a temporary folder only. See `run_job`."""
    chosen, sources = JobSettings(**settings), find(inputs)
    with _opened(model, prefiller, config, {}) as ours, tempfile.TemporaryDirectory() as scratch:
        check_choices(ours.session, chosen)
        total, picked = _sample(rows(sources, chosen))
        with closing(JobFolder(Path(scratch) / "job", describe(ours.session, chosen))) as folder:
            trial = replace(chosen, disk_budget=None, max_errors=None, window=SAMPLE)
            job = _Job(folder, trial, Display(), None)
            report = job.run(lambda: picked, Server(ours, folder.path, trial, job.budget))
    scale = total / max(1, len(picked))
    tokens, nbytes = round(report.tokens * scale), round(report.nbytes * scale)
    return JobEstimate(total, report, tokens, nbytes, report.seconds * scale)


def _sample(every: Iterable[Row]) -> tuple[int, list[Row]]:
    """How many rows there are, and up to `SAMPLE` of them: a reservoir, so that none has to be kept."""
    chance, kept, total = random.Random(0), list[Row](), 0  # noqa: S311  no secret
    for total, row in enumerate(every, 1):
        place = len(kept) if len(kept) < SAMPLE else chance.randrange(total)
        if place < SAMPLE:
            kept[place : place + 1] = [row]
    return total, sorted(kept, key=lambda row: row.index)


@contextmanager
def _opened(
    model: str | Path | None, prefiller: Prefiller | None, config: PrefillConfig | None, options: Mapping[str, Any]
) -> Iterator[Prefiller]:
    """The caller's engine, left open, or one of our own."""
    if prefiller is not None:
        if model is not None or config is not None or options:
            raise ValueError("an engine that is given has its model and config; give either")
        yield prefiller
        return
    with Prefiller.from_pretrained(model, config=config, **options) as own:
        yield own


class _Job:
    """One run of a job over rows."""

    def __init__(self, folder: JobFolder, settings: JobSettings, shown: Display, total: int | None) -> None:
        self._folder, self._settings, self._shown, self._total = folder, settings, shown, total
        budget = settings.disk_budget
        self.budget = Budget(None if budget is None else max(0, budget - folder.nbytes))
        self._served: list[Served] = []  # of the part that is not complete yet
        self._report = JobReport(folder.path, failed_before=folder.failed)

    def run(self, every: Callable[[], Iterable[Row]], workers: Workers) -> JobReport:
        """Serve every row that is not done yet."""
        started = time.perf_counter()
        plan = Plan(self._folder.path, tuple(self._folder.commits), self._settings, every)
        try:
            if not self._settings.retry_failed:
                self._check_errors()
            with closing(workers.run(plan)) as landed:
                for group, served in landed:
                    self._land(group, served)
        except StopJob as stop:
            self._report.stopped = str(stop)
        finally:
            self._settle()
        self._report.seconds = time.perf_counter() - started
        write_whole(self._folder.path / "report.svg", stages_svg(self._report).encode())
        self._report.nbytes = self._folder.nbytes
        self._folder.finish(complete=not self._report.stopped)
        return self._report

    def _land(self, group: Group, served: Served) -> None:
        """Count a group; commit its part if it is complete."""
        self._report.skipped += group.skipped
        self._report.add(served)
        self._shown.update(self._report, self._total)
        self._served.append(served)
        if group.last:
            self._commit(group, self._served)
            self._served = []
            self._check_errors()

    def _commit(self, group: Group, served: Seq[Served]) -> None:
        before = read_commit(self._folder.path, group.start) if group.again else None
        made = [each for s in served for each in s.records]
        made += read_table(self._folder.path / before.table) if before else []
        errors = sorted((each for s in served for each in s.errors), key=lambda each: int(each["index"]))
        files = [file for s in served for file in s.files]
        self.budget.take(STATE + 2 * len(repr(errors)) + 256 * len(files))  # of the part's state and the error table
        records = sorted(made, key=lambda each: int(each["index"]))
        assert len(records) + len(errors) == group.stop - group.start, "a part lost rows"
        table = write_table(self._folder.path, group.start, records, self._settings, self.budget)
        if before:
            self._report.failed_before -= len(before.errors)
            self._folder.amend(before, [table, *files], errors)
        else:
            self._folder.commit(group.start, group.stop, group.digest, [table, *files], errors)
        memory.give_back()

    def _check_errors(self) -> None:
        most = self._settings.max_errors
        # where failed rows are done again, those of earlier runs have not failed yet
        failed = self._report.failed if self._settings.retry_failed else self._folder.failed
        if most is not None and failed > most:
            raise StopJob(f"{failed} rows have failed, more than the {most} that are allowed")

    def _settle(self) -> None:
        """Leave nothing that is half done; bring the table of errors up to date."""
        self._folder.clear()
        parts = sorted(self._folder.commits, key=lambda each: each.start)
        errors = chain.from_iterable(self._folder.of(part).errors for part in parts if part.failed)
        batches = iter(lambda: list(islice(errors, BATCH)), [])
        path = self._folder.path / f"errors.{self._settings.format}"
        write_atomically(path, pieces(batches, ERROR_COLUMNS, self._settings.format))
