"""Layers computed in fp32 are as exact as torch's own, and leave a model as it was."""

import pytest
import torch
from torch import nn

from mmprefill.pipeline import linear, tiled, widen
from mmprefill.pipeline.widen import WidenedConv2d, WidenedConv3d, WidenedLinear


def frozen(layer, dtype):
    return layer.eval().requires_grad_(False).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_it_errs_by_half_a_place_of_its_dtype(dtype, bias, monkeypatch):
    """In slices of the weight that do not divide it, with and without a bias: what double precision gives, rounded once."""
    monkeypatch.setattr(widen, "SLICE", 24 * 7)
    torch.manual_seed(0)
    layer, x = frozen(WidenedLinear(24, 40, bias=bias), dtype), torch.randn(2, 16, 24).to(dtype)
    exact = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    got = layer(x)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), exact, rtol=torch.finfo(dtype).eps * 0.51, atol=1e-6)


def test_what_takes_torchs_own_way(monkeypatch):
    """Few rows, other dtypes and gradients."""
    layer, plain = frozen(WidenedLinear(24, 40), torch.bfloat16), frozen(nn.Linear(24, 40), torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    few = torch.randn(widen.FEWEST_ROWS - 1, 24).bfloat16()
    assert torch.equal(layer(few), plain(few))
    asked = torch.randn(32, 24).bfloat16().requires_grad_(True)
    layer(asked).sum().backward()
    assert asked.grad is not None
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.randn(32, 24))


@pytest.mark.parametrize("kind", [WidenedConv2d, WidenedConv3d])
def test_convolutions(kind):
    """Patch embeddings, of pictures and of frames; with gradients torch's own."""
    torch.manual_seed(0)
    axes = 2 if kind is WidenedConv2d else 3
    layer, x = frozen(kind(3, 8, 4, stride=4), torch.bfloat16), torch.randn(2, 3, *[8] * axes).bfloat16()
    exact = frozen(kind.__mro__[1](3, 8, 4, stride=4), torch.float64)
    exact.load_state_dict(layer.state_dict())
    assert torch.allclose(layer(x).double(), exact(x.double()), rtol=torch.finfo(torch.bfloat16).eps * 0.51, atol=1e-6)
    asked = x.clone().requires_grad_(True)
    layer(asked).sum().backward()
    assert asked.grad is not None


def test_small_layers_are_widened_too(monkeypatch):
    """As the bundled model's are: torch's own bf16 is slow there at any size. Packing for oneDNN is not worth it."""
    monkeypatch.setattr(widen, "wants", lambda dtype: dtype != torch.float32)
    monkeypatch.setattr(tiled, "preferred", lambda _: False)
    small = [linear.pack(frozen(nn.Linear(64, 64), dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    assert small == [1, 0, 0]
    assert linear.pack(frozen(nn.Linear(32, 32), torch.bfloat16)) == 0


def test_packing_widens_what_onednn_does_not_multiply(monkeypatch):
    """On whatever processor: the layer changes, its weights do not, and unpacking gives it back."""
    monkeypatch.setattr(linear, "FEWEST", 0)
    monkeypatch.setattr(linear, "FEWEST_PACKED", 0)
    monkeypatch.setattr(widen, "wants", lambda dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(tiled, "preferred", lambda _: False)
    layers = nn.Conv2d(3, 24, 4, stride=4), nn.Flatten(2), nn.Linear(64, 40), nn.GELU(), nn.Linear(40, 8)
    model = frozen(nn.Sequential(*layers), torch.bfloat16)
    before, x = {name: t.clone() for name, t in model.state_dict().items()}, torch.randn(1, 3, 32, 32).bfloat16()
    wanted = model(x)
    assert linear.pack(model) == 3
    assert linear.pack(model) == 0
    assert [type(model[i]) for i in (0, 2, 4)] == [WidenedConv2d, WidenedLinear, WidenedLinear]
    assert torch.allclose(model(x), wanted, atol=2e-2)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    with linear.unpacked(model):
        assert [type(model[i]) for i in (0, 2, 4)] == [nn.Conv2d, nn.Linear, nn.Linear]
    assert type(model[2]) is WidenedLinear
