"""`mmprefill bench prefill`: throughput beside other systems on the same checkpoint and the same requests.

Each system runs in a process of its own and repeats the whole workload; the repeats of the systems alternate, so that a
slow minute of the machine hits all of them. A system is timed from decoded pictures and message text to next-token
logits and KV; decoding picture files, loading and one warm-up are outside the clock, resizing is inside.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mmprefill.errors import MMPrefillError

PEERS = ("vllm", "openvino")
VARIANTS = {"a": "different pictures", "b": "4 pictures x 8 questions", "c": "text only"}
SPLITTING = "do_image_splitting"
RATE = "rate"  # the system that is no model: how fast the machine multiplies matrices
REQUESTS = 32  # of a repeat, unless others are asked for


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
        gflops: the machine's matrix-multiply rate beside the repeats, median: best of plain and prepacked oneDNN, of a
            large square and of the model's own shapes.
        seconds: of each repeat.
        fraction: arithmetic of plain forwards (linear layers and attention, counted by torch) per second, over the rate
            just before and after a repeat; median of the repeats. Work that was not done because it was shared counts
            as done. None where transformers, which counts, is not among the systems.
        stages: mean seconds of a request alone by stage (mmprefill only).
        kinds: shares of the time of requests alone by kind of operation (mmprefill only).
        split: whether every picture was cut into tiles, whatever the checkpoint's own setting.
        tokens: prompt tokens of one repeat, as the system counts them.
    """

    system: str
    variant: str
    tokens_per_s: float
    requests_per_s: float
    first_token_s: float
    peak_rss_mb: int
    gflops: float
    seconds: tuple[float, ...]
    fraction: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    kinds: Mapping[str, float] = field(default_factory=dict)
    split: bool = False
    tokens: int = 0

    @property
    def workload(self) -> str:
        """The variant in words."""
        return f"{VARIANTS[self.variant]}, split" if self.split and self.variant != "c" else VARIANTS[self.variant]


@dataclass(frozen=True)
class Peer:
    """Another system in an environment of its own.

    Attributes:
        name: "vllm" or "openvino".
        python: interpreter of its environment.
        model: folder in the form that it reads; None is the checkpoint itself.
    """

    name: str
    python: str
    model: str | None = None

    @classmethod
    def parse(cls, text: str) -> Peer:
        """NAME=PYTHON or NAME=PYTHON@FOLDER.

        Raises:
            ValueError: for anything else, and for an interpreter that is not there.
        """
        name, _, rest = text.partition("=")
        python, _, folder = rest.partition("@")
        if name not in PEERS or not python:
            raise ValueError(
                f"a peer is NAME=PYTHON or NAME=PYTHON@FOLDER with NAME of {', '.join(PEERS)}, got {text!r}"
            )
        if not Path(python).is_file():
            raise ValueError(f"peer {name}: there is no interpreter {python!r}")
        return cls(name, python, folder or None)


def tiles(model: str) -> dict[str, bool]:
    """The setting by which the checkpoint's processor cuts pictures into tiles.

    Raises:
        ValueError: if it has none.
    """
    from transformers import AutoProcessor

    processor = getattr(AutoProcessor.from_pretrained(model), "image_processor", None)
    if not hasattr(processor, SPLITTING):
        raise ValueError(
            f"--split: the image processor of {model!r} ({type(processor).__name__}) has no setting {SPLITTING!r}; "
            "SmolVLM's and Idefics3's have"
        )
    return {SPLITTING: True}


def compare(
    model: str,
    workload: Path,
    *,
    systems: Seq[str] = ("mmprefill", "transformers"),
    variants: Seq[str] = ("a", "b", "c"),
    requests: int = REQUESTS,
    repeats: int = 3,
    dtype: str = "bf16",
    threads: int = 2,
    against: Seq[Peer] = (),
    split: bool = False,
) -> Iterator[Measured]:
    """Run the systems and peers side by side; yields one record per variant and system.

    With `split` every system cuts pictures into tiles; else as the checkpoint's processor is set.

    Raises:
        ValueError: to split, for a checkpoint whose processor cannot.
    """
    settings = json.dumps(tiles(model) if split else {})
    here = [sys.executable, "-m", "mmprefill.bench_worker"]
    starts = [(name, [*here, name, model]) for name in systems]
    script = Path(__file__).with_name("bench_peer.py").read_text()  # as text: beside the file lies our own types.py
    starts += [(each.name, [each.python, "-c", script, each.name, each.model or model]) for each in against]
    for variant in variants:
        rest = [str(each) for each in (workload, variant, requests, dtype, threads, settings)]
        with ExitStack() as stack:
            workers = {name: stack.enter_context(_worker([*start, *rest], threads)) for name, start in starts}
            machine = stack.enter_context(_worker([*here, RATE, model, *rest], threads))
            rate = machine.rate()
            for number in range(repeats):
                turns = [*workers.values()]
                for worker in turns[number % len(turns) :] + turns[: number % len(turns)]:  # nobody is always first
                    worker.run()
                    before, rate = rate, machine.rate()
                    worker.rates.append((before + rate) / 2)
            measured = [(worker, worker.measured(name, variant)) for name, worker in workers.items()]
            work = next((worker.work for worker in workers.values() if worker.work), None)
            for worker, row in measured:
                yield replace(row, fraction=worker.fraction(work) if work else None, split=split)


class _Worker:
    """One system in a process, run on demand."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._repeats: list[Mapping[str, Any]] = []
        self.rates: list[float] = []  # the machine's beside each repeat, GFLOP/s
        self.work = 0.0  # arithmetic in one repeat, where the system can count it
        self._ask()  # loaded and warm

    def run(self) -> None:
        """One repeat of the workload."""
        self._repeats.append(self._ask("run"))

    def rate(self) -> float:
        """The machine's matrix-multiply rate, GFLOP/s, of the process that measures it."""
        return float(self._ask("run")["gflops"])

    def fraction(self, work: float) -> float:
        """Of the machine's rate, doing `work` operations a repeat."""
        repeats = zip(self._repeats, self.rates, strict=True)
        reached = [work / float(each["seconds"]) / (rate * 1e9) for each, rate in repeats]
        return round(statistics.median(reached), 3)

    def measured(self, system: str, variant: str) -> Measured:
        """Medians of the repeats, and what only the process itself knows."""
        last = self._ask("quit")
        seconds = [repeat["seconds"] for repeat in self._repeats]
        tokens, requests = self._repeats[0]["tokens"], self._repeats[0]["requests"]
        self.work = last.get("work", 0.0)
        middle = statistics.median(seconds)
        return Measured(
            system, variant, tokens_per_s=round(tokens / middle, 1), requests_per_s=round(requests / middle, 3),
            first_token_s=round(last["first_token_s"], 4), peak_rss_mb=int(last["peak_rss_mb"]),
            gflops=round(statistics.median(self.rates)), seconds=tuple(round(s, 3) for s in seconds),
            stages=last.get("stages", {}), kinds=last.get("kinds", {}), tokens=tokens,
        )  # fmt: skip

    def _ask(self, order: str = "") -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if order:
            print(order, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise MMPrefillError(f"a benchmark process died with exit code {self._process.wait()}; what it said is above")


@contextmanager
def _worker(command: Seq[str], threads: int) -> Iterator[_Worker]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603
    with process:  # closes its pipes and waits for it
        try:
            yield _Worker(process)
        finally:
            process.kill()


def as_lines(rows: Seq[Measured]) -> str:
    """Markdown tables (ratios to transformers; where the time of a request alone goes), and one line of JSON."""
    base = {row.variant: row for row in rows if row.system == "transformers"}
    lines = [
        "| workload | system | prompt tokens/s | x transformers | of the rate | requests/s | first token alone, ms "
        "| peak RSS, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"{row.requests_per_s / base[row.variant].requests_per_s:.2f}" if row.variant in base else "-"
        share = "-" if row.fraction is None else f"{row.fraction:.0%}"
        lines.append(
            f"| {row.workload} | {row.system} | {row.tokens_per_s:.0f} | {ratio} | {share} "
            f"| {row.requests_per_s:.2f} | {row.first_token_s * 1000:.0f} | {row.peak_rss_mb} |"
        )
    for variant in dict.fromkeys(row.variant for row in rows):
        counted = {row.system: row.tokens for row in rows if row.variant == variant}
        if len({*counted.values()}) > 1:
            lines += ["", f"Prompt tokens of {variant!r} are counted differently: {counted}. Compare requests/s."]
    for row in rows:
        if row.stages:
            stages = ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in row.stages.items())
            kinds = ", ".join(f"{name} {share:.0%}" for name, share in row.kinds.items())
            lines += ["", f"A request of {row.workload!r} alone: {stages}; {kinds}."]
    return "\n".join([*lines, "", json.dumps([asdict(row) for row in rows])])
