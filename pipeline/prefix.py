"""Prefix KV shared across requests, text and pictures, finished or still being prefilled.

A prompt is a chain of hashes over blocks of tokens. Each placeholder token enters with its picture's key and its offset
in it, so equal placeholders over different pictures differ. A prompt is registered when it starts: a later one with the
same beginning waits for those rows instead of computing them again.

The store holds the very buffers of the sequences that it serves from; nobody writes into [0, length) of them. Lives on
the engine's loop and is only touched there.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmprefill.pipeline.kv_cache import SequenceKV

BLOCK = 16  # tokens; a match is extended token by token behind its last block
TOKEN = 160  # bytes that a chain takes for each of its tokens, placeholders with their picture's key included


@dataclass(frozen=True)
class Spot:
    """Where a picture's tokens lie in a prompt.

    Attributes:
        key: names its content and everything else that its rows depend on.
        runs: its placeholder tokens, as (start, end).
    """

    key: bytes
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chain:
    """A prompt's identity.

    Attributes:
        tokens: per token its id and, for a placeholder, what picture and offset it stands for.
        blocks: hash of everything up to the end of each whole block.
        whole: hash of the whole prompt.
    """

    tokens: tuple[object, ...]
    blocks: tuple[bytes, ...]
    whole: bytes


def chain_of(ids: Seq[int], spots: Seq[Spot], salt: str = "") -> Chain:
    """Hash a prompt; `salt` keeps tenants apart (an empty one is shared)."""
    tokens: list[object] = list(ids)
    for spot in spots:
        offset = 0
        for start, end in spot.runs:
            for place in range(start, end):
                tokens[place] = (ids[place], spot.key, offset)
                offset += 1
    running = hashlib.blake2b(digest_size=32)
    running.update(f"{len(salt)}:{salt}".encode())
    blocks = []
    for start in range(0, len(tokens), BLOCK):
        block = tokens[start : start + BLOCK]
        running.update(repr(block).encode())
        if len(block) == BLOCK:
            blocks.append(running.digest())
    running.update(b"|end")
    return Chain(tuple(tokens), tuple(blocks), running.digest())


@dataclass(eq=False)
class Entry:
    """A registered prompt.

    Attributes:
        chain: its identity.
        kv: its rows; [0, kv.length) are there. None until it is merged.
        logits: [1, V] of its last token, once done.
        places: its positions [P, T] in host memory, once done.
        attention: see `PrefillResult.attention`.
        alive: False once it failed or was cancelled; rows that are there stay good.
    """

    chain: Chain
    kv: SequenceKV | None = None
    logits: Tensor | None = None
    places: Tensor | None = None
    attention: str = "causal"
    alive: bool = True
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def length(self) -> int:
        """Rows that are there."""
        return self.kv.length if self.kv else 0

    @property
    def nbytes(self) -> int:
        """Bytes that keeping it takes."""
        tensors = sum(each.nbytes for each in (self.logits, self.places) if each is not None)
        return (self.kv.nbytes if self.kv else 0) + tensors + TOKEN * len(self.chain.tokens)

    def advance(self) -> None:
        """Tell those who wait that rows, or an end, came."""
        self.moved.set()
        self.moved = asyncio.Event()

    async def finished(self) -> bool:
        """Wait for the end; whether it was a good one."""
        while self.alive and self.logits is None:
            await self.moved.wait()
        return self.logits is not None

    async def reach(self, tokens: int) -> int:
        """Wait until `tokens` rows are there or no more will come; returns how many of them are."""
        while self.length < tokens and self.alive and self.logits is None:
            await self.moved.wait()
        return min(tokens, self.length)


@dataclass(frozen=True)
class Match:
    """What is shared with an earlier prompt: `tokens` of it, or all of it."""

    entry: Entry
    tokens: int
    whole: bool = False


class PrefixStore:
    """Least recently used prompts up to a number of bytes.

    Args:
        limit: most bytes kept behind finished prompts; 0 keeps none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: dict[bytes, Entry] = {}
        self._wholes: dict[bytes, Entry] = {}
        self._kept: OrderedDict[Entry, int] = OrderedDict()
        self.nbytes = 0

    def match(self, chain: Chain) -> Match | None:
        """The longest beginning that a registered prompt shares; at least one block, or the whole prompt."""
        entry = self._wholes.get(chain.whole)
        if entry is not None:
            self._touch(entry)
            return Match(entry, len(chain.tokens), whole=True)
        for index in range(len(chain.blocks) - 1, -1, -1):
            entry = self._blocks.get(chain.blocks[index])
            if entry is not None:
                self._touch(entry)
                return Match(entry, _shared(chain.tokens, entry.chain.tokens, (index + 1) * BLOCK))
        return None

    def register(self, chain: Chain) -> Entry:
        """Announce a prompt that is about to be prefilled."""
        entry = Entry(chain)
        self._index(entry)
        return entry

    def _index(self, entry: Entry) -> None:
        for digest in entry.chain.blocks:
            self._blocks.setdefault(digest, entry)
        self._wholes.setdefault(entry.chain.whole, entry)

    def finish(self, entry: Entry, logits: Tensor, places: Tensor, attention: str) -> None:
        """A prompt is done: keep it within the limit."""
        assert entry.kv is not None
        entry.logits, entry.places, entry.attention = logits, places, attention
        entry.kv.shared = True  # also if it is not kept: whoever found it on its way holds it
        entry.advance()
        self._index(entry)  # again: an entry that it shared blocks with may be gone by now
        size = entry.nbytes
        if size > self._limit or self._wholes[entry.chain.whole] is not entry:  # too large, or the same is there
            self._forget(entry)
            return
        self._kept[entry] = size
        self.nbytes += size
        while self.nbytes > self._limit:
            oldest, size = self._kept.popitem(last=False)
            self.nbytes -= size
            self._forget(oldest)

    def fail(self, entry: Entry) -> None:
        """A prompt will not be finished; whoever waits takes the rows that are there."""
        if entry.logits is None:
            entry.alive = False
            self._forget(entry)
            entry.advance()

    def _touch(self, entry: Entry) -> None:
        if entry in self._kept:
            self._kept.move_to_end(entry)

    def _forget(self, entry: Entry) -> None:
        for digest in entry.chain.blocks:
            if self._blocks.get(digest) is entry:
                del self._blocks[digest]
        if self._wholes.get(entry.chain.whole) is entry:
            del self._wholes[entry.chain.whole]
        for other in self._kept:  # those that begin the same serve its blocks from now on
            if other.chain.blocks[:1] == entry.chain.blocks[:1]:
                self._index(other)


def _shared(mine: Seq[object], theirs: Seq[object], start: int) -> int:
    """How many leading tokens are equal, given that the first `start` are."""
    end = start
    while end < len(mine) and end < len(theirs) and mine[end] == theirs[end]:
        end += 1
    return end


def adopt(kv: SequenceKV, source: SequenceKV, tokens: int) -> None:
    """Copy the first rows of a stored prompt into a fresh one; runs on the prefill lane."""
    with torch.no_grad():
        for layer, pair in source.layers.items():
            keys, values = pair
            kv.write(layer, keys[:, :, :tokens], values[:, :, :tokens])
    kv.length = tokens
