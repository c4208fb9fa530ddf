"""The way of one request through the engine; `Flow.run` reads as the data flow."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from asyncio_throttle.throttler import Throttler
from torch import Tensor

from mmprefill.config import PrefillConfig
from mmprefill.encoders.families import Family
from mmprefill.encoders.items import join
from mmprefill.encoders.text import Intake
from mmprefill.errors import DeadlineError, RequestError
from mmprefill.metrics import Observer
from mmprefill.pipeline import batcher, calibrate, decode, generic, memory, merge, positions
from mmprefill.pipeline.driver import Active, Driver
from mmprefill.pipeline.footprint import weights_of
from mmprefill.pipeline.kv_cache import together
from mmprefill.pipeline.prefill import Prefill
from mmprefill.pipeline.prefix import adopt
from mmprefill.pipeline.reuse import Plan, Stores
from mmprefill.results import PrefillResult, Progress, Session
from mmprefill.room import Room
from mmprefill.streams import Encoded, Lanes, keep_to_one_core
from mmprefill.trace import Recorder
from mmprefill.types import Prepared, Request, Reuse

Watch = Callable[[Progress | None], None]
STEP_TOKENS = 1024  # where nothing was measured
# Bytes between intake and merge, beyond which no further pictures are taken in: where the tower shares its lane it takes
# a few dozen times as long as the intake, and a few calls ahead of it are plenty.
SHARED_PIXELS, OWN_PIXELS = 16 * 2**20, 256 * 2**20
PLENTY = 2 * 2**20  # bytes of them, from which on one picture at a time is enough where the tower shares its lane
TIDY = 2 * 2**20  # bytes of pixels and KV, after which what was thrown away on the way to them goes back to the system
IN_TURN = ("text_first", "first_come")  # policies that let pictures through in the order in which they come


class Flow:
    """Takes requests from intake to result, on the loop that runs `serve`; whatever a request held is free when it leaves.

    Args:
        session: the model, its route and its lane.
        intake: what turns a request into tensors.
        config: limits and batch sizes.
        lanes: where towers and decoder run.
        trace: told what every lane did, and when.
        observer: told of every request, tower call and step.
    """

    def __init__(
        self, session: Session, intake: Intake, config: PrefillConfig, lanes: Lanes, trace: Recorder, observer: Observer
    ) -> None:
        self._session, self._family, self._intake, self._config = session, session.family, intake, config
        self._lanes, self._trace, self._observer = lanes, trace, observer
        self._host = ThreadPoolExecutor(
            config.intake_threads, thread_name_prefix="mmprefill-intake", initializer=keep_to_one_core
        )
        self.driver = Driver(self._family, session.route.plan, lanes, _batcher(config, self._family), trace, observer)
        weights = weights_of(self._family.model)
        self.stores = Stores(
            self._family,
            packed=session.route.packed,
            encoder_bytes=memory.store_bytes(config.encoder_bytes, weights, memory.PICTURES),
            prefix_bytes=memory.store_bytes(config.prefix_bytes, weights, memory.PROMPTS),
        )
        self._together = together(session.route.plan)
        self._made = 0  # bytes of tensors by intake and decoder, since memory was last given back
        self._text_stands_alone: bool | None = None  # learnt from the first request with media
        self._door = asyncio.Semaphore(config.max_waiting)
        pixels, plenty = (SHARED_PIXELS, PLENTY) if lanes.vision is lanes.prefill else (OWN_PIXELS, math.inf)
        in_turn = config.policy in IN_TURN
        self._room = Room(pixels if in_turn else math.inf, config.intake_threads, plenty if in_turn else math.inf)
        rate = config.admission_rate
        self._rate = Throttler(rate_limit=1, period=1 / rate) if rate else None

    def close(self) -> None:
        """End the host threads, when nothing is under way any more."""
        self._host.shutdown()

    async def serve(
        self,
        request: Request,
        watch: Watch | None = None,
        prepared: Prepared | None = None,
        call: object | None = None,
    ) -> PrefillResult:
        """`run`, with the observer told of how it begins and ends."""
        self._observer.requested(request.id)
        try:
            result = await self.run(request, watch, prepared, call)
        except BaseException as error:
            self._observer.failed(request.id, error)
            raise
        self._observer.finished(result)
        self._observer.stored(encoder=self.stores.encoder.nbytes, prefix=self.stores.prefix.nbytes)
        return result

    async def run(
        self, request: Request, watch: Watch | None, prepared: Prepared | None, call: object | None
    ) -> PrefillResult:
        """The way of one request; `prepared` where another intake has prepared it, `call` as in `Job`."""
        clock = Clock()
        async with self._admitted(request, prepared.seconds if prepared else 0.0):
            clock.lap("queued")
            self._check_layers(request)
            async with (
                self._taken_in(request, prepared, clock, call) as prepared,
                self._scheduled(prepared, watch, call) as (active, plan),
            ):
                clock.lap("intake")
                if plan.match and plan.match.whole and await plan.match.entry.finished():
                    return self._emit_stored(prepared, plan, clock)
                if self._session.route.plan is None:
                    return await self._serve_generic(active, plan, prepared, clock)
                await self._sequence(active, plan, prepared, clock)
                await self.driver.prefill(active)
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
    async def _scheduled(
        self, prepared: Prepared, watch: Watch | None, call: object | None
    ) -> AsyncIterator[tuple[Active, Plan]]:
        """Known to the batcher and to the stores until the block is left."""
        plan = self.stores.look_up(prepared)
        tokens, media = len(prepared.input_ids), bool(prepared.media)
        try:
            async with self.driver.admit(prepared.id, tokens, media, prepared.request.priority, call) as active:
                active.on_progress.append(lambda: self._tell(active, plan, watch))
                yield active, plan
        finally:
            self.stores.leave(plan)

    def _check_layers(self, request: Request) -> None:
        most = self._family.text_config.num_hidden_layers
        wrong = [layer for layer in request.hidden_states if not -most - 1 <= layer <= most]
        if wrong:
            raise RequestError(
                f"request {request.id!r}: hidden_states must lie in [{-most - 1}, {most}] for this model, got {wrong}"
            )

    @asynccontextmanager
    async def _taken_in(
        self, request: Request, prepared: Prepared | None, clock: Clock, call: object | None
    ) -> AsyncIterator[Prepared]:
        """The request after intake; what its tensors take is counted until the block is left. Text never waits here."""
        if prepared is None and not _shows(request):
            yield await self._prepare(request, call)
            return
        if prepared is None:
            async with self._room.entrance():
                clock.lap("queued")
                prepared = await self._prepare(request, call)
                self._room.take(prepared)
        else:  # it is in memory already, and somebody else's
            prepared = replace(prepared, inputs=dict(prepared.inputs))
            self._room.take(prepared)
        try:
            yield prepared
        finally:
            self._room.leave(prepared)

    async def _prepare(self, request: Request, call: object | None) -> Prepared:
        prepare = self._trace.timed("", "intake", self._prepare_tidily, request=request.id)
        with self.driver.arriving(call):
            return await asyncio.get_running_loop().run_in_executor(self._host, prepare, request)

    def _prepare_tidily(self, request: Request) -> Prepared:
        """On a host thread, in whose heap decoding and resizing leave several times what they make."""
        prepared = self._intake.prepare(request)
        if self._untidy(_size(prepared)):
            memory.give_back()
        return prepared

    def _untidy(self, made: int) -> bool:
        """Whether it is time to give back what was thrown away: it lies between what is kept, in every heap."""
        self._made += made  # by several threads: a lost sum only puts it off
        if self._made < TIDY:
            return False
        self._made = 0
        return True

    async def _sequence(self, active: Active, plan: Plan, prepared: Prepared, clock: Clock) -> None:
        """Encode and merge what an earlier prompt does not give, and take over what it does."""
        shared = min(await self.stores.shared_rows(plan), len(prepared.input_ids) - 1)
        clock.lap("awaited")
        await self._start_on_text(active, plan, prepared, shared)
        covered = self._text_stands_alone and 0 < plan.media_end <= shared
        encoded = None if covered else await self.stores.encode(self.driver, active, plan, prepared)
        clock.lap("vision")
        await self.driver.pause(active)
        prefill = await self.driver.merge(active, partial(self._merge, prepared, encoded, active.prefill))
        start = prefill.sequence.legal_start(shared)
        if encoded is None and start < plan.media_end:  # the shared part ends inside a two-way span
            self.driver.settled(active)
            encoded = await self.stores.encode(self.driver, active, plan, prepared)
            prefill = await self.driver.merge(active, partial(self._merge, prepared, encoded, None))
        if start and plan.match and plan.match.entry.kv:
            await self._lanes.prefill.run(adopt, prefill.kv, plan.match.entry.kv, start)
        plan.took_over(start, shared)
        if plan.entry:
            plan.entry.kv = prefill.kv
        plan.items.clear()
        self._room.drop_pixels(prepared)
        clock.lap("merge")

    async def _start_on_text(self, active: Active, plan: Plan, prepared: Prepared, shared: int) -> None:
        """A long enough text before the first picture goes to the decoder while the tower works."""
        first, request = plan.media_start, prepared.request
        wanted = not (shared or request.hidden_states or request.all_logits)
        if not (wanted and self._text_stands_alone and first >= self._config.early_tokens):
            return
        await self.driver.prefill_early(active, partial(self._merge_text, prepared, first))
        if plan.entry and active.prefill:
            plan.entry.kv = active.prefill.kv

    def _merge_text(self, prepared: Prepared, tokens: int) -> Prefill | None:
        sequence = merge.merge_text(self._family, prepared, tokens)
        return Prefill.start(sequence, len(prepared.input_ids), self._together) if sequence else None

    def _merge(
        self, prepared: Prepared, encoded: Mapping[str, list[Encoded[Any]]] | None, early: Prefill | None
    ) -> Prefill:
        sequence = merge.merge(self._family, prepared, encoded if encoded is None else _taken(encoded))
        if encoded and self._text_stands_alone is None:
            self._text_stands_alone = merge.text_stands_alone(self._family, prepared, sequence)
        return early.continued(sequence) if early else Prefill.start(sequence, together=self._together)

    async def _serve_generic(self, active: Active, plan: Plan, prepared: Prepared, clock: Clock) -> PrefillResult:
        encoded = await self.stores.encode(self.driver, active, plan, prepared)
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
        return generic.run(self._family, prepared, _taken(encoded))

    def _tell(self, active: Active, plan: Plan, watch: Watch | None) -> None:
        """Rows were added: tell those who share them, and whoever watches."""
        if plan.entry:
            plan.entry.advance()
        if watch and active.prefill:
            kv = active.prefill.kv.prefix(active.job.done)
            watch(Progress(active.id, active.job.done, active.job.tokens, kv, self._session))

    def _emit(self, active: Active, plan: Plan, clock: Clock) -> PrefillResult:
        done = active.prefill
        assert done is not None
        self.stores.finish(plan, done)
        if self._lanes.prefill.device.type == "cpu" and self._untidy(done.kv.nbytes):
            with suppress(RuntimeError):  # the interpreter ends around the last request: nobody needs the memory
                self._host.submit(memory.give_back)  # it takes milliseconds
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
            token_ids=prepared.input_ids.clone(),  # these two are also others': the caller's `Prepared`, later results
            positions=places.clone(),
            next_position=positions.next_position(places),
            next_token_logits=logits[-1],
            emitted=emitted,
            session=self._session,
            logits=logits if prepared.request.all_logits else None,
            hidden_states=hidden,
            media=prepared.media,
            spans=tuple(item.runs for item in prepared.media),
            seconds=clock.laps,
            reuse=Reuse(plan.tokens, plan.pictures, plan.why),
            route=route,
            attention=attention,
        )


class Clock:
    """Seconds by stage, one after another."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """The time since the last lap belongs to `stage`."""
        now = time.perf_counter()
        self.laps[stage] = self.laps.get(stage, 0.0) + now - self._last
        self._last = now


def _size(prepared: Prepared) -> int:
    return sum(tensor.nbytes for tensor in prepared.inputs.values())


def _shows(request: Request) -> bool:
    """Whether a request has pictures, as far as can be told before it is checked."""
    if isinstance(request.messages, (list, tuple)):
        contents = [message.get("content") for message in request.messages if isinstance(message, Mapping)]
        parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
        return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)
    return any(isinstance(media, (list, tuple)) and media for media in (request.images, request.videos))


def _taken(encoded: Mapping[str, Seq[Encoded[Any]]]) -> dict[str, Any]:
    """Feature outputs by medium, for use on the current lane: waited for, and put together per request."""
    return {medium: join([part.take() for part in parts]) for medium, parts in encoded.items()}


def _batcher(config: PrefillConfig, family: Family) -> batcher.Batcher:
    """A batcher with the measured costs of this model on this machine, where `mmprefill plan` has left any."""
    orders = {
        "text_first": batcher.text_first(config.ageing),
        "first_come": batcher.first_come,
        "shortest": batcher.shortest_remaining(),
        "priority": batcher.by_priority,
    }
    costs = calibrate.kept(family)
    measured = {"overhead": costs.overhead_tokens, "patch_tokens": costs.patch_tokens} if costs else {}
    longest = min(family.text_config.max_position_embeddings, memory.LONG)
    step = memory.step_tokens(costs, longest)[0] if costs else STEP_TOKENS
    return batcher.Batcher(
        orders[config.policy],
        step_tokens=config.step_tokens or step,
        chunk_tokens=config.chunk_tokens,
        vision_patches=config.vision_patches,
        **measured,
    )
