"""Traces and metrics: what is recorded, what is written, and that nothing is done when nobody looks."""

import asyncio
import json
import sys
import threading
import time
from contextlib import nullcontext
from urllib.request import urlopen

import checkpoints
import pytest

from mmprefill import Prefiller, Request
from mmprefill.errors import MMPrefillError
from mmprefill.metrics import Metrics, Observer
from mmprefill.trace import OFF, Trace


def events(trace, tmp_path):
    return json.loads(trace.write(tmp_path / "run.trace.json").read_text())["traceEvents"]


def test_one_row_per_lane(tmp_path):
    """Bars lie in the row of their lane, with the ids and sizes that they were given, in microseconds."""
    trace = Trace()
    trace.record("vision", "encode", 10.0, 10.5, requests=["a", "b"], patches=2048)
    trace.record("prefill", "step", 10.25, 11.0, tokens=300)
    trace.record("vision", "encode", 10.5, 10.75)
    rows = {each["args"]["name"]: each["tid"] for each in events(trace, tmp_path) if each["ph"] == "M"}
    bars = [each for each in events(trace, tmp_path) if each["ph"] == "X"]
    assert rows.keys() == {"vision", "prefill"}
    assert [each["tid"] for each in bars] == [rows["vision"], rows["prefill"], rows["vision"]]
    assert [(each["ts"], each["dur"]) for each in bars] == [(0, 500_000), (250_000, 750_000), (500_000, 250_000)]
    assert bars[0]["args"] == {"requests": ["a", "b"], "patches": 2048}


def test_spans_time_their_block_and_name_errors(tmp_path):
    trace = Trace()
    with pytest.raises(KeyError), trace.span("text", "merge", request="a"):
        time.sleep(0.01)
        raise KeyError("x")
    (bar,) = trace.bars
    assert bar.end - bar.start >= 0.01
    assert bar.args == {"request": "a", "error": "KeyError"}


def test_timed_functions_record_on_the_thread_that_runs_them():
    """Many threads at once: no bar is lost, and results pass through."""
    trace = Trace()
    work = trace.timed("prefill", "step", lambda x, *, y: x + y, tokens=3)
    threads = [threading.Thread(target=lambda: [work(1, y=2) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert work(1, y=2) == 3
    assert len(trace.bars) == 801


def test_a_span_without_a_lane_lies_in_the_row_of_its_thread():
    trace = Trace()
    with trace.span("", "intake"):
        pass
    assert trace.bars[0].lane == threading.current_thread().name


def test_off_costs_nothing():
    """Without a trace the function itself comes back, spans are one shared object, and nothing is kept."""
    assert not OFF.enabled
    assert OFF.timed("a", "b", len) is len
    assert OFF.span("a", "b", tokens=1) is OFF.span("c", "d")
    assert isinstance(OFF.span("a", "b"), nullcontext)
    OFF.record("a", "b", 0.0, 1.0)


def test_a_trace_is_bounded_and_replaced_whole(tmp_path):
    trace = Trace(limit=100)
    for i in range(1000):
        trace.record("a", str(i), float(i), i + 1.0)
    assert len(trace.bars) <= 100
    assert trace.bars[-1].name == "999"
    trace.write(tmp_path / "t.json")
    with pytest.raises(FileNotFoundError):
        trace.write(tmp_path / "missing" / "t.json")
    assert [each.name for each in tmp_path.iterdir()] == ["t.json"]


def test_an_empty_trace_is_a_trace(tmp_path):
    assert events(Trace(), tmp_path) == []


# Metrics.


@pytest.fixture(scope="module")
def result():
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached("smolvlm")) as prefiller:
        yield prefiller.prefill(Request(prompt="what is it?", images=[checkpoints.picture(1)]))


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"mmprefill_{name}", labels)


def test_metrics_count_what_happened(result):
    """Outcomes, tokens by modality, reuse, seconds by stage, fill of steps and calls, queues and stores."""
    metrics = Metrics()
    for i in range(4):
        metrics.requested(str(i))
    metrics.finished(result)
    metrics.failed("1", MMPrefillError("no"))
    metrics.failed("2", asyncio.CancelledError())
    metrics.encoded(pictures=2, patches=2048, budget=4096, seconds=0.5)
    metrics.stepped(requests=3, tokens=700, budget=1000, seconds=0.3)
    metrics.waiting(door=1, tower=5)
    metrics.stored(encoder=1000, prefix=50)
    assert value(metrics, "in_flight") == 1
    assert [value(metrics, "requests_total", outcome=x) for x in ("ok", "MMPrefillError", "CancelledError")] == [
        1,
        1,
        1,
    ]
    assert value(metrics, "prompt_tokens_total", modality="image") == result.tokens["image"]
    assert value(metrics, "pictures_total", source="encoded") == 1
    assert value(metrics, "prefix_lookups_total", result="miss") == 1
    assert value(metrics, "stage_seconds_count", stage="prefill") == 1
    assert value(metrics, "lane_units_total", work="tower") == 2048
    assert value(metrics, "fill_sum", work="step") == pytest.approx(0.7)
    assert value(metrics, "waiting", queue="tower") == 5
    assert value(metrics, "store_bytes", store="encoder") == 1000
    assert "mmprefill_first_token_seconds_bucket" in metrics.text()


def test_metrics_are_served():
    metrics = Metrics()
    server, thread = metrics.serve(0)
    try:
        with urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as page:
            assert b"mmprefill_in_flight 0.0" in page.read()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_two_engines_have_counters_of_their_own():
    one, two = Metrics(), Metrics()
    one.requested("a")
    assert (value(one, "in_flight"), value(two, "in_flight")) == (1, 0)


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MMPrefillError, match=r"mmprefill\[metrics\]"):
        Metrics()


def test_an_observer_that_raises_is_logged(caplog):
    """Whatever an observer raises, requests come back as if it had not; the log says what it was."""

    def fail(self, *_, **__):
        raise RuntimeError("a broken observer")

    names = [name for name in vars(Observer) if not name.startswith("_")]
    broken = type("Broken", (Observer,), dict.fromkeys(names, fail))()
    with checkpoints.quiet():
        prefiller = Prefiller.from_pretrained(checkpoints.cached("smolvlm"), observer=broken)
    with prefiller:
        outcomes = prefiller.prefill_many([Request(prompt=f"{i}", images=[checkpoints.picture(1)]) for i in range(3)])
        assert [len(outcome.token_ids) for outcome in outcomes]
        with pytest.raises(MMPrefillError):
            prefiller.prefill("x", images=[b"broken"])
    assert "a broken observer" in caplog.text


def test_an_observer_does_nothing(result):
    observer = Observer()
    observer.requested("a")
    observer.finished(result)
    observer.failed("a", ValueError())
    observer.encoded(pictures=1, patches=1, budget=1, seconds=0.0)
    observer.stepped(requests=1, tokens=1, budget=1, seconds=0.0)
    observer.waiting(door=1)
    observer.stored(encoder=1)
