"""AsyncPrefiller: requests in, results out, batched across whoever is waiting.

`_flow` is the whole way of one request. The engine owns an event loop on a thread of its own, so that it can be used
from any loop, from several, or from none.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from asyncio_throttle.throttler import Throttler
from torch import Tensor

from mmprefill.config import PrefillConfig
from mmprefill.encoders import families, tower_attention
from mmprefill.encoders.items import join
from mmprefill.encoders.text import Intake
from mmprefill.errors import DeadlineError, EngineClosedError, RequestError
from mmprefill.metrics import SILENT, Observer, guarded
from mmprefill.models import ModelBundle, load
from mmprefill.pipeline import batcher, calibrate, decode, generic, linear, memory, merge, norm, positions
from mmprefill.pipeline.driver import Active, Driver
from mmprefill.pipeline.prefill import Prefill
from mmprefill.pipeline.prefix import adopt
from mmprefill.pipeline.probe import choose_route
from mmprefill.pipeline.reuse import Plan, Stores
from mmprefill.results import PrefillResult, Progress, Session
from mmprefill.scoring import score_together
from mmprefill.streams import Encoded, Lanes, keep_to_one_core
from mmprefill.trace import OFF, Recorder
from mmprefill.types import Choice, Generation, Prepared, Rendered, Request, Reuse

T = TypeVar("T")
Requests = TypeVar("Requests", Iterable[Any], Iterable[Any] | AsyncIterable[Any])
Outcome = PrefillResult | BaseException
Watch = Callable[[Progress | None], None]
STEP_TOKENS = 1024  # where nothing was measured


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
        self._trace, self._observer = trace, guarded(observer)
        self.family = families.describe(bundle.model)
        self._lanes = Lanes.on(self.family.device, bundle.lock)
        route = self._lanes.prefill.call(choose_route, self.family)
        self._lanes.prefill.call(tower_attention.install, self.family.base, self.family.decoder)
        if self.config.pack_weights:
            self._lanes.prefill.call(linear.pack, bundle.model)
            self._lanes.prefill.call(norm.fuse, bundle.model)
        self.session = Session(bundle, self.family, route, self._lanes.prefill)
        self.intake = Intake(bundle.processor, self.family.placeholders, self.config, bundle.context)
        self._host = ThreadPoolExecutor(
            self.config.intake_threads, thread_name_prefix="mmprefill-intake", initializer=keep_to_one_core
        )
        self._driver = Driver(
            self.family, route.plan, self._lanes, _batcher(self.config, self.family), trace, self._observer
        )
        self._stores = Stores(
            self.family,
            packed=route.packed,
            encoder_bytes=self.config.encoder_bytes,
            prefix_bytes=self.config.prefix_bytes,
        )
        self._text_stands_alone: bool | None = None  # learnt from the first request with media
        self._door = asyncio.Semaphore(self.config.max_waiting)
        rate = self.config.admission_rate
        self._rate = Throttler(rate_limit=1, period=1 / rate) if rate else None
        self._closed, self._closing = False, threading.Lock()  # nothing is submitted behind the last look of `_drain`
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="mmprefill-engine", daemon=True)
        self._thread.start()
        self._dropped = weakref.finalize(self, _wind_up, self._loop, self._driver)
        self._dropped.atexit = False
        atexit.register(
            _close, weakref.ref(self)
        )  # for those who forget: else the interpreter ends around a running loop

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

    # The flow.

    async def _serve(
        self, request: Request, watch: Watch | None = None, prepared: Prepared | None = None
    ) -> PrefillResult:
        self._observer.requested(request.id)
        try:
            result = await self._flow(request, watch, prepared)
        except BaseException as error:
            self._observer.failed(request.id, error)
            raise
        self._observer.finished(result)
        self._observer.stored(encoder=self._stores.encoder.nbytes, prefix=self._stores.prefix.nbytes)
        return result

    async def _flow(self, request: Request, watch: Watch | None, prepared: Prepared | None) -> PrefillResult:
        clock = Clock()
        async with self._admitted(request, prepared.seconds if prepared else 0.0):
            clock.lap("queued")
            self._check_layers(request)
            prepared = prepared or await self._prepare(request)
            clock.lap("intake")
            async with self._scheduled(prepared, watch) as (active, plan):
                if plan.match and plan.match.whole and await plan.match.entry.finished():
                    return self._emit_stored(prepared, plan, clock)
                if self.session.route.plan is None:
                    return await self._serve_generic(active, plan, prepared, clock)
                await self._sequence(active, plan, prepared, clock)
                await self._driver.prefill(active)
                clock.lap("prefill")
                return self._emit(active, plan, clock)

    @asynccontextmanager
    async def _admitted(self, request: Request, spent: float) -> AsyncIterator[None]:
        """At most `max_waiting` at once, at most `admission_rate` a second; the deadline runs at the door already."""
        left = None if request.deadline is None else request.deadline - spent
        try:
            async with asyncio.timeout(left) as deadline, self._door:
                if self._rate:
                    async with self._rate:
                        pass
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise DeadlineError(
                f"request {request.id!r}: not done within its deadline of {request.deadline} s"
            ) from error

    @asynccontextmanager
    async def _scheduled(self, prepared: Prepared, watch: Watch | None) -> AsyncIterator[tuple[Active, Plan]]:
        """Known to the batcher and to the stores until the block is left."""
        plan = self._stores.look_up(prepared)
        tokens, media = len(prepared.input_ids), bool(prepared.media)
        try:
            async with self._driver.admit(prepared.id, tokens, media, prepared.request.priority) as active:
                active.on_progress.append(lambda: self._tell(active, plan, watch))
                yield active, plan
        finally:
            self._stores.leave(plan)

    def _check_layers(self, request: Request) -> None:
        most = self.family.text_config.num_hidden_layers
        wrong = [layer for layer in request.hidden_states if not -most - 1 <= layer <= most]
        if wrong:
            raise RequestError(
                f"request {request.id!r}: hidden_states must lie in [{-most - 1}, {most}] for this model, got {wrong}"
            )

    async def _prepare(self, request: Request) -> Prepared:
        prepare = self._trace.timed("", "intake", self.intake.prepare, request=request.id)
        self._driver.arriving += 1
        try:
            return await self._loop.run_in_executor(self._host, prepare, request)
        finally:
            self._driver.arriving -= 1

    async def _sequence(self, active: Active, plan: Plan, prepared: Prepared, clock: Clock) -> None:
        """Encode and merge what an earlier prompt does not give, and take over what it does."""
        shared = min(await self._stores.shared_rows(plan), len(prepared.input_ids) - 1)
        clock.lap("awaited")
        await self._start_on_text(active, plan, prepared, shared)
        covered = self._text_stands_alone and 0 < plan.media_end <= shared
        encoded = None if covered else await self._stores.encode(self._driver, active, plan, prepared)
        clock.lap("vision")
        await self._driver.pause(active)
        prefill = await self._driver.merge(active, partial(self._merge, prepared, encoded, active.prefill))
        start = prefill.sequence.legal_start(shared)
        if encoded is None and start < plan.media_end:  # the shared part ends inside a two-way span
            self._driver.settled(active)
            encoded = await self._stores.encode(self._driver, active, plan, prepared)
            prefill = await self._driver.merge(active, partial(self._merge, prepared, encoded, None))
        if start and plan.match and plan.match.entry.kv:
            await self._lanes.prefill.run(adopt, prefill.kv, plan.match.entry.kv, start)
        plan.took_over(start, shared)
        if plan.entry:
            plan.entry.kv = prefill.kv
        clock.lap("merge")

    async def _start_on_text(self, active: Active, plan: Plan, prepared: Prepared, shared: int) -> None:
        """A long enough text before the first picture goes to the decoder while the tower works."""
        first, request = plan.media_start, prepared.request
        wanted = not (shared or request.hidden_states or request.all_logits)
        if not (wanted and self._text_stands_alone and first >= self.config.early_tokens):
            return
        await self._driver.prefill_early(active, partial(self._merge_text, prepared, first))
        if plan.entry and active.prefill:
            plan.entry.kv = active.prefill.kv

    def _merge_text(self, prepared: Prepared, tokens: int) -> Prefill | None:
        sequence = merge.merge_text(self.family, prepared, tokens)
        return Prefill.start(sequence, len(prepared.input_ids)) if sequence else None

    def _merge(
        self, prepared: Prepared, encoded: Mapping[str, list[Encoded[Any]]] | None, early: Prefill | None
    ) -> Prefill:
        sequence = merge.merge(self.family, prepared, encoded if encoded is None else _taken(encoded))
        if encoded and self._text_stands_alone is None:
            self._text_stands_alone = merge.text_stands_alone(self.family, prepared, sequence)
        return early.continued(sequence) if early else Prefill.start(sequence)

    async def _serve_generic(self, active: Active, plan: Plan, prepared: Prepared, clock: Clock) -> PrefillResult:
        encoded = await self._stores.encode(self._driver, active, plan, prepared)
        clock.lap("vision")
        run = partial(self._run_generic, prepared, encoded)
        done = await self._lanes.prefill.run(run)
        await done.landed()
        output = done.take()
        clock.lap("prefill")
        return self._result(
            prepared, plan, clock, output.places, output.logits, output.cache, output.hidden,
            route="generic", attention="model",
        )  # fmt: skip

    def _run_generic(self, prepared: Prepared, encoded: Mapping[str, list[Encoded[Any]]]) -> generic.GenericOutput:
        return generic.run(self.family, prepared, _taken(encoded))

    def _tell(self, active: Active, plan: Plan, watch: Watch | None) -> None:
        """Rows were added: tell those who share them, and whoever watches."""
        if plan.entry:
            plan.entry.advance()
        if watch and active.prefill:
            kv = active.prefill.kv.prefix(active.job.done)
            watch(Progress(active.id, active.job.done, active.job.tokens, kv, self.session))

    def _emit(self, active: Active, plan: Plan, clock: Clock) -> PrefillResult:
        done = active.prefill
        assert done is not None
        self._stores.finish(plan, done)
        hidden = {layer: torch.cat(parts) for layer, parts in done.hidden.items()}
        sequence = done.sequence
        return self._result(
            sequence.prepared, plan, clock, sequence.places, torch.cat(done.logits), done.kv, hidden,
            attention="spans" if sequence.rules else "causal",
        )  # fmt: skip

    def _emit_stored(self, prepared: Prepared, plan: Plan, clock: Clock) -> PrefillResult:
        """The whole prompt was prefilled before: its KV and logits are the result."""
        assert plan.match is not None
        entry = plan.match.entry
        assert entry.logits is not None
        assert entry.kv is not None
        assert entry.places is not None
        clock.lap("awaited")
        plan.tokens, plan.why = len(prepared.input_ids), "the whole prompt was prefilled before"
        return self._result(
            prepared, plan, clock, entry.places, entry.logits.clone(), entry.kv, {}, attention=entry.attention
        )

    def _result(
        self,
        prepared: Prepared,
        plan: Plan,
        clock: Clock,
        places: Tensor,
        logits: Tensor,
        emitted: decode.Emitted,
        hidden: Mapping[int, Tensor],
        *,
        attention: str,
        route: str = "packed",
    ) -> PrefillResult:
        return PrefillResult(
            id=prepared.id,
            token_ids=prepared.input_ids,
            positions=places,
            next_position=positions.next_position(places),
            next_token_logits=logits[-1],
            emitted=emitted,
            session=self.session,
            logits=logits if prepared.request.all_logits else None,
            hidden_states=hidden,
            media=prepared.media,
            spans=tuple(item.runs for item in prepared.media),
            seconds=clock.laps,
            reuse=Reuse(plan.tokens, plan.pictures, plan.why),
            route=route,
            attention=attention,
        )

    # The verbs.

    async def prefill(self, prompt: Any, **fields: Any) -> PrefillResult:
        """Prefill one request; see `Request` for the fields."""
        return await self._call(self._serve(as_request(prompt, **fields)))

    async def prefill_many(self, requests: Iterable[Any]) -> list[Outcome]:
        """Prefill requests together; results in order, a failed one as its exception."""
        return await self._call(self._serve_all(list(several(requests))))

    async def stream(self, requests: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Outcome]:
        """Results in the order of the requests, which are drawn while earlier ones run; a failed one is its exception."""
        waiting: deque[Future[PrefillResult]] = deque()
        try:
            async for request in _drawn(several(requests)):
                waiting.append(self.start(request))
                while waiting and (waiting[0].done() or len(waiting) >= self.config.max_waiting):
                    yield await _outcome(waiting.popleft())
            while waiting:
                yield await _outcome(waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()

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
            texts = iter([each.generate(max_new_tokens) for each in good])
        else:
            starts = [(each.emitted, each.next_token_logits, each.next_position) for each in good]
            ids = self.session.lane.call(
                decode.generate_greedily, self.family, plan, starts, max_new_tokens, self.session.stop_ids
            )
            texts = iter([Generation(tuple(each), self.session.text(each)) for each in ids])
        return [next(texts) if isinstance(each, PrefillResult) else each for each in outcomes]

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
        self._host.shutdown()
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

    async def _serve_any(self, request: Any) -> PrefillResult:
        if isinstance(request, Prepared):  # by an intake like this one's, somewhere else
            return await self._serve(request.request, prepared=request)
        return await self._serve(as_request(request))

    async def _serve_all(self, requests: Seq[Any]) -> list[Outcome]:
        return await asyncio.gather(*map(self._serve_any, requests), return_exceptions=True)

    def start(self, request: Any) -> Future[PrefillResult]:
        """Start one request, from any thread; cancelling the future cancels the request."""
        return self.submit(self._serve_any(request))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the engine's own loop, whatever loop or thread the caller is in."""
        with self._closing:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise EngineClosedError("the engine is closed")

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
    return requests


def as_request(prompt: Any, **fields: Any) -> Request:
    """A `Request` from what callers pass: itself, a string, `Rendered`, chat messages, token ids or a mapping of fields.

    Raises:
        ValueError: for anything else, and for fields that a request does not have.
    """
    if isinstance(prompt, Request):
        if fields:
            raise ValueError(f"a Request is complete; {sorted(fields)} cannot be added to it")
        return prompt
    if isinstance(prompt, Mapping):
        fields = {**prompt, **fields}
    elif isinstance(prompt, (str, Rendered)):
        fields["prompt"] = prompt
    elif isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, bytearray)):
        items = list(prompt)
        fields["messages" if items and isinstance(items[0], Mapping) else "input_ids"] = items
    else:
        raise ValueError(
            f"a request is a string, Rendered(text), chat messages, token ids, a mapping of fields or a Request; "
            f"got {type(prompt).__name__}"
        )
    unknown = sorted(map(str, set(fields) - set(Request.__dataclass_fields__)))
    if unknown:
        known = ", ".join(Request.__dataclass_fields__)
        raise ValueError(f"a request has no {', '.join(unknown)}; its fields are {known}")
    return Request(**fields)


def _taken(encoded: Mapping[str, Seq[Encoded[Any]]]) -> dict[str, Any]:
    """Feature outputs by medium, for use on the current lane: waited for, and put together per request."""
    return {medium: join([part.take() for part in parts]) for medium, parts in encoded.items()}


def _batcher(config: PrefillConfig, family: families.Family) -> batcher.Batcher:
    """A batcher with the measured costs of this model on this machine, where `mmprefill plan` has left any."""
    orders = {
        "text_first": batcher.text_first(config.ageing),
        "first_come": batcher.first_come,
        "shortest": batcher.shortest_remaining(),
        "priority": batcher.by_priority,
    }
    costs = calibrate.kept(family)
    measured = {"overhead": costs.overhead_tokens, "patch_tokens": costs.patch_tokens} if costs else {}
    step = memory.step_tokens(costs)[0] if costs else STEP_TOKENS
    return batcher.Batcher(
        orders[config.policy],
        step_tokens=config.step_tokens or step,
        chunk_tokens=config.chunk_tokens,
        vision_patches=config.vision_patches,
        **measured,
    )


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
