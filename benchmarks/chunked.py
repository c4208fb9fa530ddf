"""A long prompt in chunks against one step over all of it: time, and how much memory it takes for a moment.

    python benchmarks/chunked.py build/shapes/smolvlm-256m                       8,192 tokens of text, the planned chunk
    python benchmarks/chunked.py MODEL --tokens 4096 --chunks 512 1024 --rounds 2
    python benchmarks/chunked.py MODEL --what memory

Time: our engine's own steps in one process, chunked and in one step by turns, so that the machine's moods meet both; with
--threads 1 the processor's seconds, which hardly change while others use the machine.
Memory: each system in a process of its own under torch's profiler; the peak of all allocations while the prompt runs, less
the keys and values that stay. Weights are allocated before. transformers runs one shot with last-position logits, which
is what its own `generate` does. Prints a table and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from mmprefill import PrefillConfig, Prefiller, Request
from mmprefill.models import load
from mmprefill.pipeline import calibrate, merge
from mmprefill.pipeline.prefill import Chunk, Prefill, run_step


def main() -> None:
    arguments = parser().parse_args()
    chunks = arguments.chunks or [planned(arguments)]
    record: dict[str, Any] = {"model": arguments.model.name, "tokens": arguments.tokens, "threads": arguments.threads}
    print(f"{arguments.tokens} tokens, {arguments.dtype}, {arguments.threads} threads, chunks of {chunks}\n")
    if "memory" in arguments.what:
        record["memory"] = in_fresh_processes(arguments, chunks)
    if "time" in arguments.what:
        record["seconds"] = alone(times, arguments, chunks)
    print("\n".join(table(record)))
    print(json.dumps(record))


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root.add_argument("model", type=Path, help="folder of a checkpoint")
    root.add_argument("--tokens", type=int, default=8192)
    root.add_argument("--chunks", type=int, nargs="+", help="tokens of a chunk; default: what the engine would take")
    root.add_argument("--rounds", type=int, default=2, help="of the times, which alternate")
    root.add_argument("--what", nargs="+", choices=["memory", "time"], default=["memory", "time"])
    root.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    root.add_argument("--threads", type=int, default=2)
    return root


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


# What runs.


def opened(arguments: argparse.Namespace) -> Prefiller:
    torch.set_num_threads(arguments.threads)
    config = PrefillConfig(prefix_bytes=0, encoder_bytes=0)
    return Prefiller.from_pretrained(arguments.model, device="cpu", dtype=arguments.dtype, config=config)


def planned(arguments: argparse.Namespace) -> int:
    """The chunk that the engine takes on this machine."""
    return int(alone(_planned, arguments))


def _planned(arguments: argparse.Namespace) -> int:
    with opened(arguments) as prefiller:
        bench = calibrate.Bench(prefiller.session.family, prefiller.session.route.plan, prefiller.intake)
        prefiller.session.lane.call(calibrate.costs_of, bench)
    with opened(arguments) as prefiller:
        batcher = prefiller._engine._driver.batcher
        return batcher.chunk_tokens or batcher.step_tokens


def ids_of(prefiller: Prefiller, tokens: int) -> list[int]:
    found: list[int] = calibrate.plain_ids(prefiller.session.family, tokens)[0].tolist()
    return found


def ours(prefiller: Prefiller, ids: list[int], chunk: int) -> Prefill:
    """Merge and every step, as the engine runs them on its lane."""
    family, plan = prefiller.session.family, prefiller.session.route.plan
    assert plan is not None
    prepared = prefiller.intake.prepare(Request(input_ids=ids))
    sequence = merge.merge(family, prepared, {})
    running = Prefill.start(sequence)
    while not running.done:
        run_step(family, plan, [Chunk(running, min(running.kv.length + chunk, sequence.length))])
    return running


# Time.


def times(arguments: argparse.Namespace, chunks: list[int]) -> dict[str, float]:
    """Median seconds by chunk, "one step" among them."""
    with opened(arguments) as prefiller:
        ids = ids_of(prefiller, arguments.tokens)
        prefiller.session.lane.call(ours, prefiller, ids[: max(chunks)], max(chunks))  # warm
        ways = {"one step": arguments.tokens, **{f"chunks of {chunk}": chunk for chunk in chunks}}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, chunk in ways.items():
                found[name].append(prefiller.session.lane.call(seconds_of, prefiller, ids, chunk))
                print(f"{name}: {found[name][-1]:.2f} s", file=sys.stderr, flush=True)
    return {name: statistics.median(each) for name, each in found.items()}


def seconds_of(prefiller: Prefiller, ids: list[int], chunk: int) -> float:
    """On the lane's thread, which is the only one that computes if torch has one."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    ours(prefiller, ids, chunk)
    return clock() - started


# Memory.


def in_fresh_processes(arguments: argparse.Namespace, chunks: list[int]) -> dict[str, Any]:
    ways = {"transformers, one shot": partial(alone, their_memory, arguments)}
    for chunk in (arguments.tokens, *chunks):
        name = "one step" if chunk == arguments.tokens else f"chunks of {chunk}"
        ways[name] = partial(alone, our_memory, arguments, chunk)
    rows = {}
    for name, run in ways.items():
        rows[name] = run()
        print(f"{name}: {rows[name]}", file=sys.stderr, flush=True)
    return rows


def our_memory(arguments: argparse.Namespace, chunk: int) -> dict[str, int]:
    with opened(arguments) as prefiller:
        ids = ids_of(prefiller, arguments.tokens)
        prefiller.session.lane.call(ours, prefiller, ids[:64], 64)
        # On the lane's thread: the profiler sees the thread that opens it.
        peak, done = prefiller.session.lane.call(peak_of, partial(ours, prefiller, ids, chunk))
        return {"peak": peak, "kv": done.kv.nbytes}


def their_memory(arguments: argparse.Namespace) -> dict[str, int]:
    with opened(arguments) as prefiller:
        ids = torch.tensor([ids_of(prefiller, arguments.tokens)])
    model = load(arguments.model, device="cpu", dtype=arguments.dtype).model
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    run = partial(model, input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
    with torch.inference_mode():
        model(input_ids=ids[:, :64], logits_to_keep=1)
        peak, _ = peak_of(run)
    return {
        "peak": peak,
        "kv": sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values)),
    }


def peak_of(run: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes allocated at once during a call, beyond what was there before, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        output = run()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, output


def table(record: dict[str, Any]) -> list[str]:
    memory, seconds = record.get("memory", {}), record.get("seconds", {})
    lines = [
        "| run | seconds | x one step | KV, MiB | transient peak, MiB | against transformers |",
        "|---|---|---|---|---|---|",
    ]
    theirs = _transient(memory["transformers, one shot"]) if memory else 0
    for name in [*memory, *(name for name in seconds if name not in memory)]:
        cells = (
            [f"{seconds[name]:.2f}", f"{seconds[name] / seconds['one step']:.3f}"] if name in seconds else ["-", "-"]
        )
        row = memory.get(name)
        cells += [f"{row['kv'] / 2**20:.1f}", f"{_transient(row) / 2**20:.1f}"] if row else ["-", "-"]
        cells.append(f"{_transient(row) / theirs - 1:+.0%}" if row and name != "transformers, one shot" else "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _transient(row: dict[str, int]) -> int:
    return row["peak"] - row["kv"]


if __name__ == "__main__":
    main()
