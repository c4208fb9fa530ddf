"""The tower's attention, fused or in tiles, equals exact attention, and leaves what it is not made for to transformers."""

import functools
import itertools

import checkpoints
import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mmprefill import Prefiller
from mmprefill.encoders import kernels, tower_attention


class Full(torch.nn.Module):
    is_causal = False


def heads(batch, count, rows, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, count, rows, width, generator=generator).bfloat16() for _ in range(3)]


@pytest.fixture(params=["fused", "tiles"])
def kernel(request, monkeypatch):
    if request.param == "tiles":
        monkeypatch.setattr(kernels, "function", lambda *_: None)
    return request.param


def rms(out, exact):
    return float((out.double() - exact).square().mean().sqrt())


@functools.cache
def exact_attention(batch, count, rows, width):
    """Query, key and value, what double precision makes of them, and the error of transformers' eager attention."""
    query, key, value = heads(batch, count, rows, width)
    scores = query.double() @ key.double().transpose(-1, -2) * width**-0.5
    exact = (scores.softmax(-1) @ value.double()).transpose(1, 2)
    eager = (query @ key.transpose(-1, -2) * width**-0.5).softmax(-1, dtype=torch.float32).bfloat16() @ value
    return (query, key, value), exact, rms(eager.transpose(1, 2), exact)


@pytest.mark.parametrize(
    ("batch", "count", "rows", "width"),
    [(1, tower_attention.HEADS + 1, 1024, 64), (2, 1, 1100, 80), (2, 2, 1030, 72)],  # tiles that are full, and rests
)
def test_it_is_as_close_to_exact_as_bf16_allows(kernel, batch, count, rows, width):
    """Against double precision it errs by no more than transformers' eager attention does, give or take a tenth."""
    inputs, exact, eager = exact_attention(batch, count, rows, width)
    ours, _ = tower_attention.tower_attention(Full(), *inputs, None, scaling=width**-0.5)
    assert ours.shape == exact.shape
    assert rms(ours, exact) <= 1.1 * eager


@pytest.mark.parametrize("why", ["mask", "causal", "short", "fp32"])
def test_the_rest_goes_to_transformers(why, monkeypatch):
    """Masks, causal towers, and without a kernel short rows and fp32, get transformers' own result, bit for bit."""
    monkeypatch.setattr(kernels, "function", lambda *_: None)
    query, key, value = heads(1, 4, 40 if why == "short" else 1024, 16)
    if why == "fp32":
        query, key, value = query.float(), key.float(), value.float()
    mask = torch.ones(1, 1, 1024, 1024, dtype=torch.bool).tril() if why == "mask" else None
    arguments = {"scaling": 0.25, "is_causal": why == "causal"}
    ours, _ = tower_attention.tower_attention(Full(), query, key, value, mask, **arguments)
    theirs, _ = sdpa_attention_forward(Full(), query, key, value, mask, **arguments)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_boundaries_are_windows(kernel, dtype):
    """With boundaries each stretch is what it is alone."""
    query, key, value = (each.to(dtype) for each in heads(1, 4, 90, 16))
    bounds = [0, 30, 31, 90]
    arguments = {"cu_seq_lens_q": torch.tensor(bounds), "cu_seq_lens_k": torch.tensor(bounds), "is_causal": False}
    together, _ = tower_attention.tower_attention(Full(), query, key, value, None, **arguments, max_length_q=59)
    for start, end in itertools.pairwise(bounds):
        parts = (each[:, :, start:end] for each in (query, key, value))
        alone, _ = sdpa_attention_forward(Full(), *parts, None, is_causal=False)
        assert torch.allclose(together[:, start:end], alone, atol=1e-5 if dtype == torch.float32 else 0.03)


def test_only_towers_get_it():
    """The decoder keeps the packed attention; the tower has the tiles."""
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached("smolvlm")) as prefiller:
        family = prefiller.session.family
        assert family.decoder.config._attn_implementation == "mmprefill_sdpa"
        assert family.base.vision_model.config._attn_implementation == tower_attention.NAME
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached("qwen2_5_vl")) as prefiller:
        visual = prefiller.session.family.base.visual
        assert visual.config._attn_implementation == tower_attention.NAME_BOUNDS
