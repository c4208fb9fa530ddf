"""One group of rows, from requests to files: what a job does on its workers, wherever they are."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from mmprefill.errors import MediaFetchError
from mmprefill.job_output import Budget, Outcome, Output, Served, is_fatal
from mmprefill.job_rows import Row, with_remotes
from mmprefill.job_settings import JobSettings
from mmprefill.pipeline.kv_store import identity_of
from mmprefill.prefiller import Prefiller
from mmprefill.results import Session
from mmprefill.types import Request

IN_FLIGHT = 3  # groups of an engine: one being read or written, two in the engine
BACKOFF = 0.5  # seconds before the first retry, doubled for each further one
Item = tuple[Row, Request | BaseException]


class Waiting(Protocol):
    """A group that a worker has."""

    def result(self) -> Served:
        """Wait for it."""


class Workers(Protocol):
    """Who serves groups; left as a context, nothing runs any more.

    Attributes:
        capacity: groups that may be in flight.
    """

    capacity: int

    def submit(self, start: int, number: int, group: Seq[Item]) -> Waiting:
        """Start on the group `number` of the part that begins at row `start`."""

    def __enter__(self) -> Workers: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class Server:
    """Serves groups with an engine; from several threads.

    Args:
        prefiller: the engine.
        folder: the job's folder.
        settings: what is wanted.
        budget: bytes that may be written.
    """

    def __init__(self, prefiller: Prefiller, folder: Path, settings: JobSettings, budget: Budget) -> None:
        self._prefiller, self._settings = prefiller, settings
        self._output = Output(prefiller, folder, settings, budget)

    def serve(self, start: int, number: int, group: Seq[Item]) -> Served:
        """Prefill the group, make its records and write its files."""
        outcomes = self._prefill([each for _, each in group])
        return self._output.serve(start, number, [row for row, _ in group], outcomes)

    def _prefill(self, requests: Seq[Request | BaseException]) -> list[Outcome]:
        """An outcome for each; what failed for want of the network is tried again."""
        outcomes = self._attempt(requests)
        for attempt in range(self._settings.retries):
            again = [i for i, each in enumerate(outcomes) if isinstance(each, MediaFetchError)]
            if not again:
                break
            time.sleep(BACKOFF * 2**attempt)
            for i, outcome in zip(again, self._attempt([requests[i] for i in again]), strict=True):
                outcomes[i] = outcome
        return outcomes

    def _attempt(self, requests: Seq[Request | BaseException]) -> list[Outcome]:
        ready = [self._fetched(each) if isinstance(each, Request) else each for each in requests]
        outcomes = iter(self._prefiller.prefill_many([each for each in ready if isinstance(each, Request)]))
        found: list[Outcome] = [next(outcomes) if isinstance(each, Request) else each for each in ready]
        lost = next((each for each in found if isinstance(each, BaseException) and _is_lost(each)), None)
        if lost is not None:
            raise lost
        return found

    def _fetched(self, request: Request) -> Request | BaseException:
        try:
            return with_remotes(request, self._prefiller.intake.config.media.max_bytes)
        except Exception as error:  # whatever the storage raises fails this row alone
            return error


class Threads:
    """Workers on this machine that share an engine."""

    capacity = IN_FLIGHT

    def __init__(self, server: Server) -> None:
        self._server = server
        self._threads = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="mmprefill-job")

    def submit(self, start: int, number: int, group: Seq[Item]) -> Waiting:
        """See `Workers.submit`."""
        return self._threads.submit(self._server.serve, start, number, group)

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def describe(session: Session, settings: JobSettings) -> dict[str, Any]:
    """How the output is made, for its manifest and for whoever goes on with it."""
    identity, source = identity_of(session), session.bundle.source
    parts = ("model_type", "dtype", "weights", "config", "processor")
    return {
        "model": {name: getattr(identity, name) for name in parts},
        "settings": settings.meaning,
        "source": Path(source).name if Path(source).exists() else source,
        "versions": {name: _version(name) for name in ("mmprefill", "torch", "transformers")},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a source checkout that was never installed
        return "unknown"


def check_choices(session: Session, settings: JobSettings) -> None:
    """Every choice has a token.

    Raises:
        ValueError: naming the one that has none.
    """
    for choice in settings.choices:
        if not session.tokenizer(choice, add_special_tokens=False).input_ids:
            raise ValueError(f"a choice needs at least one token, got {choice!r}")


def _is_lost(error: BaseException) -> bool:
    return is_fatal(error) and not isinstance(error, OSError)
