"""RMS norms of the stock modules in one pass on a CPU (`mmprefill.encoders.kernels`).

transformers writes them as eight operations, each a pass over memory: an eighth of a small decoder's time. What a module
computes is found by running it, not by its name; what is rounded where stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmprefill.encoders import kernels
from mmprefill.encoders.stand_in import NOT_LIKE_IT, StandIn, put


class FusedNorm(StandIn):
    """Stands in for the `forward` of an RMS norm."""

    def __init__(self, module: nn.Module, eps: float, offset: bool) -> None:
        super().__init__(module)
        self.eps, self.offset = eps, offset

    def __call__(self, *inputs: Tensor | None, **named: Any) -> Tensor:
        """[..., D] -> [..., D]; what is not contiguous, of another dtype, needs gradients or comes with more than the one
        input (the gate of a gated norm) takes the stock way."""
        weight: Tensor = self.module.weight
        function = kernels.function("normalise", weight.dtype)
        hidden = inputs[0] if len(inputs) == 1 and not named else None
        if function is None or hidden is None or not _served(hidden, weight):
            made: Tensor = type(self.module).forward(self.module, *inputs, **named)
            return made
        out, width = torch.empty_like(hidden), weight.shape[0]
        with kernels.recorded("norm"):
            function(
                hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), hidden.numel() // width, width,
                self.eps, self.offset, torch.get_num_threads(),
            )  # fmt: skip
        return out


def _served(hidden: Tensor, weight: Tensor) -> bool:
    alike = hidden.dtype == weight.dtype and hidden.is_cpu and weight.is_cpu and hidden.is_contiguous()
    asked = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return alike and weight.is_contiguous() and hidden.shape[-1:] == weight.shape and not asked


def fuse(model: nn.Module) -> int:
    """Put the kernel behind every frozen RMS norm of a model; returns how many. Twice does no harm."""
    return put(list(_norms(model)))


def _norms(model: nn.Module) -> Iterator[FusedNorm]:
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if set(own) != {"weight"} or not isinstance(eps, float) or "forward" in vars(module) or list(module.children()):
            continue
        weight = own["weight"]
        frozen = not (weight.requires_grad or module.training) and weight.device.type == "cpu"
        if weight.dim() != 1 or len(weight) == 1:  # one scale for all is not told by its shape
            continue
        if frozen and kernels.function("normalise", weight.dtype) is not None:
            yield from (FusedNorm(module, eps, offset) for offset in (False, True) if _same(module, eps, offset))


@torch.no_grad()
def _same(module: nn.Module, eps: float, offset: bool) -> bool:
    """Whether the module computes what the kernel does: in fp32 to the last places, in its own dtype as that rounds."""
    return all(_close(twin, eps, offset) for twin in (copy.deepcopy(module).float(), module))


def _close(module: nn.Module, eps: float, offset: bool) -> bool:
    weight: Tensor = module.weight  # type: ignore[assignment]
    scales = torch.tensor([[eps**0.5], [1.0], [30.0]])  # entries near eps, where it shows, and far from it
    rows = (torch.randn(3, weight.shape[0], generator=torch.Generator().manual_seed(0)) * scales).to(weight.dtype)
    try:
        wanted, got = module(rows), FusedNorm(module, eps, offset)(rows)
        step = torch.finfo(weight.dtype).eps * (8 if weight.dtype == torch.float32 else 2)
        return got.dtype == wanted.dtype and bool(torch.allclose(got, wanted, rtol=step, atol=step * eps**0.5))
    except NOT_LIKE_IT:
        return False
