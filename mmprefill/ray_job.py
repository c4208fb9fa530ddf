"""Workers of a batch job on Ray: an engine per actor, on this machine or on many.

Reading, committing and reporting stay where the job was started, so that output, resume and errors are those of a local
job; what runs elsewhere is `Server.serve`. The machines share the folder that the output goes to, and the pictures.

Needs `pip install 'mmprefill[ray]'`. A cluster that was joined before (`ray.init`) is used and left as it is; else one
is started on this machine and ended with the job. Nothing is reported to Ray's makers unless the environment asks for it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmprefill.config import PrefillConfig
from mmprefill.errors import EngineClosedError, MMPrefillError
from mmprefill.job_output import Budget, Served
from mmprefill.job_serve import IN_FLIGHT, Item, Server, Waiting, check_choices, describe
from mmprefill.job_settings import JobSettings
from mmprefill.prefiller import Prefiller


class Engine:
    """What an actor holds: a loaded model, and the server of one job."""

    def __init__(
        self, model: str | None, config: PrefillConfig | None, options: Mapping[str, Any], settings: JobSettings
    ) -> None:
        self._prefiller = Prefiller.from_pretrained(model, config=config, **options)
        self._settings = settings
        self._server: Server | None = None

    def describe(self) -> dict[str, Any]:
        """What `job_serve.describe` says, here."""
        check_choices(self._prefiller.session, self._settings)
        return describe(self._prefiller.session, self._settings)

    def open(self, folder: Path) -> None:
        """Write to this folder from now on."""
        self._server = Server(self._prefiller, folder, self._settings, Budget(None))

    def serve(self, start: int, number: int, group: Seq[Item]) -> Served:
        """See `Server.serve`."""
        assert self._server is not None, "open() comes first"
        return self._server.serve(start, number, group)


class Group:
    """A group that an actor has."""

    def __init__(self, ray: Any, ref: Any) -> None:
        self._ray, self.ref = ray, ref

    def result(self) -> Served:
        """Wait for it; what an actor raises is raised here."""
        served: Served = fetched(self._ray, self.ref)
        return served


class RayWorkers:
    """Actors with an engine each; groups go to them in turn.

    Args:
        actors: how many.
        model: folder or hub id, as the actors find it.
        config: their engines' settings.
        options: further arguments of `Prefiller.from_pretrained`.
        settings: the job's.
    """

    def __init__(
        self,
        actors: int,
        model: str | Path | None,
        config: PrefillConfig | None,
        options: Mapping[str, Any],
        settings: JobSettings,
    ) -> None:
        if actors < 1:
            raise ValueError(f"actors must be positive, got {actors}")
        if settings.disk_budget is not None:
            raise ValueError("a disk budget is kept by the local engine only")
        self.capacity = IN_FLIGHT * actors
        self._ray, self._own = _ray()
        there = self._ray.cluster_resources()
        needs = {"num_cpus": max(1, int(there.get("CPU", 1)) // actors), "num_gpus": 1 if there.get("GPU") else 0}
        make = self._ray.remote(Engine).options(max_concurrency=IN_FLIGHT, **needs)
        where = None if model is None else str(Path(model).absolute() if Path(model).exists() else model)
        self._actors = [make.remote(where, config, dict(options), settings) for _ in range(actors)]
        self._sent, self._waiting = 0, list[Any]()

    def describe(self) -> dict[str, Any]:
        """What the actors run; the same on each.

        Raises:
            MMPrefillError: if it is not.
        """
        found: list[dict[str, Any]] = [fetched(self._ray, actor.describe.remote()) for actor in self._actors]
        if any(each["model"] != found[0]["model"] for each in found):
            raise MMPrefillError(
                "the actors have loaded different models: is the checkpoint the same on every machine?"
            )
        return found[0]

    def open(self, folder: Path) -> None:
        """The actors write to this folder from now on."""
        for actor in self._actors:
            fetched(self._ray, actor.open.remote(folder.absolute()))

    def submit(self, start: int, number: int, group: Seq[Item]) -> Waiting:
        """See `Workers.submit`."""
        ref = self._actors[self._sent % len(self._actors)].serve.remote(start, number, group)
        self._sent += 1
        self._waiting = [*self._waiting[1 - self.capacity :], ref]
        return Group(self._ray, ref)

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what runs: it writes files."""
        if self._waiting:
            self._ray.wait(self._waiting, num_returns=len(self._waiting))

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        for actor in self._actors:
            with suppress(Exception):  # it may be gone
                self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()


def fetched(ray: Any, ref: Any) -> Any:
    """A result of an actor.

    Raises:
        EngineClosedError: if the actor is gone; else whatever it raised.
    """
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, BaseException):
            raise error.cause from error
        raise
    except ray.exceptions.RayError as error:
        raise EngineClosedError(f"a Ray actor was lost: {str(error).strip().splitlines()[0]}") from error


def _ray() -> tuple[Any, bool]:
    """Ray, connected, and whether that was done here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise MMPrefillError("the engine 'ray' needs ray: pip install 'mmprefill[ray]'") from error
    if ray.is_initialized():
        return ray, False
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    return ray, True
