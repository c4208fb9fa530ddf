"""Ragged attention over one packed row, registered with transformers' AttentionInterface.

The decoder's own layers call `ragged_attention` through `config._attn_implementation`. When a step is running they hand
us its description in the keyword argument `mmprefill_step`; when it is absent (a plain `forward` or `generate` of the
same model, perhaps at the same moment) the call goes to the implementation that the model had before.

Masks are never built for the packed row. `ragged_mask` is registered beside the attention function so that a composite
model which wants a mask of its own (two-way picture spans) hands us its *mask function* while we record it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from mmprefill.encoders import fused_attention, varlen
from mmprefill.encoders.fused_attention import Rows
from mmprefill.encoders.varlen import Bounds
from mmprefill.types import MaskFunction

KEYWORD = "mmprefill_step"
_PREFIX = "mmprefill_"
FEWEST_FUSED = 16  # rows of queries over stored keys
# Stored keys up to which a sequence shares a call on CUDA, for which they are copied: 8 KB a key (of 8 heads of 128 in
# bf16, read and written) at 3 TB/s are then what a launch of 10 us costs. Reckoned, not measured.
MOST_COPIED = 4096
BOTTOM_RIGHT = ("cuda",)  # types of devices with kernels for causal attention of few queries to more keys


@dataclass(frozen=True)
class Segment:
    """One sequence's part of one attention call.

    Attributes:
        start: first row of its queries in the packed row.
        rows: queries, and new tokens, in this step.
        done: tokens before them, already stored.
        rule: mask function over (query, key) indices of the whole sequence; None is plain causal.
    """

    start: int
    rows: int
    done: int
    rule: MaskFunction | None = None

    @property
    def slice(self) -> slice:
        """Its rows."""
        return slice(self.start, self.start + self.rows)


class PackedStep(Protocol):
    """What attention needs to know of a running step."""

    masks: dict[Any, Tensor | None]  # and bounds: built once per step and kind of layer

    def segments(self, layer: int) -> Iterator[Segment]:
        """The step's sequences in the order of their rows."""

    def context(self, layer: int, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each segment, the keys and values [1, G, done + rows, W] that its queries may look at."""

    def limits(self, layer: int) -> tuple[int | None, int | None]:
        """Sliding window and attention chunk of a layer."""


# What masks become on this thread: "record" them, "skip" them because a packed step runs, or "check" that skipping is
# right. Unset: build as usual.
_masks: ContextVar[str | None] = ContextVar("mmprefill_masks", default=None)


def masking() -> str | None:
    """What `masks` set on this thread."""
    return _masks.get()


@contextmanager
def masks(mode: str) -> Iterator[None]:
    """Within the block, masks of packed models are recorded, left out ("skip"), or checked and left out ("check")."""
    token = _masks.set(mode)
    try:
        yield
    finally:
        _masks.reset(token)


@dataclass(frozen=True)
class RecordedMask:
    """A mask that a composite model asked for, as the function that defines it."""

    rule: MaskFunction

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Evaluate on index tensors that broadcast: query [..., q, 1], key [..., 1, k]."""
        return self.rule(batch, head, query, key)


def _looks_ahead(rule: MaskFunction, size: int = 8) -> bool:
    index = torch.arange(size)
    return bool(evaluate(rule, index[:, None], index[None]).triu(1).any())


def _ragged_mask(plain: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        mode = _masks.get()
        if mode == "record":
            return RecordedMask(kwargs["mask_function"])
        if mode == "check" and _looks_ahead(kwargs["mask_function"]):
            raise ValueError("the decoder builds a mask of its own that sees later tokens")
        return plain(*args, **kwargs) if mode is None else None

    return mask


def _plain_eager(module: torch.nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    function: Callable[..., tuple[Tensor, Any]] = sys.modules[type(module).__module__].eager_attention_forward
    return function


def _ragged(plain: Callable[[torch.nn.Module], Callable[..., tuple[Tensor, Any]]]) -> Callable[..., tuple[Tensor, Any]]:
    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        step = kwargs.pop(KEYWORD, None)
        if step is None:
            if _masks.get() is not None:
                raise RuntimeError(f"{type(module).__name__} dropped the keyword argument that carries the packed step")
            return plain(module)(module, query, key, value, attention_mask, **kwargs)
        told = getattr(step, "told", None)
        if told:
            told(kwargs)
        return ragged_attention(step, module, query, key, value, **kwargs), None

    return attention


def ragged_attention(
    step: PackedStep,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Attention of every sequence of the step to itself only.

    Args:
        step: the running step.
        module: the attention layer, for its `layer_idx`.
        query: [1, H, N, W].
        key: [1, G, N or sum of contexts, W], as `cache.update` returned it.
        value: like `key`; its width may differ.
        scaling: factor of the scores; W ** -0.5 if None.
        sliding_window: tokens a query sees, itself included.
        softcap: scores become tanh(score / softcap) * softcap.
        s_aux: attention sinks [H].

    Returns:
        [1, N, H, W of value].
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    window, chunk = step.limits(layer)
    window = sliding_window or window
    plain = softcap is None and s_aux is None
    pairs = zip(step.segments(layer), step.context(layer, key, value), strict=True)
    packed, alone = _sorted([_Part(segment, *context) for segment, context in pairs], query, (key, value), chunk, plain)
    if not alone and not any(part.far for part in packed):
        return _packed(step, packed, query, (key, value), scaling, window)
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    fused = []
    for part in alone:
        segment, keys, values = part
        if plain and _fusable(part, query, (key, value), chunk):
            place = out[0, segment.slice].transpose(0, 1)
            fused.append(Rows(query[0, :, segment.slice], keys[0], values[0], place, segment.done))
            continue
        kind = (segment, window, chunk)
        if kind not in step.masks:
            step.masks[kind] = visible(segment, window, chunk, query.device)
        mask = step.masks[kind]
        attended = _attend(query[:, :, segment.slice], keys, values, mask, scaling, softcap, s_aux)
        out[:, segment.slice] = attended.transpose(1, 2)
    if fused:
        fused_attention.attend(fused, scaling, causal=True, window=window)
    for group in _calls(packed):
        rows = [part.segment.slice for part in group]
        queries = _joined([query[:, :, each] for each in rows])
        attended = _packed(step, group, queries, None, scaling, window)
        for each, piece in zip(rows, attended.split([part.segment.rows for part in group], 1), strict=True):
            out[:, each] = piece
    return out


class _Part(NamedTuple):
    """A segment with the keys and values [1, G, done + rows, W] that it looks at."""

    segment: Segment
    keys: Tensor
    values: Tensor

    @property
    def far(self) -> bool:
        """Whether its keys are too many to be copied."""
        return self.segment.done > MOST_COPIED


def _sorted(
    parts: list[_Part], query: Tensor, fresh: tuple[Tensor, Tensor], chunk: int | None, plain: bool
) -> tuple[list[_Part], list[_Part]]:
    """What may share calls of `varlen`, and the rest."""
    if not plain or not varlen.serves(query, *fresh):
        return [], parts
    packed: list[_Part] = []
    alone: list[_Part] = []
    for part in parts:
        stored = part.segment.done > 0  # what is fresh is a piece of what was just asked about
        served = _plainly(part.segment, chunk) and _belongs(part, fresh)
        served = served and (not stored or varlen.serves(query, part.keys, part.values))
        (packed if served else alone).append(part)
    return packed, alone


def _calls(packed: list[_Part]) -> Iterator[list[_Part]]:
    """Those with few stored keys together; each of the others alone, where its keys are read in place.

    With one arena for all sequences a block table would do that for all of them in one call.
    """
    near = [part for part in packed if not part.far]
    if near:
        yield near
    yield from ([part] for part in packed if part.far)


def _packed(
    step: PackedStep,
    parts: Seq[_Part],
    query: Tensor,
    fresh: tuple[Tensor, Tensor] | None,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """One call: query [1, H, N, W] of all parts -> [1, N, H, W]; `fresh` is what the layer made for all of them."""
    lengths = tuple((part.segment.rows, part.segment.done + part.segment.rows) for part in parts)
    edges = step.masks.get(("edges", lengths))
    if edges is None:
        edges = step.masks["edges", lengths] = varlen.edges(lengths, query.device)
    if fresh is None or fresh[0].shape[2] != sum(keys for _, keys in lengths):
        fresh = _joined([part.keys for part in parts]), _joined([part.values for part in parts])
    return varlen.attend(query, *fresh, Bounds.of(lengths, edges), scaling, causal=True, window=window)


def _joined(tensors: Seq[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), 2)


def _belongs(part: _Part, fresh: tuple[Tensor, Tensor]) -> bool:
    """Whether what is read is like what this step made: stored rows need not be, and a kernel checks nothing."""
    read = part.keys, part.values
    alike = all(a.shape[1] == b.shape[1] and a.shape[3] == b.shape[3] for a, b in zip(fresh, read, strict=True))
    return alike and part.keys.shape[2] == part.segment.done + part.segment.rows


def _plainly(segment: Segment, chunk: int | None) -> bool:
    """Causal, perhaps in a window."""
    return segment.rule is None and (not chunk or segment.done + segment.rows <= chunk)


def _fusable(part: _Part, query: Tensor, fresh: tuple[Tensor, Tensor], chunk: int | None) -> bool:
    """Whether there is a kernel for it on a CPU, and rows enough (of all heads with the same keys) to pack those for."""
    segment, shared = part.segment, query.shape[1] // max(1, part.keys.shape[1])
    enough = not segment.done or segment.rows * shared >= FEWEST_FUSED
    return (
        _plainly(segment, chunk)
        and enough
        and _belongs(part, fresh)
        and fused_attention.serves(query, part.keys, part.values)
    )


def visible(segment: Segment, window: int | None, chunk: int | None, device: torch.device) -> Tensor | None:
    """Which keys each query sees, bool [rows, done + rows]; None where plain causal attention does it."""
    total = segment.done + segment.rows
    if segment.rule is None:
        fits = (not window or total <= window) and (not chunk or total <= chunk)
        if fits and (segment.done == 0 or segment.rows == 1 or device.type in BOTTOM_RIGHT):
            return None
    query = torch.arange(segment.done, total, device=device)[:, None]
    key = torch.arange(total, device=device)[None]
    if segment.rule is not None:
        return evaluate(segment.rule, query, key)
    seen = key <= query
    if window:
        seen = seen & (key > query - window)
    if chunk:
        seen = seen & (query // chunk == key // chunk)
    return seen


def evaluate(rule: MaskFunction, query: Tensor, key: Tensor) -> Tensor:
    """A transformers mask function on query [q, 1] and key [1, k] indices -> bool [q, k]."""
    zero = query.new_zeros(())
    return rule(zero, zero, query, key).expand(query.shape[0], key.shape[1])


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """One sequence: query [1, H, q, W], key and value [1, G, k, W] -> [1, H, q, W]."""
    if softcap is None and s_aux is None:
        if mask is None and 1 < query.shape[2] < key.shape[2]:
            return _attend_onward(query, key, value, scaling)
        grouped = query.shape[1] != key.shape[1]
        causal = mask is None and query.shape[2] > 1
        if grouped and mask is not None:  # a masked grouped call leaves the fast kernels
            key, value, grouped = _repeat(query, key), _repeat(query, value), False
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
        )
    return _attend_eagerly(query, _repeat(query, key), _repeat(query, value), mask, scaling, softcap, s_aux)


def _attend_onward(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Causal, with the last query at the last key; no mask where there is a kernel for it."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and not can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, grouped)):
        key, value, grouped = _repeat(query, key), _repeat(query, value), False
    bias = causal_lower_right(1, 1)  # allocates for its sizes, although nobody reads it: they are told afterwards
    bias.seq_len_q, bias.seq_len_kv = query.shape[2], key.shape[2]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling, enable_gqa=grouped)


def _repeat(query: Tensor, heads: Tensor) -> Tensor:
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def _attend_eagerly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """The order of operations of transformers' `eager_attention_forward`, for what no kernel takes."""
    scores = query @ key.transpose(-1, -2) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and query.shape[2] > 1:
        own = key.shape[2] - query.shape[2]  # index among the keys of the first query's
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(own)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if s_aux is None:
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value
    sinks = s_aux.reshape(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1).to(scores.dtype)
    weights = torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return weights.to(query.dtype) @ value


def _register(plain: str, attention: Callable[[torch.nn.Module], Any], mask: Callable[..., Any]) -> str:
    name = _PREFIX + plain
    AttentionInterface.register(name, _ragged(attention))
    AttentionMaskInterface.register(name, _ragged_mask(mask))
    return name


_NAMES = {
    "sdpa": _register("sdpa", lambda module: sdpa_attention_forward, sdpa_mask),
    "eager": _register("eager", _plain_eager, eager_mask),
}


def install(config: Any) -> None:
    """Give a decoder's config the packed attention that falls back to what it had; done once, never flipped back.

    Raises:
        ValueError: if the decoder uses an implementation other than sdpa and eager.
    """
    current = config._attn_implementation
    if current in _NAMES.values():
        return
    if current not in _NAMES:
        raise ValueError(
            f"attention implementation {current!r} cannot be packed; load the model with 'sdpa' or 'eager'"
        )
    config._attn_implementation = _NAMES[current]
