"""Linear layers of the stock modules in a kernel of ours (`encoders/linear.h`), with what an MLP does to their output.

For processors with AVX2 and without AVX-512, where it is faster than torch's and oneDNN's: weights stay as they are
stored, bf16 ones become fp32 on the way into the cache, and the activation and the product of a gated MLP are computed
before anything is written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
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
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "up", "up_bias", "out")),
        ("outs", ctypes.c_int64),
    ]


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
    made = _run(input, [(layer, up)], inside)
    return None if made is None else made[0]


def together(input: Tensor, layers: Seq[nn.Linear]) -> list[Tensor]:
    """Layers that share an input [..., in], each [..., out]; in one call where all are such layers and it serves them."""
    tiled = all(type(layer) is TiledLinear and not hooked(layer) for layer in layers)
    made = _run(input, [(layer, None) for layer in layers], PLAIN) if tiled else None
    return [layer(input) for layer in layers] if made is None else made


def hooked(module: nn.Module) -> bool:
    """Whether something watches or changes what the module takes or gives."""
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return any(getattr(module, name, None) for name in hooks)


def _run(input: Tensor, pairs: Seq[tuple[nn.Linear, nn.Linear | None]], inside: Activation) -> list[Tensor] | None:
    function = kernels.function("multiply", input.dtype)
    if function is None or not all(_served(input, layer) for pair in pairs for layer in pair if layer is not None):
        return None
    input, width = input.contiguous(), input.shape[-1]
    outs = [input.new_empty(*input.shape[:-1], layer.out_features) for layer, _ in pairs]
    layers = (_Layer * len(pairs))()
    for each, (layer, up), out in zip(layers, pairs, outs, strict=True):
        weight, bias = _pointers(layer)
        each.weight, each.bias, each.out, each.outs = weight, bias, out.data_ptr(), layer.out_features
        if up is not None:
            each.up, each.up_bias = _pointers(up)
    sizes = (ctypes.c_int64(n) for n in (len(pairs), input.numel() // width, width))
    with record_function("mmprefill::linear") if profiler._is_profiler_enabled else nullcontext():
        function(ctypes.c_void_p(input.data_ptr()), layers, *sizes, KINDS[inside], torch.get_num_threads())
    return outs


def _served(input: Tensor, layer: nn.Linear) -> bool:
    parameters = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    plain = all(p.dtype == input.dtype and p.device == input.device and p.is_contiguous() for p in parameters)
    many = input.numel() >= FEWEST_ROWS[input.dtype] * layer.in_features == FEWEST_ROWS[input.dtype] * input.shape[-1]
    return plain and many and not (input.requires_grad and torch.is_grad_enabled())


def _pointers(layer: nn.Linear) -> tuple[int, int | None]:
    return layer.weight.data_ptr(), None if layer.bias is None else layer.bias.data_ptr()
