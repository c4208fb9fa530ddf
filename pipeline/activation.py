"""Activations of MLPs in one pass, with the gate's product (`mmprefill.encoders.kernels`).

oneDNN computes them inside the multiplication before. With AVX2 that takes three times as long as on their own: at 1,024
rows of 576 x 1,536 a third of the multiplication's own time. With AVX-512 it takes the same.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mmprefill.encoders import kernels

Activation = tuple[str, str]  # oneDNN's name, and which algorithm
KINDS: dict[Activation, int] = {("gelu", "none"): 0, ("gelu", "tanh"): 1, ("swish", ""): 2, ("relu", ""): 3}


def preferred(dtype: torch.dtype) -> bool:
    """Whether the kernel is faster on this machine than what oneDNN does inside a multiplication, or cannot do."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and kernels.function("activate", dtype) is not None


def activate(hidden: Tensor, activation: Activation, factor: Tensor | None = None) -> None:
    """act(hidden), or act(hidden) * factor, into hidden; both contiguous, of one shape and dtype, without gradients."""
    function = kernels.function("activate", hidden.dtype)
    assert function is not None
    pointer = ctypes.c_void_p(None if factor is None else factor.data_ptr())
    count = ctypes.c_int64(hidden.numel())
    function(ctypes.c_void_p(hidden.data_ptr()), pointer, count, KINDS[activation], torch.get_num_threads())
