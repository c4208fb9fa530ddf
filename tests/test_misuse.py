"""The blocking face under odd but reasonable use: wrong types, slow or greedy iterators, Ctrl-C, leaving half way."""

import copy
import itertools
import pickle
import signal
import threading
import time

import pytest
from engines import open_prefiller

from mmprefill import Rendered, Request
from mmprefill.errors import EngineClosedError, MMPrefillError, RequestError
from mmprefill.pipeline import driver
from mmprefill.results import PrefillResult


@pytest.fixture(scope="module")
def shared():
    with open_prefiller("smolvlm") as prefiller:
        yield prefiller


@pytest.fixture
def slow_steps(monkeypatch):
    """Every step of the decoder takes a fifth of a second more."""
    original = driver.run_step
    monkeypatch.setattr(driver, "run_step", lambda *args: time.sleep(0.2) or original(*args))


@pytest.mark.parametrize("wrong", [None, 5, b"bytes", bytearray(b"bytes"), 1.5])
def test_what_is_no_request(shared, wrong):
    """Anything that cannot be a request is refused, saying what can."""
    with pytest.raises(ValueError, match=f"token ids.*got {type(wrong).__name__}"):
        shared.prefill(wrong)


def test_unknown_fields(shared):
    """A misspelt field is named, beside those that there are."""
    with pytest.raises(ValueError, match=r"imagess.*images"):
        shared.prefill("x", imagess=[])
    with pytest.raises(ValueError, match=r"promt.*prompt"):
        shared.prefill({"promt": "x"})
    with pytest.raises(ValueError, match="content, role"):
        shared.prefill({"role": "user", "content": "a message outside a list"})


@pytest.mark.parametrize(
    "fields",
    [{"priority": "high"}, {"deadline": "1"}, {"deadline": float("nan")}, {"salt": 5}, {"hidden_states": -1}],
    ids=lambda fields: next(iter(fields)),
)
def test_wrong_fields(fields):
    """A field of a wrong type is refused when the request is made, by name; none reaches the engine."""
    with pytest.raises(ValueError, match=f"'q': {next(iter(fields))} must be"):
        Request(prompt="x", id="q", **fields)


def test_ids_that_count_as_none():
    """Zero is an id like any other; nothing is none."""
    assert Request(prompt="x", id=0).id == "0"
    assert Request(prompt="x").id.startswith("request-")


@pytest.mark.parametrize("ids", [[1.5, 2.0], [True, False], [], [[1, 2]], ["1"]])
def test_ids_are_integers(shared, ids):
    """Token ids are not rounded, nor made of truth values."""
    with pytest.raises(RequestError, match="flat"):
        shared.prefill(ids)


def test_choices_and_lengths(shared):
    """One string where choices are wanted, and lengths of nothing, are refused."""
    for choices, said in (
        ("yes", "choices must be a list"),
        (None, "choices must be a list of strings, got NoneType"),
        (["yes", 5], "choice 2 must be a string, got int"),
        (["\ud800"], "choice 1: not text: character 1 is .*half of a surrogate pair"),
    ):
        with pytest.raises(ValueError, match=said):
            shared.score("x", choices)
    with pytest.raises(ValueError, match="max_new_tokens"):
        shared.generate_many(["x"], 0)


@pytest.mark.parametrize("one", ["text", {"prompt": "x"}, Request(prompt="x"), Rendered("x")])
def test_one_request_where_several_are_wanted(shared, one):
    """A string is not quietly taken for a list of letters."""
    for verb in (shared.prefill_many, shared.generate_many, lambda requests: list(shared.stream(requests))):
        with pytest.raises(ValueError, match="requests must be a list"):
            verb(one)


@pytest.mark.parametrize("wrong", [None, 5])
def test_what_is_no_list_of_requests(shared, wrong):
    """What cannot be gone through is refused as what it is, by every verb that takes several requests."""
    for verb in (
        shared.prefill_many,
        shared.generate_many,
        lambda requests: shared.score_many(requests, ["yes"]),
        lambda requests: list(shared.stream(requests)),
    ):
        with pytest.raises(ValueError, match=f"requests must be a list.*got {type(wrong).__name__}"):
            verb(wrong)


def test_a_malformed_request_fails_alone(shared):
    """What cannot even become a request is an exception in its place, in a batch and in a stream."""
    requests = ["good", {"promt": "bad"}, None, {"prompt": "good"}]
    for outcomes in (shared.prefill_many(requests), list(shared.stream(requests))):
        assert [type(outcome) for outcome in outcomes] == [PrefillResult, ValueError, ValueError, PrefillResult]


def test_an_iterator_that_uses_the_prefiller(shared):
    """Requests may be made with the prefiller that they are for, while earlier ones run."""

    def chain():
        for i in range(3):
            yield f"{len(shared.prefill(f'{i}').token_ids)} tokens"

    done = []
    thread = threading.Thread(target=lambda: done.extend(shared.stream(chain())), daemon=True)
    thread.start()
    thread.join(20)
    assert [type(outcome) for outcome in done] == [PrefillResult] * 3


def test_a_stream_does_not_wait_for_a_slow_iterator(shared):
    """Results come out as they are ready, long before an endless iterator has filled the queue."""

    def endless():
        for i in itertools.count():
            yield f"request {i}"
            time.sleep(0.02)

    results = shared.stream(endless())
    assert isinstance(next(results), PrefillResult)
    assert isinstance(next(results), PrefillResult)
    results.close()


def test_leaving_a_stream_cancels_the_rest(slow_steps):
    """A stream that is left half way leaves nothing running."""
    with open_prefiller("smolvlm") as prefiller:
        stream = prefiller.stream(Request(prompt=f"{i} " * 30, reuse=False) for i in range(60))
        next(stream)
        stream.close()
        started = time.perf_counter()
    assert time.perf_counter() - started < 2


@pytest.fixture
def interruptible():
    """What a shell starts in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupting_cancels(slow_steps, interruptible):
    """Ctrl-C ends a long call at once; closing does not finish it first."""
    with open_prefiller("smolvlm", step_tokens=64) as prefiller:
        requests = [Request(prompt=f"{i} " * 30, reuse=False) for i in range(60)]
        threading.Timer(0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        started = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            prefiller.prefill_many(requests)
    assert time.perf_counter() - started < 4
    with pytest.raises(EngineClosedError):
        prefiller.prefill("later")
    assert issubclass(EngineClosedError, MMPrefillError)


def test_salts_are_text():
    """Half a surrogate pair is refused where it is written, not when it is hashed."""
    with pytest.raises(ValueError, match=r"request 'q': salt must be text, got '\\ud800'"):
        Request(prompt="x", id="q", salt="\ud800")


def test_results_are_not_pickled(shared):
    """A result belongs to its engine: pickling and deep copies point to save and load; a plain copy is one."""
    result = shared.prefill("x")
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"save\(path\).*prefiller\.resume\(path\).*mmprefill\.load"):
            attempt(result)
    again = copy.copy(result)
    assert again is not result
    assert again.generate(3) == result.generate(3)
