"""Every path against plain transformers, on a tiny checkpoint of every family."""

import random

import checkpoints
import engines
import pytest
import torch

from mmprefill import Request
from mmprefill.encoders import vision
from mmprefill.pipeline.merge import merge
from mmprefill.pipeline.prefill import Chunk, Prefill, run_step
from mmprefill.results import unwrap
from mmprefill.verify import attention, reference, sample_requests, verify

FAMILIES = list(checkpoints.FAMILIES)
EVERY = FAMILIES + list(checkpoints.GENERIC)
FIRST = ("smolvlm", "qwen3_vl", "gemma3")  # 1-D positions, M-RoPE with deepstack, two-way spans with windows
KINDS = (*FIRST, "qwen3_5")  # and one that is generic
FEW = ("r2", "r4", "r5", "r6")  # sample requests: a picture last; between texts; first, adjacent and five; none


@pytest.fixture(params=FIRST)
def first(request):
    return engines.cold(request.param)


def prepared_requests(prefiller):
    """Three requests that every family's processor takes."""
    picture = checkpoints.picture
    if prefiller.intake.has_template:
        requests = [
            Request(prompt="a cat on a mat", images=[picture(1)]),
            Request(prompt="only words here"),
            Request(prompt="two of them, side by side", images=[picture(2), picture(3)]),
        ]
    else:
        requests = [Request(prompt=f"describe {i}", images=[picture(i)]) for i in range(3)]
    return requests


def plain(prefiller, requests, tokens):
    """What transformers gives for each; together, since taking a model's layers back and forth takes longer than a run."""
    model = prefiller.session.family.model
    with attention(model, "sdpa"):
        return [reference(model, prefiller.intake.prepare(request), tokens) for request in requests]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_families_are_packed(family):
    """A family whose layers are all attention takes the packed path, found by the probe and not by name."""
    route = engines.cold(family).session.route
    assert route.packed, route.reason


@pytest.mark.parametrize("family", list(checkpoints.GENERIC))
def test_hybrids_are_generic(family):
    """A family with layers that mix along the row takes the generic path, with the reason."""
    route = engines.cold(family).session.route
    assert not route.packed
    assert "mix along the row" in route.reason


@pytest.mark.parametrize("family", EVERY)
def test_every_path_equals_transformers(family):
    """Alone, packed with others and shuffled: logits and KV within 1e-4, greedy continuations identical.

    Of one family of each kind all sample requests. In the others the requests that differ most, and the first tokens,
    which show that transformers goes on from what was handed over; the next test has 16 tokens of every family.

    A recurrence with random weights (MiniCPM-V 4.6) makes 1e-4 of a last place: there on some processors transformers'
    own attention functions differ by more than that, and KV is held to twice their difference.
    """
    prefiller, whole = engines.cold(family), family in KINDS
    requests = [each for each in sample_requests(prefiller) if whole or each.id in FEW]
    report = verify(prefiller, requests=requests, new_tokens=8 if whole else 4, threads=(1,))
    for row in report.rows:
        assert row.logits.max <= 1e-4, row
        assert row.kv.max <= row.limit_kv, row
        assert row.greedy == row.requests, row


@pytest.mark.parametrize("family", EVERY)
def test_decoding_together_equals_alone(family):
    """`generate_many` gives each request the tokens that transformers' `generate` gives it from scratch."""
    prefiller = engines.cold(family)
    requests = prepared_requests(prefiller)[0 if family in KINDS else 1 :]
    together = prefiller.generate_many(requests, max_new_tokens=16)
    assert [list(each.token_ids) for each in together] == [each.tokens for each in plain(prefiller, requests, 16)]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [*((family, (1, 7, 16)) for family in FAMILIES), *((family, (1,)) for family in FIRST)],
    ids=str,
)
def test_chunked_equals_one_shot(family, sizes):
    """Chunks of any size, several sequences at different places: the same KV and logits; none ends in a two-way span."""
    prefiller = engines.cold(family)
    requests = prepared_requests(prefiller)
    whole = [unwrap(outcome) for outcome in prefiller.prefill_many(requests)]
    chunked = prefiller.session.lane.call(prefill_in_chunks, prefiller, requests, sizes)
    for one, many in zip(whole, chunked, strict=True):
        assert (one.next_token_logits - many.logits[-1][-1]).abs().max() <= 1e-4
        for layer, pair in one.emitted.layers.items():
            for a, b in zip(pair, many.kv.layers[layer], strict=True):
                assert (a - b).abs().max() <= 1e-4


def prefill_in_chunks(prefiller, requests, sizes):
    """Every sequence in chunks of about one of `sizes`, out of step with each other."""
    engine, draw = prefiller._engine, random.Random(1)
    merged = []
    for request in requests:
        prepared = engine.intake.prepare(request)
        inputs = vision.media_inputs(engine.family, prepared)
        encoded = {each.medium: vision.encode(engine.family, [each])[0] for each in inputs}
        merged.append(Prefill.start(merge(engine.family, prepared, encoded)))
    while waiting := [each for each in merged if not each.done]:
        step = draw.sample(waiting, draw.randint(1, len(waiting)))
        chunks = [Chunk(each, legal_end(each, draw.choice(sizes))) for each in step]
        run_step(engine.family, engine.session.route.plan, chunks)
    return merged


def legal_end(prefill: Prefill, size: int) -> int:
    start = prefill.kv.length
    return prefill.sequence.legal_end(start, min(start + size, prefill.sequence.length))


def test_scores_equal_a_forward_over_prompt_and_choice(first):
    """Each choice's log-probability equals that of plain transformers run on prompt and choice together."""
    request = Request(prompt="yes or no?", images=[checkpoints.picture(4)])
    choices = [" yes", " no, not at all", " x"]
    scored = first.score(request, choices)
    model, prepared = first.session.family.model, first.intake.prepare(request)
    for choice, got in zip(choices, scored, strict=True):
        ids = first.session.tokenizer(choice, add_special_tokens=False, return_tensors="pt").input_ids
        inputs = dict(prepared.inputs)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], ids], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                inputs[name] = torch.cat([inputs[name], torch.zeros_like(ids)], 1)
        with attention(model, "sdpa"), torch.no_grad():
            logprobs = model(**inputs).logits[0].log_softmax(-1)
        start = len(prepared.input_ids) - 1
        wanted = [float(logprobs[start + i, token]) for i, token in enumerate(ids[0])]
        assert got.token_logprobs == pytest.approx(wanted, abs=1e-4)
        assert got.logprob == pytest.approx(sum(wanted), abs=1e-3)


def test_hidden_states_equal_transformers(first):
    """Hidden states of a layer, and logits of all positions, equal transformers' `output_hidden_states`."""
    request = Request(prompt="look closely", images=[checkpoints.picture(5)], hidden_states=(0, 1, -1), all_logits=True)
    result = unwrap(first.prefill_many([Request(prompt="company in the row"), request])[1])
    model, prepared = first.session.family.model, first.intake.prepare(request)
    with attention(model, "sdpa"), torch.no_grad():
        output = model(**prepared.inputs, output_hidden_states=True)
    for layer in request.hidden_states:
        assert (result.hidden_states[layer] - output.hidden_states[layer][0]).abs().max() <= 1e-4
    assert (result.logits - output.logits[0]).abs().max() <= 1e-4


def test_embeddings(first):
    """`embed` pools the last layer over the last token or the mean, or gives every token."""
    fields = {"images": [checkpoints.picture(6)]}
    tokens = first.embed("embed me", pooling=None, **fields)
    assert torch.equal(first.embed("embed me", **fields), tokens[-1])
    assert torch.allclose(first.embed("embed me", pooling="mean", **fields), tokens.mean(0), atol=1e-6)


def test_next_position_under_mrope():
    """Under M-RoPE the next position is not the token count: a picture takes fewer positions than tokens."""
    result = engines.cold("qwen2_5_vl").prefill("where am I?", images=[checkpoints.picture(1, (200, 150))])
    assert result.next_position == int(result.positions.max()) + 1 < len(result.token_ids)


def test_plain_forward_beside_a_packed_step(first):
    """A stock forward of the same model object is right beside the packed attention, norms and layers that it carries."""
    request = sample_requests(first)[1]
    prepared = first.intake.prepare(request)
    first.prefill(request)
    model = first.session.family.model
    with torch.no_grad():
        ours = model(**prepared.inputs).logits
        with attention(model, "sdpa"):
            stock = model(**prepared.inputs).logits
    assert (ours - stock).abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["gemma3", "paligemma", "smolvlm"])
def test_chunks_end_anywhere_but_inside_a_two_way_span(family):
    """Each single picture stays whole in Gemma 3, a whole prompt in PaliGemma, and nothing more (D10)."""
    prefiller = engines.cold(family)
    request = Request(prompt="two of them", images=[checkpoints.picture(1), checkpoints.picture(2)])
    sequence = prefiller.session.lane.call(merged, prefiller, request)
    spans = [run for runs in prefiller.prefill(request).spans for run in runs]
    expected = torch.ones(sequence.length + 1, dtype=torch.bool)
    for start, end in {"gemma3": spans, "paligemma": [(0, sequence.length)], "smolvlm": []}[family]:
        expected[start + 1 : end] = False
    if family == "smolvlm":
        assert sequence.edges is None
    else:
        assert torch.equal(sequence.edges, expected)


def merged(prefiller, request):
    engine = prefiller._engine
    prepared = engine.intake.prepare(request)
    inputs = vision.media_inputs(engine.family, prepared)
    encoded = {each.medium: vision.encode(engine.family, [each])[0] for each in inputs}
    return merge(engine.family, prepared, encoded)


@pytest.mark.parametrize("family", FIRST)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_chunks(family, dtype):
    """Finite in every dtype, stored in it, and chunks no further from fp32 than one step is, give or take (D6, D13)."""
    requests = [Request(prompt="word " * 30, images=[checkpoints.picture(1)]), Request(prompt="short")]
    logits = {}
    for name, settings in (("fp32", {}), (dtype, {}), (dtype, {"chunk_tokens": 7})):
        with engines.open_prefiller(family, name, prefix_bytes=0, encoder_bytes=0, **settings) as prefiller:
            results = [unwrap(outcome) for outcome in prefiller.prefill_many(requests)]
            assert {layer.keys.dtype for each in results for layer in each.cache.layers} == {
                prefiller.session.family.dtype
            }
        logits[name, bool(settings)] = torch.stack([each.next_token_logits for each in results])
    assert all(each.isfinite().all() for each in logits.values())
    whole, chunked = ((logits[dtype, cut] - logits["fp32", False]).abs().max() for cut in (False, True))
    assert chunked <= 3 * whole + 1e-3


def test_only_last_rows_reach_the_head(first, monkeypatch):
    """One row of logits per request, however long it is and in whatever chunks (H6)."""
    from mmprefill.pipeline import prefill

    rows, original = [], prefill.logits_of
    monkeypatch.setattr(prefill, "logits_of", lambda f, hidden: rows.append(hidden.shape[1]) or original(f, hidden))
    requests = prepared_requests(first)
    for outcome in first.prefill_many(requests):
        unwrap(outcome)
    assert sum(rows) == len(requests)
