"""One system of `mmprefill bench prefill`, in a process of its own: loads, warms up, then runs on "run" until "quit".

A process named "rate" measures the machine instead: how fast it multiplies matrices.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mmprefill.bench import RATE
from mmprefill.models import DTYPES
from mmprefill.pipeline import widen

Row = Mapping[str, Any]
Run = Callable[[Seq[Row], str], int]  # rows, a name that no two runs share -> prompt tokens
More = Callable[[Seq[Row]], dict[str, Any]]  # rows -> what else the system knows


def main(
    system: str, model: str, workload: str, variant: str, requests: str, dtype: str, threads: str, settings: str
) -> None:
    """Serve orders from standard input, one JSON line each; `settings` is JSON of the processor's."""
    torch.set_num_threads(int(threads))
    if system == RATE:
        _rates(DTYPES[dtype], [(2048, 2048), *linear_shapes(model)])
    else:
        start = {"mmprefill": _mmprefill, "transformers": _transformers}[system]
        _serve(load_rows(Path(workload), variant, int(requests)), *start(model, dtype, json.loads(settings)))


def _serve(rows: Seq[Row], run: Run, more: More) -> None:
    run(rows[:2], "warm-up")
    _say({"ready": True})
    for number, order in enumerate(sys.stdin):
        if order.strip() == "quit":
            break
        started = time.perf_counter()
        tokens = run(rows, str(number))
        _say({"seconds": time.perf_counter() - started, "tokens": tokens, "requests": len(rows)})
    alone = [_timed(partial(run, [row], f"alone {i}")) for i, row in enumerate(rows[:4])]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    _say({"first_token_s": statistics.median(alone), "peak_rss_mb": peak, **more(rows)})


def _rates(dtype: torch.dtype, shapes: Seq[tuple[int, int]]) -> None:
    """Which layer the machine multiplies fastest is found once, and that one's rate told when asked."""
    best = max(shapes, key=lambda shape: gemm_gflops(dtype, *shape))
    _say({"ready": True})
    for _ in sys.stdin:
        _say({"gflops": gemm_gflops(dtype, *best)})


def load_rows(folder: Path, variant: str, count: int) -> list[Row]:
    """Rows of a variant with their pictures decoded."""
    rows = json.loads((folder / "workload.json").read_text())[variant][:count]
    return [
        {"text": row["text"], "image": row["image"] and Image.open(folder / row["image"]).convert("RGB")}
        for row in rows
    ]


def messages(row: Row) -> list[dict[str, Any]]:
    """One user turn: the picture, then the text."""
    picture = [{"type": "image", "image": row["image"]}] if row["image"] is not None else []
    return [{"role": "user", "content": [*picture, {"type": "text", "text": row["text"]}]}]


def _mmprefill(model: str, dtype: str, settings: Mapping[str, Any]) -> tuple[Run, More]:
    from mmprefill import Prefiller
    from mmprefill.results import unwrap

    prefiller = Prefiller.from_pretrained(model, dtype=dtype, processor_kwargs=dict(settings))

    def serve(rows: Seq[Row], salt: str) -> Iterator[Any]:  # the salt keeps a repeat from living off the one before
        requests = ({"messages": messages(row), "salt": salt} for row in rows)
        return map(unwrap, prefiller.stream(requests))  # each dropped before the next, as transformers' loop does

    def run(rows: Seq[Row], salt: str) -> int:
        return sum(len(result.token_ids) for result in serve(rows, salt))

    def more(rows: Seq[Row]) -> dict[str, Any]:
        seconds = [next(serve([row], f"stage {i}")).seconds for i, row in enumerate(rows[:4])]
        stages = {name: round(statistics.mean(each[name] for each in seconds), 4) for name in seconds[0]}
        lane = prefiller.session.lane.call
        return {"stages": stages, "kinds": kinds_of(lambda: run(rows[:2], "kinds"), lane)}

    return run, more


def _transformers(model: str, dtype: str, settings: Mapping[str, Any]) -> tuple[Run, More]:
    """The competent loop: one request at a time, last-position logits, no padding."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(model, **settings)
    stock = AutoModelForImageTextToText.from_pretrained(model, dtype=DTYPES[dtype]).eval()

    def run(rows: Seq[Row], _: str = "") -> int:
        tokens = 0
        for row in rows:
            text = processor.apply_chat_template(messages(row), add_generation_prompt=True)
            pictures = {"images": [[row["image"]]]} if row["image"] is not None else {}
            inputs = processor(text=[text], return_tensors="pt", **pictures)
            tokens += inputs["input_ids"].shape[1]
            inputs = {k: v.to(stock.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
            with torch.inference_mode():
                stock(**inputs, use_cache=True, logits_to_keep=1)
        return tokens

    def attention(query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, **_: Any) -> float:
        return float(sdpa_flop_count(query, key, value)) / (2 if causal else 1)

    def more(rows: Seq[Row]) -> dict[str, Any]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        with FlopCounterMode(display=False, custom_mapping={kernel: attention}) as counter:
            run(rows)
        return {"work": float(counter.get_total_flops())}

    return run, more


# Kinds of operation, by what their names begin with, first match; the rest of the time is Python, waiting and hand-overs.
_KINDS = (
    ("attention", ("mmprefill::attend", "aten::_scaled_dot_product", "aten::bmm", "aten::_softmax")),
    (
        "linear",
        ("mmprefill::linear", "mkldnn::_linear", "aten::mm", "aten::addmm", "aten::mkldnn_conv", "aten::_mkldnn"),
    ),
    ("copies", ("aten::copy_", "aten::cat", "aten::clone", "aten::index", "aten::_to_copy", "aten::contiguous")),
    ("elementwise", ("mmprefill::norm", "aten::", "mkldnn::")),
)


def kinds_of(function: Callable[[], Any], lane: Callable[[Callable[[], Any]], Any]) -> dict[str, float]:
    """Shares of a call's wall time by kind of operation, on the thread that computes, where `lane` runs a function."""
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU])
    lane(profiler.start)
    wall = _timed(function)
    lane(profiler.stop)
    shares = dict.fromkeys([kind for kind, _ in _KINDS], 0.0)
    for event in profiler.key_averages():
        kind = next((kind for kind, starts in _KINDS if event.key.startswith(starts)), None)
        if kind:
            shares[kind] += event.self_cpu_time_total / 1e6 / wall
    return {kind: round(share, 3) for kind, share in {**shares, "rest": max(0.0, 1 - sum(shares.values()))}.items()}


def linear_shapes(model: str, most: int = 4) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers that hold most of a checkpoint's weights; not the head, which sees one row."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        stock = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(model))
    weights: Counter[tuple[int, int]] = Counter()
    for module in stock.modules():
        if isinstance(module, torch.nn.Linear) and module is not stock.get_output_embeddings():
            weights[module.in_features, module.out_features] += module.weight.numel()
    return [shape for shape, _ in weights.most_common(most)]


def gemm_gflops(dtype: torch.dtype, inputs: int, outputs: int, rows: int = 2048) -> float:
    """A linear layer's rate over `rows` rows: the better of torch's and oneDNN's with weights packed beforehand; that of
    fp32 where the processor multiplies nothing faster."""
    dtype = torch.float32 if widen.wants(dtype) else dtype
    a, w = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    runs: list[Callable[[], Any]] = [lambda: torch.nn.functional.linear(a, w)]
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(w, rows)
        runs.append(lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], ""))
    with torch.inference_mode():
        best = min(statistics.median(_timed(run) for _ in range(5)) for run in runs)
    return 2 * rows * inputs * outputs / best / 1e9


def _timed(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _say(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
