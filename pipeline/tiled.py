"""Linear layers of the stock modules in a kernel of ours (`encoders/linear.h`), with what an MLP does to their output.

For processors with AVX2 and without AVX-512, where it is faster than torch's and oneDNN's: weights stay as they are
stored, bf16 ones become fp32 on the way into the cache, and the activation and the product of a gated MLP are computed
before anything is written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmprefill.encoders import kernels

Activation = tuple[str, str]  # oneDNN's name, and which algorithm
PLAIN: Activation = ("none", "")
CODES: dict[Activation, int] = {PLAIN: 0, ("gelu", "none"): 1, ("gelu", "tanh"): 2, ("swish", ""): 3, ("relu", ""): 4}
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
    """act(layer(input)), or act(layer(input)) * up(input): [..., in] -> [..., out].

    None for few rows, layers of another dtype or size than the input's, not on the CPU or not laid out row by row, two
    layers that are not of one size, and what needs gradients.
    """
    made = _run(input, [(layer,) if up is None else (layer, up)], inside)
    return None if made is None else made[0]


def multiply_all(input: Tensor, layers: Seq[nn.Linear]) -> list[Tensor]:
    """Layers that share an input [..., in], each [..., out]; in one call where all are such layers and it serves them."""
    tiled = all(type(layer) is TiledLinear and not hooked(layer) for layer in layers)
    made = _run(input, [(layer,) for layer in layers], PLAIN) if tiled else None
    return [layer(input) for layer in layers] if made is None else made


def hooked(module: nn.Module) -> bool:
    """Whether something watches or changes what the module takes or gives, or stands in for its forward."""
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return "forward" in vars(module) or any(getattr(module, name, None) for name in hooks)


def tracked(*tensors: Tensor | None) -> bool:
    """Whether gradients are asked of what is made of them."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


Parameters = tuple[Tensor, Tensor | None]  # weight and bias


def _run(input: Tensor, products: Seq[Seq[nn.Linear]], inside: Activation) -> list[Tensor] | None:
    if torch.compiler.is_compiling() or torch._C._get_tracing_state():  # they see operators, not what a kernel writes
        return None
    function = kernels.function("multiply", input.dtype)
    # looked up once: those of a parametrised layer are made on the way, and live as long as they are held
    factors: list[list[Parameters]] = [[(layer.weight, layer.bias) for layer in layers] for layers in products]
    if function is None or not all(_served(input, each) for each in factors):
        return None
    input, width = input.contiguous(), input.shape[-1]
    outs = [input.new_empty(*input.shape[:-1], len(each[0][0])) for each in factors]
    layers = [_Layer(*_pointers(each), out.data_ptr(), out.shape[-1]) for each, out in zip(factors, outs, strict=True)]
    sizes = (ctypes.c_int64(n) for n in (len(layers), input.numel() // width, width))
    with kernels.recorded("linear"):
        array = (_Layer * len(layers))(*layers)
        failed = function(ctypes.c_void_p(input.data_ptr()), array, *sizes, CODES[inside], torch.get_num_threads())
    return None if failed else outs


def _served(input: Tensor, layers: Seq[Parameters]) -> bool:
    """The kernel reads what its sizes say, wherever that is: they are those of the tensors, not what a module says."""
    (weight, _), width = layers[0], input.shape[-1] if input.dim() else 0
    tensors = [input, *(tensor for layer in layers for tensor in layer if tensor is not None)]
    plain = all(type(t) in (Tensor, nn.Parameter) and t.is_cpu and t.layout == torch.strided for t in tensors)
    if not plain or not all(t.dtype == input.dtype and t.is_contiguous() for t in tensors[1:]):
        return False
    outs, enough = len(weight), input.numel() >= FEWEST_ROWS[input.dtype] * width > 0
    fits = all(w.shape == (outs, width) and (b is None or b.shape == (outs,)) for w, b in layers)
    return enough and outs > 0 and fits and not tracked(*tensors)


def _pointers(layers: Seq[Parameters]) -> list[int | None]:
    """Of the weight and the bias of one layer, and of a second one or none."""
    found = [None if tensor is None else tensor.data_ptr() for layer in layers for tensor in layer]
    return [*found, None, None][:4]
