"""Measures what steps cost on this machine with this model, in seconds, once: the result is kept in the user's cache.

A few decoder steps of growing size, a few tower calls and a request through intake; seconds on a model of a few hundred
million parameters. Runs on the thread of the lane that owns the model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import nn

from mmprefill.encoders import vision
from mmprefill.encoders.families import Family
from mmprefill.encoders.text import Intake
from mmprefill.errors import RequestError
from mmprefill.files import cache_folder
from mmprefill.pipeline import generic, head, merge
from mmprefill.pipeline.costs import Costs, Curve
from mmprefill.pipeline.kv_cache import LayerPlan, SequenceKV, StepCache
from mmprefill.pipeline.prefill import _pieces, forward, text_arguments
from mmprefill.types import Request

VERSION = 4  # of what is measured and how; a stored result of another version is measured again
PIECE = 256  # tokens of one sequence in a measured step
SIZES = (16, 64, 256, 512, 1024, 2048, 4096, 8192)  # tokens of the measured steps
PAST = 4096  # tokens that are stored before another measured step
SIDES = (224, 448, 896)  # pixels of the measured pictures
ENOUGH = 1.0  # seconds for repeats of one measurement
STAT = Path("/proc/stat")
CROWD = 0.15  # of the processors' time: where others take more, what is measured is not kept

Say = Callable[[str], None]  # told what is measured next


@dataclass(frozen=True)
class Bench:
    """What is measured: a loaded model, its layers (None: the generic path) and its intake."""

    family: Family
    plan: LayerPlan | None
    intake: Intake


def costs_of(bench: Bench, *, budget: float = 10.0, fresh: bool = False, say: Say = lambda _: None) -> Costs:
    """The costs on this machine: from the cache, else measured, and stored unless the machine was busy.

    Args:
        bench: what to measure; on the thread of its lane.
        budget: seconds that measuring may take, about.
        fresh: measure again, whatever the cache says.
        say: told what is measured next.
    """
    key = key_of(bench.family)
    path = cache_path(key)
    found = None if fresh else read(path, key)
    if found is None:
        started, before = time.perf_counter(), used_by_others()
        found = measure(bench, budget, say)
        taken = (used_by_others() - before) / (os.cpu_count() or 1) / (time.perf_counter() - started)
        if taken > CROWD and bench.family.device.type != "cuda":
            say(f"not keeping this: others took {taken:.0%} of the processors meanwhile")
        else:
            write(path, key, found)
    return found


def used_by_others() -> float:
    """Processor seconds that other processes of this machine, or its neighbours, have used so far; 0 where nobody says."""
    try:
        fields = STAT.read_text(encoding="ascii").split(maxsplit=9)[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _waiting, irq, softirq, stolen = map(int, fields)
    ours = os.times()
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK") - ours.user - ours.system


def kept(family: Family) -> Costs | None:
    """The costs that an earlier calibration of this model on this machine left, if any."""
    key = key_of(family)
    return read(cache_path(key), key)


# The cache.


def key_of(family: Family) -> dict[str, Any]:
    """What the costs depend on."""
    shapes = hashlib.blake2b(digest_size=16)
    for name, weight in family.model.named_parameters():
        shapes.update(f"{name}{tuple(weight.shape)}{weight.dtype};".encode())
    cuda = family.device.type == "cuda"
    return {
        "version": VERSION,
        "device": torch.cuda.get_device_name(family.device) if cuda else f"{_cpu()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": f"{family.name} {shapes.hexdigest()}",
        "dtype": str(family.dtype),
        "linear": sorted({type(each).__name__ for each in family.decoder.modules() if isinstance(each, nn.Linear)}),
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} x{os.cpu_count()}"
    return f"{platform.processor() or platform.machine()} x{os.cpu_count()}"


def cache_path(key: Mapping[str, Any]) -> Path:
    """Where the costs for a key are kept: under XDG_CACHE_HOME, else ~/.cache."""
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=12).hexdigest()
    return cache_folder() / f"costs-{digest}.json"


def read(path: Path, key: Mapping[str, Any]) -> Costs | None:
    """Stored costs; None if there are none, or a file that is damaged or belongs to another key."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return Costs.from_dict(record["costs"]) if record["key"] == key else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write(path: Path, key: Mapping[str, Any], costs: Costs) -> None:
    """Store costs in one move; a cache that cannot be written is no error."""
    draft = ""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # compiled kernels lie there too
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".costs-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"key": key, "costs": costs.as_dict()}, file)
        Path(draft).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(draft).unlink()


# The measurements.


@torch.no_grad()
def measure(bench: Bench, budget: float = 10.0, say: Say = lambda _: None) -> Costs:
    """Run the measurements, in about `budget` seconds."""
    say("measuring decoder steps")
    steps = dict(_steps(bench, budget * 0.5))
    pairs = _attention(bench, steps)
    say("measuring intake")
    text = _intake(bench, Request(prompt=_words(100)))
    picture = _intake(bench, _pictured(SIDES[1])) - text if _takes_pictures(bench) else 0.0
    say("measuring the tower")
    return Costs(
        step=Curve.rising((n, max(s - pairs * _pairs(n), 0.0)) for n, s in steps.items()),
        tower=_tower(bench, budget * 0.3),
        attention=pairs,
        stored=_stored(bench, steps, pairs),
        request=_request(bench),
        intake_text=text,
        intake_picture=max(picture, 0.0),
        intake_share=0.0 if bench.family.device.type == "cuda" else 1 / torch.get_num_threads(),
    )


def _intake(bench: Bench, request: Request) -> float:
    return _seconds(lambda: bench.intake.prepare(request))


def _steps(bench: Bench, budget: float) -> Iterator[tuple[int, float]]:
    """Seconds of steps of growing size while the next one fits in what is left of the budget; three at least."""
    ends, last = time.perf_counter() + budget, 0.0
    for count, size in enumerate(SIZES):
        if size > max(bench.intake.context, SIZES[1]) or (count >= 3 and time.perf_counter() + 2 * last > ends):
            return
        last = _seconds(step_of(bench, [min(PIECE, size)] * max(1, size // PIECE)))
        yield size, last


def _pairs(tokens: int) -> float:
    pieces, length = max(1, tokens // PIECE), min(PIECE, tokens)
    return pieces * length * (length + 1) / 2


def _attention(bench: Bench, steps: Mapping[int, float]) -> float:
    """Seconds per pair of query and key: one long sequence against as many tokens in short ones."""
    size = max((n for n in steps if PIECE < n <= min(1024, bench.intake.context)), default=0)
    if not size:
        return 0.0
    return max(_seconds(step_of(bench, [size])) - steps[size], 0.0) / (size * (size + 1) / 2 - _pairs(size))


def _stored(bench: Bench, steps: Mapping[int, float], pairs: float) -> float:
    """Seconds per stored key: a few tokens behind a long prefix against as many alone."""
    plan, few, past = bench.plan, SIZES[0], min(PAST, bench.intake.context - SIZES[0])
    if plan is None or past < PIECE:
        return 0.0
    kv, ids = SequenceKV(past + few), plain_ids(bench.family, few)
    arguments = text_arguments(bench.family, ids)
    embeds, positions = arguments.pop("inputs_embeds"), torch.arange(few, device=bench.family.device)[None]

    def run() -> None:
        forward(bench.family, StepCache(_pieces([(kv, few, {})]), plan), embeds, positions, arguments)

    run()  # makes the buffers
    for pair in kv.layers.values():
        for buffer in pair:
            buffer.zero_()
    kv.length = past
    return max(_seconds(run) - steps[few] - pairs * few * past, 0.0) / past


def step_of(bench: Bench, lengths: list[int], kvs: list[SequenceKV] | None = None) -> Callable[[], Any]:
    """A decoder step of fresh text sequences of these lengths, stored in `kvs`, or in buffers that each call makes."""
    family, plan = bench.family, bench.plan
    ids = plain_ids(family, sum(lengths))
    if plan is None:
        prepared = [bench.intake.prepare(Request(input_ids=ids[0, :n].tolist())) for n in lengths]
        return lambda: [generic.run(family, each, {}) for each in prepared]
    arguments = text_arguments(family, ids)
    embeds = arguments.pop("inputs_embeds")
    positions = torch.cat([torch.arange(n, device=family.device) for n in lengths])[None]

    def run() -> Any:
        pieces = _pieces((kv, kv.capacity, {}) for kv in kvs or map(SequenceKV, lengths))
        return forward(family, StepCache(pieces, plan), embeds, positions, arguments)

    return run


def plain_ids(family: Family, count: int) -> torch.Tensor:
    """Token ids [1, count] that stand for no medium."""
    taken = set(family.placeholders.values())
    free = [i for i in range(64) if i not in taken]
    return torch.tensor([free[i % len(free)] for i in range(count)], device=family.device)[None]


def _request(bench: Bench) -> float:
    """Lane seconds of a request beside steps and tower: merging, and the logits of one row."""
    if bench.plan is None:
        return 0.0
    prepared = bench.intake.prepare(Request(prompt=_words(100)))
    merged = merge.merge(bench.family, prepared, {})
    row = merged.embeds[:, -1:]
    return _seconds(lambda: merge.merge(bench.family, prepared, {})) + _seconds(
        lambda: head.logits_of(bench.family, row)
    )


def _tower(bench: Bench, budget: float) -> Curve:
    """Seconds of tower calls: pictures of several sizes alone, and the last size in twos and fours."""
    points: dict[float, float] = {}
    ends = time.perf_counter() + budget
    for inputs in tower_inputs(bench):
        if not points:
            with contextlib.suppress(RuntimeError, ValueError):
                vision.encode(bench.family, [inputs])  # packs the tower
        for copies in (1, 2, 4):
            size = float(inputs.patches * copies)
            expected = max((seconds * size / other for other, seconds in points.items()), default=0.0)
            if size in points or (points and time.perf_counter() + expected > ends):
                continue
            with contextlib.suppress(RuntimeError, ValueError):  # a tower that takes one picture at a time
                points[size] = _seconds(lambda n=copies, each=inputs: vision.encode(bench.family, [each] * n))  # type: ignore[misc]
    if not points:
        return Curve.line(0.0, 0.0)
    if len(points) == 1:
        points[0.0] = 0.0
    return Curve.rising(points.items())


def tower_inputs(bench: Bench) -> Iterator[vision.MediaInputs]:
    """What the tower takes for made-up pictures of growing size, as far as the model takes any."""
    if not _takes_pictures(bench):
        return
    for side in SIDES:
        with contextlib.suppress(RequestError):
            yield from vision.media_inputs(bench.family, bench.intake.prepare(_pictured(side)))


def _takes_pictures(bench: Bench) -> bool:
    if "image" not in bench.family.features:
        return False
    with contextlib.suppress(RequestError):
        bench.intake.prepare(_pictured(SIDES[0]))
        return True
    return False


def _pictured(side: int) -> Request:
    return Request(prompt="what is it?", images=[Image.effect_noise((side, side), 64).convert("RGB")])


def _words(count: int) -> str:
    return "word " * count


def _seconds(run: Callable[[], Any], rounds: int = 6) -> float:
    """The usual time of a run: the middle of a few, of as many as fit in `ENOUGH` seconds, behind one that warms up."""
    times: list[float] = []
    while len(times) < rounds and sum(times) + (times[-1] if times else 0.0) <= ENOUGH:
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median_low(times[1:] or times)
