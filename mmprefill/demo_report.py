"""What the pipeline did for one request of the demo, as plain values: none of the request's tensors is kept alive."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeVar

from mmprefill.pipeline.decode import fresh_cache
from mmprefill.results import PrefillResult
from mmprefill.trace import Bar

T = TypeVar("T")
ROWS = ("intake", "vision", "text", "decoder", "hand-over", "answer")
_STAGES = {"load": "intake", "intake": "intake", "vision": "vision", "merge": "text", "prefill": "decoder"}


@dataclass(frozen=True)
class Span:
    """A bar of the chart; times in seconds of `time.perf_counter`."""

    row: str
    label: str
    start: float
    end: float


@dataclass
class Report:
    """The last request of a chat; grows while it runs.

    Attributes:
        chunk_tokens: the bound that was asked for; None for none.
        reuse: whether earlier work might be used.
        progress: prompt tokens prefilled, and in all.
        tokens: prompt tokens by modality.
        media: pictures as (height, width).
        kv_bytes: bytes of the KV cache.
        kv_shape: how it is made up, in words.
        candidates: text and probability of the most probable next tokens.
        reused: tokens and pictures that were there already.
        why: where they came from, or why there were none.
        spans: what the lanes did.
        answered: tokens of the answer so far.
        route: "packed" or "generic".
    """

    chunk_tokens: int | None = None
    reuse: bool = True
    progress: tuple[int, int] = (0, 0)
    tokens: dict[str, int] = field(default_factory=dict)
    media: list[tuple[int, int]] = field(default_factory=list)
    kv_bytes: int = 0
    kv_shape: str = ""
    candidates: list[tuple[str, float]] = field(default_factory=list)
    reused: tuple[int, int] = (0, 0)
    why: str = ""
    spans: list[Span] = field(default_factory=list)
    answered: int = 0
    route: str = ""

    @property
    def ready(self) -> bool:
        """Whether the prompt is prefilled."""
        return bool(self.tokens)

    @property
    def started(self) -> float:
        """When the first lane began."""
        return min((span.start for span in self.spans), default=0.0)

    @property
    def seconds(self) -> float:
        """From the first bar's start to the last one's end."""
        return max((span.end for span in self.spans), default=0.0) - self.started

    @property
    def first_token(self) -> float:
        """Seconds from the first bar's start until the prompt's KV and logits were there."""
        return max((s.end for s in self.spans if s.row not in ("hand-over", "answer")), default=0.0) - self.started

    def prefilled(self, result: PrefillResult, bars: Iterable[Bar]) -> None:
        """Take over what a result says of itself, and the trace's bars of its request."""
        self.tokens = dict(result.tokens)
        self.media = [item.size for item in result.media]
        self.kv_bytes, self.kv_shape = result.kv_bytes, _kv_shape(result)
        self.candidates = [(token.text, math.exp(token.logprob)) for token in result.top_tokens(5)]
        self.reused, self.why = (result.reuse.tokens, result.reuse.pictures), result.reuse.why
        self.route = result.route
        self.spans = list(spans_of(result.id, bars)) or list(_in_a_row(result, time.perf_counter()))
        if not any(span.row == "vision" for span in self.spans):  # no picture was asked for at all
            self.reused = result.reuse.tokens, len(self.media)
        if result.route == "generic" and not any(span.row == "decoder" for span in self.spans):
            after = max(span.end for span in self.spans)
            self.spans.append(Span("decoder", "the model's own forward", after, after + result.seconds["prefill"]))

    def handing_over(self, function: Callable[[], T]) -> Callable[[], T]:
        """The function, with its one call as the hand-over's bar."""

        def run() -> T:
            started = time.perf_counter()
            value = function()
            self.spans.append(Span("hand-over", "copy with room for the answer", started, time.perf_counter()))
            return value

        return run

    def answering(self, function: Callable[[], T]) -> Callable[[], T]:
        """The function, each call of which makes a token of the answer."""

        def run() -> T:
            started = time.perf_counter()
            value = function()
            self.answered += 1
            self.spans.append(Span("answer", f"token {self.answered}", started, time.perf_counter()))
            return value

        return run


def spans_of(request: str, bars: Iterable[Bar]) -> Iterable[Span]:
    """The bars of a trace that one request had a part in."""
    for bar in bars:
        requests = bar.args.get("requests", ())
        if request != bar.args.get("request") and request not in requests:
            continue
        row = "intake" if "intake" in bar.lane else bar.lane
        yield Span(row, _label(bar, requests), bar.start, bar.end)


def _label(bar: Bar, requests: Seq[str]) -> str:
    what = {"step": "chunk", "encode": "tower call"}.get(bar.name, bar.name)
    sizes = [f"{bar.args[name]} {name}" for name in ("pictures", "patches", "tokens") if name in bar.args]
    others = [f"with {len(requests) - 1} other request(s)"] if len(requests) > 1 else []
    return ", ".join([what, *sizes, *others])


def _in_a_row(result: PrefillResult, end: float) -> Iterable[Span]:
    """Stages that no trace saw, one after another up to now."""
    start = end - sum(result.seconds.values())
    for stage, seconds in result.seconds.items():
        if stage in _STAGES:
            yield Span(_STAGES[stage], stage, start, start + seconds)
        start += seconds


def _kv_shape(result: PrefillResult) -> str:
    packed = result.route == "packed"
    cache = fresh_cache(result.session.family, result.emitted) if packed else result.emitted  # without a copy
    keys = [layer.keys for layer in cache.layers if getattr(layer, "keys", None) is not None]
    heads, width = sorted({(k.shape[1], k.shape[3]) for k in keys})[0]
    return f"{len(keys)} layers x 2 x {heads} heads x {width}, {str(keys[0].dtype).removeprefix('torch.')}"
