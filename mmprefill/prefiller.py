"""Prefiller: the engine for code that does not await. Works anywhere, also in a notebook whose loop is running."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmprefill.config import PrefillConfig
from mmprefill.encoders.text import Intake
from mmprefill.engine import AsyncPrefiller, Outcome, several
from mmprefill.metrics import SILENT, Observer
from mmprefill.models import ModelBundle
from mmprefill.results import PrefillResult, Session
from mmprefill.trace import OFF, Recorder
from mmprefill.types import Choice, Generation

T = TypeVar("T")


class Prefiller:
    """Blocking twin of `AsyncPrefiller`; close it, or use it in a `with` block.

    Args:
        bundle: a loaded checkpoint (`from_pretrained` loads one).
        config: limits and batch sizes.
        trace: see `AsyncPrefiller`.
        observer: see `AsyncPrefiller`.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        config: PrefillConfig | None = None,
        *,
        trace: Recorder = OFF,
        observer: Observer = SILENT,
    ) -> None:
        self._engine = AsyncPrefiller(bundle, config, trace=trace, observer=observer)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        revision: str | None = None,
        token: str | None = None,
        processor_kwargs: dict[str, Any] | None = None,
        config: PrefillConfig | None = None,
        trace: Recorder = OFF,
        observer: Observer = SILENT,
    ) -> Prefiller:
        """Load a checkpoint (no argument: the bundled model); see `mmprefill.models.load` for the arguments."""
        engine = AsyncPrefiller.from_pretrained(
            source, device=device, dtype=dtype, revision=revision, token=token,
            processor_kwargs=processor_kwargs, config=config, trace=trace, observer=observer,
        )  # fmt: skip
        prefiller = cls.__new__(cls)
        prefiller._engine = engine
        return prefiller

    @property
    def session(self) -> Session:
        """The model, its route and its lane."""
        return self._engine.session

    @property
    def intake(self) -> Intake:
        """Media, template and processor: what turns a request into tensors."""
        return self._engine.intake

    def prefill(self, prompt: Any, **fields: Any) -> PrefillResult:
        """Prefill one request: a string with `images=[...]`, chat messages, `Rendered`, token ids, or a `Request`."""
        return self._wait(self._engine.prefill(prompt, **fields))

    def prefill_many(self, requests: Iterable[Any]) -> list[Outcome]:
        """Prefill requests together; results in order, a failed one as its exception."""
        return self._wait(self._engine.prefill_many(requests))

    def stream(self, requests: Iterable[Any]) -> Iterator[Outcome]:
        """Results in the order of the requests, which are drawn while earlier ones run; a failed one is its exception.

        Requests are drawn on the caller's thread, so that an iterator may take its time, or use this prefiller itself;
        results come out between them. Steps are as full as can be: whoever waits for one result soonest takes `prefill`.
        """
        waiting: deque[Future[PrefillResult]] = deque()
        call = object()
        most = self._engine.config.max_waiting
        try:
            for request in several(requests):
                waiting.append(self._engine.start(request, call))
                while waiting and (waiting[0].done() or len(waiting) >= most):
                    yield _outcome(waiting[0])
                    waiting.popleft()
            while waiting:
                yield _outcome(waiting[0])
                waiting.popleft()
        finally:
            for future in waiting:
                future.cancel()

    def score(self, prompt: Any, choices: Seq[str], **fields: Any) -> list[Choice]:
        """Log-probability of each choice as the continuation of the prompt."""
        return self._wait(self._engine.score(prompt, choices, **fields))

    def embed(self, prompt: Any, *, pooling: str | None = "last", layer: int = -1, **fields: Any) -> Tensor:
        """Hidden states of a layer: pooled to [D] ("last", "mean"), or [T, D] with pooling=None."""
        return self._wait(self._engine.embed(prompt, pooling=pooling, layer=layer, **fields))

    def generate(self, prompt: Any, max_new_tokens: int = 64, **fields: Any) -> Generation:
        """Prefill, then continue with transformers' `generate`."""
        return self._wait(self._engine.generate(prompt, max_new_tokens, **fields))

    def generate_many(self, requests: Iterable[Any], max_new_tokens: int = 64) -> list[Generation | BaseException]:
        """Prefill requests together and decode the emitted caches together, greedily; equal to each alone."""
        return self._wait(self._engine.generate_many(requests, max_new_tokens))

    def decode_many(self, outcomes: Seq[Outcome], max_new_tokens: int = 64) -> list[Generation | BaseException]:
        """Decode results together, greedily; exceptions among them stay where they are."""
        return self._engine.decode_many(outcomes, max_new_tokens)

    def score_many(self, requests: Iterable[Any], choices: Seq[str]) -> list[list[Choice] | BaseException]:
        """Prefill requests together and score the choices after them together; equal to each alone."""
        return self._wait(self._engine.score_many(requests, choices))

    def score_results(self, outcomes: Seq[Outcome], choices: Seq[str]) -> list[list[Choice] | BaseException]:
        """Score choices after results together; exceptions among them stay where they are."""
        return self._engine.score_results(outcomes, choices)

    def resume(self, source: Any) -> PrefillResult:
        """An artefact (its path, or the handle of `mmprefill.load`) as a result again; nothing is recomputed."""
        return self._engine.resume(source)

    def close(self, *, cancel: bool = False) -> None:
        """Finish what was admitted, or with `cancel` fail it with `EngineClosedError`; then end every thread."""
        self._engine.close(cancel=cancel)

    def __enter__(self) -> Prefiller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self._engine.submit(coroutine)
        try:
            return future.result()
        except BaseException:  # Ctrl-C, for one: nobody waits for it any more
            future.cancel()
            raise


def _outcome(future: Future[PrefillResult]) -> Outcome:
    try:
        return future.result()
    except Exception as error:  # handed to the caller in the place of the result
        return error
