"""The kernel of linear layers: right at every edge of its blocks, and torch's own way for what it is not made for."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmprefill.encoders import kernels
from mmprefill.pipeline import tiled
from mmprefill.pipeline.packed import ACTIVATIONS
from mmprefill.pipeline.tiled import FEWEST_ROWS, PLAIN, TiledLinear

DTYPES = [torch.float32, torch.bfloat16]
KNOWN = {PLAIN: lambda x: x, **ACTIVATIONS}

if kernels.function("multiply", torch.float32) is None:
    pytest.skip("no kernel on this machine", allow_module_level=True)


def layer(inputs, outputs, dtype, bias=True):
    return TiledLinear(inputs, outputs, bias=bias).eval().requires_grad_(False).to(dtype)


def exactly(each, x):
    """What double precision gives, rounded once to the layer's dtype."""
    bias = None if each.bias is None else each.bias.double()
    return F.linear(x.double(), each.weight.double(), bias).to(x.dtype).double()


def close(got, exact, dtype):
    """To a few last places of what is largest in a row: sums cancel."""
    places = (16 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
    return bool(((got.double() - exact).abs() <= places * exact.abs().amax(-1, keepdim=True).clamp(min=1)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("inputs", [2, 30, 384, 386, 1000])
@pytest.mark.parametrize("outputs", [1, 16, 33, 97, 200, 600])
def test_it_is_what_double_precision_gives(outputs, inputs, threads, dtype):
    """Sizes on, beside and far from those of a tile, a panel and a block."""
    torch.manual_seed(0)
    each, before = layer(inputs, outputs, dtype), torch.get_num_threads()
    inputs_of = {rows: torch.randn(rows, inputs).to(dtype) for rows in (3, 7, 96, 97, 200)}
    torch.set_num_threads(threads)
    try:
        got = {rows: tiled.multiply(x, each) for rows, x in inputs_of.items()}
    finally:
        torch.set_num_threads(before)
    for rows, x in inputs_of.items():
        assert got[rows].dtype == dtype
        assert close(got[rows], exactly(each, x), dtype), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_activations_and_products(known, gated, bias, dtype):
    """Far from zero too, at an odd size, with a shape of three axes; rounded where a stock MLP rounds."""
    torch.manual_seed(0)
    first, up = layer(24, 37, dtype, bias), layer(24, 37, dtype, bias) if gated else None
    x = (torch.randn(2, 19, 24) * torch.logspace(-3, 3, 19)[:, None]).to(dtype)
    exact = KNOWN[known](exactly(first, x))
    if up is not None:
        exact = exact.to(dtype).double() * exactly(up, x)
    got = tiled.multiply(x, first, up, known)
    assert got.shape == (2, 19, 37)
    assert close(got, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_numbers_that_are_none(known, dtype):
    """NaN and infinity reach what is made of them, and nothing else."""
    each, x = layer(24, 37, dtype), torch.ones(4, 24, dtype=dtype)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    got = tiled.multiply(x, each, inside=known)
    assert got[1].isnan().all()
    assert not got[2].isfinite().all()
    assert got[[0, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_takes_torchs_own_way(dtype):
    """Few rows, none, another dtype, gradients, a weight that lies otherwise; inputs that do are made contiguous."""
    each, plain = layer(24, 40, dtype), nn.Linear(24, 40).requires_grad_(False).to(dtype)
    plain.load_state_dict(each.state_dict())
    for rows in range(FEWEST_ROWS[dtype]):
        few = torch.randn(rows, 24).to(dtype)
        assert tiled.multiply(few, each) is None
        assert torch.equal(each(few), plain(few))
    asked = torch.randn(8, 24).to(dtype).requires_grad_(True)
    each(asked).sum().backward()
    assert asked.grad is not None
    with pytest.raises(RuntimeError, match="dtype"):
        each(torch.randn(8, 24, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="shapes"):
        each(torch.randn(8, 48).to(dtype))
    x = torch.randn(24, 8).to(dtype).T
    assert close(each(x), exactly(each, x), dtype)
    each.weight = nn.Parameter(each.weight.T.contiguous().T, requires_grad=False)
    assert tiled.multiply(x, each) is None
    assert close(each(x), exactly(each, x), dtype)


def test_long_sums_are_as_exact_as_torchs():
    """Made in parts that are added up: rounding does not grow with their length."""
    torch.manual_seed(0)
    each, x = layer(16384, 48, torch.float32, bias=False), torch.randn(24, 16384)
    exact = F.linear(x.double(), each.weight.double())
    error, torchs = ((made.double() - exact).norm() for made in (tiled.multiply(x, each), F.linear(x, each.weight)))
    assert error <= 3 * torchs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_kernel_would_read_wrongly(dtype):
    """Weights and biases of another size than the layer says or than each other, nothing at all, other devices."""
    plain = nn.Linear(24, 40).requires_grad_(False).to(dtype)

    def with_parameters(weight, bias=None):
        each = layer(24, 40, dtype, bias=False)
        each.weight, each.bias = nn.Parameter(weight, requires_grad=False), bias
        return each

    x = torch.randn(8, 24).to(dtype)
    smaller = with_parameters(plain.weight[:8].clone())
    assert tiled.multiply(x, smaller).shape == (8, 8)
    assert close(smaller(x), exactly(smaller, x), dtype)
    one_bias = with_parameters(plain.weight, nn.Parameter(plain.bias[:1].clone(), requires_grad=False))
    assert torch.equal(one_bias(x), F.linear(x, plain.weight, plain.bias[:1]))
    assert tiled.multiply(x, smaller, plain) is None
    assert with_parameters(torch.empty(0, 24, dtype=dtype))(x).shape == (8, 0)
    assert tiled.multiply(torch.empty(8, 0, dtype=dtype), with_parameters(torch.empty(40, 0, dtype=dtype))) is None
    assert layer(24, 40, dtype).to("meta")(x.to("meta")).device.type == "meta"
    odd = layer(23, 40, dtype)
    assert close(odd(x[:, 1:]), exactly(odd, x[:, 1:]), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_are_made_on_the_way(dtype):
    """A parametrised layer's weight lives no longer than whoever looked it up holds it."""
    each = layer(512, 512, dtype)

    class Negative(nn.Module):
        def forward(self, weight):
            return -weight

    nn.utils.parametrize.register_parametrization(each, "weight", Negative())
    each.requires_grad_(False)
    x = torch.randn(8, 512).to(dtype)
    assert tiled.multiply(x, each) is not None
    assert close(each(x), exactly(each, x), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_gradients_of_a_layers_own_parameters(name, dtype):
    """Asked for after it was packed, of an input that needs none."""
    each, x = layer(24, 40, dtype), torch.randn(8, 24).to(dtype)
    getattr(each, name).requires_grad_(True)
    each(x).sum().backward()
    assert getattr(each, name).grad is not None


def test_traced_and_compiled_it_is_torchs():
    """What only sees operators would keep a result that nothing has written."""
    each, x = layer(24, 40, torch.float32), torch.randn(8, 24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tracing is deprecated
        traced = torch.jit.trace(each, (x,))
    compiled = torch.compile(each, backend="eager", fullgraph=True)
    for made in traced, compiled:
        assert close(made(2 * x), exactly(each, 2 * x), torch.float32)


def test_inputs_that_are_widened_a_part_at_a_time():
    """More numbers than are widened at once: every row is right."""
    torch.manual_seed(0)
    each, x = layer(1000, 40, torch.bfloat16), torch.randn(4300, 1000).bfloat16()
    assert close(tiled.multiply(x, each), exactly(each, x), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_that_share_an_input(dtype):
    """Of unlike widths, with and without a bias; one that something watches, and too few rows, go one by one."""
    layers = [layer(24, 40, dtype), layer(24, 8, dtype, bias=False), layer(24, 300, dtype)]
    x, seen = torch.randn(2, 5, 24).to(dtype), []
    for got, each in zip(tiled.multiply_all(x, layers), layers, strict=True):
        assert got.shape == (2, 5, each.out_features)
        assert close(got, exactly(each, x), dtype)
    layers[1].register_forward_hook(lambda *_: seen.append(1))
    for got, each in zip(tiled.multiply_all(x, layers), layers, strict=True):
        assert close(got, exactly(each, x), dtype)
    assert len(seen) == 1
    assert [each.shape[-1] for each in tiled.multiply_all(x[:1, :1], layers)] == [40, 8, 300]
