"""Logits are those of the composite model, whatever it does to them; only where it does nothing, its head is asked alone."""

import checkpoints
import engines
import pytest
import torch

from mmprefill.encoders import families
from mmprefill.models import load
from mmprefill.pipeline import head


@pytest.fixture
def family():
    with checkpoints.quiet():
        return families.describe(load(checkpoints.cached("smolvlm"), dtype="fp32").model)


def rows(family):
    size = family.model.get_output_embeddings().in_features
    return torch.randn(1, 5, size, generator=torch.Generator().manual_seed(1)) * 50


def changed(change):
    """A class of models whose logits are something more than what their output layer gives."""

    def forward(self, *args, **kwargs):
        output = super(type(self), self).forward(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    return lambda kind: type("Changed", (kind,), {"forward": forward})


@torch.no_grad()
def test_the_head_alone_where_it_is_all(family, monkeypatch):
    wanted = head._composite(family, rows(family))
    assert torch.equal(head.logits_of(family, rows(family)), wanted)
    monkeypatch.setattr(head, "_composite", lambda *_: pytest.fail("it was seen to be the same already"))
    assert torch.equal(head.logits_of(family, rows(family)), wanted)


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda logits: 30 * torch.tanh(logits / 30),
        lambda logits: logits / 4,
        lambda logits: logits.clamp(-2000, 2000),
        lambda logits: torch.cat([logits[..., :-1], torch.full_like(logits[..., :1], -1e9)], -1),
    ],
    ids=["capped", "scaled", "clamped", "masked"],
)
def test_what_comes_after_the_head(family, change):
    plain = head.logits_of(family, rows(family))
    head._bare.pop(family.model)
    family.model.__class__ = changed(change)(type(family.model))
    assert torch.equal(head.logits_of(family, rows(family)), change(plain))


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "paligemma2", "granite4_vision"])
def test_logits_are_what_each_family_gives(name):
    family = engines.bundle(name)
    family = families.describe(family.model)
    assert torch.equal(head.logits_of(family, rows(family)), head._composite(family, rows(family)).float())


@torch.no_grad()
def test_a_head_in_half_precision():
    family = families.describe(engines.bundle("smolvlm", "bf16").model)
    hidden = rows(family).bfloat16()
    got = head.logits_of(family, hidden)
    assert got.dtype == torch.float32
    assert torch.equal(got, head._composite(family, hidden).float())
