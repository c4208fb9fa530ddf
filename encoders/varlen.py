"""Attention of many sequences in one call on CUDA: `torch.nn.attention.varlen`, where it serves.

Which cards, dtypes and widths it takes, whether heads may be grouped, and where a causal diagonal begins when keys are
more than queries, has changed between torch releases and is written nowhere in full. So it is tried, once per device and
kind of heads, on a call that has all of it; what it refuses or gets wrong is left to others from then on.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from mmprefill.streams import sent

log = logging.getLogger("mmprefill")
DEVICES = ("cuda",)  # types of devices where it is tried
_LINE = 16  # bytes that its kernels load at once, and do not check for
_TRIED = ((150, 150), (7, 40), (1, 9))  # queries and keys of the trial's sequences
_NEAR = 0.05  # largest difference: outputs reach 4, where bf16 steps by 0.03; a key too many moves some by 0.3 and more


@dataclass(frozen=True)
class Bounds:
    """Where sequences begin and end among packed queries and keys.

    Attributes:
        queries: int32 [n + 1], on the device of what they bound; from 0 to the number of queries.
        keys: the same for keys.
        most_queries: of one sequence.
        most_keys: of one sequence.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, lengths: Seq[tuple[int, int]], edges: Tensor) -> Bounds:
        """From the number of queries and of keys of every sequence, and their `edges`."""
        return cls(edges[0], edges[1], *(max(each) for each in zip(*lengths, strict=True)))


def edges(lengths: Seq[tuple[int, int]], device: torch.device) -> Tensor:
    """int32 [2, n + 1]: where the queries, and where the keys, of sequences of these lengths begin and end."""
    sums = [[0, *accumulate(each)] for each in zip(*lengths, strict=True)]
    return sent(torch.tensor(sums, dtype=torch.int32), device)


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attend` takes such tensors [1, H or G, n, W]; the first time for a kind of heads it is tried."""
    if query.device.type not in DEVICES or not query.dtype == key.dtype == value.dtype:
        return False
    if key.shape[:3] != value.shape[:3] or query.shape[0] != 1 or not all(map(_aligned, (query, key, value))):
        return False
    return _works(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3], value.shape[3])


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Bounds,
    scaling: float | None = None,
    *,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Attention of every sequence to itself. `serves` must hold.

    Args:
        query: [1, H, N, W], all sequences' one after the other.
        key: [1, G, K, W].
        value: like `key`.
        bounds: of the sequences.
        scaling: factor of the scores; W ** -0.5 if None.
        causal: the last query of a sequence sees all of its keys, each one before it one less.
        window: keys that a query sees, its own included (with `causal`); None for all.

    Returns:
        [1, N, H, W].
    """
    q_NHW, k_KGW, v_KGW = (each[0].transpose(0, 1) for each in (query, key, value))
    sides = _sides(bounds, window) if causal else (-1, -1)
    attended: Tensor = _told(varlen_attn)(
        q_NHW, k_KGW, v_KGW, bounds.queries, bounds.keys, bounds.most_queries, bounds.most_keys,
        scale=scaling, window_size=sides,
    )  # fmt: skip
    return attended[None]


def _sides(bounds: Bounds, window: int | None) -> tuple[int, int]:
    """Keys before and after a query's own that it sees; -1 is all of them."""
    if window:
        return window - 1, 0
    return -1, -1 if bounds.most_queries == 1 else 0  # a lone row sees all: told so, kernels read its keys but once


@cache
def _told(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch 2.11 and 2.12 take grouped heads as they come; later ones want to be told, and have the argument for it.

    Told always: what is not grouped may go to cuDNN there, which makes a plan for every shape that it has not seen.
    """
    grouped = "enable_gqa" in inspect.signature(function).parameters
    return partial(function, enable_gqa=True) if grouped else function


def _aligned(tensor: Tensor) -> bool:
    steps = (stride * tensor.element_size() % _LINE for stride in tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and not any(steps) and not tensor.data_ptr() % _LINE


@cache
def _works(device: torch.device, dtype: torch.dtype, heads: int, groups: int, width: int, value_width: int) -> bool:
    """Try it: causal, in a window, and with every key in sight."""
    kind = f"{dtype}, {heads} heads of {width} over {groups} of {value_width}, on {device}"
    try:
        worst = max(
            _error(device, dtype, (heads, groups, width, value_width), causal, window)
            for causal, window in ((True, None), (True, 5), (False, None))
        )
    except torch.OutOfMemoryError:
        raise  # says nothing about the kernel; the next call tries again
    except (RuntimeError, ValueError, TypeError, ZeroDivisionError) as error:
        log.info("attention sequence by sequence for %s: varlen_attn refused: %s", kind, error)
        return False
    if not worst <= _NEAR:
        log.warning("attention sequence by sequence for %s: varlen_attn was off by %.2g", kind, worst)
        return False
    return True


def _error(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int], causal: bool, window: int | None
) -> float:
    """The largest difference from attention in fp32, on random input."""
    heads, groups, width, value_width = shape
    draw = torch.Generator().manual_seed(0)
    rows, keys = (sum(each) for each in zip(*_TRIED, strict=True))
    sizes = (heads, rows, width), (groups, keys, width), (groups, keys, value_width)
    query, key, value = (torch.randn(1, *size, generator=draw).to(device, dtype) for size in sizes)
    got = attend(query, key, value, Bounds.of(_TRIED, edges(_TRIED, device)), causal=causal, window=window)
    return float((got.float() - reference(query, key, value, _TRIED, causal=causal, window=window)).abs().max())


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Seq[tuple[int, int]],
    *,
    causal: bool,
    window: int | None = None,
    scaling: float | None = None,
) -> Tensor:
    """What `attend` is held to, in fp32: [1, N, H, W] of values."""
    shared = query.shape[1] // key.shape[1]
    rows, keys = ([length[side] for length in lengths] for side in range(2))
    outs = []
    for q, k, v in zip(
        query.float().split(rows, 2), key.float().split(keys, 2), value.float().split(keys, 2), strict=True
    ):
        k, v = (each.repeat_interleave(shared, 1) for each in (k, v))
        own = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
        at = torch.arange(k.shape[2], device=q.device)
        hidden = (at > own if causal else at < 0) | (at <= own - window if window else at < 0)
        scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scaling is None else scaling)
        outs.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v)
    return torch.cat(outs, 2).transpose(1, 2)
