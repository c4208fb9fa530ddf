"""What a batch job on Ray runs elsewhere: rows to what a model takes, and that to files. See `ray_job`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from mmprefill.encoders.text import Intake
from mmprefill.errors import EngineClosedError, MMPrefillError
from mmprefill.job_output import Budget, Served
from mmprefill.job_plan import Group
from mmprefill.job_rows import Row, failure
from mmprefill.job_serve import Server, check_choices, describe, fetched, retried
from mmprefill.prefiller import Prefiller
from mmprefill.ray_reader import Batch, Setup, batch_of
from mmprefill.streams import keep_to_one_core
from mmprefill.types import Prepared, Request


def described(setup: Setup) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """What the manifest says of the model, and what an intake is made of."""
    with _prefiller(setup) as prefiller:
        check_choices(prefiller.session, setup.settings)
        intake = prefiller.intake
        return describe(prefiller.session, setup.settings), (intake.processor, intake.placeholders, intake.context)


class Stage:
    """What groups go through. An actor that Ray has started again after it was lost does no more: it could be its group
    that ends it, for ever."""

    def __init__(self) -> None:
        self._lost = _ray().get_runtime_context().was_current_actor_reconstructed

    def __call__(self, batch: Batch) -> Batch:
        """A batch of one group, or of what an earlier stage raised, which goes through as it is."""
        [group] = batch["group"]
        if isinstance(group, Exception):
            return batch_of(group)
        try:
            if self._lost:
                raise EngineClosedError("a Ray actor was lost, and with it what it was doing")
            return batch_of(self._work(group))
        except Exception as error:
            return batch_of(error)

    def _work(self, group: Group) -> Any:
        raise NotImplementedError


class Preparer(Stage):
    """Makes a group's rows what a model takes."""

    def __init__(self, setup: Any, intake: Any) -> None:
        super().__init__()
        made: Setup = _ray().get(setup)
        processor, placeholders, context = _ray().get(intake)
        self._retries, self._limit = made.settings.retries, made.config.media.max_bytes
        self._intake = Intake(processor, placeholders, made.config, context)
        self._threads = ThreadPoolExecutor(made.config.intake_threads, initializer=keep_to_one_core)

    def _work(self, group: Group) -> Group:
        outcomes = retried([request for _, request in group.items], self._attempt, self._retries)
        made = [(Row(row.index, row.id, {}), each) for (row, _), each in zip(group.items, outcomes, strict=True)]
        failed = [failure(row, each) for row, each in made if isinstance(each, Exception)]
        pictures: dict[Any, Any] = {}
        items = [(row, _sharing(each, pictures)) for row, each in made if isinstance(each, Prepared)]
        return replace(group, items=items, failed=[*group.failed, *failed])

    def _attempt(self, requests: Seq[Any]) -> list[Any]:
        return list(self._threads.map(self._prepared, requests))

    def _prepared(self, request: Request) -> Prepared | Exception:
        """With arrays for tensors, and without the text and pictures that it is made of."""
        ready = fetched(request, self._limit)
        if isinstance(ready, Exception):
            return ready
        try:
            prepared = self._intake.prepare(ready)
        except Exception as error:  # of this row, as in an engine
            return error
        arrays: Any = {name: tensor.numpy() for name, tensor in prepared.inputs.items()}
        return replace(prepared, request=replace(request, prompt="", messages=None, images=()), inputs=arrays)


class Engine(Stage):
    """Prefills a group and writes its files."""

    def __init__(self, setup: Any, job: Any, gate: Any) -> None:
        super().__init__()
        if self._lost:
            return
        ray = _ray()
        ray.get(gate.join.remote(ray.get_runtime_context().current_actor))
        made, (about, folder) = ray.get(setup), ray.get(job)
        prefiller = _prefiller(made)
        self._same = describe(prefiller.session, made.settings)["model"] == about["model"]
        self._server = Server(prefiller, folder, made.settings, Budget(None))

    def _work(self, group: Group) -> tuple[Group, Served]:
        if not self._same:
            raise MMPrefillError("the actors loaded different models: is the checkpoint the same on every machine?")
        items = [(row, _with_tensors(each)) for row, each in group.items if isinstance(each, Prepared)]
        served = self._server.serve(replace(group, items=items))
        if served.records:
            served.seconds["intake"] += sum(each.seconds for _, each in items)
        return replace(group, items=(), failed=()), served


def _sharing(prepared: Prepared, pictures: dict[Any, Any]) -> Prepared:
    """With the arrays of an earlier row's pictures if they are the same: they then go on once (see `items._key`)."""
    shown = tuple(item.digest for item in prepared.media)
    arrays: Any = {
        name: pictures.setdefault((name, array.shape, shown), array) if name.startswith("pixel_") else array
        for name, array in prepared.inputs.items()
    }
    return replace(prepared, inputs=arrays)


def _with_tensors(prepared: Prepared) -> Prepared:
    arrays: Any = prepared.inputs
    return replace(prepared, inputs={name: torch.from_numpy(array) for name, array in arrays.items()})


def _prefiller(setup: Setup) -> Prefiller:
    return Prefiller.from_pretrained(setup.model, config=setup.config, **setup.options)


def _ray() -> Any:
    return importlib.import_module("ray")
