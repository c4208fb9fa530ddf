"""Thousands of requests with random cancellations and injected failures: nothing leaks, nothing is lost or doubled.

    python benchmarks/soak.py [--requests 5000] [--pictures 500] [--model FOLDER]

Without a model a tiny random SmolVLM is used (its checkpoint is made by the tests' recipes). Prints a table of resident
memory over the run, what became of every request, and what the engine's pools hold at the end; ends with one line of JSON
and exit code 1 if memory grew over the last half, a pool is not empty, or an answer is missing or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from mmprefill import AsyncPrefiller, PrefillConfig, Request
from mmprefill.pipeline import driver

INSIDE = 32  # requests under way at once


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    engine = AsyncPrefiller.from_pretrained(
        options.model or tiny_model(), config=PrefillConfig(prefix_bytes=2**22, encoder_bytes=2**20)
    )
    pictures = make_pictures(options.pictures)
    inject_failures(random.Random(1))
    outcomes, memory = asyncio.run(soak(engine, pictures, options.requests))
    pools = held(engine)
    engine.close()
    return report(outcomes, memory, pools, options.requests)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--pictures", type=int, default=500, help="different pictures")
    parser.add_argument("--model", help="a checkpoint folder")
    return parser.parse_args()


def tiny_model() -> Path:
    import checkpoints

    return checkpoints.cached("smolvlm")


def make_pictures(count: int) -> list[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mmprefill-soak-"))
    generator = np.random.default_rng(0)
    paths = [folder / f"{i}.png" for i in range(count)]
    for path in paths:
        Image.fromarray(generator.integers(0, 255, (48, 64, 3), dtype=np.uint8)).save(path)
    return paths


def inject_failures(draw: random.Random) -> None:
    """One step in fifty fails, as out of memory or with an odd error; a step of one request is let through."""
    original = driver.run_step

    def fragile(family, plan, chunks):
        if len(chunks) > 1 and draw.random() < 0.02:
            raise draw.choice([torch.OutOfMemoryError("injected"), RuntimeError("injected")])
        return original(family, plan, chunks)

    driver.run_step = fragile


async def soak(engine: AsyncPrefiller, pictures: list[Path], count: int) -> tuple[dict[str, str], list[int]]:
    """Run them all; returns what became of each request, and resident memory in MB sampled along the way."""
    draw, inside = random.Random(2), asyncio.Semaphore(INSIDE)
    outcomes: dict[str, str] = {}
    memory: list[int] = []

    async def one(number: int) -> None:
        async with inside:
            request = make_request(draw, pictures, number)
            task = asyncio.ensure_future(engine.prefill(request))
            if draw.random() < 0.1:
                asyncio.get_running_loop().call_later(draw.random() * 0.05, task.cancel)
            assert request.id not in outcomes, "doubled"
            try:
                result = await task
                outcomes[request.id] = (
                    "ok" if result.id == request.id and bool(result.next_token_logits.isfinite().all()) else "wrong"
                )
            except asyncio.CancelledError:
                outcomes[request.id] = "cancelled"
            except Exception as error:
                outcomes[request.id] = type(error).__name__
            if number % max(1, count // 40) == 0:
                memory.append(resident_mb())

    await asyncio.gather(*(one(number) for number in range(count)))
    return outcomes, memory


def resident_mb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 2**20


def make_request(draw: random.Random, pictures: list[Path], number: int) -> Request:
    if draw.random() < 0.02:
        return Request(prompt="broken", images=[b"not a picture"], id=str(number))
    chosen = [draw.choice(pictures) for _ in range(draw.choice([0, 0, 1, 1, 2]))]
    return Request(prompt=f"question {draw.randrange(200)}", images=chosen, id=str(number))


def held(engine: AsyncPrefiller) -> dict[str, int]:
    """What is left in the engine's pools."""
    return {
        "active": len(engine._driver._active),
        "tower": len(engine._driver._tower),
        "jobs": len(engine._driver.batcher.jobs),
        "in flight": len(engine._stores.encoder._flying),
        "moving": len(engine._driver._moving),
    }


def report(outcomes: dict[str, str], memory: list[int], pools: dict[str, int], count: int) -> int:
    half = memory[len(memory) // 2 :]
    growth = max(half[len(half) // 2 :]) / max(half[: len(half) // 2]) - 1
    counts = Counter(outcomes.values())
    print("resident memory, MB:", " ".join(map(str, memory)))
    print("outcomes:", dict(counts))
    print("pools at the end:", pools)
    good = growth < 0.02 and not any(pools.values()) and len(outcomes) == count and not counts["wrong"]
    print(json.dumps({"growth_last_half": round(growth, 4), "outcomes": counts, "pools": pools, "passed": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
