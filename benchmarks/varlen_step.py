"""Attention of one packed step on CUDA: one call for all sequences against one for each.

    python benchmarks/varlen_step.py --device cuda --dtype bf16

Prints a line per kind of step: the error of both against attention in fp32, and the time of both, in turns. Elsewhere than
on CUDA both ways are the same, and the script only shows that it runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch
from torch import Tensor

from mmprefill.encoders import varlen
from mmprefill.pipeline.attention import ragged_attention
from mmprefill.pipeline.kv_cache import LayerPlan, Piece, SequenceKV, StepCache

HEADS, GROUPS, WIDTH = 32, 8, 128  # of a language model of 7 to 8 B parameters
LAYER: Any = SimpleNamespace(layer_idx=0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Kind:
    """A kind of step: rows and stored tokens of its sequences, and the window of the layer."""

    lengths: tuple[tuple[int, int], ...]
    window: int | None = None


KINDS = {
    "texts": Kind(((90, 0), (150, 0), (40, 0), (220, 0)) * 16),
    "pictures": Kind(((1200, 0), (900, 0), (1500, 0), (500, 0))),
    "windowed": Kind(((1200, 0), (900, 300), (1500, 0), (500, 0)), 512),
    "reused": Kind(((60, 1200), (80, 900), (30, 2000), (100, 700)) * 4),
    "chunk": Kind(((2048, 14_000),)),
    "tokens": Kind(((1, 1500), (1, 700), (1, 300), (1, 2500)) * 8),
}


@dataclass(frozen=True)
class Figures:
    """Of one call for all and of one call each: RMS error against fp32, seconds; and whether there is the one call."""

    errors: tuple[float, float]
    seconds: tuple[float, float]
    served: bool

    def __str__(self) -> str:
        ours, each = self.seconds
        times = f"{ours * 1e6:.0f} us, each alone {each * 1e6:.0f} us: x{each / ours:.2f}"
        errors = f"rms error {self.errors[0]:.2g} and {self.errors[1]:.2g}"
        return f"{times}, {errors}" + ("" if self.served else "; not served here, both are one by one")


def measure(kind: Kind, device: torch.device, dtype: torch.dtype, rounds: int = 20) -> Figures:
    """Both ways on the same step, in turns."""
    step, query, key, value = _step(kind, device, dtype)
    run = lambda: ragged_attention(step, LAYER, query, key, value)  # noqa: E731
    contexts = list(step.context(0, key, value))
    keys, values = (torch.cat([pair[side] for pair in contexts], 2) for side in range(2))
    lengths = [(rows, rows + done) for rows, done in kind.lengths]
    exact = varlen.reference(query, keys, values, lengths, causal=True, window=kind.window)
    ways: list[Callable[[], AbstractContextManager[Any]]] = [nullcontext, _one_by_one]
    errors, seconds = [0.0, 0.0], [float("inf")] * 2
    for i, way in enumerate(ways):
        with way():
            errors[i] = float((run().float() - exact).square().mean().sqrt())
    for _ in range(rounds):
        for i, way in enumerate(ways):
            with way():
                seconds[i] = min(seconds[i], _timed(run, device))
    return Figures((errors[0], errors[1]), (seconds[0], seconds[1]), varlen.serves(query, key, value))


def _one_by_one() -> AbstractContextManager[Any]:
    return mock.patch.object(varlen, "DEVICES", ())


def _step(kind: Kind, device: torch.device, dtype: torch.dtype) -> tuple[StepCache, Tensor, Tensor, Tensor]:
    draw = torch.Generator(device).manual_seed(0)

    def random(heads: int, rows: int) -> Tensor:
        made = torch.randn(1, rows, heads, WIDTH, generator=draw, device=device)
        return made.to(dtype).transpose(1, 2)

    pieces, start = [], 0
    for rows, done in kind.lengths:
        kv = SequenceKV(rows + done)
        if done:
            kv.write(0, random(GROUPS, done), random(GROUPS, done))
            kv.length = done
        pieces.append(Piece(start, rows, kv))
        start += rows
    name = "sliding_attention" if kind.window else "full_attention"
    step = StepCache(pieces, LayerPlan((name,), window=kind.window, direct=True))
    key, value = step.update(random(GROUPS, start), random(GROUPS, start), 0)
    return step, random(HEADS, start), key, value


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call; on CUDA of several queued one behind the other, as those of layers are."""
    finish, calls = (torch.cuda.synchronize, 5) if device.type == "cuda" else (lambda: None, 1)
    finish()
    started = time.perf_counter()
    for _ in range(calls):
        run()
    finish()
    return (time.perf_counter() - started) / calls


@torch.no_grad()
def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; all without any")
    arguments = parser.parse_args()
    for name in arguments.kinds or KINDS:
        figures = measure(KINDS[name], torch.device(arguments.device), DTYPES[arguments.dtype], arguments.rounds)
        print(f"{name:10} {figures}", flush=True)


if __name__ == "__main__":
    main()
