"""Linear layers of the stock modules in a kernel of ours (`encoders/linear.h`), with what an MLP does to their output.

For processors with AVX2 and without AVX-512, where it is faster than torch's and oneDNN's: weights stay as they are
stored, bf16 ones become fp32 on the way into the cache, and the activation and the product of a gated MLP are computed
before anything is written.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import profiler
from torch.profiler import record_function

from mmprefill.encoders import kernels

Activation = tuple[str, str]  # oneDNN's name, and which algorithm
PLAIN: Activation = ("none", "")
KINDS: dict[Activation, int] = {PLAIN: 0, ("gelu", "none"): 1, ("gelu", "tanh"): 2, ("swish", ""): 3, ("relu", ""): 4}
# Below, packing the weights takes longer than torch's whole product.
FEWEST_ROWS = {torch.float32: 2, torch.bfloat16: 3}


class _Layer(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


class TiledLinear(nn.Linear):
    """A linear layer of a stock model after `linear.pack`, for inference; its parameters are untouched."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], summed in fp32 and rounded once; what `multiply` does not serve takes torch's own way."""
        made = multiply(input, self)
        return F.linear(input, self.weight, self.bias) if made is None else made


def preferred(dtype: torch.dtype) -> bool:
    """Whether the kernel is there and faster than what torch and oneDNN have on this machine."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and kernels.function("multiply", dtype) is not None


def multiply(input: Tensor, layer: nn.Linear, up: nn.Linear | None = None, inside: Activation = PLAIN) -> Tensor | None:
    """act(layer(input)), or act(layer(input)) * up(input), of layers with weights of one shape: [..., in] -> [..., out].

    None for few rows, layers in another dtype than the input or not laid out row by row, and what needs gradients.
    """
    layers = [layer] if up is None else [layer, up]
    function = kernels.function("multiply", input.dtype)
    if function is None or not all(_served(input, each) for each in layers):
        return None
    input = input.contiguous()
    out = input.new_empty(*input.shape[:-1], layer.out_features)
    sizes = (ctypes.c_int64(n) for n in (out.numel() // layer.out_features, layer.in_features, layer.out_features))
    parts = (_Layer * 2)(*map(_pointers, layers))
    with record_function("mmprefill::linear") if profiler._is_profiler_enabled else nullcontext():
        function(_pointer(input), parts, _pointer(out), *sizes, KINDS[inside], torch.get_num_threads())
    return out


def _served(input: Tensor, layer: nn.Linear) -> bool:
    parameters = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    plain = all(p.dtype == input.dtype and p.device == input.device and p.is_contiguous() for p in parameters)
    many = input.numel() >= FEWEST_ROWS[input.dtype] * layer.in_features == FEWEST_ROWS[input.dtype] * input.shape[-1]
    return plain and many and not (input.requires_grad and torch.is_grad_enabled())


def _pointers(layer: nn.Linear) -> _Layer:
    return _Layer(layer.weight.data_ptr(), None if layer.bias is None else layer.bias.data_ptr())


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
