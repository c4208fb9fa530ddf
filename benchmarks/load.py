"""The engine under load: Poisson arrivals, 70 % text only and 30 % with 1-4 pictures, against a one-by-one loop.

    python benchmarks/load.py simulate FOLDER --requests 20000     the batcher on a clock, with costs measured on FOLDER
    python benchmarks/load.py simulate --costs costs.json          the same with costs that were measured before
    python benchmarks/load.py live FOLDER --requests 300           the engine itself, and the simulator on the same trace

A live run takes about 2.6 times the loop's own time: for minutes rather than a quarter of an hour cut the shape
(`benchmarks/shapes.py smolvlm-256m FOLDER --layers 6`).

`live` runs the requests through the loop, one at a time as fast as it goes, which gives its service times and its
capacity; then through the engine, open loop, at a share of that capacity. The loop under load is that queue replayed:
first come, one at a time, with the service times just measured. The simulator gets the calibrated costs, with a request's
overhead and the tower's speed as the loop has shown them a minute before: these machines drift. Prints Markdown tables
and ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from PIL import Image

from mmprefill.pipeline import calibrate
from mmprefill.pipeline import simulate as sim
from mmprefill.pipeline.batcher import Batcher, text_first
from mmprefill.pipeline.costs import Costs

SHARES = (0.5, 0.7, 0.85)  # of the loop's capacity
REPEATS = sim.Mix(repeats=0.3, shared=0.5)  # what reuse is shown on: pictures and a system prompt that come back


def main() -> None:
    arguments = parser().parse_args()
    print(json.dumps(arguments.run(arguments)))


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = root.add_subparsers(required=True)
    for name, run, requests in (("simulate", run_simulated, 20_000), ("live", run_live, 300)):
        command = commands.add_parser(name)
        command.add_argument("model", nargs="?", type=Path, help="folder of a checkpoint")
        command.add_argument("--requests", type=int, default=requests)
        command.add_argument("--loads", type=float, nargs="+", default=SHARES if name == "simulate" else (0.7,))
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--patches", type=int, default=1024, help="most patches of a tower call")
        command.add_argument("--costs", type=Path, help="costs as JSON, instead of measuring them")
        command.add_argument("--dtype", default="bf16")
        command.set_defaults(run=run)
    return root


# Simulated.


def run_simulated(arguments: argparse.Namespace) -> Any:
    costs = costs_for(arguments)
    print(f"costs: {describe(costs)}\n")
    return [
        simulated_cell(f"load {load}{title}", mix, load, costs, arguments)
        for title, mix in (("", sim.Mix()), (", pictures and prefixes that come back", REPEATS))
        for load in arguments.loads
    ]


def simulated_cell(title: str, mix: sim.Mix, load: float, costs: Costs, arguments: argparse.Namespace) -> Any:
    """One table: the loop and every variant on the same arrivals."""
    started, rate = time.process_time(), sim.capacity(mix, costs) * load
    arrivals = mix.draw(arguments.requests, rate, arguments.seed)
    base = sim.by_class(sim.one_by_one(arrivals, costs))
    rows = [(each.name, each.serve(arrivals, costs)) for each in sim.variants(costs, vision_patches=arguments.patches)]
    seconds = time.process_time() - started
    print(f"{title}: {len(arrivals)} requests at {rate:.2f} a second; {seconds:.0f} s of CPU for all rows\n")
    print("\n".join(sim.as_lines(base, rows)), end="\n\n")
    return {"title": title, "rows": {name: as_record(waits) for name, waits in [("loop", base), *rows]}}


def as_record(waits: dict[str, sim.Waits]) -> dict[str, Any]:
    return {kind: asdict(each) for kind, each in waits.items()}


def describe(costs: Costs) -> str:
    return (
        f"a step {costs.step.fixed * 1e3:.1f} ms and {costs.step.slope * 1e6:.0f} us a token, a picture of 1024 patches "
        f"{costs.tower(1024) * 1e3:.0f} ms, intake {costs.intake_text * 1e3:.1f} ms and {costs.intake_picture * 1e3:.1f} ms "
        f"a picture, per request {costs.request * 1e3:.1f} ms"
    )


def costs_for(arguments: argparse.Namespace) -> Costs:
    """From the file, or measured on the model."""
    if arguments.costs:
        record = json.loads(arguments.costs.read_text())
        return Costs.from_dict(record.get("costs", record))
    with opened(arguments, 1024) as prefiller:
        return prefiller.session.lane.call(calibrate.costs_of, bench_of(prefiller))


def bench_of(prefiller: Any) -> calibrate.Bench:
    return calibrate.Bench(prefiller.session.family, prefiller.session.route.plan, prefiller.intake)


def measured(prefiller: Any) -> Costs:
    """Measured now, not taken from the cache: the machine's speed changes with its neighbours."""
    with quiet("calibration"):
        return prefiller.session.lane.call(calibrate.measure, bench_of(prefiller))


def fitted(costs: Costs, asks: Sequence[Ask], service: Sequence[float]) -> Costs:
    """The costs as the loop has just shown them: of a request by its texts, of the tower by the others."""
    bare = replace(costs, request=0.0)
    over = [seconds - sim.alone(as_arrival(ask), bare) for ask, seconds in zip(asks, service, strict=True)]
    request = max(statistics.fmean(each for ask, each in zip(asks, over, strict=True) if not ask.patches), 0.0)
    pictured = [(ask, each - request) for ask, each in zip(asks, over, strict=True) if ask.patches]
    towers = sum(costs.tower(patches) for ask, _ in pictured for patches in ask.patches) or 1.0
    scale = max(1 + sum(each for _, each in pictured) / towers, 0.0)  # a tiny tower is lost in the noise
    tower = replace(costs.tower, points=tuple((size, seconds * scale) for size, seconds in costs.tower.points))
    return replace(costs, request=request, tower=tower)


def as_arrival(ask: Ask, time: float = 0.0, number: int = 0) -> sim.Arrival:
    """The simulator's picture of a live request."""
    return sim.Arrival(time, ask.tokens, tuple((patches, (number, i)) for i, patches in enumerate(ask.patches)))


def opened(arguments: argparse.Namespace, patches: int) -> Any:
    from mmprefill import PrefillConfig, Prefiller

    config = PrefillConfig(vision_patches=patches, ageing=10.0, encoder_bytes=0, prefix_bytes=0)
    return Prefiller.from_pretrained(arguments.model, dtype=arguments.dtype, config=config)


# Live.


@dataclass(frozen=True)
class Ask:
    """A live request and what it costs: prompt tokens, patches of each picture."""

    request: Any
    tokens: int
    patches: tuple[int, ...]


def run_live(arguments: argparse.Namespace) -> Any:
    with opened(arguments, arguments.patches) as prefiller:
        costs = costs_for(arguments) if arguments.costs else measured(prefiller)
        asks = list(live_requests(prefiller, arguments.requests, arguments.seed))
        print(f"costs: {describe(costs)}\n")
        with quiet("the loop"):
            service = [loop_seconds(prefiller, ask) for ask in asks]
        costs = fitted(costs, asks, service)
        print(f"as the loop showed them: {describe(costs)}\n")
        cells = [live_cell(prefiller, asks, service, load, costs, arguments) for load in arguments.loads]
        again = sum(loop_seconds(prefiller, ask) for ask in asks[: len(asks) // 8])
        print(f"the loop after the runs over before: {again / sum(service[: len(asks) // 8]):.2f}\n")
        return cells


@contextmanager
def quiet(what: str) -> Iterator[None]:
    """Say how much of the processors others took meanwhile: figures are worth something where that is little."""
    started, before = time.perf_counter(), calibrate.used_by_others()
    yield
    seconds = time.perf_counter() - started
    taken = (calibrate.used_by_others() - before) / (os.cpu_count() or 1) / seconds
    print(f"{what}: {seconds:.0f} s, in which others took {taken:.0%} of the processors\n")


def live_requests(prefiller: Any, count: int, seed: int) -> Any:
    """Requests of the simulator's mix: different texts, pictures of noise that no cache has seen."""
    from mmprefill import Request
    from mmprefill.encoders.vision import media_inputs

    draw = random.Random(seed)
    for arrival in sim.Mix().draw(count, 1.0, seed):
        text = " ".join(f"{draw.randrange(10**6)}" for _ in range(max(1, arrival.tokens // 7)))
        pictures = [Image.effect_noise((512, 512), draw.uniform(20, 90)).convert("RGB") for _ in arrival.pictures]
        request = Request(prompt=text, images=pictures)
        prepared = prefiller.intake.prepare(request)
        inputs = list(media_inputs(prefiller.session.family, prepared))
        patches = sum(each.patches for each in inputs) // max(len(pictures), 1)
        yield Ask(request, len(prepared.input_ids), (patches,) * len(pictures))


def loop_seconds(prefiller: Any, ask: Ask) -> float:
    """The same engine, one request at a time."""
    started = time.perf_counter()
    prefiller.prefill(ask.request)
    return time.perf_counter() - started


def live_cell(
    prefiller: Any,
    asks: Sequence[Ask],
    service: Sequence[float],
    load: float,
    costs: Costs,
    arguments: argparse.Namespace,
) -> Any:
    """One table: the loop, the engine, and what the simulator says of both."""
    rate = load * len(service) / sum(service)
    draw, now, arrivals = random.Random(arguments.seed), 0.0, []
    for number, ask in enumerate(asks):
        now += draw.expovariate(rate)
        arrivals.append(as_arrival(ask, now, number))
    loop = sim.by_class(replayed(arrivals, service))
    with quiet(f"the engine, load {load}"):
        finished = asyncio.run(open_loop(prefiller._engine, arrivals, [ask.request for ask in asks]))
    engine = sim.by_class(sim.Served(a, end) for a, end in zip(arrivals, finished, strict=True))
    batcher = Batcher(text_first(10.0), vision_patches=arguments.patches)  # as the engine makes it
    said = sim.by_class(sim.simulate(arrivals, costs, batcher, reuse=False))
    said_loop = sim.by_class(sim.one_by_one(arrivals, costs))
    rows = [("the engine, live", engine), ("the engine, simulated", said), ("the loop, simulated", said_loop)]
    print(f"load {load}: {len(asks)} requests at {rate:.2f} a second, over {now:.0f} s\n")
    print("\n".join(sim.as_lines(loop, rows)), end="\n\n")
    off = {kind: said[kind].mean / engine[kind].mean - 1 for kind in engine if engine[kind].mean}
    print(f"simulated over live means: {', '.join(f'{kind} {share:+.1%}' for kind, share in off.items())}\n")
    return {"load": load, "rows": {name: as_record(waits) for name, waits in [("loop", loop), *rows]}, "off": off}


def replayed(arrivals: Sequence[sim.Arrival], service: Sequence[float]) -> list[sim.Served]:
    """First come, one at a time, with measured service times."""
    now, served = 0.0, []
    for arrival, seconds in zip(arrivals, service, strict=True):
        now = max(now, arrival.time) + seconds
        served.append(sim.Served(arrival, now))
    return served


async def open_loop(engine: Any, arrivals: Sequence[sim.Arrival], requests: Sequence[Any]) -> list[float]:
    """Send each request at its time, whatever the engine does; returns when each had its first token."""
    started = time.perf_counter()
    ends = [math.nan] * len(requests)

    async def send(number: int) -> None:
        await asyncio.sleep(max(arrivals[number].time - (time.perf_counter() - started), 0.0))
        await engine.prefill(replace(requests[number], id=f"live-{number}-{started}"))
        ends[number] = time.perf_counter() - started

    await asyncio.gather(*(send(number) for number in range(len(requests))))
    return ends


if __name__ == "__main__":
    main()
