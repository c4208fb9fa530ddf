"""Per-request KV: storage while prefilling, the cache object a packed step passes to the decoder, and the hand-over.

K and V are stored by `StepCache`, which stands in for a transformers `Cache` while a step runs: what a layer stores and
what its attention sees may differ (MLA), and some layers reuse another layer's K and V; storing here needs no special
case for either.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import get_layer_types_and_kwargs

from mmprefill.pipeline.attention import Segment
from mmprefill.types import MaskFunction

ALIGNED = 64  # bytes
PAGED = 2**18  # bytes of an allocation that has pages of its own


def together(plan: LayerPlan | None) -> int:
    """How many layers share an allocation: all where they are alike, so that nothing of it is left over, else each has
    its own."""
    return 1 if plan is None or len(set(plan.kinds)) > 1 else len(plan.kinds)


def _bytes(count: int, like: Tensor) -> Tensor:
    """An allocation of KV, which may be kept for long. Many bytes have pages of their own: in a heap, what a step throws
    away would lie around them, and none of it would be found again."""
    if count >= PAGED and hasattr(mmap, "MAP_PRIVATE"):
        with suppress(OSError):  # too many of them
            pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(pages, dtype=torch.uint8)
    return like.new_empty(count, dtype=torch.uint8)


def _aligned(shape: Seq[int], like: Tensor) -> int:
    """Bytes of a tensor in an allocation of several."""
    return -(-math.prod(shape) * like.element_size() // ALIGNED) * ALIGNED


def _pairs(own: Tensor, like: Tensor, key: Seq[int], value: Seq[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Bytes as K and V of several layers. Their storages are no larger than themselves: who pickles one writes no more."""
    storage, start = own.untyped_storage(), 0

    def part(shape: Seq[int]) -> Tensor:
        nonlocal start
        count = math.prod(shape)
        alone = cast("torch.UntypedStorage", storage[start : start + count * like.element_size()])
        start += _aligned(shape, like)
        return like.new_empty(0).set_(alone, 0, (count,), (1,)).view(*shape)

    while start < len(own):
        yield part(key), part(value)


@dataclass
class SequenceKV:
    """Keys and values of one sequence, layer -> (K, V) of [1, G, capacity, W].

    Buffers are allocated from the first tensors seen, so widths and head counts may differ per layer; several at once,
    or what every layer keeps, the tensors themselves too, would lie between what it throws away, and the heap would grow.
    [0, length) is valid; only the step that is running writes, at [length, ...).

    Args:
        together: layers that share an allocation, see `together`.
    """

    capacity: int
    length: int = 0
    shared: bool = False  # others read it too: what is handed to a user must be a copy
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    together: int = 1
    _spare: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)  # of the last allocation, not in use

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store new rows [1, G, n, W] after the valid ones; `length` moves when the whole step is done."""
        if layer not in self.layers:
            self.layers[layer] = self._buffers(key, key.shape[1::2], value.shape[1::2])
        end = self.length + key.shape[2]
        for buffer, new in zip(self.layers[layer], (key, value), strict=True):
            buffer[:, :, self.length : end] = new

    def room(self, layer: int, like: Tensor, groups: int, width: int) -> tuple[Tensor, Tensor]:
        """The buffers of a layer, allocated if they are not there, for a kernel that writes into them."""
        if layer not in self.layers:
            self.layers[layer] = self._buffers(like, (groups, width), (groups, width))
        return self.layers[layer]

    def _buffers(self, like: Tensor, *shapes: Seq[int]) -> tuple[Tensor, Tensor]:
        """Of a layer's K and V, whose [G, W] are given."""
        key, value = ((1, groups, self.capacity, width) for groups, width in shapes)
        if self.together == 1 or like.device.type != "cpu":
            return like.new_empty(key), like.new_empty(value)
        if not self._spare or [t.shape for t in self._spare[-1]] != [key, value]:
            own = _bytes(_aligned(key, like) * self.together + _aligned(value, like) * self.together, like)
            self._spare = list(_pairs(own, like, key, value))
        return self._spare.pop()

    def view(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """The first `end` rows of a layer, without a copy."""
        key, value = self.layers[layer]
        return key[:, :, :end], value[:, :, :end]

    def prefix(self, tokens: int) -> SequenceKV:
        """The first `tokens` rows, sharing the buffers."""
        return SequenceKV(self.capacity, length=tokens, shared=True, layers=dict(self.layers))

    def grown(self, extra: int) -> SequenceKV:
        """A copy with room for `extra` more tokens; the original stays as it is."""
        copy = SequenceKV(self.length + extra, length=self.length, together=self.together)
        for layer, (key, value) in self.layers.items():
            buffers = copy._buffers(key, key.shape[1::2], value.shape[1::2])
            for buffer, old in zip(buffers, (key, value), strict=True):
                buffer[:, :, : self.length] = old[:, :, : self.length]
            copy.layers[layer] = buffers
        return copy

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.numel() * t.element_size() for pair in self.layers.values() for t in pair)


@dataclass(frozen=True)
class Piece:
    """One sequence's chunk in a packed step: rows [start, start + rows) of the step, tokens [done, done + rows) of it.

    `kv` holds the tokens before the chunk. With `stored` False the new rows are not kept (a probe that leaves no trace,
    such as scoring a choice).
    """

    start: int
    rows: int
    kv: SequenceKV
    rules: Mapping[str, MaskFunction] = field(default_factory=dict)
    stored: bool = True

    @property
    def done(self) -> int:
        """Tokens stored before this step."""
        return self.kv.length


@dataclass(frozen=True)
class LayerPlan:
    """What the decoder's layers are, read from its config once.

    Attributes:
        kinds: transformers' layer type of every layer.
        window: tokens that sliding layers see; None if there are none.
        chunk: chunk of chunked layers; None if there are none.
        direct: attention sees exactly what the same layer stored, so it may read buffers in place.
    """

    kinds: tuple[str, ...]
    window: int | None = None
    chunk: int | None = None
    direct: bool = False

    @classmethod
    def of(cls, config: Any) -> LayerPlan:
        """Read the plan from a text config."""
        kinds, _ = get_layer_types_and_kwargs(config)
        return cls(tuple(kinds), getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None))


class StepCache:
    """Passed as `cache=` and as the step's keyword argument: stores K and V, and tells attention what each piece sees."""

    is_compileable = False

    def __init__(self, pieces: Iterable[Piece], plan: LayerPlan) -> None:
        self.pieces, self.plan = tuple(pieces), plan
        self.rows = sum(piece.rows for piece in self.pieces)
        self.fresh = all(piece.done == 0 for piece in self.pieces)
        self.masks: dict[Any, Tensor | None] = {}
        self._plain: dict[Any, bool] = {}

    # What transformers' decoders and mask builders ask of a cache.

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store [1, G, N, W] and return what attention shall see: the same rows, or every piece's whole context."""
        for piece in self.pieces:
            if piece.stored:
                rows = slice(piece.start, piece.start + piece.rows)
                piece.kv.write(layer, key[:, :, rows], value[:, :, rows])
        if self.fresh or self.plan.direct:
            return key, value
        contexts = list(self._contexts(layer, key, value))
        return torch.cat([k for k, _ in contexts], 2), torch.cat([v for _, v in contexts], 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always passed in."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Zero, see `get_seq_length`."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Only asked for masks that are then left out."""
        return query_length, 0

    # What attention asks of a step.

    def limits(self, layer: int) -> tuple[int | None, int | None]:
        """Window and chunk of a layer."""
        kind = self.plan.kinds[layer]
        window = self.plan.window if kind == "sliding_attention" else None
        return window, self.plan.chunk if kind == "chunked_attention" else None

    def plainly(self, layer: int, fewest: int) -> bool:
        """Whether every piece is stored and causal in a layer, and those over stored keys have `fewest` rows or more."""
        kind = self.plan.kinds[layer], fewest
        if kind not in self._plain:
            _, chunk = self.limits(layer)
            self._plain[kind] = all(
                piece.stored and segment.rule is None and (not chunk or piece.done + piece.rows <= chunk)
                and (not piece.done or piece.rows >= fewest)
                for piece, segment in zip(self.pieces, self.segments(layer), strict=True)
            )  # fmt: skip
        return self._plain[kind]

    def segments(self, layer: int) -> Iterator[Segment]:
        """The pieces, with the rule that holds in this layer."""
        kind = self.plan.kinds[layer]
        for piece in self.pieces:
            rule = piece.rules.get(kind, piece.rules.get(""))
            yield Segment(piece.start, piece.rows, piece.done, rule)

    def context(self, layer: int, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values that each piece's queries look at."""
        if self.fresh or self.plan.direct:
            yield from self._contexts(layer, key, value)
            return
        start = 0
        for piece in self.pieces:
            rows = slice(start, start + piece.done + piece.rows)
            start = rows.stop
            yield key[:, :, rows], value[:, :, rows]

    def _contexts(self, layer: int, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for piece in self.pieces:
            rows = slice(piece.start, piece.start + piece.rows)
            new = key[:, :, rows], value[:, :, rows]
            if piece.done == 0:
                yield new
            elif piece.stored:
                yield piece.kv.view(layer, piece.done + piece.rows)
            else:
                past = piece.kv.view(layer, piece.done)
                yield torch.cat([past[0], new[0]], 2), torch.cat([past[1], new[1]], 2)


def hand_over(config: Any, kv: SequenceKV, *, own: bool = False) -> DynamicCache:
    """The stored KV as a `DynamicCache` of batch 1, ready for `generate`.

    Full layers share our buffers, unless `own` asks for copies: decoding concatenates into new tensors and never writes
    into them. Sliding layers get their last window - 1 rows as a copy, because a view would keep the whole buffer alive.
    """
    cache = DynamicCache(config=config)
    for layer, _ in sorted(kv.layers.items()):
        key, value = kv.view(layer, kv.length)
        target: Any = cache.layers[layer]
        target.lazy_initialization(key, value)
        if getattr(target, "is_sliding", False):
            keep = target.sliding_window - 1
            key, value = (t[:, :, max(kv.length - keep, 0) :].clone() for t in (key, value))
            target.cumulative_length = kv.length
        elif own:
            key, value = key.clone(), value.clone()
        target.keys, target.values = key, value
    return cache
