"""How long the caller's event loop is held up by 32 concurrent requests with 1024 x 1024 pictures.

    python benchmarks/lag.py [--model FOLDER] [--requests 32]

A ticker on the caller's loop wants to wake every 5 ms; its lateness is the lag. Prints percentiles and one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from mmprefill import AsyncPrefiller, Request

TICK = 0.005


async def ticker(lags: list[float]) -> None:
    while True:
        started = time.perf_counter()
        await asyncio.sleep(TICK)
        lags.append(time.perf_counter() - started - TICK)


async def run(engine: AsyncPrefiller, count: int) -> list[float]:
    generator = np.random.default_rng(0)
    pictures = [generator.integers(0, 255, (1024, 1024, 3), dtype=np.uint8) for _ in range(count)]
    lags: list[float] = []
    clock = asyncio.ensure_future(ticker(lags))
    await asyncio.sleep(0.1)
    lags.clear()
    await asyncio.gather(*(engine.prefill(Request(prompt="what is it?", images=[each])) for each in pictures))
    clock.cancel()
    return lags


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint folder; a tiny random SmolVLM if not given")
    parser.add_argument("--requests", type=int, default=32)
    options = parser.parse_args()
    model = options.model
    if model is None:
        import checkpoints

        model = checkpoints.cached("smolvlm")
    engine = AsyncPrefiller.from_pretrained(model)
    lags = [1000 * lag for lag in asyncio.run(run(engine, options.requests))]
    engine.close()
    cuts = statistics.quantiles(lags, n=100)
    result = {"ticks": len(lags), "median_ms": cuts[49], "p99_ms": cuts[98], "max_ms": max(lags)}
    print("event-loop lag:", ", ".join(f"{name} {value:.1f}" for name, value in result.items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
