"""4 pictures x 8 questions: each picture through the tower once, beside transformers one request at a time.

    python benchmarks/shared_pictures.py build/shapes/smolvlm-256m [--rounds 2] [--questions 8] [--pictures 4]

Rounds alternate; ours starts each round with empty stores. What reuse can give at most is counted, not guessed: the floating
point operations of every plain forward, as torch counts them, over those that are left without the pictures and the tokens
that `result.reuse` says were not computed. Prints a table and ends with one line of JSON; exit code 1 if the tower ran
more often than there are pictures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import throughput
import torch
from torch.utils.flop_counter import FlopCounterMode

from mmprefill import Prefiller
from mmprefill.encoders import vision
from mmprefill.models import ModelBundle, load
from mmprefill.results import PrefillResult, unwrap


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--pictures", type=int, default=4)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    requests = asked(arguments.pictures, arguments.questions)
    rounds = compare(arguments.model, requests, arguments.rounds)
    record = summary(rounds, len(requests))
    print("\n".join(table(record)))
    print(json.dumps(record))
    return int(max(round_.encoded for round_ in rounds) > arguments.pictures)


def asked(pictures: int, questions: int) -> list[throughput.Messages]:
    """Every question about every picture: the picture first, as chats about one picture have it."""
    shown = [request[0]["content"][0] for request in throughput.workload(pictures)]
    words = [
        f"Question {i}: what is the {i}. thing that somebody would notice here, and why?" for i in range(questions)
    ]
    return [
        [{"role": "user", "content": [picture, {"type": "text", "text": text}]}] for text in words for picture in shown
    ]


@dataclass(frozen=True)
class Round:
    """Seconds of both, pictures that our tower was given, and the share of all operations that ours had to do."""

    ours: float
    theirs: float
    encoded: int
    left: float


def compare(folder: Path, requests: Sequence[throughput.Messages], rounds: int) -> list[Round]:
    plain, bundle = load(folder, dtype="bf16"), load(folder, dtype="bf16")
    with torch.inference_mode():
        throughput.transformers_runs(plain, requests[:1], 1)
    tower, token = operations(plain, requests[0])
    found = []
    for _ in range(rounds):
        with Prefiller(bundle) as prefiller:
            started = time.perf_counter()
            results, encoded = counted(prefiller, requests)
            ours = time.perf_counter() - started
            started = time.perf_counter()  # on the same thread: on a CPU each has a team of its own
            prefiller.session.lane.call(throughput.transformers_runs, plain, requests, 1)
            theirs = time.perf_counter() - started
        found.append(Round(ours, theirs, encoded, share_left(results, tower, token)))
    return found


def counted(prefiller: Prefiller, requests: Sequence[throughput.Messages]) -> tuple[list[PrefillResult], int]:
    """The results, and how many pictures the tower was given for them."""
    given, original = [], vision.encode

    def encode(family: Any, batch: Any) -> Any:
        given.extend(batch)
        return original(family, batch)

    vision.encode = encode
    try:
        return [unwrap(outcome) for outcome in prefiller.prefill_many(requests)], len(given)
    finally:
        vision.encode = original


def operations(bundle: ModelBundle, request: throughput.Messages) -> tuple[float, float]:
    """Floating point operations of a picture in the tower, and of a token in the decoder, in a plain forward."""
    with FlopCounterMode(display=False) as counter:
        throughput.transformers_runs(bundle, [request], 1)
    every = counter.get_flop_counts()
    decoder = sum(every[_name(bundle.model, bundle.model.get_decoder())].values())
    tokens = len(throughput._inputs(bundle, [request])["input_ids"][0])
    return counter.get_total_flops() - decoder, decoder / tokens


def _name(model: Any, module: Any) -> str:
    path = next(name for name, each in model.named_modules() if each is module)
    return f"{type(model).__name__}.{path}"


def share_left(results: Sequence[PrefillResult], tower: float, token: float) -> float:
    every = sum(tower * len(each.media) + token * len(each.token_ids) for each in results)
    saved = sum(tower * each.reuse.pictures + token * each.reuse.tokens for each in results)
    # A shared prefix that holds the picture needs no rows of it, whoever encoded them.
    saved += sum(
        tower * len(each.media) for each in results if not each.reuse.pictures and each.reuse.tokens >= _end(each)
    )
    return 1 - saved / every


def _end(result: PrefillResult) -> int:
    return max((end for runs in result.spans for _, end in runs), default=0)


def summary(rounds: Sequence[Round], count: int) -> dict[str, Any]:
    ours, theirs = (statistics.median(getattr(each, who) for each in rounds) for who in ("ours", "theirs"))
    allowed = 1 / statistics.median(each.left for each in rounds)
    gain = theirs / ours
    return {
        "requests": count,
        "encoded": max(each.encoded for each in rounds),
        "requests_per_second": {"mmprefill": count / ours, "transformers": count / theirs},
        "speedup": gain,
        "allowed_by_operations": allowed,
        "share_of_allowed": gain / allowed,
    }


def table(record: dict[str, Any]) -> list[str]:
    rates = record["requests_per_second"]
    return [
        "| requests/s, mmprefill | transformers, one by one | speed-up | operations allow | reached | pictures encoded |",
        "|---|---|---|---|---|---|",
        f"| {rates['mmprefill']:.2f} | {rates['transformers']:.2f} | {record['speedup']:.2f} | "
        f"{record['allowed_by_operations']:.2f} | {record['share_of_allowed']:.0%} | {record['encoded']} |",
    ]


if __name__ == "__main__":
    sys.exit(main())
