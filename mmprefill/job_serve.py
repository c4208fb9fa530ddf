"""One group of rows, from requests to files: what a job does on its workers, wherever they are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mmprefill.errors import MediaFetchError
from mmprefill.job_output import Budget, Outcome, Output, Served, is_fatal
from mmprefill.job_plan import IN_FLIGHT, Group, Plan
from mmprefill.job_rows import with_remotes
from mmprefill.job_settings import JobSettings
from mmprefill.pipeline.kv_store import identity_of
from mmprefill.prefiller import Prefiller
from mmprefill.results import Session
from mmprefill.scoring import token_ids
from mmprefill.types import Prepared, Request

BACKOFF = 0.5  # seconds before the first retry, doubled for each further one
Asked = TypeVar("Asked")
Landed = Generator[tuple[Group, Served], None, None]


class Workers(Protocol):
    """Who serves a job."""

    def run(self, plan: Plan) -> Landed:
        """A plan's groups and what was made of them, in order; closed before its end, nothing runs any more."""


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

    def run(self, plan: Iterable[Group]) -> Landed:
        """See `Workers.run`: groups are read on the caller's thread, served on threads of their own."""
        flying: deque[tuple[Group, Future[Served]]] = deque()
        threads = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="mmprefill-job")
        try:
            for group in plan:
                if len(flying) == IN_FLIGHT:
                    yield _landed(*flying.popleft())
                flying.append((group, threads.submit(self.serve, group)))
            while flying:
                yield _landed(*flying.popleft())
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    def serve(self, group: Group) -> Served:
        """Prefill the group, make its records and write its files."""
        served = Served()
        if group.items:
            outcomes = retried([request for _, request in group.items], self._attempt, self._settings.retries)
            served = self._output.serve(group.start, group.number, [row for row, _ in group.items], outcomes)
        served.errors += group.failed
        return served

    def _attempt(self, requests: Seq[Request | Prepared]) -> list[Outcome]:
        limit = self._prefiller.intake.config.media.max_bytes
        ready = [fetched(each, limit) if isinstance(each, Request) else each for each in requests]
        outcomes = iter(self._prefiller.prefill_many([each for each in ready if not isinstance(each, Exception)]))
        found: list[Outcome] = [each if isinstance(each, Exception) else next(outcomes) for each in ready]
        lost = next((each for each in found if isinstance(each, BaseException) and _is_lost(each)), None)
        if lost is not None:
            raise lost
        return found


def _landed(group: Group, future: Future[Served]) -> tuple[Group, Served]:
    return group, future.result()


def retried(requests: Seq[Asked], attempt: Callable[[Seq[Asked]], list[Any]], retries: int) -> list[Any]:
    """An outcome for each; what failed for want of the network is tried again."""
    outcomes = attempt(requests)
    for number in range(retries):
        again = [i for i, each in enumerate(outcomes) if isinstance(each, MediaFetchError)]
        if not again:
            break
        time.sleep(BACKOFF * 2**number)
        for i, outcome in zip(again, attempt([requests[i] for i in again]), strict=True):
            outcomes[i] = outcome
    return outcomes


def fetched(request: Request, limit: int) -> Request | Exception:
    """The request with its remote pictures of at most so many bytes each, or why it cannot be had."""
    try:
        return with_remotes(request, limit)
    except Exception as error:  # whatever the storage raises fails this row alone
        return error


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
    """Every choice is text and has a token.

    Raises:
        ValueError: naming the one that is not, or has none.
    """
    token_ids(session, settings.choices)


def _is_lost(error: BaseException) -> bool:
    return is_fatal(error) and not isinstance(error, OSError)
