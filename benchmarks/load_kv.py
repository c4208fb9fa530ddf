"""Seconds to load a stored artefact, checksums included, beside prefilling the same prompt.

    python benchmarks/load_kv.py build/shapes/smolvlm-256m --tokens 2000

Loading is `prefiller.resume`: open the file, check its header, read every tensor against its checksum, copy it into a cache
that decoding can grow. `cache` is `mmprefill.load(path).cache()`, which needs no engine. The file is in the page cache, as
after it was written. Each is the median; processor seconds tell more than the clock on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import mmprefill
from mmprefill import Prefiller, Request


def timed(function, repeats):
    """Median seconds by the clock and of processors."""
    found = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), sum(os.times()[:2])
        function()
        found.append((time.perf_counter() - wall, sum(os.times()[:2]) - cpu))
    return [round(statistics.median(column), 4) for column in zip(*found, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with Prefiller.from_pretrained(arguments.model) as prefiller, tempfile.TemporaryDirectory() as scratch:
        ids = [100 + i % 5000 for i in range(arguments.tokens)]
        request = Request(input_ids=ids, reuse=False)
        first = prefiller.prefill(request)
        path = first.save(Path(scratch) / "a.kv.safetensors")
        again = prefiller.resume(path)
        assert torch.equal(again.next_token_logits, first.next_token_logits)
        rows = {
            "prefill": timed(lambda: prefiller.prefill(request), arguments.repeats),
            "load and resume": timed(lambda: prefiller.resume(path), 5 * arguments.repeats),
            "load as a cache": timed(lambda: mmprefill.load(path).cache(), 5 * arguments.repeats),
        }
        size = path.stat().st_size
    print(f"{arguments.tokens} tokens, {size / 2**20:.1f} MiB, {arguments.threads} threads\n")
    print("| | s | processor s | x faster by the clock | by processors |")
    print("|---|---|---|---|---|")
    wall, cpu = rows["prefill"]
    for name, (w, c) in rows.items():
        print(f"| {name} | {w:.4f} | {c:.4f} | {wall / w:.1f} | {cpu / max(c, 1e-3):.1f} |")
    print(json.dumps({"tokens": arguments.tokens, "bytes": size, **rows}))


if __name__ == "__main__":
    main()
