"""The stand-in for timm's attention layers gives what they give, and only where it does."""

import copy

import checkpoints
import pytest
import timm
import torch
from timm.layers.attention import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import nn

from mmprefill import Prefiller, Request
from mmprefill.encoders import stand_in, timm_attention
from mmprefill.pipeline import linear

SIZE, HEADS, ROWS = 48, 3, 11


def frozen(module, dtype=torch.float32):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return nn.Sequential(module.eval().requires_grad_(False).to(dtype))


def angles(rows, width=SIZE // HEADS, paired=True):
    made = torch.randn(rows, width // 2, generator=torch.Generator().manual_seed(1)).repeat_interleave(2, -1)
    made = made if paired else made + torch.rand(rows, width)
    return torch.cat([made.sin(), made.cos()], -1)


def both(tower, *inputs, **named):
    """What the layer gives with the stand-in, which must be there, and what it gives without."""
    got = tower[0](*inputs, **named)
    found = stand_in.undo(tower)
    assert len(found) == 1
    wanted = tower[0](*inputs, **named)
    stand_in.put(found)
    return got, wanted


def hidden(prefix=0, dtype=torch.float32, batch=2):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, prefix + ROWS, SIZE, generator=generator).to(dtype)


LAYERS = {
    "plain": lambda: Attention(SIZE, HEADS, qkv_bias=True),
    "normed": lambda: Attention(SIZE, HEADS, scale_norm=True, norm_layer=nn.LayerNorm),
    "rotated": lambda: AttentionRope(SIZE, HEADS, num_prefix_tokens=0),
    "behind a class token": lambda: AttentionRope(SIZE, HEADS, num_prefix_tokens=1),
    "eva": lambda: EvaAttention(SIZE, HEADS, qkv_bias=False, scale_norm=False, num_prefix_tokens=2),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", LAYERS)
def test_it_is_what_the_layer_gives(kind):
    """In fp32 to the last places; angles are taken as they come, also when others follow."""
    tower = frozen(LAYERS[kind]())
    assert timm_attention.install(tower, nn.Linear(1, 1)) == 1
    assert timm_attention.install(tower, nn.Linear(1, 1)) == 0
    rotated, prefix = "rope" in LAYERS[kind]().forward.__code__.co_varnames, getattr(tower[0], "num_prefix_tokens", 0)
    for named in [{}, {"rope": angles(ROWS)}, {"rope": angles(ROWS).flip(0)}] if rotated else [{}]:
        got, wanted = both(tower, hidden(prefix), **named)
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize(
    "named",
    [
        {"rope": angles(ROWS, paired=False)},
        {"rope": angles(ROWS).double()},
        {"rope": angles(ROWS)[None].expand(2, -1, -1).unsqueeze(1)},
        {"attn_mask": torch.ones(ROWS, ROWS, dtype=torch.bool).tril()},
        {"is_causal": True},
    ],
    ids=["unpaired", "double", "of each picture", "mask", "causal"],
)
def test_the_rest_goes_the_stock_way(named, monkeypatch):
    tower = frozen(AttentionRope(SIZE, HEADS, num_prefix_tokens=0))
    timm_attention.install(tower, nn.Linear(1, 1))
    monkeypatch.setattr(timm_attention.TimmAttention, "run", lambda *_: pytest.fail("it is not made for it"))
    got, wanted = both(tower, hidden(), **named)
    assert torch.equal(got, wanted)


def test_gradients_and_hooks_are_left_to_timm():
    tower = frozen(AttentionRope(SIZE, HEADS, num_prefix_tokens=0))
    timm_attention.install(tower, nn.Linear(1, 1))
    x, kept = hidden().requires_grad_(True), []
    tower[0](x, rope=angles(ROWS)).sum().backward()
    assert x.grad is not None
    with torch.no_grad(), tower[0].qkv.register_forward_hook(lambda *made: kept.append(made[-1])):
        tower[0](hidden(), rope=angles(ROWS))
        assert torch.equal(kept[0], tower[0].qkv(hidden()))  # not rotated in place


@pytest.mark.parametrize(
    "layer",
    [
        lambda: AttentionRope(SIZE, HEADS, num_prefix_tokens=0, rotate_half=True),
        lambda: Attention(SIZE, HEADS, qk_norm=True, norm_layer=nn.LayerNorm),
        lambda: Attention(SIZE, HEADS, gated=True),
        lambda: EvaAttention(SIZE, HEADS, qkv_bias=True, scale_norm=False),
    ],
    ids=["halves", "normed heads", "gated", "biases apart"],
)
def test_what_computes_something_else(layer):
    assert timm_attention.install(frozen(layer()), nn.Linear(1, 1)) == 0


def test_what_is_trained():
    tower = frozen(AttentionRope(SIZE, HEADS, num_prefix_tokens=0))
    assert timm_attention.install(tower.train(), nn.Linear(1, 1)) == 0
    assert timm_attention.install(tower.eval().requires_grad_(True), nn.Linear(1, 1)) == 0


@torch.no_grad()
@pytest.mark.parametrize("name", ["vit_pe_core_tiny_patch16_384", "vit_tiny_patch16_224"])
def test_whole_towers(name):
    """Also while torch traces them, which does not see what a kernel writes; in bf16 they are left to timm."""
    tower = frozen(timm.create_model(name, depth=2, embed_dim=48, num_heads=3, img_size=64, num_classes=0))[0]
    picture = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    assert timm_attention.install(copy.deepcopy(tower).bfloat16(), nn.Linear(1, 1)) == 0
    wanted = tower.forward_features(picture)
    assert timm_attention.install(tower, nn.Linear(1, 1)) == 2
    got = tower.forward_features(picture)
    assert float((got - wanted).norm() / wanted.norm()) < 1e-5
    exported = torch.export.export(tower, (picture,)).module()
    assert torch.allclose(exported(picture), tower(picture), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["q_norm", "k_norm", "proj_drop"])
def test_parts_that_are_watched_or_replaced(name):
    """The stand-in skips these: a hook on one, or another in its place, is seen nevertheless."""
    tower = frozen(AttentionRope(SIZE, HEADS, num_prefix_tokens=0))
    timm_attention.install(tower, nn.Linear(1, 1))
    plain = tower[0](hidden(), rope=angles(ROWS))
    with getattr(tower[0], name).register_forward_hook(lambda *made: made[-1] * 2):
        got, wanted = both(tower, hidden(), rope=angles(ROWS))
    assert torch.equal(got, wanted)
    assert not torch.allclose(got, plain)
    setattr(tower[0], name, nn.Hardtanh())
    got, wanted = both(tower, hidden(), rope=angles(ROWS))
    assert torch.equal(got, wanted)


@torch.no_grad()
def test_angles_that_change_in_place():
    tower, rope = frozen(AttentionRope(SIZE, HEADS, num_prefix_tokens=0)), angles(ROWS)
    timm_attention.install(tower, nn.Linear(1, 1))
    tower[0](hidden(), rope=rope)
    rope.mul_(0.5)
    got, wanted = both(tower, hidden(), rope=rope)
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_hooks_see_no_probe():
    tower, seen = frozen(AttentionRope(SIZE, HEADS, num_prefix_tokens=0)), []
    tower[0].qkv.register_forward_hook(lambda *made: seen.append(made))
    assert timm_attention.install(tower, nn.Linear(1, 1)) == 0
    assert not seen


def test_biases_that_are_zero_yet():
    tower = frozen(EvaAttention(SIZE, HEADS, qkv_bias=True, scale_norm=False))
    for bias in (tower[0].q_bias, tower[0].v_bias):
        nn.init.zeros_(bias)
    assert timm_attention.install(tower, nn.Linear(1, 1)) == 0


def test_it_comes_with_the_first_picture():
    """As the packing of a tower does; `unpacked` takes it away, and gives it back."""

    def count(model):
        return sum(isinstance(vars(m).get("forward"), timm_attention.TimmAttention) for m in model.modules())

    with Prefiller.from_pretrained(dtype="fp32") as prefiller:
        model = prefiller.session.family.model
        prefiller.prefill("text alone")
        assert count(model) == 0
        prefiller.prefill(Request(prompt="what is it?", images=[checkpoints.picture(1)]))
        assert count(model) == len(model.model.vision_tower.timm_model.blocks)
        with linear.unpacked(model):
            assert count(model) == 0
        assert count(model) == len(model.model.vision_tower.timm_model.blocks)
