"""Attention layers in one kernel call give, and store, what the stock layers do."""

import checkpoints
import pytest
import torch
from test_parity import prepared_requests
from torch import nn

from mmprefill import PrefillConfig, Prefiller
from mmprefill.encoders import kernels, stand_in
from mmprefill.models import load
from mmprefill.pipeline import linear, packed_attention
from mmprefill.pipeline.packed_attention import PackedAttention
from mmprefill.results import unwrap

SERVED = ("smolvlm", "idefics3", "llava_clip", "mistral3", "internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FRESH = PrefillConfig(prefix_bytes=0, encoder_bytes=0)
LEFT = ("glm4v", "kimi_k25")  # rotated in pairs; latent keys


def layers(prefiller):
    modules = prefiller.session.family.decoder.modules()
    return [module for module in modules if isinstance(vars(module).get("forward"), PackedAttention)]


@pytest.fixture(autouse=True)
def _kernel():
    if kernels.function("attend_packed", torch.float32) is None:
        pytest.skip("no kernel on this machine")


@pytest.mark.parametrize("family", SERVED)
def test_families_that_are_served(family):
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached(family)) as prefiller:
        assert len(layers(prefiller)) == prefiller.session.family.text_config.num_hidden_layers


@pytest.mark.parametrize("family", LEFT)
def test_families_that_are_not(family):
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached(family)) as prefiller:
        assert not layers(prefiller)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl", "mistral3"])
def test_a_step_equals_the_stock_layers(family, dtype):
    """KV and logits of several requests in a step, with the layers and without them."""
    if kernels.function("attend_packed", torch.bfloat16 if dtype == "bf16" else torch.float32) is None:
        pytest.skip("no kernel for this dtype on this machine")
    with (
        checkpoints.quiet(),
        Prefiller.from_pretrained(checkpoints.cached(family), dtype=dtype, config=FRESH) as prefiller,
    ):
        requests = prepared_requests(prefiller)
        fused = [unwrap(outcome) for outcome in prefiller.prefill_many(requests)]
        assert stand_in.undo(prefiller.session.family.model)
        stock = [unwrap(outcome) for outcome in prefiller.prefill_many(requests)]
        for one, other in zip(fused, stock, strict=True):
            assert close(one.next_token_logits, other.next_token_logits, dtype)
            for layer, pair in other.emitted.layers.items():
                assert all(close(a, b, dtype) for a, b in zip(one.emitted.layers[layer], pair, strict=True))


def close(a, b, dtype):
    return float((a.float() - b.float()).abs().max()) <= (1e-5 if dtype == "fp32" else 0.05)


def test_a_plain_model_is_given_back():
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached("smolvlm")) as prefiller:
        model, found = prefiller.session.family.model, layers(prefiller)
        assert found
        with linear.unpacked(model):
            assert not layers(prefiller)
        assert layers(prefiller) == found


def test_what_is_almost_like_it_is_left_alone():
    """A layer that scales what it returns, or only far from the start, and one that rotates with twice the sine."""
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached("smolvlm")) as prefiller:
        family, plan = prefiller.session.family, prefiller.session.route.plan
        stand_in.undo(family.model)
        one, other, third, *rest = [m for m in family.decoder.modules() if hasattr(m, "q_proj")]

        class Scaled(type(one)):
            def forward(self, *inputs, **named):
                out, weights = super().forward(*inputs, **named)
                return out * 1.002, weights

        class Doubled(type(one)):
            def forward(self, *inputs, position_embeddings, **named):
                cos, sin = position_embeddings
                return super().forward(*inputs, position_embeddings=(cos, 2 * sin), **named)

        class Far(type(one)):
            def forward(self, *inputs, position_ids, **named):
                out, weights = super().forward(*inputs, position_ids=position_ids, **named)
                return out * (1 + 0.1 * (position_ids >= 2**14)[..., None]), weights

        one.__class__, other.__class__, third.__class__ = Scaled, Doubled, Far
        prefiller.session.lane.call(packed_attention.fuse, family.decoder, plan)
        assert layers(prefiller) == rest


def test_what_a_hook_keeps_is_what_the_layer_made():
    kept = []
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached("smolvlm"), config=FRESH) as prefiller:
        query = layers(prefiller)[0].q_proj
        query.register_forward_hook(lambda _, __, made: kept.append((made, made.clone())))
        prefiller.prefill("what does it see?")
    assert kept
    assert all(torch.equal(made, copy) for made, copy in kept)


def test_layers_that_clip_are_left_alone():
    """The probe's input is too small to be clipped."""
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached("smolvlm")) as prefiller:
        module = layers(prefiller)[0]
        del module.forward
        assert packed_attention._alike(module)
        module.config.clip_qkv = 8.0
        assert not packed_attention._alike(module)


def test_a_second_engine_on_the_same_model_packs_too():
    """Its probe looks at the stock layers, whatever an engine before it has put behind them."""
    with checkpoints.quiet():
        bundle = load(checkpoints.cached("smolvlm"), device="cpu", dtype="fp32")
    for _ in range(2):
        with Prefiller(bundle) as prefiller:
            assert prefiller.session.route.packed, prefiller.session.route.reason


def test_projections_of_another_size_take_the_stock_way():
    """Heads pruned between two engines: the stand-in of the first would write past what is there."""
    with checkpoints.quiet():
        bundle = load(checkpoints.cached("smolvlm"), dtype="fp32")
    Prefiller(bundle, FRESH).close()
    attention = next(m for m in bundle.model.modules() if hasattr(m, "q_proj") and hasattr(m, "layer_idx"))
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(attention, name)
        setattr(attention, name, nn.Linear(old.in_features, old.out_features // 2, bias=False).requires_grad_(False))
    old = attention.o_proj
    attention.o_proj = nn.Linear(old.in_features // 2, old.out_features, bias=False).requires_grad_(False)
    with Prefiller(bundle, FRESH) as prefiller:
        got = prefiller.prefill("how many heads?")
    with linear.unpacked(bundle.model), torch.no_grad():
        wanted = bundle.model(input_ids=got.token_ids[None], use_cache=False).logits[0, -1]
    assert torch.allclose(got.next_token_logits, wanted, atol=1e-4)
