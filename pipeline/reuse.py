"""One request's way through the two stores: pictures that are encoded already, prompts that begin the same."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mmprefill.encoders.cache import EncoderCache
from mmprefill.encoders.families import Family
from mmprefill.encoders.items import Item, items_of, joinable, whole
from mmprefill.encoders.vision import MediaInputs, media_inputs
from mmprefill.pipeline.driver import Active, Driver
from mmprefill.pipeline.prefill import Prefill
from mmprefill.pipeline.prefix import Chain, Entry, Match, PrefixStore, Spot, chain_of
from mmprefill.streams import Encoded
from mmprefill.types import Prepared

T = TypeVar("T")


@dataclass
class Plan:
    """What a request shares, as far as known before anything runs.

    Attributes:
        items: its media by medium, one by one where they can be cut apart.
        chain: its identity; None if it takes no part in prefix reuse.
        match: an earlier prompt that begins the same.
        entry: its own place in the store.
        pictures: encoder outputs that were there or on their way.
        tokens: tokens whose KV was taken over.
        why: see `Reuse.why`.
    """

    items: dict[str, list[Item]]
    chain: Chain | None = None
    match: Match | None = None
    entry: Entry | None = None
    pictures: int = 0
    tokens: int = 0
    why: str = ""

    def took_over(self, tokens: int, shared: int) -> None:
        """Note how much of the shared beginning could be used."""
        self.tokens = tokens
        if tokens:
            self.why = f"the first {tokens} tokens of an earlier prompt"
        elif shared:
            self.why = "the shared beginning ends inside a two-way span"
        elif self.match:
            self.why = "the earlier prompt that begins the same ended before its first token was there"

    @property
    def media_start(self) -> int:
        """The first placeholder; 0 without media."""
        return min((item.start for items in self.items.values() for item in items), default=0)

    @property
    def media_end(self) -> int:
        """The token after the last placeholder."""
        return max((item.end for items in self.items.values() for item in items), default=0)


class Stores:
    """The engine's encoder cache and prefix store.

    Args:
        family: the loaded model.
        packed: whether prompts are prefilled on the packed path; the generic one shares pictures only.
        encoder_bytes: limit of the encoder cache.
        prefix_bytes: limit of the prefix store; 0 turns prefix reuse off.
    """

    def __init__(self, family: Family, *, packed: bool, encoder_bytes: int, prefix_bytes: int) -> None:
        self._family = family
        self._packed, self._prefix_on = packed, prefix_bytes > 0
        self._whole: set[str] = set()  # media whose outputs cannot be joined, so that they are not cut either
        self.encoder = EncoderCache(encoder_bytes)
        self.prefix = PrefixStore(prefix_bytes)

    def look_up(self, prepared: Prepared) -> Plan:
        """Find what the request shares and announce it to later ones."""
        plan = Plan({each.medium: self._items(prepared, each) for each in media_inputs(self._family, prepared)})
        plan.why = self._objection(prepared)
        if plan.why:
            return plan
        ids = prepared.input_ids.tolist()
        plan.chain = chain_of(ids, self._spots(prepared, plan), prepared.request.salt)
        plan.match = self._match(prepared, plan.chain)
        if plan.match is None or not plan.match.whole:
            plan.entry = self.prefix.register(plan.chain)
        if plan.match is None:
            plan.why = "no earlier prompt begins the same"
        return plan

    def _items(self, prepared: Prepared, inputs: MediaInputs) -> list[Item]:
        return [whole(prepared, inputs)] if inputs.medium in self._whole else items_of(prepared, inputs)

    def _objection(self, prepared: Prepared) -> str:
        if not self._packed:
            return "the generic path keeps no prefixes"
        if not self._prefix_on:
            return "prefix reuse is off"
        return "" if prepared.request.reuse else "the request asked for none"

    def _match(self, prepared: Prepared, chain: Chain) -> Match | None:
        match = self.prefix.match(chain)
        request = prepared.request
        if (
            match is None or request.hidden_states or request.all_logits
        ):  # every token's states are wanted: compute them
            return None
        return match

    def _spots(self, prepared: Prepared, plan: Plan) -> list[Spot]:
        """Whose content each placeholder stands for: its own picture's where that is known, else that of all together."""
        spots, known = [], set()
        for medium, items in plan.items.items():
            media = [item for item in prepared.media if item.medium == medium]
            rows = sum(end - start for item in media for start, end in item.runs)
            if len(items) == len(media) and rows == sum(item.inputs.rows for item in items):
                spots += [Spot(item.key, one.runs) for item, one in zip(items, media, strict=True)]
                known |= {place for one in media for start, end in one.runs for place in range(start, end)}
        everything = hashlib.blake2b(
            b"".join(item.key for items in plan.items.values() for item in items), digest_size=32
        )
        tokens = torch.tensor(list(self._family.placeholders.values()))
        places = torch.isin(prepared.input_ids, tokens).nonzero()[:, 0].tolist()
        rest = tuple((place, place + 1) for place in places if place not in known)
        return [*spots, Spot(everything.digest(), rest)]

    async def shared_rows(self, plan: Plan) -> int:
        """Tokens of the request that an earlier prompt has ready, after waiting for those that are still coming."""
        return await plan.match.entry.reach(plan.match.tokens) if plan.match else 0

    async def encode(
        self, driver: Driver, active: Active, plan: Plan, prepared: Prepared
    ) -> dict[str, list[Encoded[Any]]]:
        """Feature outputs by medium, each picture from the cache, from a request in flight, or from the tower."""
        if not self._family.takes_encoded:
            return {}
        outputs = {}
        for medium, items in plan.items.items():
            parts = await self._encode_all(driver, active, plan, items, prepared)
            if len(parts) > 1 and not all(joinable(part.value) for part in parts):
                self._whole.add(medium)  # this family's outputs cannot be put together again
                items = [
                    whole(prepared, each) for each in media_inputs(self._family, prepared) if each.medium == medium
                ]
                parts = await self._encode_all(driver, active, plan, items, prepared)
            outputs[medium] = parts
        return outputs

    async def _encode_all(
        self, driver: Driver, active: Active, plan: Plan, items: Seq[Item], prepared: Prepared
    ) -> list[Encoded[Any]]:
        return await _together(self._encode(driver, active, plan, item, prepared) for item in items)

    async def _encode(self, driver: Driver, active: Active, plan: Plan, item: Item, prepared: Prepared) -> Encoded[Any]:
        key = item.key + prepared.request.salt.encode()
        output, shared = await self.encoder.get(key, lambda: driver.encode(active, item.inputs))
        plan.pictures += shared
        return output

    def finish(self, plan: Plan, prefill: Prefill) -> None:
        """The request is done: keep its KV for later ones."""
        if plan.entry is not None:
            attention = "spans" if prefill.sequence.rules else "causal"
            self.prefix.finish(plan.entry, prefill.logits[-1][-1:].clone(), prefill.sequence.places, attention)

    def leave(self, plan: Plan) -> None:
        """The request ended, well or not; nobody waits for it any longer."""
        if plan.entry is not None:
            self.prefix.fail(plan.entry)


async def _together(encodings: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; if one fails, or the request is cancelled, the others are gone before this returns."""
    tasks = [asyncio.ensure_future(each) for each in encodings]
    try:
        return await asyncio.gather(*tasks)
    finally:
        if rest := [task for task in tasks if not task.done()]:
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
