"""Scores of many prompts together are those of a plain forward over prompt and choice."""

import dataclasses

import checkpoints
import pytest
import torch
from engines import open_prefiller

from mmprefill import Request
from mmprefill.errors import RequestError
from mmprefill.pipeline import choices as scoring
from mmprefill.pipeline.choices import runs_of
from mmprefill.verify import attention

CHOICES = [" yes", " no, not at all", " no, not now", " no", " no, not", "x"]


@pytest.fixture(scope="module", params=["smolvlm", "qwen2_5_vl", "gemma3", "kimi_k25", "qwen3_5"])
def prefiller(request):
    with open_prefiller(request.param) as prefiller:
        yield prefiller


def requests():
    return [
        Request(prompt="yes or no?", images=[checkpoints.picture(4)]),
        Request(prompt="is it so, however long the question becomes before it ends?", images=[checkpoints.picture(1)]),
        Request(prompt="yes?", images=[checkpoints.picture(4), checkpoints.picture(2)]),
    ]


@pytest.fixture(scope="module")
def plain(prefiller):
    """For each request and choice what transformers has, computed once: it depends on no bound of ours."""
    with attention(prefiller.session.family.model, "sdpa"):
        return [[plain_scores(prefiller, request, choice) for choice in CHOICES] for request in requests()]


def plain_scores(prefiller, request, choice):
    """Of every token of the choice, from transformers' forward over prompt and choice together."""
    prepared = prefiller.intake.prepare(request)
    ids = prefiller.session.tokenizer(choice, add_special_tokens=False, return_tensors="pt").input_ids
    inputs = {**prepared.inputs, "input_ids": torch.cat([prepared.inputs["input_ids"], ids], 1)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = torch.cat([inputs[name], torch.zeros_like(ids)], 1)
    model = prefiller.session.family.model
    with torch.no_grad():
        logprobs = model(**inputs).logits[0].log_softmax(-1)
    start = len(prepared.input_ids) - 1
    return [float(logprobs[start + i, token]) for i, token in enumerate(ids[0])]


@pytest.mark.parametrize("bounds", [(1024, 2**16), (5, 2**16), (1024, 200)])
def test_together_as_alone(prefiller, plain, monkeypatch, bounds):
    """Prompts of any length, choices that share beginnings, steps of any size: each token as a plain forward has it."""
    monkeypatch.setattr(scoring, "STEP_ROWS", bounds[0])
    monkeypatch.setattr(scoring, "STEP_CONTEXT", bounds[1])
    monkeypatch.setattr(scoring, "HEAD_ROWS", 2)
    found = prefiller.score_many(requests(), CHOICES)
    for expected, scores in zip(plain, found, strict=True):
        assert [each.text for each in scores] == CHOICES
        for wanted, each in zip(expected, scores, strict=True):
            assert each.token_logprobs == pytest.approx(wanted, abs=1e-4)


def test_scoring_leaves_no_trace(prefiller):
    """What is stored does not change: the same scores again, and the same continuation."""
    (result,) = prefiller.prefill_many(requests()[:1])
    before = result.generate(6)
    assert result.score(CHOICES) == result.score(CHOICES)
    assert result.generate(6) == before


def test_runs_are_the_fewest():
    """What several choices begin with is computed once; what begins a longer one comes with it; one token needs none."""
    assert runs_of([(1,), (2,)]) == []
    runs = runs_of([(1, 2, 3), (1, 2, 4), (1, 5), (1,), (6, 7), (1, 2, 4, 8)])
    assert [run.ids for run in runs] == [(1, 2, 4), (6,)]
    ends = [end for run in runs for end in run.ends]
    assert sorted(ends) == [(1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 4, 8), (1, 5), (6, 7)]
    assert all(end[:-1] == run.ids[: len(end) - 1] for run in runs for end in run.ends)


@pytest.fixture(scope="module")
def smolvlm():
    with open_prefiller("smolvlm") as prefiller:
        yield prefiller


def test_one_token_needs_no_forward(smolvlm, monkeypatch):
    """Choices of one token are answered by the logits that are there: the lane is not even asked."""
    results = smolvlm.prefill_many(requests())
    letters = [
        text for text in "abcdxyz" if len(smolvlm.session.tokenizer(text, add_special_tokens=False).input_ids) == 1
    ]
    assert len(letters) > 1
    monkeypatch.setattr(smolvlm.session.lane.__class__, "submit", None)
    scores = smolvlm.score_results(results, letters)
    for result, found in zip(results, scores, strict=True):
        logprobs = result.next_token_logits.log_softmax(-1)
        assert [each.logprob for each in found] == [float(logprobs[each.token_ids[0]]) for each in found]


def test_a_failed_request_stays_in_its_place(smolvlm):
    """Exceptions among outcomes are handed through; choices that make no sense are refused for all."""
    found = smolvlm.score_many([Request(prompt="a"), {"prompt": "x", "images": [5]}, Request(prompt="b")], CHOICES)
    assert [type(each) for each in found] == [list, RequestError, list] or isinstance(found[1], ValueError)
    assert smolvlm.score_many([], CHOICES) == []
    with pytest.raises(ValueError, match="at least one token"):
        smolvlm.score_many(["a"], [""])


def test_equal_tokens_come_by_their_ids(smolvlm):
    """Of tokens that are equally probable the smaller id comes first, however many are asked for: as greedy decoding."""
    result = smolvlm.prefill("a")
    logits = torch.zeros_like(result.next_token_logits)
    logits[[300, 7, 90, 41]] = torch.tensor([2.0, 2.0, 2.0, 3.0])
    tied = dataclasses.replace(result, next_token_logits=logits)
    for k, ids in ((1, [41]), (2, [41, 7]), (3, [41, 7, 90]), (4, [41, 7, 90, 300]), (6, [41, 7, 90, 300, 0, 1])):
        assert [token.id for token in tied.top_tokens(k)] == ids
    logits[41] = 2.0
    assert tied.top_tokens(1)[0].id == int(logits.argmax()) == 7
    assert len(tied.top_tokens(10**9)) == len(logits)
