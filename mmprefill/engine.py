"""AsyncPrefiller: requests in, results out, batched across whoever is waiting.

`_serve` is the whole flow of one request. The engine owns an event loop on a thread of its own, so that it can be used
from any loop, from several, or from none.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Mapping, Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmprefill.config import PrefillConfig
from mmprefill.encoders import families, vision
from mmprefill.encoders.text import Intake
from mmprefill.errors import EngineClosedError
from mmprefill.models import ModelBundle, load
from mmprefill.pipeline import decode, generic, merge, positions
from mmprefill.pipeline.batching import PrefillQueue, VisionQueue
from mmprefill.pipeline.prefill import Prefill
from mmprefill.pipeline.probe import choose_route
from mmprefill.pipeline.spans import media_spans
from mmprefill.results import PrefillResult, Session
from mmprefill.streams import Encoded, Lanes, keep_to_one_core
from mmprefill.types import Choice, Generation, Prepared, Rendered, Request

T = TypeVar("T")
Outcome = PrefillResult | BaseException


class AsyncPrefiller:
    """Prefills image+text requests on one loaded model.

    Args:
        bundle: a loaded checkpoint (`from_pretrained` loads one).
        config: limits and batch sizes.
    """

    def __init__(self, bundle: ModelBundle, config: PrefillConfig | None = None) -> None:
        self.bundle, self.config = bundle, config or PrefillConfig()
        self.family = families.describe(bundle.model)
        self._lanes = Lanes.on(self.family.device)
        route = self._lanes.prefill.call(choose_route, self.family)
        self.session = Session(bundle, self.family, route, self._lanes.prefill)
        self.intake = Intake(bundle.processor, self.family.placeholders, self.config, bundle.context)
        self._host = ThreadPoolExecutor(
            self.config.intake_threads, thread_name_prefix="mmprefill-intake", initializer=keep_to_one_core
        )
        self._vision = VisionQueue(self.family, self._lanes.vision, self.config.vision_patches)
        self._prefill = PrefillQueue(self.family, route.plan, self._lanes.prefill, self.config.step_tokens)
        self._door = asyncio.Semaphore(self.config.max_waiting)
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mmprefill-engine", daemon=True)
        self._thread.start()

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
    ) -> AsyncPrefiller:
        """Load a checkpoint and start an engine on it; see `mmprefill.models.load` for the arguments."""
        bundle = load(
            source, device=device, dtype=dtype, revision=revision, token=token, processor_kwargs=processor_kwargs
        )
        return cls(bundle, config)

    # The flow.

    async def _serve(self, request: Request) -> PrefillResult:
        clock = Clock()
        async with self._door:
            clock.lap("queued")
            with self._prefill.expecting():
                prepared = await self._prepare(request)
                clock.lap("intake")
                encoded = await self._vision.encode(prepared)
                clock.lap("vision")
                if self._prefill.plan is None:
                    return await self._serve_generic(prepared, encoded, clock)
                merged = await self._lanes.text.run(self._merge, prepared, encoded)
                clock.lap("merge")
            done = await self._prefill.run(merged)
            clock.lap("prefill")
            return self._emit(done, encoded, clock)

    async def _prepare(self, request: Request) -> Prepared:
        return await self._loop.run_in_executor(self._host, self.intake.prepare, request)

    def _merge(self, prepared: Prepared, encoded: Mapping[str, Encoded[Any]]) -> Prefill:
        taken = {medium: each.take() for medium, each in encoded.items()}
        return Prefill.start(merge.merge(self.family, prepared, taken))

    async def _serve_generic(
        self, prepared: Prepared, encoded: Mapping[str, Encoded[Any]], clock: Clock
    ) -> PrefillResult:
        def run() -> generic.GenericOutput:
            return generic.run(self.family, prepared, {medium: each.take() for medium, each in encoded.items()})

        output = (await self._lanes.prefill.run(run)).take()
        clock.lap("prefill")
        return PrefillResult(
            id=prepared.id,
            token_ids=prepared.input_ids,
            positions=output.positions.reshape(-1, output.positions.shape[-1]).cpu(),
            next_position=positions.next_position(output.positions),
            next_token_logits=output.logits[-1],
            emitted=output.cache,
            session=self.session,
            logits=output.logits if prepared.request.all_logits else None,
            hidden_states=output.hidden,
            media=prepared.media,
            spans=media_spans(self.family, prepared, encoded),
            seconds=clock.laps,
            route="generic",
            attention="model",
        )

    def _emit(self, done: Prefill, encoded: Mapping[str, Encoded[Any]], clock: Clock) -> PrefillResult:
        sequence = done.sequence
        logits = torch.cat(done.logits)
        return PrefillResult(
            id=sequence.prepared.id,
            token_ids=sequence.prepared.input_ids,
            positions=sequence.positions.reshape(-1, sequence.length).cpu(),
            next_position=positions.next_position(sequence.positions),
            next_token_logits=logits[-1],
            emitted=done.kv,
            session=self.session,
            logits=logits if sequence.prepared.request.all_logits else None,
            hidden_states={layer: torch.cat(parts) for layer, parts in done.hidden.items()},
            media=sequence.prepared.media,
            spans=media_spans(self.family, sequence.prepared, encoded),
            seconds=clock.laps,
            attention="spans" if sequence.rules else "causal",
        )

    def encode_alone(self, prepared: Prepared) -> dict[str, Encoded[Any]]:
        """Feature outputs of one request's media, at once; on the lane's thread only."""
        inputs = vision.media_inputs(self.family, prepared)
        return {each.medium: Encoded(vision.encode(self.family, [each])[0]) for each in inputs}

    # The verbs.

    async def prefill(self, prompt: Any, **fields: Any) -> PrefillResult:
        """Prefill one request; see `Request` for the fields."""
        return await self._call(self._serve(as_request(prompt, **fields)))

    async def prefill_many(self, requests: Iterable[Any]) -> list[Outcome]:
        """Prefill requests together; results in order, a failed one as its exception."""
        return await self._call(self._serve_all([as_request(each) for each in requests]))

    async def stream(self, requests: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Outcome]:
        """Results in the order of the requests, which are drawn while earlier ones run; a failed one is its exception."""
        waiting: list[Future[PrefillResult]] = []
        try:
            async for request in _drawn(requests):
                waiting.append(self.submit(self._serve(as_request(request))))
                if len(waiting) >= self.config.max_waiting:
                    yield await _outcome(waiting.pop(0))
            while waiting:
                yield await _outcome(waiting.pop(0))
        finally:
            for future in waiting:
                future.cancel()

    async def score(self, prompt: Any, choices: Seq[str], **fields: Any) -> list[Choice]:
        """Log-probability of each choice as the continuation of the prompt."""
        result = await self.prefill(prompt, **fields)
        return await asyncio.to_thread(result.score, choices)

    async def embed(self, prompt: Any, *, pooling: str | None = "last", layer: int = -1, **fields: Any) -> Tensor:
        """Hidden states of a layer: pooled to [D] ("last", "mean"), or [T, D] with pooling=None."""
        result = await self.prefill(prompt, hidden_states=(layer,), **fields)
        return result.pooled(pooling, layer) if pooling else result.hidden_states[layer]

    async def generate(self, prompt: Any, max_new_tokens: int = 64, **fields: Any) -> Generation:
        """Prefill, then continue with transformers' `generate`."""
        result = await self.prefill(prompt, **fields)
        return await asyncio.to_thread(result.generate, max_new_tokens)

    async def generate_many(self, requests: Iterable[Any], max_new_tokens: int = 64) -> list[Generation | BaseException]:
        """Prefill requests together and decode the emitted caches together, greedily; equal to each alone."""
        outcomes = await self.prefill_many(requests)
        return await asyncio.to_thread(self.decode_many, outcomes, max_new_tokens)

    def decode_many(self, outcomes: Seq[Outcome], max_new_tokens: int = 64) -> list[Generation | BaseException]:
        """Decode results together, greedily; exceptions among them stay where they are. Blocks."""
        good = [each for each in outcomes if isinstance(each, PrefillResult)]
        plan = self.session.route.plan
        if plan is None:
            texts = iter([each.generate(max_new_tokens) for each in good])
        else:
            starts = [(each.emitted, each.next_token_logits, each.next_position) for each in good]
            ids = self.session.lane.call(
                decode.generate_greedily, self.family, plan, starts, max_new_tokens, self.session.stop_ids
            )
            texts = iter([Generation(tuple(each), self.session.text(each)) for each in ids])
        return [next(texts) if isinstance(each, PrefillResult) else each for each in outcomes]

    def resume(self, source: Any) -> PrefillResult:
        """An artefact (its path, or the handle of `mmprefill.load`) as a result again; nothing is recomputed."""
        from mmprefill.pipeline import kv_store

        return PrefillResult(session=self.session, **kv_store.resume(self.session, source))

    # Life cycle.

    async def aclose(self) -> None:
        """Finish what was admitted, then end every thread."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """`aclose`, blocking; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._host.shutdown()
        self._lanes.close()

    async def _drain(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()} - self._vision.workers - self._prefill.workers
        await asyncio.gather(*rest, return_exceptions=True)
        self._vision.stop()
        self._prefill.stop()

    async def __aenter__(self) -> AsyncPrefiller:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _serve_all(self, requests: Seq[Request]) -> list[Outcome]:
        return await asyncio.gather(*map(self._serve, requests), return_exceptions=True)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the engine's own loop, whatever loop or thread the caller is in."""
        if self._closed:
            coroutine.close()
            raise EngineClosedError("the engine is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self.submit(coroutine))


class Clock:
    """Seconds by stage, one after another."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """The time since the last lap belongs to `stage`."""
        now = time.perf_counter()
        self.laps[stage], self._last = now - self._last, now


def as_request(prompt: Any, **fields: Any) -> Request:
    """A `Request` from what callers pass: itself, a string, `Rendered`, chat messages, token ids or a mapping of fields."""
    if isinstance(prompt, Request):
        if fields:
            raise ValueError(f"a Request is complete; {sorted(fields)} cannot be added to it")
        return prompt
    if isinstance(prompt, (str, Rendered)):
        return Request(prompt=prompt, **fields)
    if isinstance(prompt, Mapping):
        return Request(**{**prompt, **fields})
    items = list(prompt)
    if items and isinstance(items[0], Mapping):
        return Request(messages=items, **fields)
    return Request(input_ids=items, **fields)


async def _outcome(future: Future[PrefillResult]) -> Outcome:
    try:
        return await asyncio.wrap_future(future)
    except Exception as error:  # handed to the caller in the place of the result
        return error


async def _drawn(requests: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request
