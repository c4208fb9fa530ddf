"""RMS norms in one pass give what the stock modules give."""

import copy
import warnings

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mmprefill.encoders import kernels, stand_in
from mmprefill.pipeline import norm


class Unlike(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 1.01


class Gated(LlamaRMSNorm):
    def forward(self, hidden_states, gate=None):
        gated = hidden_states if gate is None else hidden_states * nn.functional.silu(gate)
        return super().forward(gated)


def frozen(kind, width, dtype):
    module = kind(width).eval().requires_grad_(False).to(dtype)
    module.weight.add_(torch.randn(width, generator=torch.Generator().manual_seed(1)).to(dtype) * 0.2)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("width", [24, 64, 1000])
def test_it_equals_the_stock_module(kind, width, dtype):
    """To the last place or so, for every shape; what is not contiguous or needs a gradient takes the stock way."""
    if kernels.function("normalise", dtype) is None:
        pytest.skip("no kernel for this dtype on this machine")
    module, x = frozen(kind, width, dtype), torch.randn(2, 40, 3, width).to(dtype)
    wanted, step = module(x), torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 2)
    assert norm.fuse(module) == 1
    assert not norm.fuse(module)
    assert torch.allclose(module(x), wanted, rtol=step, atol=1e-7)
    assert torch.allclose(module(x.transpose(1, 2)), wanted.transpose(1, 2), rtol=step, atol=1e-7)
    module(x.clone().requires_grad_(True)).sum().backward()
    with pytest.raises(RuntimeError, match="size"):
        module(torch.randn(2, 3 * width).to(dtype)[:, : width + width // 2])
    module.weight.requires_grad_(True)
    module(x).sum().backward()
    assert module.weight.grad is not None
    module.weight.requires_grad_(False)
    assert copy.deepcopy(module).to("meta")(x.to("meta")).is_meta
    assert len(stand_in.undo(module)) == 1
    assert torch.equal(module(x), wanted)


def test_what_is_left_alone():
    trained = LlamaRMSNorm(8).eval()
    for module in (
        trained,
        frozen(LlamaRMSNorm, 1, torch.float32),  # one scale for rows of any width
        frozen(Unlike, 64, torch.float32),
        frozen(Unlike, 64, torch.bfloat16),
        nn.LayerNorm(8).eval().requires_grad_(False),
    ):
        assert norm.fuse(module) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_than_one_input_takes_the_stock_way(dtype):
    """A gated norm without its gate is an RMS norm, with it another thing; inputs may come by name."""
    if kernels.function("normalise", dtype) is None:
        pytest.skip("no kernel for this dtype on this machine")
    module, (x, gate) = frozen(Gated, 64, dtype), torch.randn(2, 5, 64).to(dtype)
    plain, gated = module(x), module(x, gate)
    assert norm.fuse(module) == 1
    assert torch.equal(module(x, gate), gated)
    assert torch.equal(module(x, gate=gate), gated)
    assert torch.equal(module(hidden_states=x), plain)
    assert torch.allclose(module(x), plain, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    "weight", [torch.full((1,), 2.0).expand(256), torch.rand(512)[::2]], ids=["one", "every other"]
)
def test_weights_that_do_not_lie_side_by_side(weight):
    """The kernel would read past them, or what lies between."""
    module, x = frozen(LlamaRMSNorm, 256, torch.float32), torch.randn(3, 256)
    norm.fuse(module)
    module.weight = nn.Parameter(weight, requires_grad=False)
    got = module(x)
    stand_in.undo(module)
    assert torch.equal(got, module(x))


def test_traced_it_is_the_stock_module():
    """Tracing sees operators, not what a kernel writes."""
    module, x, y = frozen(LlamaRMSNorm, 64, torch.float32), torch.randn(3, 64), torch.randn(3, 64)
    wanted = module(y)
    norm.fuse(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, (x,))
    assert torch.allclose(traced(y), wanted, atol=1e-6)
