"""Prompt tokens per second: our pipeline against transformers, one request at a time and in padded batches.

    python benchmarks/throughput.py --shape smolvlm-256m --requests 16

The same requests for all, in interleaved rounds; the clock runs from decoded pictures to every KV cache and next-token
logits, resizing and tokenising included. Prints a table and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import shapes
import torch
from PIL import Image, ImageOps
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from mmprefill.config import PrefillConfig
from mmprefill.models import ModelBundle, load
from mmprefill.prefiller import Prefiller
from mmprefill.results import unwrap

PADDED_BATCH = 8
NOTHING_KEPT = PrefillConfig(encoder_bytes=0, prefix_bytes=0)  # rounds repeat the requests, and nobody else keeps any
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Measured:
    """One system's median over the rounds.

    Attributes:
        system: what ran.
        seconds: for all requests.
        tokens_per_second: prompt tokens, padding not counted.
        flops_share: useful floating point operations per second over the device's matrix rate in that dtype.
        peak_bytes: most device memory allocated beyond the weights, the caches of all requests included; 0 on a CPU.
    """

    system: str
    seconds: float
    tokens_per_second: float
    flops_share: float
    peak_bytes: int


def workload(count: int, seed: int = 7) -> list[Messages]:
    """Requests of one picture, cut from the sample photographs at assorted sizes, and a text of 10 to 400 words."""
    draw = random.Random(seed)
    words = "".join(shapes.library()).split()
    requests = []
    for i in range(count):
        start, length = draw.randrange(len(words) - 400), draw.randint(10, 400)
        text = " ".join(words[start : start + length])
        content = [{"type": "image", "image": _photograph(i, draw)}, {"type": "text", "text": text}]
        requests.append([{"role": "user", "content": content}])
    return requests


def _photograph(index: int, draw: random.Random) -> Image.Image:
    files = sorted((ROOT / "samples/photos").glob("*.jpg"))
    with Image.open(files[index % len(files)]) as stored:
        photo = ImageOps.exif_transpose(stored).convert("RGB")
    width, height = draw.randint(photo.width // 2, photo.width), draw.randint(photo.height // 2, photo.height)
    left, top = draw.randint(0, photo.width - width), draw.randint(0, photo.height - height)
    return photo.crop((left, top, left + width, top + height))


def transformers_runs(bundle: ModelBundle, requests: Sequence[Messages], batch: int) -> list[Any]:
    """Plain transformers in batches, padded on the left; keeps caches and last logits, as ours does."""
    outputs = []
    for start in range(0, len(requests), batch):
        inputs = _inputs(bundle, requests[start : start + batch])
        cache = DynamicCache(config=bundle.model.config.get_text_config(decoder=True))
        with torch.inference_mode():
            outputs.append(bundle.model(**inputs, cache=cache, use_cache=True, logits_to_keep=1))
    _finish(bundle.model.device)
    return outputs


def processor_runs(bundle: ModelBundle, requests: Sequence[Messages]) -> None:
    """What the host does before any model runs: templates, tokens, resized pictures."""
    for request in requests:
        _inputs(bundle, [request])


def _inputs(bundle: ModelBundle, requests: Sequence[Messages]) -> dict[str, torch.Tensor]:
    texts = [bundle.processor.apply_chat_template(each, add_generation_prompt=True) for each in requests]
    pictures = [[part["image"] for part in each[0]["content"] if part["type"] == "image"] for each in requests]
    padding = {"padding": True, "padding_side": "left"} if len(texts) > 1 else {}
    inputs = bundle.processor(text=texts, images=pictures, return_tensors="pt", **padding)
    dtype = bundle.model.dtype
    return {name: t.to(bundle.model.device, dtype if t.is_floating_point() else None) for name, t in inputs.items()}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_rate(
    device: torch.device, size: int | None = None, rounds: int = 10, dtype: torch.dtype = torch.bfloat16
) -> float:
    """Floating point operations per second of a square matrix multiply: the best of `rounds`."""
    size = size or (8192 if device.type == "cuda" else 2048)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(rounds):
        _finish(device)
        started = time.perf_counter()
        left @ right
        _finish(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def flops(bundle: ModelBundle, requests: Sequence[Messages]) -> int:
    """Floating point operations of plain single forwards, as torch counts them."""
    counter = FlopCounterMode(display=False)
    with counter:
        transformers_runs(bundle, requests, 1)
    return int(counter.get_total_flops())


def compare(folder: Path, device: str, dtype: str, requests: Sequence[Messages], rounds: int = 3) -> list[Measured]:
    """Every system on the same requests, in interleaved rounds after one that warms up."""
    plain = load(folder, device=device, dtype=dtype)
    rate, work = matmul_rate(plain.model.device, dtype=plain.model.dtype), flops(plain, requests)
    tokens = sum(_inputs(plain, [request])["input_ids"].numel() for request in requests)
    with Prefiller.from_pretrained(folder, device=device, dtype=dtype, config=NOTHING_KEPT) as prefiller:
        lane = prefiller.session.lane  # all run on one thread: on a CPU each thread has a team of its own
        systems: dict[str, Callable[[], Any]] = {
            "mmprefill": lambda: [unwrap(each) for each in prefiller.prefill_many(requests)],
            "transformers, one by one": lambda: lane.call(transformers_runs, plain, requests, 1),
            f"transformers, padded by {PADDED_BATCH}": lambda: lane.call(
                transformers_runs, plain, requests, PADDED_BATCH
            ),
            "the processor alone": lambda: lane.call(processor_runs, plain, requests),
        }
        taken: dict[str, list[tuple[float, int]]] = {name: [] for name in systems}
        for _ in range(rounds + 1):
            for name, run in systems.items():
                taken[name].append(_timed(run, plain.model.device))
    return [_measured(name, times[1:], tokens, work, rate) for name, times in taken.items()]


def _timed(run: Callable[[], Any], device: torch.device) -> tuple[float, int]:
    before = _reset_peak(device)
    started = time.perf_counter()
    kept = run()
    _finish(device)
    seconds = time.perf_counter() - started
    del kept
    return seconds, (torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0)


def _reset_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _measured(name: str, times: Sequence[tuple[float, int]], tokens: int, work: int, rate: float) -> Measured:
    seconds = statistics.median(each for each, _ in times)
    share = work / seconds / rate if name != "the processor alone" else 0.0
    return Measured(name, seconds, tokens / seconds, share, max(peak for _, peak in times))


def table(rows: Sequence[Measured]) -> str:
    """The rows for people."""
    lines = [f"{'':28} {'seconds':>9} {'tokens/s':>10} {'of the rate':>13} {'peak MiB':>9}"]
    for row in rows:
        peak = f"{row.peak_bytes / 2**20:9.0f}" if row.peak_bytes else f"{'-':>9}"
        lines.append(f"{row.system:28} {row.seconds:9.2f} {row.tokens_per_second:10.0f} {row.flops_share:13.1%} {peak}")
    return "\n".join(lines)


def main() -> None:
    """Run the comparison that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="smolvlm-256m")
    parser.add_argument("--model", type=Path, help="a checkpoint's folder instead of a shape")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or shapes.make(arguments.shape, Path(scratch))
        requests = workload(arguments.requests)
        rows = compare(folder, arguments.device, arguments.dtype, requests, arguments.rounds)
    settings = {key: str(value) for key, value in vars(arguments).items() if value is not None}
    print(table(rows))
    print(json.dumps({"settings": settings, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
