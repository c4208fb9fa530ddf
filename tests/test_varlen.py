"""One call for all sequences of a step, as on CUDA, equals attention one by one; what it cannot do is left to others.

There is no such kernel for a CPU: a loop that keeps to its contract, with either of torch's signatures, stands in.
"""

import contextlib
import inspect
import warnings
from types import SimpleNamespace

import checkpoints
import pytest
import torch
from engines import cold, open_prefiller
from torch.nn.attention import varlen as torch_varlen

from mmprefill.encoders import kernels, tower_attention, varlen
from mmprefill.pipeline import attention
from mmprefill.pipeline.kv_cache import LayerPlan, Piece, SequenceKV, StepCache
from mmprefill.results import unwrap
from mmprefill.streams import sent
from mmprefill.verify import pictures, sample_requests

HEADS, GROUPS, WIDTH = 4, 2, 8


def attended(query, key, value, edges, scale, sides):
    """[N, H, W], as flash attention has it: diagonals and windows are counted from the last query and the last key."""
    assert all(edge.dtype == torch.int32 and edge.is_contiguous() and edge[0] == 0 for edge in edges)
    assert edges[0][-1] == query.shape[0] and edges[1][-1] == key.shape[0]
    out = torch.full((*query.shape[:2], value.shape[-1]), torch.nan, dtype=query.dtype)
    for i in range(len(edges[0]) - 1):
        rows, keys = (slice(int(edge[i]), int(edge[i + 1])) for edge in edges)
        shared = query.shape[1] // key.shape[1]
        k, v = (each[keys].repeat_interleave(shared, 1).float() for each in (key, value))
        scores = torch.einsum("qhw,khw->hqk", query[rows].float(), k) * (scale or query.shape[2] ** -0.5)
        ahead = torch.arange(k.shape[0]) - torch.arange(scores.shape[1])[:, None] - (k.shape[0] - scores.shape[1])
        if sides[1] >= 0:
            scores = scores.masked_fill(ahead > sides[1], -torch.inf)
        if sides[0] >= 0:
            scores = scores.masked_fill(-ahead > sides[0], -torch.inf)
        out[rows] = torch.einsum("hqk,khw->qhw", scores.softmax(-1), v).to(out.dtype)
    return out


class Stand:
    """Stands in for `varlen_attn`; remembers its calls."""

    def __init__(self):
        self.calls = []

    def since_2_13(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
        window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        if not enable_gqa and query.size(1) != key.size(1):
            raise ValueError("Expect query and key/value to have the same number of heads")
        return self.before(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)

    def before(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
    ):
        assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
        assert type(window_size) is tuple  # torch compares it to one
        self.calls.append(SimpleNamespace(query=query, key=key, value=value, window=window_size))
        return attended(query, key, value, (cu_seq_q, cu_seq_k), scale, window_size)


@contextlib.contextmanager
def served(function):
    """Within the block `function` is what torch has, and CPUs are what it is for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", function)
        patch.setattr(varlen, "DEVICES", ("cpu",))
        varlen._works.cache_clear()
        yield
    varlen._works.cache_clear()


@pytest.fixture(params=["since_2_13", "before"])
def stand(request):
    made = Stand()
    with served(getattr(made, request.param)):
        yield made


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def both_ways(batch, head, query, key):
    return (key <= query) | ((query >= 2) & (query < 6) & (key >= 2) & (key < 6))


def step_of(parts, kind="full_attention", **plan):
    """A step over random stored keys, from (rows, tokens before them, what else a piece has), its query, key and value."""
    pieces, start = [], 0
    for rows, done, more in parts:
        kv = SequenceKV(done + rows + 3)
        if done:
            kv.write(0, random(1, GROUPS, done, WIDTH), random(1, GROUPS, done, WIDTH) + 1)
            kv.length = done
        pieces.append(Piece(start, rows, kv, **more))
        start += rows
    step = StepCache(pieces, LayerPlan((kind,), **{"direct": True, **plan}))
    query = random(1, start, HEADS, WIDTH).transpose(1, 2)
    key, value = (
        random(1, start, GROUPS, WIDTH).transpose(1, 2),
        random(1, start, GROUPS, WIDTH + 0).transpose(1, 2) * 2,
    )
    return step, query, *step.update(key, value, 0)


FRESH = [(5, 0, {}), (1, 0, {}), (9, 0, {})]
STORED = [(5, 0, {}), (4, 12, {}), (1, 30, {}), (3, 40, {"stored": False})]
MIXED = [(5, 0, {}), (9, 0, {"rules": {"": both_ways}}), (4, 12, {}), (8, 1, {"rules": {"": both_ways}}), (2, 0, {})]


@pytest.mark.parametrize("scaling", [None, 0.2])
@pytest.mark.parametrize("most_copied", [4096, 20, 0])
@pytest.mark.parametrize("plan", [
    {}, {"direct": False}, {"kind": "sliding_attention", "window": 6}, {"kind": "chunked_attention", "chunk": 8},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("parts", [FRESH, STORED, MIXED], ids=["fresh", "stored", "mixed"])
def test_a_step_is_what_its_sequences_are_alone(stand, parts, plan, most_copied, scaling, monkeypatch):
    """Grouped heads, windows, stored keys, rows that see both ways between others: as with masks, one by one."""
    monkeypatch.setattr(attention, "MOST_COPIED", most_copied)
    monkeypatch.setattr(kernels, "function", lambda *_: None)
    layer = SimpleNamespace(layer_idx=0)
    got = attention.ragged_attention(*step_and_layer(parts, plan, layer), scaling=scaling)
    assert stand.calls
    with served(stand.before), pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "DEVICES", ())
        expected = attention.ragged_attention(*step_and_layer(parts, plan, layer), scaling=scaling)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= 1e-5


def step_and_layer(parts, plan, layer):
    step, *tensors = step_of(parts, **plan)
    return step, layer, *tensors


def tried(stand):
    """Calls after those of the trial."""
    layer = SimpleNamespace(layer_idx=0)
    varlen.serves(*step_of(FRESH)[1:])
    stand.calls.clear()
    return layer


def test_fresh_rows_are_read_where_the_layer_made_them(stand):
    layer = tried(stand)
    step, query, key, value = step_of(FRESH)
    attention.ragged_attention(step, layer, query, key, value)
    (call,) = stand.calls
    assert [call.query.data_ptr(), call.key.data_ptr(), call.value.data_ptr()] == [
        query.data_ptr(), key.data_ptr(), value.data_ptr()]  # fmt: skip
    assert not any(kind[0] != "edges" for kind in step.masks)


def test_far_keys_are_read_where_they_are_stored(stand, monkeypatch):
    """A context that is too long to copy has a call of its own; the rest share one. No mask for any."""
    layer = tried(stand)
    monkeypatch.setattr(attention, "MOST_COPIED", 20)
    step, query, key, value = step_of([(5, 0, {}), (4, 12, {}), (3, 40, {}), (2, 50, {})])
    attention.ragged_attention(step, layer, query, key, value)
    assert [call.key.shape[0] for call in stand.calls] == [21, 43, 52]
    stored = [piece.kv.layers[0][0].data_ptr() for piece in step.pieces]
    assert [call.key.data_ptr() for call in stand.calls[1:]] == stored[2:]
    assert not any(kind[0] != "edges" for kind in step.masks)


def test_bounds_are_built_once_for_all_layers(stand, monkeypatch):
    tried(stand)
    built = []
    monkeypatch.setattr(varlen, "edges", lambda *a, made=varlen.edges: built.append(a) or made(*a))
    step, query, key, value = step_of(STORED)
    for _ in range(3):
        attention.ragged_attention(step, SimpleNamespace(layer_idx=0), query, key, value)
    assert len(built) == 1 and len(stand.calls) == 3


def test_single_rows_see_all(stand):
    """Rows that are alone need no diagonal: kernels read keys that heads share but once then."""
    layer = tried(stand)
    step, query, key, value = step_of([(1, 12, {}), (1, 3, {})])
    attention.ragged_attention(step, layer, query, key, value)
    assert stand.calls[0].window == (-1, -1)


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"s_aux": torch.zeros(HEADS)}], ids=str)
def test_scores_that_are_bent_go_alone(stand, options):
    layer = tried(stand)
    step, query, key, value = step_of(STORED)
    attention.ragged_attention(step, layer, query, key, value, **options)
    assert not stand.calls


# Whether it serves.


def refuses(*args, scale=None, window_size=(-1, -1)):
    raise RuntimeError("FlashAttention only support fp16 and bf16 data type")


def upper_left(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """The other reading of causal."""
    longer = window_size[1] == 0 and cu_seq_k.diff() > cu_seq_q.diff()
    if longer is not False and bool(longer.any()):
        key, value = key.flip(0), value.flip(0)
    return attended(query, key, value, (cu_seq_q, cu_seq_k), scale, window_size)


@pytest.mark.parametrize(("function", "word"), [(refuses, "refused"), (upper_left, "off by")])
def test_what_it_refuses_or_gets_wrong_is_decided_once(function, word, caplog, monkeypatch):
    """One trial per kind of heads, one line in the log, and attention one by one from then on."""
    calls = []

    def counted(*args, scale=None, window_size=(-1, -1)):
        calls.append(args)
        return function(*args, scale=scale, window_size=window_size)

    monkeypatch.setattr(kernels, "function", lambda *_: None)
    with served(counted), caplog.at_level("INFO", logger="mmprefill"):
        for _ in range(3):
            attention.ragged_attention(*step_and_layer(STORED, {}, SimpleNamespace(layer_idx=0)))
        tries = len(calls)
        assert 1 <= tries <= 3
        varlen.serves(random(1, 8, 5, 16), random(1, 8, 5, 16), random(1, 8, 5, 16))
        assert len(calls) > tries
    assert [word in record.message for record in caplog.records] == [True, True]


def test_out_of_memory_decides_nothing():
    heads = [random(1, 2, 5, 8) for _ in range(3)]

    def full(*args, scale=None, window_size=(-1, -1)):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with served(full), pytest.raises(torch.OutOfMemoryError):
        varlen.serves(*heads)
    made = Stand()
    with served(made.before):
        assert varlen.serves(*heads)


@pytest.mark.parametrize(
    "other",
    [lambda t: t.double(), lambda t: t[:, :, :3], lambda t: t[..., ::2], lambda t: t[..., 1:9], lambda t: t[:, :0]],
    ids=["dtype", "rows", "stride", "alignment", "no heads"],
)
def test_what_it_does_not_serve(stand, other):
    """Kernels load 16 bytes at once and do not look whether they may."""
    query, key, value = (random(1, 2, 5, 16) for _ in range(3))
    assert varlen.serves(query, key, value)
    assert not varlen.serves(query, other(key), value)


def test_torch_has_what_is_asked_for():
    """The arguments that are passed exist in the torch that is installed; elsewhere than on CUDA it is not tried."""
    names = inspect.signature(torch_varlen.varlen_attn).parameters
    assert {"cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size"} <= set(names)
    assert not varlen.serves(*(random(1, 2, 5, 8).bfloat16() for _ in range(3)))


# Where it does not serve: no mask where a causal flag will do.


@pytest.mark.parametrize("groups", [HEADS, GROUPS])
def test_rows_after_stored_ones_need_no_mask(groups, monkeypatch):
    query, key, value = random(1, HEADS, 4, WIDTH), random(1, groups, 11, WIDTH), random(1, groups, 11, WIDTH) + 1
    segment = attention.Segment(0, 4, 7)
    mask = attention.visible(segment, None, None, query.device)
    expected = attention._attend(query, key, value, mask, None, None, None)
    monkeypatch.setattr(attention, "BOTTOM_RIGHT", ("cpu",))
    assert attention.visible(segment, None, None, query.device) is None
    assert attention.visible(segment, 5, None, query.device) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says why a CPU has no kernel for it
        got = attention._attend(query, key, value, None, None, None, None)
    assert (got - expected).abs().max() <= 1e-6
    bent = [attention._attend(query, key, value, each, None, 3.0, None) for each in (mask, None)]
    assert torch.equal(*bent)


# Towers and whole models.


def test_windows_of_a_tower_share_a_call(stand):
    """Their boundaries stay where they are: nothing waits for the device."""
    query, key, value = (random(1, 4, 90, 16) + i for i in range(3))
    bounds = torch.tensor([0, 30, 31, 90], dtype=torch.int32)
    arguments = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 59, "is_causal": False}
    module = SimpleNamespace(is_causal=False)
    with served(stand.before):
        varlen.serves(query, key, value)
        stand.calls.clear()
        together, _ = tower_attention.tower_attention(module, query, key, value, None, **arguments)
        assert len(stand.calls) == 1
    expected, _ = tower_attention.tower_attention(module, query, key, value, None, **arguments)
    assert together.shape == expected.shape
    assert (together - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "smolvlm", "kimi_k25"])
def test_whole_models(family, monkeypatch):
    """Pictures and texts, packed, in chunks, and from reused prefixes: logits and KV of each alone, one by one."""
    alone = cold(family)
    requests = sample_requests(alone, pictures(4, sizes=((64, 64),)))
    expected = [alone.prefill(each) for each in requests]
    monkeypatch.setattr(kernels, "function", lambda *_: None)
    stand, settings = Stand(), {"chunk_tokens": 17, "step_tokens": 60, "pack_weights": False}
    with served(stand.since_2_13), checkpoints.quiet(), open_prefiller(family, **settings) as prefiller:
        for _ in range(2):
            for wanted, outcome in zip(expected, prefiller.prefill_many(requests), strict=True):
                got = unwrap(outcome)
                assert (got.next_token_logits - wanted.next_token_logits).abs().max() <= 1e-4
                for layer, pair in wanted.emitted.layers.items():
                    for a, b in zip(pair, got.emitted.layers[layer], strict=True):
                        assert (a - b).abs().max() <= 1e-4
    assert (
        any(call.window[1] == 0 for call in stand.calls) or family == "kimi_k25"
    )  # its values are narrower than its keys


def test_what_is_on_the_device_stays(monkeypatch):
    """Away from CUDA a copy is torch's own; nothing is pinned."""
    tensor = random(3, 4)
    assert sent(tensor, torch.device("cpu")) is tensor
    assert sent(tensor, torch.device("cpu"), torch.bfloat16).dtype == torch.bfloat16
