"""`mmprefill bench prefill`: throughput beside other systems on the same checkpoint and the same requests.

Each system runs in a process of its own and repeats the whole workload; the repeats of the systems alternate, so that a
slow minute of the machine hits all of them. A system is timed from decoded pictures and message text to next-token
logits and KV; decoding picture files, loading and one warm-up are outside the clock, resizing is inside.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

VARIANTS = {"a": "different pictures", "b": "4 pictures x 8 questions", "c": "text only"}


@dataclass(frozen=True)
class Measured:
    """What one system reached on one variant.

    Attributes:
        system: its name.
        variant: "a", "b" or "c", see `VARIANTS`.
        tokens_per_s: prompt tokens per second, median of the repeats.
        requests_per_s: requests per second, median of the repeats.
        first_token_s: median seconds of one request alone.
        peak_rss_mb: resident memory of its process, at its highest.
        gflops: bf16 matrix-multiply rate seen in the same process, best of plain and prepacked oneDNN.
        seconds: of each repeat.
    """

    system: str
    variant: str
    tokens_per_s: float
    requests_per_s: float
    first_token_s: float
    peak_rss_mb: int
    gflops: float
    seconds: tuple[float, ...]


def make_workload(folder: Path, pictures: Seq[Path], requests: int = 32, seed: int = 7) -> Path:
    """Write pictures and `workload.json`, in the form that ../shared/bench/peers.py reads.

    Variant a: different pictures of 224-800 x 224-600 pixels; b: 4 pictures x 8 questions, shuffled; c: text only.
    """
    draw = random.Random(seed)  # noqa: S311 - a fixture, not a secret
    folder.mkdir(parents=True, exist_ok=True)
    sources = [Image.open(path).convert("RGB") for path in pictures]
    unique = [_crop(draw, sources[i % len(sources)], folder / f"u{i:02d}.png") for i in range(requests)]
    sizes = [(224, 224), (448, 336), (640, 480), (800, 600)]
    four = [_resized(sources[i % len(sources)], size, folder / f"f{i}.png") for i, size in enumerate(sizes)]
    texts = [_text(draw) for _ in range(requests)]
    order = [i % 4 for i in range(requests)]
    draw.shuffle(order)
    rows = {
        "a": [{"image": image, "text": text} for image, text in zip(unique, texts, strict=True)],
        "b": [{"image": four[i], "text": text} for i, text in zip(order, texts, strict=True)],
        "c": [{"image": None, "text": text} for text in texts],
    }
    (folder / "workload.json").write_text(json.dumps(rows))
    return folder


def _crop(draw: random.Random, image: Image.Image, path: Path) -> str:
    width, height = draw.randint(224, 800), draw.randint(224, 600)
    scale = min(image.width / width, image.height / height) * draw.uniform(0.6, 1)
    crop_width, crop_height = int(width * scale), int(height * scale)
    left, top = draw.randint(0, image.width - crop_width), draw.randint(0, image.height - crop_height)
    image.crop((left, top, left + crop_width, top + crop_height)).resize((width, height)).save(path)
    return path.name


def _resized(image: Image.Image, size: tuple[int, int], path: Path) -> str:
    image.resize(size).save(path)
    return path.name


def _text(draw: random.Random) -> str:
    """10-230 words of the standard library's source: 10-400 tokens, as questions and documents mix."""
    words = Path(os.__file__).read_text(encoding="utf-8", errors="ignore").split()
    count, start = draw.randint(6, 110), draw.randint(0, len(words) - 300)
    return " ".join(words[start : start + count])


def compare(
    model: str,
    workload: Path,
    *,
    systems: Seq[str] = ("mmprefill", "transformers"),
    variants: Seq[str] = ("a", "b", "c"),
    requests: int = 32,
    repeats: int = 3,
    dtype: str = "bf16",
    threads: int = 2,
) -> Iterator[Measured]:
    """Run the systems side by side; yields one record per variant and system."""
    for variant in variants:
        with ExitStack() as stack:
            workers = {
                name: stack.enter_context(_worker(name, model, workload, variant, requests, dtype, threads))
                for name in systems
            }
            for _ in range(repeats):
                for worker in workers.values():
                    worker.run()
            for name, worker in workers.items():
                yield worker.measured(name, variant)


class _Worker:
    """One system in a process, run on demand."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._repeats: list[Mapping[str, float]] = []
        self._ask()  # loaded and warm

    def run(self) -> None:
        """One repeat of the workload."""
        self._repeats.append(self._ask("run"))

    def measured(self, system: str, variant: str) -> Measured:
        """Medians of the repeats, and what only the process itself knows."""
        last = self._ask("quit")
        seconds = [repeat["seconds"] for repeat in self._repeats]
        tokens, requests = self._repeats[0]["tokens"], self._repeats[0]["requests"]
        middle = statistics.median(seconds)
        return Measured(
            system, variant, round(tokens / middle, 1), round(requests / middle, 3), round(last["first_token_s"], 4),
            int(last["peak_rss_mb"]), round(last["gflops"]), tuple(round(s, 3) for s in seconds),
        )  # fmt: skip

    def _ask(self, order: str = "") -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if order:
            print(order, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise RuntimeError(f"a benchmark process died with exit code {self._process.wait()}")


@contextmanager
def _worker(system: str, *arguments: Any) -> Iterator[_Worker]:
    threads = str(arguments[-1])
    command = [sys.executable, "-m", "mmprefill.bench_worker", system, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603
    try:
        yield _Worker(process)
    finally:
        process.kill()
        process.wait()


def as_lines(rows: Seq[Measured]) -> str:
    """A Markdown table with ratios to transformers, and one line of JSON."""
    base = {row.variant: row for row in rows if row.system == "transformers"}
    lines = [
        "| workload | system | prompt tokens/s | x transformers | requests/s | first token alone, ms | peak RSS, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"{row.tokens_per_s / base[row.variant].tokens_per_s:.2f}" if row.variant in base else "-"
        lines.append(
            f"| {VARIANTS[row.variant]} | {row.system} | {row.tokens_per_s:.0f} | {ratio} | {row.requests_per_s:.2f} "
            f"| {row.first_token_s * 1000:.0f} | {row.peak_rss_mb} |"
        )
    return "\n".join([*lines, "", json.dumps([asdict(row) for row in rows])])
