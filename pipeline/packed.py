"""Linear layers of the stock modules in oneDNN: weights packed once, activations computed inside the multiplication.

torch's own linear reorders a bf16 weight in every call, and takes MKL for fp32. Packed at load the same multiplication
runs up to 1.25x as fast from a hundred rows up, twice as fast at sixteen, and what comes out of it is activated before
it leaves the registers. A packed layer keeps its place, name and hooks in the stock model; its parameter holds the
packed weight, which replaces the plain one, and its state dict gives the plain one back.
"""

from __future__ import annotations

import copy
import ctypes
import mmap
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmprefill.pipeline.tiled import PLAIN, Activation, tracked

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    ("gelu", "none"): F.gelu,
    ("gelu", "tanh"): partial(F.gelu, approximate="tanh"),
    ("swish", ""): F.silu,
    ("relu", ""): F.relu,
}


class PackedLinear(nn.Linear):
    """A linear layer of a stock model after `pack`, for inference: `weight` is a parameter in oneDNN's own layout."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]; what needs gradients, or comes in another dtype, takes torch's own way."""
        return multiply(self, input)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[prefix + "weight"] = self.weight.to_dense()

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("this layer's weight is packed; load weights before an engine is made, or unpack the model")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        plain, weight = nn.Linear.__new__(nn.Linear), nn.Parameter(self.weight.to_dense(), requires_grad=False)
        plain.__dict__ = {**self.__dict__, "_parameters": {**self._parameters, "weight": weight}}
        return copy.deepcopy(plain, memo)


def serves(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there, and has kernels for such weights."""
    there = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return bool(there) and dtype in (torch.float32, torch.bfloat16)


def multiply(layer: nn.Linear, input: Tensor, inside: Activation = PLAIN) -> Tensor:
    """A packed layer on an input [..., in], activated."""
    if _foreign(layer, input):
        plain = F.linear(input, layer.weight.to_dense(), layer.bias)
        return plain if inside == PLAIN else ACTIVATIONS[inside](plain)
    name, algorithm = inside
    made: Tensor = torch.ops.mkldnn._linear_pointwise.default(input, layer.weight, layer.bias, name, [], algorithm)
    return made


def multiply_by(layer: nn.Linear, input: Tensor, factor: Tensor) -> Tensor:
    """A packed layer on an input, times a factor of the output's shape."""
    if _foreign(layer, input, factor):
        return F.linear(input, layer.weight.to_dense(), layer.bias) * factor
    made: Tensor = torch.ops.mkldnn._linear_pointwise.binary(input, factor, layer.weight, layer.bias, "mul")
    return made


def pack(layers: Seq[nn.Linear]) -> None:
    """Plain layers become packed ones, the largest first: it is in memory twice while little else is."""
    files = _mapped_files() if layers else []
    for layer in sorted(layers, key=lambda each: -each.weight.numel()):
        weight = layer.weight.detach()
        _set(layer, PackedLinear, torch.ops.mkldnn._reorder_linear_weight(weight))
        _forget(weight, files)


def unpack(layer: nn.Linear) -> None:
    """A packed layer becomes a plain one."""
    _set(layer, nn.Linear, layer.weight.to_dense())


def _foreign(layer: nn.Linear, input: Tensor, *others: Tensor) -> bool:
    return input.dtype != layer.weight.dtype or tracked(input, layer.weight, layer.bias, *others)


def _set(layer: nn.Linear, kind: type[nn.Linear], weight: Tensor) -> None:
    layer.__class__ = kind
    layer._parameters["weight"] = nn.Parameter(weight, requires_grad=False)


def _mapped_files() -> list[tuple[int, int]]:
    """Address ranges of files that are mapped into memory, as transformers loads checkpoints on Linux. Of whatever name:
    in the hub's cache a checkpoint is a link to a file that is called by its digest."""
    with suppress(OSError):
        lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
        ranges = [fields[0].split("-") for fields in lines if fields[4] != "0"]  # the inode
        return [(int(start, 16), int(end, 16)) for start, end in ranges]
    return []


def _forget(weight: Tensor, files: Seq[tuple[int, int]]) -> None:
    """Let go of the pages of a checkpoint that a weight was read from: while any other weight is in use, the whole file
    stays mapped, and would be a second copy in resident memory. Whoever still reads them reads them from the file."""
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end and any(low <= start and end <= high for low, high in files):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
