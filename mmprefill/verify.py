"""The exactness table: every path against a plain transformers forward of the same inputs.

For each request the reference is `model(**inputs)` on our decoded RGB and our token ids, one request at a time. Beside
our difference stands transformers' own, between its sdpa and eager attention: what the arithmetic itself is uncertain by.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from mmprefill.config import PrefillConfig
from mmprefill.errors import RequestError
from mmprefill.models import ModelBundle
from mmprefill.pipeline.linear import unpacked
from mmprefill.prefiller import Prefiller
from mmprefill.results import PrefillResult, unwrap
from mmprefill.types import Prepared, Request

ABSOLUTE = 1e-4  # fp32, tiny checkpoints; DESIGN: elsewhere twice transformers' own sdpa/eager difference
BF16_FACTOR = 1.25
_PROSE = (
    "the cat saw a red house near water and then seven small boats went north before dinner while somebody painted "
    "every window blue because light from one lamp fell on an old map"
)


@dataclass(frozen=True)
class Error:
    """Largest and root-mean-square difference."""

    max: float
    rms: float

    @classmethod
    def between(cls, ours: Seq[Tensor], theirs: Seq[Tensor]) -> Error:
        """Over all elements of all pairs."""
        parts = [(a.double() - b.double().to(a.device)).flatten() for a, b in zip(ours, theirs, strict=True)]
        difference = torch.cat(parts) if parts else torch.zeros(1)
        return cls(float(difference.abs().max()), float(difference.square().mean().sqrt()))


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        path: how our pipeline ran the requests.
        logits: error of the next-token logits.
        kv: error of keys and values.
        greedy: requests whose greedy continuation is identical (or parts only where the reference's top two are closer
            than twice the tolerance).
        requests: requests compared.
        limit_logits: most that is accepted for `logits.max`.
        limit_kv: most that is accepted for `kv.max`.
        limit_rms: most that is accepted for (`logits.rms`, `kv.rms`); None without a bound.
    """

    path: str
    logits: Error
    kv: Error
    greedy: int
    requests: int
    limit_logits: float
    limit_kv: float
    limit_rms: tuple[float, float] | None = None

    @property
    def passed(self) -> bool:
        """Whether everything is within its bound."""
        return not self.exceeded

    @property
    def exceeded(self) -> tuple[str, ...]:
        """What is not, in words."""
        rms = self.limit_rms or (math.inf, math.inf)
        bounds = (
            ("logits max", self.logits.max, self.limit_logits),
            ("logits rms", self.logits.rms, rms[0]),
            ("KV max", self.kv.max, self.limit_kv),
            ("KV rms", self.kv.rms, rms[1]),
            ("other greedy tokens, requests:", self.requests - self.greedy, 0),
        )
        return tuple(f"{name} {got:.3g} of at most {most:.3g}" for name, got, most in bounds if not got <= most)


@dataclass(frozen=True)
class Reference:
    """What transformers gives for one request."""

    logits: Tensor  # [V] float32, after the prompt
    kv: list[Tensor]
    tokens: list[int]  # greedy continuation
    gaps: list[float]  # of the top two logits at each of its steps


@dataclass(frozen=True)
class Report:
    """The table of one checkpoint: `own` is transformers' sdpa against its eager, `rows` are ours."""

    model: str
    dtype: str
    route: str
    own: Row | None
    rows: list[Row]

    @property
    def passed(self) -> bool:
        """Whether every row passed."""
        return all(row.passed for row in self.rows)


SIZES = ((48, 64), (96, 72), (64, 64), (40, 120), (110, 80), (57, 43))


def pictures(count: int, seed: int = 0, sizes: Seq[tuple[int, int]] = SIZES) -> list[np.ndarray[Any, Any]]:
    """Seeded pictures [H, W, 3] uint8 of assorted sizes: gradients with rectangles, so that a tower has something to see."""
    generator = np.random.default_rng(seed)
    return [_picture(generator, *sizes[i % len(sizes)]) for i in range(count)]


def _picture(generator: np.random.Generator, height: int, width: int) -> np.ndarray[Any, Any]:
    ramp = np.linspace(0, 1, width)[None, :, None] * generator.uniform(0, 255, 3)
    picture = np.broadcast_to(ramp, (height, width, 3)).copy()
    for _ in range(4):
        top, left = generator.integers(0, height - 8), generator.integers(0, width - 8)
        picture[top : top + height // 3, left : left + width // 3] = generator.uniform(0, 255, 3)
    return picture.astype(np.uint8)


def sample_requests(prefiller: Prefiller, images: Seq[Any] | None = None, seed: int = 0) -> list[Request]:
    """Eight requests of 0, 1, 2 and 5 pictures: first, last, adjacent and interleaved, of assorted lengths."""
    pool = list(images or pictures(6, seed))
    draw = random.Random(seed)  # noqa: S311 - a fixture, not a secret

    def text(words: int) -> str:
        return " ".join(draw.choice(_PROSE.split()) for _ in range(words))

    def image(i: int) -> Any:
        return pool[i % len(pool)]

    layouts: list[list[Any]] = [
        [text(9)],
        [image(0), text(4)],
        [text(30), image(1)],
        [image(2), image(3), text(12)],
        [text(5), image(4), text(7), image(0), text(3)],
        [image(1), text(2), image(2), image(3), text(8), image(4), image(5), text(5)],
        [text(60)],
        [text(1), image(5), text(40)],
    ]
    if not prefiller.intake.has_template:  # one picture block in front, as such checkpoints were trained
        layouts = [layout for layout in layouts if not all(isinstance(part, str) for part in layout)]
        return [
            Request(
                prompt=" ".join(part for part in layout if isinstance(part, str)),
                images=[part for part in layout if not isinstance(part, str)],
                id=f"r{i}",
            )
            for i, layout in enumerate(layouts)
        ]
    return [
        Request(messages=[{"role": "user", "content": _parts(layout)}], id=f"r{i}") for i, layout in enumerate(layouts)
    ]


def _parts(layout: Seq[Any]) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in layout
    ]


def verify(
    prefiller: Prefiller,
    *,
    fp32: ModelBundle | None = None,
    requests: Seq[Request] | None = None,
    new_tokens: int = 16,
    threads: Seq[int] = (1, 2),
    on_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compare our paths with plain transformers on the prefiller's own model.

    Args:
        prefiller: the pipeline under test.
        fp32: the same checkpoint in fp32; needed to judge a pipeline in a smaller dtype.
        requests: what to run; `sample_requests` if None.
        new_tokens: length of the greedy continuations.
        threads: torch thread counts to repeat the packed path with.
        on_progress: told what runs next.
    """
    requests = [replace(request, reuse=False) for request in requests or sample_requests(prefiller)]
    try:
        prepared = [prefiller.intake.prepare(request) for request in requests]
    except RequestError:  # some processors cannot stack pictures that tile differently: then all of one size
        requests = [replace(each, reuse=False) for each in sample_requests(prefiller, pictures(6, sizes=((64, 64),)))]
        prepared = [prefiller.intake.prepare(request) for request in requests]
    session = prefiller.session
    on_progress("transformers")
    with attention(session.family.model, "sdpa"):
        plain = [session.lane.call(reference, session.family.model, each, new_tokens) for each in prepared]
    on_progress("transformers, eager attention")
    with attention(session.family.model, "eager"):
        eager = [session.lane.call(reference, session.family.model, each, new_tokens) for each in prepared]
    judge = _Judge.between(plain, eager) if fp32 is None else _Judge.against_fp32(
        plain, [reference(fp32.model, each, new_tokens) for each in prepared]
    )  # fmt: skip
    rows = []
    for name, run in _paths(prefiller, requests, threads):
        on_progress(name)
        rows.append(judge.row(name, run(), new_tokens))
    own = judge.compare("transformers sdpa vs eager", plain, eager)
    return Report(
        session.bundle.source,
        str(session.family.dtype).removeprefix("torch."),
        session.route.reason or "packed",
        own,
        rows,
    )


@dataclass(frozen=True)
class _Judge:
    """Bounds, and the reference that errors are taken from."""

    truth: list[Reference]
    limit_logits: float
    limit_kv: float
    limit_rms: tuple[float, float] | None

    @classmethod
    def between(cls, plain: list[Reference], eager: list[Reference]) -> _Judge:
        logits, kv = _errors(plain, eager)
        return cls(plain, max(ABSOLUTE, 2 * logits.max), max(ABSOLUTE, 2 * kv.max), None)

    @classmethod
    def against_fp32(cls, plain: list[Reference], truth: list[Reference]) -> _Judge:
        logits, kv = _errors(plain, truth)
        return cls(
            truth, BF16_FACTOR * logits.max, BF16_FACTOR * kv.max, (BF16_FACTOR * logits.rms, BF16_FACTOR * kv.rms)
        )

    def row(self, path: str, results: Seq[PrefillResult], new_tokens: int) -> Row:
        ours = [
            Reference(r.next_token_logits, _tensors(r.cache), list(r.generate(new_tokens).token_ids), [])
            for r in results
        ]
        return self.compare(path, self.truth, ours)

    def compare(self, path: str, truth: Seq[Reference], ours: Seq[Reference]) -> Row:
        logits, kv = _errors(truth, ours)
        same = sum(_agree(a, b, 2 * max(self.limit_logits, logits.max)) for a, b in zip(truth, ours, strict=True))
        return Row(path, logits, kv, same, len(ours), self.limit_logits, self.limit_kv, self.limit_rms)


def _errors(truth: Seq[Reference], ours: Seq[Reference]) -> tuple[Error, Error]:
    logits = Error.between([each.logits for each in ours], [each.logits for each in truth])
    return logits, Error.between([t for each in ours for t in each.kv], [t for each in truth for t in each.kv])


def _agree(truth: Reference, ours: Reference, doubt: float) -> bool:
    """Identical up to the first step whose two best tokens the arithmetic cannot tell apart."""
    for wanted, got, gap in zip(truth.tokens, ours.tokens, truth.gaps, strict=False):
        if wanted != got:
            return gap <= doubt
    return True


def _paths(
    prefiller: Prefiller, requests: list[Request], threads: Seq[int]
) -> Iterator[tuple[str, Callable[[], list[PrefillResult]]]]:
    yield "alone", lambda: [prefiller.prefill(request) for request in requests]
    for count in threads:
        yield f"packed, {count} thread{'s' * (count > 1)}", partial(_threaded, prefiller, requests, count)
    yield "packed, shuffled", lambda: _shuffled(prefiller, requests)
    if not prefiller.session.route.packed:
        return
    bundle = prefiller.session.bundle
    with Prefiller(bundle, PrefillConfig(chunk_tokens=16, prefix_bytes=0)) as chunked:
        yield "packed, in chunks of 16", partial(_packed, chunked, requests)
    with Prefiller(bundle) as warm:
        shared = [replace(request, reuse=True) for request in requests]
        warm.prefill_many([_same_beginning(request) for request in shared])
        yield "from a reused prefix", partial(_packed, warm, shared)


def _packed(prefiller: Prefiller, requests: Seq[Request]) -> list[PrefillResult]:
    return [unwrap(outcome) for outcome in prefiller.prefill_many(requests)]


def _threaded(prefiller: Prefiller, requests: Seq[Request], count: int) -> list[PrefillResult]:
    lane, before = prefiller.session.lane, torch.get_num_threads()
    lane.call(torch.set_num_threads, count)
    try:
        return _packed(prefiller, requests)
    finally:
        lane.call(torch.set_num_threads, before)


def _shuffled(prefiller: Prefiller, requests: Seq[Request]) -> list[PrefillResult]:
    order = random.Random(1).sample(range(len(requests)), len(requests))  # noqa: S311
    results = dict(zip(order, _packed(prefiller, [requests[i] for i in order]), strict=True))
    return [results[i] for i in range(len(requests))]


def _same_beginning(request: Request) -> Request:
    """Another request that begins the same: without its last part, or with words behind it."""
    if request.prompt is not None:
        return replace(request, prompt=f"{request.prompt} and so on")
    *first, last = request.messages or ()
    parts = last["content"]
    if len(parts) == 1:
        return replace(
            request, messages=[*first, {**last, "content": [{"type": "text", "text": parts[0]["text"] + " etc"}]}]
        )
    return replace(request, messages=[*first, {**last, "content": parts[:-1]}])


@contextmanager
def attention(model: Any, implementation: str) -> Iterator[None]:
    """Within the block the model is stock: its attention, linear layers and norms. Nothing else may run on it meanwhile."""
    configs = {
        id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")
    }
    before = {key: config._attn_implementation for key, config in configs.items()}
    wanted = "eager" if any(getattr(c, "attn_logit_softcapping", None) for c in configs.values()) else implementation
    try:
        for config in configs.values():
            config._attn_implementation = wanted
        with unpacked(model):
            yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def reference(model: Any, prepared: Prepared, new_tokens: int) -> Reference:
    """One request through the composite model's own forward and `generate`."""
    dtype = model.get_input_embeddings().weight.dtype
    inputs = {
        name: t.to(model.device, dtype if t.is_floating_point() else None)
        for name, t in prepared.inputs.items()
        if name != "labels"
    }
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    with torch.no_grad():
        logits = model(**inputs, cache=cache, use_cache=True).logits[0, -1].float()
        kv = [t.clone() for t in _tensors(cache)]
        output = model.generate(
            **inputs, do_sample=False, max_new_tokens=new_tokens, return_dict_in_generate=True, output_logits=True
        )
    tops = [step[0].float().topk(2).values for step in output.logits]
    tokens = output.sequences[0, len(prepared.input_ids) :].tolist()
    return Reference(logits, kv, tokens, [float(top[0] - top[1]) for top in tops])


def _tensors(cache: Any) -> list[Tensor]:
    """Keys and values (or a hybrid layer's states) of every layer that holds any."""
    found: list[Tensor] = []
    for layer in cache.layers:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            value = getattr(layer, name, None)
            values = (
                value
                if isinstance(value, (list, tuple))
                else list(value.values())
                if isinstance(value, dict)
                else [value]
            )
            found += [t for t in values if isinstance(t, Tensor) and t.numel()]
    return found


__all__ = ["Error", "Report", "Row", "attention", "pictures", "reference", "sample_requests", "verify"]
