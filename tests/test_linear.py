"""Packed linear layers compute what the stock ones do, and leave alone what they are not made for."""

import copy
from contextlib import nullcontext
from pathlib import Path

import checkpoints
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_parity import EVERY, plain, prepared_requests
from torch import nn
from transformers.activations import ACT2FN

from mmprefill import PrefillConfig, Prefiller
from mmprefill.encoders import kernels
from mmprefill.models import load
from mmprefill.pipeline import linear, tiled, widen
from mmprefill.pipeline.packed import PackedLinear
from mmprefill.results import unwrap
from mmprefill.verify import Error
from mmprefill.verify import _tensors as stored

if not torch.backends.mkldnn.is_available():
    pytest.skip("no oneDNN", allow_module_level=True)

WAYS = [tiled.TiledLinear, PackedLinear]  # of linear layers, where their MLPs are fused
FRESH = PrefillConfig(prefix_bytes=0, encoder_bytes=0)  # every request computed, none looked up


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Tiny checkpoints have tiny layers."""
    monkeypatch.setattr(linear, "FEWEST", 0)
    monkeypatch.setattr(linear, "FEWEST_PACKED", 0)


@pytest.fixture(params=WAYS, ids=lambda kind: kind.__name__)
def way(request, monkeypatch):
    """What linear layers become, on whatever processor."""
    if request.param is tiled.TiledLinear and kernels.function("multiply", torch.float32) is None:
        pytest.skip("no kernel on this machine")
    monkeypatch.setattr(
        tiled, "preferred", lambda dtype: request.param is tiled.TiledLinear and dtype in tiled.FEWEST_ROWS
    )
    return request.param


class Mlp(nn.Module):
    """transformers' two kinds."""

    def __init__(self, activation, gated):
        super().__init__()
        self.gated = gated
        self.first, self.second = nn.Linear(24, 40), nn.Linear(24 if gated else 40, 40 if gated else 24)
        self.last = nn.Linear(40, 24) if gated else nn.Identity()
        self.act = activation

    def forward(self, x):
        hidden = self.act(self.first(x))
        return self.last(hidden * self.second(x)) if self.gated else self.second(hidden)


class Unlike(Mlp):
    """Looks like one of them."""

    def forward(self, x):
        return x + super().forward(x)


def frozen(module, dtype=torch.float32):
    return module.eval().requires_grad_(False).to(dtype)


ACTIVATIONS = [nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.ReLU()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_an_mlp_is_fused_and_equal(activation, gated, dtype, way):
    """Against double precision a fused MLP errs by no more than the plain one does, give or take a tenth."""
    if way is PackedLinear and widen.wants(dtype):
        pytest.skip("oneDNN has no kernels for it here")
    torch.manual_seed(0)
    mlp, x = frozen(Mlp(activation, gated), dtype), torch.randn(2, 5, 24, dtype=dtype)
    wanted, exact = mlp(x), frozen(Mlp(activation, gated), torch.float64)
    exact.load_state_dict(mlp.state_dict())
    assert linear.pack(mlp) == 2 + gated
    assert "forward" in vars(mlp)
    error = (mlp(x).double() - exact(x.double())).abs().max()
    assert error <= 1.1 * (wanted.double() - exact(x.double())).abs().max() + (1e-6 if dtype == torch.float32 else 0.01)


def test_a_fused_mlp_takes_its_input_by_name(way):
    mlp, x = frozen(Mlp(nn.SiLU(), True)), torch.randn(3, 24)
    wanted = mlp(x)
    assert linear.pack(mlp) == 3
    assert "forward" in vars(mlp)
    assert torch.allclose(mlp(x=x), wanted, atol=1e-6)


def test_what_only_looks_like_an_mlp_is_not_fused(way):
    for mlp in (frozen(Unlike(nn.GELU(), True)), frozen(Mlp(nn.Hardswish(), False))):
        x = torch.randn(3, 24)
        wanted = mlp(x)
        assert linear.pack(mlp)
        assert "forward" not in vars(mlp)
        assert torch.allclose(mlp(x), wanted, atol=1e-6)


class Sparse(Mlp):
    """As Gemma 3n's: one class, sparse or not by an attribute."""

    def __init__(self, sparsity):
        super().__init__(nn.GELU(), True)
        self.sparsity = sparsity

    def forward(self, x):
        return super().forward(x) * (1 - self.sparsity)


class Clamped(Mlp):
    """As Step 3.7's: what is large is cut."""

    def forward(self, x):
        gate, up = self.first(x).clamp(max=16), self.second(x).clamp(-16, 16)
        return self.last(self.act(gate) * up)


@pytest.mark.parametrize("mlp", [Clamped(nn.SiLU(), True), Mlp(ACT2FN["gelu_10"], False)], ids=["limit", "gelu_10"])
def test_what_clamps_large_numbers_still_does(mlp, way):
    mlp, x = copy.deepcopy(frozen(mlp)), torch.randn(3, 24) * 1e3
    wanted = mlp(x)
    assert linear.pack(mlp)
    assert torch.allclose(mlp(x), wanted, rtol=1e-4, atol=1e-3)


def test_mlps_of_one_class_are_told_apart_by_their_attributes(way):
    model, x = frozen(nn.ModuleList([Sparse(0.0), Sparse(0.95)])), torch.randn(3, 24)
    wanted = [mlp(x) for mlp in model]
    assert linear.pack(model) == 6
    assert ["forward" in vars(mlp) for mlp in model] == [True, False]
    assert all(torch.allclose(mlp(x), w, atol=1e-6) for mlp, w in zip(model, wanted, strict=True))


def test_what_is_left_alone(way):
    """Trainable, training, hooked, adapted, small; shared, where its layout would change."""

    class Adapter(nn.Linear):
        pass

    shared = nn.Embedding(8, 8)
    tied = nn.Linear(8, 8)
    tied.weight = shared.weight
    trainable, training, hooked, adapter = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), Adapter(8, 8)
    hooked.register_forward_hook(lambda *_: None)
    model = frozen(nn.ModuleList([shared, tied, training, hooked, adapter, nn.Linear(8, 8), trainable]))
    model[5].double()
    training.train()
    trainable.requires_grad_(True)
    assert linear.pack(model) == (way is tiled.TiledLinear)
    assert tied.weight is shared.weight
    linear.FEWEST = 65
    assert linear.pack(frozen(nn.Linear(8, 8))) == 0


def test_layers_keep_what_a_module_promises(way):
    """State dict, deep copies, hooks put on later, other dtypes and gradients."""
    torch.manual_seed(0)
    mlp, x = frozen(Mlp(nn.GELU(), True)), torch.randn(3, 24)
    before, wanted = {name: t.clone() for name, t in mlp.state_dict().items()}, mlp(x)
    linear.pack(mlp)
    assert not linear.pack(mlp)
    assert all(torch.equal(t, before[name]) for name, t in mlp.state_dict().items())
    assert torch.allclose(copy.deepcopy(mlp)(x), wanted, atol=1e-6)
    seen = []
    handle = mlp.first.register_forward_hook(lambda *_: seen.append(1))
    assert torch.allclose(mlp(x), wanted, atol=1e-6)
    assert seen
    handle.remove()
    asked = x.clone().requires_grad_(True)
    mlp(asked).sum().backward()
    assert asked.grad is not None
    assert mlp.last(torch.randn(2, 40, dtype=torch.float32)).dtype == torch.float32
    with pytest.raises(RuntimeError, match="packed") if way is PackedLinear else nullcontext():
        mlp.load_state_dict(before)
    with linear.unpacked(mlp):
        assert type(mlp.first) is nn.Linear
        assert torch.equal(mlp(x), wanted)
    assert type(mlp.first) is way
    mlp.first = frozen(nn.Linear(24, 40))  # an adapter put in its place is used
    assert not torch.allclose(mlp(x), wanted, atol=1e-3)


def test_a_fused_mlp_is_the_stock_one_where_that_is_another(way):
    """Its activation watched or replaced, dropout switched on, weights that are trained after all."""

    class Dropping(Mlp):
        def __init__(self):
            super().__init__(nn.SiLU(), True)
            self.dropout = nn.Dropout(0.999)

        def forward(self, x):
            return self.last(self.dropout(self.act(self.first(x)) * self.second(x)))

    mlp, x = frozen(Dropping()), torch.randn(3, 24)
    wanted = mlp(x)
    assert linear.pack(mlp) == 3
    assert "forward" in vars(mlp)
    seen = []
    mlp.act.register_forward_hook(lambda *_: seen.append(1))
    assert torch.allclose(mlp(x), wanted, atol=1e-6)
    assert seen
    mlp.act = nn.ReLU()
    assert not torch.allclose(mlp(x), wanted, atol=1e-3)
    mlp.dropout.train()
    assert torch.equal(mlp(x), mlp.last(torch.zeros(3, 40)))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_what_is_trained_after_all_gets_its_gradients(name, way):
    """Of an input that needs none: the first trained layer's."""
    mlp, x = frozen(Mlp(nn.SiLU(), True)), torch.randn(3, 24)
    linear.pack(mlp)
    parameter = getattr(mlp.first, name).requires_grad_(True)
    mlp(x).sum().backward()
    assert parameter.grad is not None


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", EVERY)
def test_every_family_packed_equals_stock(family, dtype):
    """Linear layers made fast: KV and logits of every family as from the stock model; in bf16 KV rounds its own way."""
    with (
        checkpoints.quiet(),
        Prefiller.from_pretrained(checkpoints.cached(family), dtype=dtype, config=FRESH) as prefiller,
    ):
        model = prefiller.session.family.model
        kinds = tiled.TiledLinear, widen.WidenedLinear, PackedLinear
        assert any(isinstance(module, kinds) for module in model.modules())
        requests = prepared_requests(prefiller)[1:]  # with and without pictures, where a family takes such
        results = [unwrap(outcome) for outcome in prefiller.prefill_many(requests)]
        for wanted, result in zip(plain(prefiller, requests, 1), results, strict=True):
            logits = Error.between([result.next_token_logits], [wanted.logits])
            kv = Error.between(stored(result.cache), wanted.kv)
            assert logits.max <= (1e-4 if dtype == "fp32" else 0.25), logits
            assert dtype == "bf16" or kv.rms <= 1e-4, kv


def test_weights_have_one_digest_and_can_be_saved(tmp_path, way):
    """Packed or not: the same fingerprint, and the same checkpoint on disk."""
    with checkpoints.quiet():
        bundle, fresh = (load(checkpoints.cached("smolvlm"), device="cpu") for _ in range(2))
        with Prefiller(bundle, PrefillConfig(pack_weights=False)):
            assert not any(isinstance(module, (*WAYS,)) for module in bundle.model.modules())
        with Prefiller(bundle):
            assert bundle.fingerprint == fresh.fingerprint
            bundle.model.save_pretrained(tmp_path)
            bundle.processor.save_pretrained(tmp_path)
        assert load(tmp_path, device="cpu").fingerprint == fresh.fingerprint


def test_a_tower_is_packed_when_its_first_picture_comes(way):
    """Text leaves its weights where they are; the picture's result is that of a tower that is not packed."""
    with checkpoints.quiet():
        bundle, stock = (load(checkpoints.cached("smolvlm"), device="cpu") for _ in range(2))
    with Prefiller(bundle) as prefiller, Prefiller(stock, PrefillConfig(pack_weights=False)) as plain:
        tower = prefiller.session.family.base.vision_model
        decoder = prefiller.session.family.decoder
        linears = [module for module in tower.modules() if isinstance(module, nn.Linear)]
        assert {type(module) for module in decoder.modules() if isinstance(module, nn.Linear)} == {way}
        prefiller.prefill("only text")
        with linear.unpacked(prefiller.session.family.model):
            pass
        assert {type(module) for module in linears} == {nn.Linear}
        got, wanted = (each.prefill("look", images=[checkpoints.picture(1)]) for each in (prefiller, plain))
        assert {type(module) for module in linears} == {way}
        assert torch.allclose(got.next_token_logits, wanted.next_token_logits, atol=1e-4)


def resident(name):
    """Bytes of a file that this process keeps in memory."""
    found, within = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            within = line.endswith(name)
        elif within and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what is resident")
def test_packed_weights_are_in_memory_once(tmp_path, monkeypatch):
    """Also from the hub's cache, where the checkpoint is a link to a file without an ending."""
    blob, link = tmp_path / "blobs" / ("5" * 64), tmp_path / "snapshots" / "model.safetensors"
    for path in (blob, link):
        path.parent.mkdir()
    monkeypatch.setattr(tiled, "preferred", lambda _: False)
    save_file({"weight": torch.ones(1024, 1024), "other": torch.ones(8)}, blob)
    link.symlink_to(blob)
    tensors = load_file(link)
    layer = nn.Linear(1024, 1024, bias=False)
    layer.load_state_dict({"weight": tensors.pop("weight")}, assign=True)
    layer.weight.sum()
    if resident(blob.name) < 2**22:
        pytest.skip("this safetensors does not map files")
    assert linear.pack(frozen(layer)) == 1
    assert resident(blob.name) < 2**16, tensors
