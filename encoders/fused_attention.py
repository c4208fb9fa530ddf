"""Fused attention on a CPU (`kernels.py`): one call takes every sequence of a packed row."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from mmprefill.encoders import kernels


@dataclass(frozen=True)
class Rows:
    """One sequence's part of a call; the last axis of every tensor is contiguous.

    Attributes:
        query: [H, q, W].
        key: [G, k, W].
        value: [G, k, V].
        out: [H, q, V], written.
        first: index among the keys of the first query's own key (for causal attention and windows).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    first: int = 0


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether there is a kernel for such tensors [..., H or G, n, W] on this machine."""
    if query.device.type != "cpu" or not query.dtype == key.dtype == value.dtype:
        return False
    if query.shape[-1] != key.shape[-1] or key.shape[-3:-1] != value.shape[-3:-1] or not key.shape[-3]:
        return False
    if query.shape[-3] % key.shape[-3]:
        return False
    even = query.dtype == torch.float32 or not any(
        part % 2 for part in (query.shape[-1], query.stride(-2), query.stride(-3))
    )
    return (
        even
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and kernels.function("attend", query.dtype) is not None
    )


def attend(parts: Seq[Rows], scaling: float | None = None, *, causal: bool, window: int | None = None) -> None:
    """Attention of each part to itself, into its `out`. `serves` must hold for all.

    Args:
        parts: sequences of one layer: heads and widths agree.
        scaling: factor of the scores; W ** -0.5 if None.
        causal: a query sees keys up to its own.
        window: keys that a query sees, its own included (with `causal`); None for all.
    """
    first = parts[0]
    heads, _, width = first.query.shape
    scale = width**-0.5 if scaling is None else scaling
    shape = Shape(heads, first.key.shape[0], width, first.value.shape[2], scale, causal)
    numbers = [number for part in parts for number in _numbers(part, window or 0)]
    function = kernels.function("attend", first.query.dtype)
    assert function is not None
    with kernels.recorded("attend"):
        function((ctypes.c_int64 * len(numbers))(*numbers), len(parts), ctypes.byref(shape), torch.get_num_threads())


class Shape(ctypes.Structure):
    """The kernel's `Shape`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "groups", "width", "value_width")),
        ("scale", ctypes.c_float),
        ("causal", ctypes.c_int),
    )


def _numbers(part: Rows, window: int) -> tuple[int, ...]:
    """The kernel's `Segment`: everything in it takes 8 bytes."""
    query, key, value, out = part.query, part.key, part.value, part.out
    strides = (stride for tensor in (query, key, value, out) for stride in (tensor.stride(1), tensor.stride(0)))
    pointers = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
    return (*pointers, query.shape[1], key.shape[1], part.first, window, *strides)
