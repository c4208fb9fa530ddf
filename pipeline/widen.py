"""Layers in bf16 or fp16 on a CPU that only multiplies fp32 fast (AVX2, or AVX-512 without bf16).

torch multiplies there at a sixth of the rate of fp32 (19 against 122 GFLOP/s on two cores of Zen 3), and embeds patches
at a hundredth. Converted to fp32 on
the way, a slice of the weight at a time, and rounded once at the end, the same products are exact and run near fp32's
rate; the weights stay in memory as they are. What a kernel of ours does (`tiled.py`) needs no slices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmprefill.pipeline.tiled import tracked

FEWEST_ROWS = 16  # below, converting the weight takes longer than torch's own way
SLICE = 2**21  # weights converted at a time: 8 MB as fp32


class WidenedLinear(nn.Linear):
    """A linear layer of a stock model after `linear.pack`, for inference; its parameters are untouched."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], summed in fp32 and rounded once; few rows, other dtypes, and what needs gradients take
        torch's own way."""
        few = input.numel() < FEWEST_ROWS * self.in_features
        if few or input.dtype != self.weight.dtype or tracked(input, self.weight, self.bias):
            return F.linear(input, self.weight, self.bias)
        wide, out = input.float(), input.new_empty(*input.shape[:-1], self.out_features)
        step = max(1, SLICE // self.in_features)
        for start in range(0, self.out_features, step):
            part = slice(start, start + step)
            bias = None if self.bias is None else self.bias[part].float()
            out[..., part] = F.linear(wide, self.weight[part].float(), bias)
        return out


class WidenedConv2d(nn.Conv2d):
    """A convolution of a stock model after `linear.pack`, for inference: patch embeddings are."""

    def forward(self, input: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, out, H', W'], summed in fp32 and rounded once."""
        return _convolve(self, input)


class WidenedConv3d(nn.Conv3d):
    """The same with an axis of frames."""

    def forward(self, input: Tensor) -> Tensor:
        """[N, C, T, H, W] -> [N, out, T', H', W'], summed in fp32 and rounded once."""
        return _convolve(self, input)


WIDENED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: WidenedLinear,
    nn.Conv2d: WidenedConv2d,
    nn.Conv3d: WidenedConv3d,
}


def _convolve(layer: nn.Conv2d | nn.Conv3d, input: Tensor) -> Tensor:
    convolve: Callable[[Tensor, Tensor, Tensor | None], Tensor] = layer._conv_forward
    if input.dtype != layer.weight.dtype or tracked(input, layer.weight, layer.bias):
        return convolve(input, layer.weight, layer.bias)
    bias = None if layer.bias is None else layer.bias.float()
    return convolve(input.float(), layer.weight.float(), bias).to(input.dtype)


def wants(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies such numbers faster as fp32: oneDNN is there and has no kernels for them."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()
