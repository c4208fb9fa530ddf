"""Everything that needs CUDA, as one table in under six minutes; without CUDA it says so and is content.

    python benchmarks/gpu_check.py                          all rows; exit code 1 if an exactness row fails
    python benchmarks/gpu_check.py --only "exact fp32"      rows whose name begins so; may be repeated
    python benchmarks/gpu_check.py --device cpu --quick     the same code on a CPU, to check the check

It takes the environment that it finds: no network, no install, checkpoints made on the spot. Rows run in a worker
process that is replaced when it crashes, hangs or has lost its CUDA context, so that one bad row costs one row.

Nothing is compiled: a step has another number of rows every time, so torch.compile would spend tens of seconds on graphs
for any shape, and what it could gain over cuBLAS and one attention call has to be measured on a GPU before it is offered.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
os.environ["HF_HUB_OFFLINE"] = "1"

NEEDED = (
    "torch",
    "torchvision",
    "transformers",
    "timm",
    "PIL",
    "safetensors",
    "asyncio_throttle",
    "jinja2",
    "num2words",
)
BUDGET_S = 330.0  # after which no further row starts
ROW_LIMIT_S = 75.0
START_LIMIT_S = 120.0  # imports on a cold disk


@dataclass(frozen=True)
class Settings:
    """What every row needs to know.

    Attributes:
        device: torch device.
        quick: fewer families, layers and tokens, for a CPU.
        scratch: folder for checkpoints that rows share.
    """

    device: str
    quick: bool
    scratch: Path


@dataclass(frozen=True)
class Outcome:
    """How a row went; `passed` is None where there is nothing to pass."""

    row: str
    passed: bool | None
    figures: str
    seconds: float = 0.0
    trace: str = ""


class OutOfBoundsError(Exception):
    """An exactness row ran and found too large a difference; the message holds the figures."""


Check = Callable[[], str]


# The rows. Each returns its figures, or raises.


def all_checks(settings: Settings) -> dict[str, Check]:
    """Row name -> what runs; exactness rows have names that begin with "exact"."""
    import checkpoints
    import shapes
    import varlen_step

    packed, generic = list(checkpoints.FAMILIES), list(checkpoints.GENERIC)
    if settings.quick:
        packed, generic = packed[::6], generic[:1]
    checks: dict[str, Check] = {"device": partial(device_facts, settings)}
    kinds = ["windowed", "reused"] if settings.quick else list(varlen_step.KINDS)
    checks |= {f"exact varlen {name}": partial(attention_step, settings, name) for name in kinds}
    checks |= {f"exact fp32 {name}": partial(exact_family, settings, name, "fp32") for name in packed}
    checks |= {f"speed {name}": partial(speed, settings, name) for name in shapes.SHAPES}
    checks |= {f"exact bf16 {name}": partial(exact_family, settings, name, "bf16") for name in packed}
    checks |= {f"exact fp32 generic {name}": partial(exact_family, settings, name, "fp32") for name in generic}
    for dtype in ("fp32", "bf16"):
        checks |= {f"exact {dtype} {name}": partial(exact_shape, settings, name, dtype) for name in shapes.SHAPES}
    checks |= {f"exact lanes {name}": partial(exact_lanes, settings, name) for name in shapes.SHAPES}
    checks |= {f"lanes {name}": partial(lanes, settings, name) for name in shapes.SHAPES}
    return checks


def device_facts(settings: Settings) -> str:
    """What runs here, and how fast it multiplies."""
    import torch
    import transformers
    from throughput import matmul_rate

    device = torch.device(settings.device)
    rate = f"bf16 matmul {matmul_rate(device, 512 if settings.quick else None) / 1e12:.3g} TFLOP/s"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if device.type != "cuda":
        return f"{device.type}, {torch.get_num_threads()} threads, {rate}, {versions}"
    facts = torch.cuda.get_device_properties(device)
    return f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory / 2**30:.0f} GiB, {rate}, {versions}"


def attention_step(settings: Settings, kind: str) -> str:
    """Attention of a packed step in one call, beside SDPA for each sequence: no less exact, and how much faster."""
    import torch
    import varlen_step

    step, rounds = varlen_step.KINDS[kind], 20
    if settings.quick:
        step, rounds = replace(step, lengths=tuple((rows // 8, done // 8) for rows, done in step.lengths[:2])), 1
    with torch.no_grad():
        figures = varlen_step.measure(step, torch.device(settings.device), torch.bfloat16, rounds)
    if not figures.errors[0] <= 1.25 * figures.errors[1]:
        raise OutOfBoundsError(str(figures))
    return str(figures)


def exact_family(settings: Settings, family: str, dtype: str) -> str:
    """A tiny checkpoint: alone, packed and shuffled against transformers; caches decoded together as alone."""
    import checkpoints

    return _exact(settings, checkpoints.cached(family), dtype, new_tokens=2 if settings.quick else 8)


def exact_shape(settings: Settings, shape: str, dtype: str) -> str:
    """The same on a checkpoint of real size."""
    return _exact(settings, _shape(settings, shape), dtype, new_tokens=2 if settings.quick else 8)


def _exact(settings: Settings, folder: Path, dtype: str, new_tokens: int) -> str:
    from mmprefill.models import load
    from mmprefill.prefiller import Prefiller
    from mmprefill.verify import verify

    fp32 = None if dtype == "fp32" else load(folder, device=settings.device, dtype="fp32")
    with Prefiller.from_pretrained(folder, device=settings.device, dtype=dtype) as prefiller:
        report = verify(prefiller, fp32=fp32, new_tokens=new_tokens, threads=(1,))
        further = _decoded_and_reused(prefiller, new_tokens, report.rows[0].limit_logits) if fp32 is None else None
    worst = max(report.rows, key=lambda row: (not row.passed, row.logits.max / (row.limit_logits or 1)))
    greedy = f"{sum(row.greedy for row in report.rows)}/{sum(row.requests for row in report.rows)}"
    figures = (
        f"{worst.path}: dlogit {worst.logits.max:.1e} (limit {worst.limit_logits:.1e}), "
        f"dKV {worst.kv.max:.1e} ({worst.limit_kv:.1e}), greedy {greedy}, {further.figures if further else ''}{report.route}"
    )
    if not report.passed or (further and not further.passed):
        raise OutOfBoundsError(figures)
    return figures


@dataclass(frozen=True)
class _Further:
    passed: bool
    figures: str


def _decoded_and_reused(prefiller: Any, new_tokens: int, limit: float) -> _Further:
    """Caches decoded together give the tokens of each alone; requests that come again, from kept KV, the same logits."""
    from mmprefill.results import unwrap
    from mmprefill.verify import pictures, sample_requests

    requests = sample_requests(prefiller, pictures(6, sizes=((64, 64),)))  # one size: some processors stack them
    first = [unwrap(each) for each in prefiller.prefill_many(requests)]
    again = [unwrap(each) for each in prefiller.prefill_many(requests)]
    worst = max(
        float((a.next_token_logits - b.next_token_logits).abs().max()) for a, b in zip(first, again, strict=True)
    )
    alone = [each.generate(new_tokens).token_ids for each in again]
    together = [each.token_ids for each in prefiller.generate_many(requests, new_tokens)]
    same = sum(a == b for a, b in zip(alone, together, strict=True))
    figures = f"decoded together {same}/{len(alone)}, reused: dlogit {worst:.1e}, "
    return _Further(worst <= limit and same == len(alone), figures)


def speed(settings: Settings, shape: str) -> str:
    """Our pipeline beside transformers, one by one and padded, in bf16."""
    from throughput import compare, workload

    count, rounds = (3, 1) if settings.quick else (48, 3)
    rows = compare(_shape(settings, shape), settings.device, "bf16", workload(count), rounds)
    return "; ".join(
        f"{row.system} {row.tokens_per_second:.0f} tok/s"
        + (f" ({row.flops_share:.1%} of bf16 rate, +{row.peak_bytes / 2**20:.0f} MiB)" if row.flops_share else "")
        for row in rows
    )


def exact_lanes(settings: Settings, shape: str) -> str:
    """Three rounds on several streams give in fp32 what one stream gives: no tensor is read before it is written."""
    with _BothLanes(settings, shape, "fp32") as (several, one):
        expected = one.logits()
        worst = scale = 0.0
        for _ in range(1 if settings.quick else 3):
            for ours, theirs in zip(several.logits(), expected, strict=True):
                worst = max(worst, float((ours - theirs).abs().max()))
                scale = max(scale, float(theirs.abs().max()))
    figures = f"several streams against one: dlogit {worst:.1e} (limit {1e-3 * scale:.1e})"
    if not worst <= 1e-3 * scale:
        raise OutOfBoundsError(figures)
    return figures


def lanes(settings: Settings, shape: str) -> str:
    """What overlap gains: the same requests on several streams and on one, in turns."""
    seconds: dict[str, list[float]] = {"several": [], "one": []}
    with _BothLanes(settings, shape, "bf16") as (several, one):
        for _ in range(1 if settings.quick else 4):
            for name, side in (("several", several), ("one", one)):
                started = time.perf_counter()
                side.logits()
                seconds[name].append(time.perf_counter() - started)
    best = {name: min(times) for name, times in seconds.items()}
    return f"several streams {best['several']:.3f} s, one {best['one']:.3f} s: x{best['one'] / best['several']:.2f}"


@dataclass(frozen=True)
class _Side:
    prefiller: Any
    requests: list[Any]

    def logits(self) -> list[Any]:
        from mmprefill.results import unwrap

        return [unwrap(each).next_token_logits.cpu() for each in self.prefiller.prefill_many(self.requests)]


class _BothLanes:
    """Context of the same model and requests under an engine with a lane per stage, and one with a single lane."""

    def __init__(self, settings: Settings, shape: str, dtype: str) -> None:
        from throughput import NOTHING_KEPT, workload

        self._source = partial(_shape, settings, shape)
        self._options = {"device": settings.device, "dtype": dtype, "config": NOTHING_KEPT}
        self._requests = workload(3 if settings.quick else 32)

    def __enter__(self) -> tuple[_Side, _Side]:
        from mmprefill.prefiller import Prefiller
        from mmprefill.streams import Lane, Lanes

        def single(device: Any) -> Lanes:
            lane = Lane("only", device)
            return Lanes(lane, lane, lane)

        folder = self._source()
        self._several = Prefiller.from_pretrained(folder, **self._options)
        with mock.patch.object(Lanes, "on", single):
            self._one = Prefiller.from_pretrained(folder, **self._options)
        sides = _Side(self._several, self._requests), _Side(self._one, self._requests)
        for side in sides:
            side.logits()  # warms up
        return sides

    def __exit__(self, *_: object) -> None:
        self._several.close()
        self._one.close()


def _shape(settings: Settings, name: str) -> Path:
    """The folder of a shape's checkpoint, made by the first row that needs it."""
    import shapes

    folder = settings.scratch / name
    if not folder.exists():
        draft = Path(tempfile.mkdtemp(dir=settings.scratch))
        shapes.make(name, draft, layers=2 if settings.quick else None)
        draft.rename(folder)
    return folder


# The worker.


def work(pipe: Connection, settings: Settings) -> None:
    """Send the names of all rows, then answer each name received with its Outcome."""
    try:
        checks = _prepare(settings)
    except Exception:
        pipe.send(traceback.format_exc())
        return
    pipe.send(list(checks))
    while True:
        name = pipe.recv()
        outcome = _run(name, checks[name])
        usable = _tidy(settings.device)
        pipe.send((outcome, usable))
        if not usable:
            return


def _prepare(settings: Settings) -> dict[str, Check]:
    import torch
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return all_checks(settings)


def _run(name: str, check: Check) -> Outcome:
    started = time.perf_counter()
    try:
        passed: bool | None = True if name.startswith("exact") else None
        figures, trace = check(), ""
    except OutOfBoundsError as error:
        passed, figures, trace = False, str(error), ""
    except Exception as error:
        passed, trace = False, traceback.format_exc()
        figures = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    return Outcome(name, passed, figures, time.perf_counter() - started, trace)


def _tidy(device: str) -> bool:
    """Free what the row left; False when the CUDA context is lost and nothing can run in this process any more."""
    import torch

    gc.collect()
    if torch.device(device).type == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


# The parent: it never touches the device.


class WorkerError(Exception):
    """A worker did not start, died or took too long."""


class Worker:
    """A process that runs rows one after another."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()
        names = self._receive(START_LIMIT_S)
        if isinstance(names, str):
            raise WorkerError(names)
        self.rows: list[str] = names
        self.usable = True

    def run(self, row: str, limit: float) -> Outcome:
        """Run one row.

        Raises:
            WorkerError: if the worker died or took longer than `limit` seconds; it is of no use any more.
        """
        try:
            self._pipe.send(row)
        except OSError as error:
            raise WorkerError("the worker is gone") from error
        outcome: Outcome
        outcome, self.usable = self._receive(limit)
        return outcome

    def _receive(self, limit: float) -> Any:
        if not self._pipe.poll(limit):
            raise WorkerError(f"no answer within {limit:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError as error:
            self._process.join(5)
            raise WorkerError(f"the worker died, exit code {self._process.exitcode}") from error

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def run_rows(settings: Settings, only: list[str], budget: float) -> Iterator[Outcome]:
    """Run the rows that `only` chooses, one after another."""
    started = time.perf_counter()
    limit = ROW_LIMIT_S if settings.device.startswith("cuda") else budget
    worker = Worker(settings)
    try:
        for row in [row for row in worker.rows if not only or any(row.startswith(prefix) for prefix in only)]:
            left = budget - (time.perf_counter() - started)
            if left < 5:
                yield Outcome(row, False, "not run: out of time")
                continue
            began = time.perf_counter()
            try:
                if not worker.usable:
                    worker.stop()
                    worker = Worker(settings)
                yield worker.run(row, min(limit, left))
            except WorkerError as error:
                worker.usable = False
                yield Outcome(row, False, f"{error}".splitlines()[-1], time.perf_counter() - began)
    finally:
        worker.stop()


def show(outcome: Outcome) -> None:
    """Print one line of the table, and where an unforeseen failure came from."""
    verdict = {True: "ok", False: "FAIL", None: "-"}[outcome.passed]
    print(f"{outcome.row:32} {verdict:5} {outcome.seconds:6.1f}  {outcome.figures}", flush=True)
    if outcome.trace:
        print(outcome.trace, file=sys.stderr, flush=True)


def reason_to_skip(device: str) -> str | None:
    """Why nothing can run, None if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed here"
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device here"
    return None


def main() -> int:
    """Run the rows that the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", default=[], metavar="PREFIX")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS")
    arguments = parser.parse_args()
    if reason := reason_to_skip(arguments.device):
        print(f"gpu-check: nothing to do: {reason}")
        return 0
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"gpu-check: not importable here, rows that need it will fail: {', '.join(missing)}")
    outcomes = []
    print(f"{'row':32} {'':5} {'s':>6}  figures")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for outcome in run_rows(
                Settings(arguments.device, arguments.quick, Path(scratch)), arguments.only, arguments.budget
            ):
                outcomes.append(outcome)
                show(outcome)
        except WorkerError as error:
            print(f"gpu-check: no row could run:\n{error}")
            return 1
    failed = [outcome.row for outcome in outcomes if outcome.passed is False]
    print(f"gpu-check: {len(outcomes)} rows, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    print(json.dumps([{**asdict(outcome), "trace": ""} for outcome in outcomes]))
    return 1 if any(row.startswith("exact") for row in failed) else 0


if __name__ == "__main__":
    sys.exit(main())
