"""AsyncPrefiller: requests in, results out, batched across whoever is waiting.

The way of one request is `flow.py`; here are the engine's verbs and its life. It owns an event loop on a thread of its
own, so that it can be used from any loop, from several, or from none.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmprefill.config import PrefillConfig
from mmprefill.encoders import families, pixels, tower_attention
from mmprefill.encoders.text import Intake
from mmprefill.errors import EngineClosedError
from mmprefill.flow import Flow, Watch
from mmprefill.metrics import SILENT, Observer, guarded
from mmprefill.models import ModelBundle, load
from mmprefill.pipeline import decode, linear, norm, packed_attention
from mmprefill.pipeline.driver import Driver
from mmprefill.pipeline.probe import choose_route
from mmprefill.results import PrefillResult, Progress, Session
from mmprefill.scoring import score_together
from mmprefill.streams import Lanes
from mmprefill.trace import OFF, Recorder
from mmprefill.types import Choice, Generation, Prepared, Rendered, Request, as_request

T = TypeVar("T")
Requests = TypeVar("Requests", Iterable[Any], Iterable[Any] | AsyncIterable[Any])
Outcome = PrefillResult | BaseException


class AsyncPrefiller:
    """Prefills image+text requests on one loaded model.

    Args:
        bundle: a loaded checkpoint (`from_pretrained` loads one).
        config: limits and batch sizes.
        trace: a `Trace` to keep what every lane did, and when.
        observer: told of every request, tower call and step; `Metrics` counts for Prometheus.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        config: PrefillConfig | None = None,
        *,
        trace: Recorder = OFF,
        observer: Observer = SILENT,
    ) -> None:
        self.bundle, self.config = bundle, config or PrefillConfig()
        self.family = families.describe(bundle.model)
        self._lanes = Lanes.on(self.family.device, bundle.lock)
        if self.config.pack_weights:  # first, or what the probe reads of the file would be in memory beside it
            self._lanes.prefill.call(linear.pack_towers_later, self.family)
        route = self._lanes.prefill.call(choose_route, self.family)
        self._lanes.prefill.call(tower_attention.install, self.family.base, self.family.decoder)
        if self.config.pack_weights:
            self._lanes.prefill.call(norm.fuse, bundle.model)
            if route.plan:
                self._lanes.prefill.call(packed_attention.fuse, self.family.decoder, route.plan)
        self.session = Session(bundle, self.family, route, self._lanes.prefill)
        processor = pixels.shared(bundle.processor)
        self.intake = Intake(processor, self.family.placeholders, self.config, bundle.context)
        self._flow = Flow(self.session, self.intake, self.config, self._lanes, trace, guarded(observer))
        self._driver, self._stores = self._flow.driver, self._flow.stores
        self._closed, self._closing = False, threading.Lock()  # nothing is submitted behind the last look of `_drain`
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="mmprefill-engine", daemon=True)
        self._thread.start()
        self._dropped = weakref.finalize(self, _wind_up, self._loop, self._driver)
        self._dropped.atexit = False
        # For those who forget: else the interpreter ends around a running loop.
        atexit.register(_close, weakref.ref(self))

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
    ) -> AsyncPrefiller:
        """Load a checkpoint and start an engine on it; see `mmprefill.models.load` for the arguments."""
        bundle = load(
            source, device=device, dtype=dtype, revision=revision, token=token, processor_kwargs=processor_kwargs
        )
        return cls(bundle, config, trace=trace, observer=observer)

    # The verbs.

    async def prefill(self, prompt: Any, **fields: Any) -> PrefillResult:
        """Prefill one request; see `Request` for the fields."""
        return await self._call(self._serve(as_request(prompt, **fields)))

    async def prefill_many(self, requests: Iterable[Any]) -> list[Outcome]:
        """Prefill requests together; results in order, a failed one as its exception."""
        return await self._call(self._serve_all(list(several(requests))))

    async def stream(self, requests: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Outcome]:
        """Results in the order of the requests, which are drawn while earlier ones run; a failed one is its exception.

        Steps are as full as can be: whoever waits for one result soonest takes `prefill`. An async iterator may take its
        time, or wait for earlier results: they come out meanwhile.
        """
        drawn: asyncio.Queue[Future[PrefillResult] | None] = asyncio.Queue()
        more, call = asyncio.Semaphore(self.config.max_waiting - 1), object()

        async def draw() -> None:
            try:
                async for request in _drawn(several(requests)):
                    drawn.put_nowait(self.start(request, call))
                    await asyncio.sleep(0)  # results come out between two requests of an iterator that does not await
                    await more.acquire()
            finally:
                drawn.put_nowait(None)

        drawing = asyncio.create_task(draw())
        try:
            while (future := await drawn.get()) is not None:
                yield await _outcome(future)
                del future  # no result is held while the next one is waited for
                more.release()
            await drawing  # raises what the iterator raised
        finally:
            drawing.cancel()
            while not drawn.empty():
                if future := drawn.get_nowait():
                    future.cancel()
            await asyncio.gather(drawing, return_exceptions=True)

    async def watch(self, prompt: Any, **fields: Any) -> AsyncIterator[Progress | PrefillResult]:
        """Progress after each chunk of one request, its KV usable as it grows; the result comes last."""
        heard: asyncio.Queue[Progress | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(progress: Progress | None) -> None:
            with suppress(RuntimeError):  # the watcher's loop was closed: nobody listens any more
                loop.call_soon_threadsafe(heard.put_nowait, progress)

        future = self.submit(self._serve(as_request(prompt, **fields), tell))
        future.add_done_callback(lambda _: tell(None))
        try:
            while (progress := await heard.get()) is not None:
                yield progress
            yield future.result()
        finally:
            future.cancel()

    async def score(self, prompt: Any, choices: Seq[str], **fields: Any) -> list[Choice]:
        """Log-probability of each choice as the continuation of the prompt."""
        result = await self.prefill(prompt, **fields)
        return await asyncio.to_thread(result.score, choices)

    async def score_many(self, requests: Iterable[Any], choices: Seq[str]) -> list[list[Choice] | BaseException]:
        """Prefill requests together and score the choices after them together; equal to each alone."""
        outcomes = await self.prefill_many(requests)
        return await asyncio.to_thread(self.score_results, outcomes, choices)

    async def embed(self, prompt: Any, *, pooling: str | None = "last", layer: int = -1, **fields: Any) -> Tensor:
        """Hidden states of a layer: pooled to [D] ("last", "mean"), or [T, D] with pooling=None."""
        result = await self.prefill(prompt, hidden_states=(layer,), **fields)
        return result.pooled(pooling, layer) if pooling else result.hidden_states[layer]

    async def generate(self, prompt: Any, max_new_tokens: int = 64, **fields: Any) -> Generation:
        """Prefill, then continue with transformers' `generate`."""
        result = await self.prefill(prompt, **fields)
        return await asyncio.to_thread(result.generate, max_new_tokens)

    async def generate_many(
        self, requests: Iterable[Any], max_new_tokens: int = 64
    ) -> list[Generation | BaseException]:
        """Prefill requests together and decode the emitted caches together, greedily; equal to each alone."""
        outcomes = await self.prefill_many(requests)
        return await asyncio.to_thread(self.decode_many, outcomes, max_new_tokens)

    def decode_many(self, outcomes: Seq[Outcome], max_new_tokens: int = 64) -> list[Generation | BaseException]:
        """Decode results together, greedily; exceptions among them stay where they are. Blocks."""
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        good = [each for each in outcomes if isinstance(each, PrefillResult)]
        plan = self.session.route.plan
        if plan is None:
            answers = iter([each.generate(max_new_tokens) for each in good])
        else:
            starts = [(each.emitted, each.next_token_logits, each.next_position) for each in good]
            ids = self.session.lane.call(
                decode.generate_greedily, self.family, plan, starts, max_new_tokens, self.session.stop_ids
            )
            answers = iter([Generation(tuple(each), self.session.text(each)) for each in ids])
        return [next(answers) if isinstance(each, PrefillResult) else each for each in outcomes]

    def score_results(self, outcomes: Seq[Outcome], choices: Seq[str]) -> list[list[Choice] | BaseException]:
        """Score choices after results together; exceptions among them stay where they are. Blocks."""
        good = [each for each in outcomes if isinstance(each, PrefillResult)]
        scores = iter(score_together(good, choices))
        return [next(scores) if isinstance(each, PrefillResult) else each for each in outcomes]

    def resume(self, source: Any) -> PrefillResult:
        """An artefact (its path, or the handle of `mmprefill.load`) as a result again; nothing is recomputed."""
        from mmprefill.pipeline import kv_store

        return PrefillResult(session=self.session, **kv_store.resume(self.session, source))

    # Life cycle.

    async def aclose(self, *, cancel: bool = False) -> None:
        """Finish what was admitted, or with `cancel` fail it with `EngineClosedError`; then end every thread."""
        await asyncio.to_thread(self.close, cancel=cancel)

    def close(self, *, cancel: bool = False) -> None:
        """`aclose`, blocking; safe to call twice."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._dropped.detach()
        asyncio.run_coroutine_threadsafe(self._drain(cancel), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._flow.close()
        self._lanes.close()

    async def _drain(self, cancel: bool) -> None:
        if cancel:
            self._driver.die(EngineClosedError("the engine was closed before this was done"))
        while rest := asyncio.all_tasks() - {asyncio.current_task()} - self._driver.loops:
            await asyncio.gather(*rest, return_exceptions=True)
        self._driver.stop()
        await self._loop.shutdown_default_executor()

    async def __aenter__(self) -> AsyncPrefiller:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _serve(
        self,
        request: Request,
        watch: Watch | None = None,
        prepared: Prepared | None = None,
        call: object | None = None,
    ) -> PrefillResult:
        """`Flow.serve`, holding the engine meanwhile: one that is dropped with a request under way finishes it."""
        return await self._flow.serve(request, watch, prepared, call)

    async def _serve_any(self, request: Any, call: object | None = None) -> PrefillResult:
        if isinstance(request, Prepared):  # by an intake like this one's, somewhere else
            return await self._serve(request.request, prepared=request, call=call)
        return await self._serve(as_request(request), call=call)

    async def _serve_all(self, requests: Seq[Any]) -> list[Outcome]:
        call = object() if len(requests) > 1 else None  # nobody sees a result before all are there
        return await asyncio.gather(*(self._serve_any(each, call) for each in requests), return_exceptions=True)

    def start(self, request: Any, call: object | None = None) -> Future[PrefillResult]:
        """Start one request, from any thread; cancelling the future cancels the request. `call` is as in `Job`."""
        return self.submit(self._serve_any(request, call))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the engine's own loop, whatever loop or thread the caller is in."""
        with self._closing:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise EngineClosedError("the engine is closed")

    async def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if asyncio.get_running_loop() is self._loop:  # `Prefiller` has come here already
            return await coroutine
        return await asyncio.wrap_future(self.submit(coroutine))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """An engine's thread."""
    loop.run_forever()
    loop.close()


def _wind_up(loop: asyncio.AbstractEventLoop, driver: Driver) -> None:
    """An engine was dropped without `close`: end its loop, which nobody can reach any more.

    Nothing is in flight, else it would still be held. Its other threads end with whoever is the last to hold them: a
    result may still want to be decoded. Called by the garbage collector on any thread, so nothing is waited for.
    """

    async def end() -> None:
        loops = driver.loops
        driver.stop()
        await asyncio.gather(*loops, return_exceptions=True)
        await loop.shutdown_default_executor()
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)


def _close(engine: weakref.ref[AsyncPrefiller]) -> None:
    found = engine()
    if found is not None:
        found.close()


def several(requests: Requests) -> Requests:
    """The requests as they came; one request in the place of many is a mistake that would go unnoticed."""
    if isinstance(requests, (str, bytes, Mapping, Rendered, Request)):
        raise ValueError(f"requests must be a list or another iterable of them, got one {type(requests).__name__}")
    if not isinstance(requests, (Iterable, AsyncIterable)):
        raise ValueError(f"requests must be a list or another iterable of them, got {type(requests).__name__}")
    return requests


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
