"""Fused attention on a CPU with AVX-512: `attention_kernel.cpp`, compiled on first use and kept under the user's cache.

One call takes every sequence of a packed row. Without a compiler, on another processor, or where anything goes wrong
while compiling, there is no kernel, and callers take what they took before.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("attention_kernel.cpp")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-w",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mfma",
)
_TIMEOUT = 120


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
    """Whether there is a kernel for such tensors [..., n, W] on this machine."""
    if query.device.type != "cpu" or not query.dtype == key.dtype == value.dtype:
        return False
    even = query.dtype == torch.float32 or not any(
        part % 2 for part in (query.shape[-1], query.stride(-2), query.stride(-3))
    )
    return even and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1 and _function(query.dtype) is not None


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
    shape = _Shape(heads, first.key.shape[0], width, first.value.shape[2], scale, causal)
    numbers = [number for part in parts for number in _numbers(part, window or 0)]
    function = _function(first.query.dtype)
    assert function is not None
    function((ctypes.c_int64 * len(numbers))(*numbers), len(parts), ctypes.byref(shape), torch.get_num_threads())


class _Shape(ctypes.Structure):
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


# The library.


def _function(dtype: torch.dtype) -> Any:
    """The compiled function for a dtype, or None."""
    if dtype not in (torch.float32, torch.bfloat16) or "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return None
    pairs = torch.cpu._is_avx512_bf16_supported()
    if dtype == torch.bfloat16 and not pairs:
        return None
    return getattr(_library(pairs), "attend_bf16" if dtype == torch.bfloat16 else "attend_float", None)


@cache
def _library(pairs: bool) -> ctypes.CDLL | None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        return None
    with suppress(OSError, subprocess.SubprocessError):
        return ctypes.CDLL(str(_compiled(compiler, [*_FLAGS, *(["-mavx512bf16"] if pairs else [])])))
    return None


def _compiled(compiler: str, flags: Seq[str]) -> Path:
    """The shared library, from the cache if this source was compiled before."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_TIMEOUT).stdout  # noqa: S603
    key = hashlib.sha256(b"\0".join([SOURCE.read_bytes(), version, " ".join(flags).encode()])).hexdigest()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmprefill"
    library = root / f"attention-{key[:24]}.so"
    if not library.exists():
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:  # two processes may compile at once: each renames its own
            draft = Path(folder) / "attention.so"
            command = [compiler, *flags, "-shared", str(SOURCE), "-o", str(draft)]
            subprocess.run(command, capture_output=True, check=True, timeout=_TIMEOUT)  # noqa: S603
            draft.rename(library)
    return library
