"""What the engine tells whoever watches it, and counters for Prometheus that are fed from it.

    metrics = Metrics()
    engine = AsyncPrefiller(bundle, observer=metrics)
    metrics.serve(9100)          # or metrics.text() in a server of your own

Needs `pip install 'mmprefill[metrics]'`; an `Observer` of your own needs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mmprefill.errors import MMPrefillError

if TYPE_CHECKING:
    from mmprefill.results import PrefillResult

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Observer:
    """Hears of everything and does nothing: the base of your own.

    Called on the engine's loop: return quickly. What it raises is logged and changes nothing.
    """

    def requested(self, request_id: str) -> None:
        """A request was made; it may still wait at the door."""

    def finished(self, result: PrefillResult) -> None:
        """A request has its result."""

    def failed(self, request_id: str, error: BaseException) -> None:
        """A request failed, or was cancelled."""

    def encoded(self, *, pictures: int, patches: int, budget: int, seconds: float) -> None:
        """A tower call is over."""

    def stepped(self, *, requests: int, tokens: int, budget: int, seconds: float) -> None:
        """A step of the decoder is over."""

    def waiting(self, **depths: int) -> None:
        """How many items each queue holds now."""

    def stored(self, **sizes: int) -> None:
        """How many bytes each store holds now."""


SILENT = Observer()


def guarded(observer: Observer) -> Observer:
    """The observer, with what it raises logged: a mistake of those who watch must not fail those who are watched."""
    if observer is SILENT:
        return observer
    safe = Observer()
    for name in vars(Observer):
        if not name.startswith("_"):
            setattr(safe, name, _logged(getattr(observer, name)))
    return safe


def _logged(tell: Callable[..., None]) -> Callable[..., None]:
    def told(*args: Any, **named: Any) -> None:
        try:
            tell(*args, **named)
        except Exception:  # see `guarded`
            logging.getLogger(__name__).exception("an observer failed")

    return told


class Metrics(Observer):
    """Counters, gauges and histograms for Prometheus.

    Args:
        registry: where to register them; its own, so that two engines in one process do not clash.

    Raises:
        MMPrefillError: if prometheus-client is not installed; it names the extra.
    """

    def __init__(self, registry: Any = None) -> None:
        self._client = _prometheus()
        self.registry = registry if registry is not None else self._client.CollectorRegistry()
        self._requests = self._counter(
            "requests", "Requests by how they ended: ok, or the name of the error.", "outcome"
        )
        self._tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.", "modality")
        self._reused = self._counter("reused_tokens", "Prompt tokens whose KV came from an earlier prompt.")
        self._pictures = self._counter("pictures", "Pictures of finished requests, encoded or reused.", "source")
        self._prefixes = self._counter("prefix_lookups", "Finished requests that took over a prefix, or not.", "result")
        self._now = self._gauge("in_flight", "Requests made and not ended.")
        self._depths = self._gauge("waiting", "Items in a queue.", "queue")
        self._bytes = self._gauge("store_bytes", "Bytes that a store holds.", "store")
        self._stages = self._histogram("stage_seconds", "Seconds of a request by stage.", SECONDS, "stage")
        self._first = self._histogram("first_token_seconds", "Seconds from request to first token.", SECONDS)
        self._work = self._histogram("lane_seconds", "Seconds of tower calls and decoder steps.", SECONDS, "work")
        self._fill = self._histogram("fill", "Share of its budget that a tower call or a step used.", SHARES, "work")
        self._rows = self._counter("lane_units", "Patches encoded and tokens prefilled.", "work")

    def requested(self, request_id: str) -> None:
        """Count it as in flight."""
        self._now.inc()

    def finished(self, result: PrefillResult) -> None:
        """Count outcome, tokens, reuse and seconds."""
        self._end("ok")
        for modality, count in result.tokens.items():
            self._tokens.labels(modality).inc(count)
        self._reused.inc(result.reuse.tokens)
        self._prefixes.labels("hit" if result.reuse.tokens else "miss").inc()
        self._pictures.labels("reused").inc(result.reuse.pictures)
        self._pictures.labels("encoded").inc(max(len(result.media) - result.reuse.pictures, 0))
        for stage, seconds in result.seconds.items():
            self._stages.labels(stage).observe(seconds)
        self._first.observe(sum(result.seconds.values()))

    def failed(self, request_id: str, error: BaseException) -> None:
        """Count it under the error's name."""
        self._end(type(error).__name__)

    def encoded(self, *, pictures: int, patches: int, budget: int, seconds: float) -> None:
        """Count the call, its patches and how full it was."""
        self._did("tower", patches, budget, seconds)

    def stepped(self, *, requests: int, tokens: int, budget: int, seconds: float) -> None:
        """Count the step, its tokens and how full it was."""
        self._did("step", tokens, budget, seconds)

    def waiting(self, **depths: int) -> None:
        """Set the queues' gauges."""
        for queue, depth in depths.items():
            self._depths.labels(queue).set(depth)

    def stored(self, **sizes: int) -> None:
        """Set the stores' gauges."""
        for store, size in sizes.items():
            self._bytes.labels(store).set(size)

    def text(self) -> str:
        """Everything in Prometheus' text format."""
        return str(self._client.generate_latest(self.registry).decode())

    def serve(self, port: int, host: str = "127.0.0.1") -> Any:
        """Serve `/metrics` on a thread of its own; returns prometheus-client's (server, thread)."""
        return self._client.start_http_server(port, host, self.registry)

    def _end(self, outcome: str) -> None:
        self._now.dec()
        self._requests.labels(outcome).inc()

    def _did(self, work: str, units: int, budget: int, seconds: float) -> None:
        self._rows.labels(work).inc(units)
        self._work.labels(work).observe(seconds)
        self._fill.labels(work).observe(units / budget)

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._client.Counter(f"mmprefill_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        return self._client.Gauge(f"mmprefill_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Any:
        return self._client.Histogram(f"mmprefill_{name}", text, labels, registry=self.registry, buckets=buckets)


def _prometheus() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise MMPrefillError("metrics need prometheus-client: pip install 'mmprefill[metrics]'") from error
    return prometheus_client
