"""A batch job on Ray Data: read, prepared and prefilled on whatever machines a cluster has.

    reader --> preparers --> engines --> commits
    (a task    (actors:      (actors with a device:    (where the job
    beside      fetch,        encode, prefill,          was started)
    the job)    decode,       write the files)
                resize,
                tokenise)

One task reads: the order of rows, that no two ids are alike and what is done before are known only to whoever goes
through all of them. Parts are committed where the job was started, in order, as those of a local job are: hence the same
output, resume and errors. A group goes through as it is, in a block of its own; where a stage cannot go on (a row's
failure is no such thing, but data) the reason takes the group's place, to be raised here in its turn. Ray Data bounds
bytes, not groups, so the reader waits until there is room for another. Which model it is must be known before the folder
is opened, and the actors of a stream cannot be asked: a task of its own loads the model, tells, and hands the preparers
the checkpoint's processor.

The machines share the folder that the output goes to, and the pictures. A lost actor ends the job, which the same command
goes on with; a lost reader is run again. A cluster that was joined before (`ray.init`) is used and left as it is; else
one is started on this machine and ended with the job. Nothing is reported to Ray's makers unless the environment asks
for it.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmprefill.config import PrefillConfig
from mmprefill.errors import EngineClosedError, MMPrefillError
from mmprefill.job_plan import IN_FLIGHT, Plan
from mmprefill.job_serve import Landed
from mmprefill.job_settings import JobSettings
from mmprefill.ray_reader import Gate, Setup, read
from mmprefill.ray_stages import Engine, Preparer, described

HANDS = 4  # most preparers of an engine
READER = 2**26  # bytes it has asked for; alike in what they ask for, Ray Data would make it one with a preparer


class RayWorkers:
    """Serves a job on Ray; see `Workers`.

    Args:
        actors: how many engines.
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
        self._ray, self._own = _ray()
        where = None if model is None else str(Path(model).absolute() if Path(model).exists() else model)
        self._setup = self._ray.put(Setup(where, _anywhere(config or PrefillConfig()), dict(options), settings))
        self._engines, nodes = actors, [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self._preparers, self._preparer, self._engine = shares(nodes, actors)
        self._about, self._intake = dict[str, Any](), None

    def describe(self) -> dict[str, Any]:
        """What `job_serve.describe` says, there."""
        errors = self._ray.exceptions
        task = self._ray.remote(max_calls=1, max_retries=0, **self._engine)(described)
        try:
            self._about, self._intake = self._ray.get(task.remote(self._setup))
        except errors.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from error
        except errors.RayError as error:
            raise _lost(error) from error
        return self._about

    def run(self, plan: Plan) -> Landed:
        """See `Workers.run`."""
        ray = self._ray
        most = IN_FLIGHT * self._engines + 2 * self._preparers
        gate = ray.remote(num_cpus=0)(Gate).remote(most)
        try:
            for bundle in self._stream(plan, gate).iter_internal_ref_bundles():  # no thread of its own, as `iter_rows`
                for block in bundle.block_refs:
                    [landed] = ray.get(block)["group"].to_pylist()
                    if isinstance(landed, Exception):
                        raise landed
                    yield landed
                    gate.leave.remote()
        except ray.exceptions.RayError as error:
            raise _lost(error) from error
        finally:
            _end(ray, gate)

    def _stream(self, plan: Plan, gate: Any) -> Any:
        data, put, folder = self._ray.data, self._ray.put, plan.path.absolute()
        source = put(replace(plan, path=folder)), Path.cwd(), gate, self._engines
        here = {"ray.io/node-id": self._ray.get_runtime_context().get_node_id()}
        prepare = data.ActorPoolStrategy(size=self._preparers)
        prefill = data.ActorPoolStrategy(
            size=self._engines,
            max_tasks_in_flight_per_actor=IN_FLIGHT,
            max_concurrent_calls_per_actor=IN_FLIGHT,
            enable_true_multi_threading=True,
        )
        hands, model = (self._setup, put(self._intake)), (self._setup, put((self._about, folder)), gate)
        with data.DataContext.current(_context(data)):
            groups = data.from_items([0]).map_batches(
                read, fn_args=source, num_cpus=0, memory=READER, label_selector=here
            )
            ready = groups.map_batches(
                Preparer, fn_constructor_args=hands, batch_size=1, compute=prepare, **self._preparer
            )
            return ready.map_batches(Engine, fn_constructor_args=model, batch_size=1, compute=prefill, **self._engine)

    def close(self) -> None:
        """End the cluster if it was started here."""
        if self._own:
            self._ray.shutdown()


def shares(nodes: Seq[Mapping[str, float]], engines: int) -> tuple[int, dict[str, float], dict[str, float]]:
    """How many preparers there are, and what one of them and an engine take of the machines.

    Where there are devices an engine has one, and the CPUs are for preparers. Else an engine has as many CPUs as all of
    them can have; preparers then ask for none: what they do is little beside that, as in a local engine.
    """
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    if any(node.get("GPU") for node in nodes):
        left = sum(cpus) - engines  # Ray Data adds a CPU to a device
        return max(1, min(left, HANDS * engines)), {"num_cpus": float(left > 0)}, {"num_gpus": 1.0}
    fits = (n for n in range(max(cpus), 1, -1) if sum(each // n for each in cpus) >= engines)
    return engines, {"num_cpus": 0.0}, {"num_cpus": float(next(fits, 1))}


def _anywhere(config: PrefillConfig) -> PrefillConfig:
    """Settings that mean the same whatever folder a process is in."""
    roots = config.media.allowed_roots
    absolute = None if roots is None else tuple(Path(root).absolute() for root in roots)
    return replace(config, media=replace(config.media, allowed_roots=absolute))


def _context(data: Any) -> Any:
    """Ray Data's settings for groups in order, each a block of its own."""
    context = data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.target_max_block_size = 1
    context.enable_progress_bars = context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # a group may take its time
    return context


def _end(ray: Any, gate: Any) -> None:
    """Kill the engines, which may be stopped at any instant, so that none writes when the job has ended."""
    with suppress(ray.exceptions.RayError):
        engines = ray.get(gate.engines.remote())
        for engine in engines:
            ray.kill(engine)
        ray.wait([engine.__ray_ready__.remote() for engine in engines], num_returns=len(engines), timeout=30)
    ray.kill(gate)


def _lost(error: BaseException) -> EngineClosedError:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return EngineClosedError(f"a Ray actor was lost: {' ... '.join(dict.fromkeys((lines[0], lines[-1])))}")


def _ray() -> tuple[Any, bool]:
    """Ray with its Data, connected, and whether that was done here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.data")
    except ImportError as error:
        raise MMPrefillError("the engine 'ray' needs Ray Data: pip install 'mmprefill[ray]'") from error
    if ray.is_initialized():
        return ray, False
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what is raised says it
    return ray, True
