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
from mmprefill.encoders.stand_in import hooked

Activation = tuple[str, str]  # oneDNN's name, and which algorithm
PLAIN: Activation = ("none", "")
CODES: dict[Activation, int] = {PLAIN: 0, ("gelu", "none"): 1, ("gelu", "tanh"): 2, ("swish", ""): 3, ("relu", ""): 4}
# Below, packing the weights takes longer than torch's whole product.
FEWEST_ROWS = {torch.float32: 2, torch.bfloat16: 3}


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


def tracked(*tensors: Tensor | None) -> bool:
    """Whether gradients are asked of what is made of them."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _run(input: Tensor, products: Seq[Seq[nn.Linear]], inside: Activation) -> list[Tensor] | None:
    dtype, shape = input.dtype, input.shape
    enough = FEWEST_ROWS.get(dtype, 0) * shape[-1] if shape else 0
    function = kernels.function("multiply", dtype)
    if function is None or not _plain(input, dtype) or not 0 < enough <= input.numel():
        return None
    # looked up once: those of a parametrised layer are made on the way, and live as long as they are held
    parameters = [[(layer.weight, layer.bias) for layer in layers] for layers in products]
    outs: list[Tensor] = []
    numbers: list[int] = []  # the kernel's `Linear`s: weight, bias, up, up's bias, out, outs, of 8 bytes each
    for layers in parameters:
        size = layers[0][0].shape[0] if layers[0][0].dim() else 0
        if not size or not all(_fit(weight, bias, dtype, size, shape[-1]) for weight, bias in layers):
            return None
        outs.append(input.new_empty(*shape[:-1], size))
        pointers = [0 if each is None else each.data_ptr() for pair in layers for each in pair]
        numbers += [*pointers, *([0] * (4 - len(pointers))), outs[-1].data_ptr(), size]
    input, rows = input.contiguous(), input.numel() // shape[-1]
    array = (ctypes.c_int64 * len(numbers))(*numbers)
    with kernels.recorded("linear"):
        failed = function(input.data_ptr(), array, len(outs), rows, shape[-1], CODES[inside], torch.get_num_threads())
    return None if failed else outs


def _fit(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, size: int, width: int) -> bool:
    """Whether the kernel may read them: it does as far as its sizes say, which are those of the tensors, not a module's."""
    good = _plain(weight, dtype) and weight.shape == (size, width) and weight.is_contiguous()
    return good and (bias is None or (_plain(bias, dtype) and bias.shape == (size,) and bias.is_contiguous()))


def _plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    common = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.layout == torch.strided
    return common and tensor.dtype == dtype and not tracked(tensor)
