"""Peak resident memory of the batch job at two sizes of input, on a tiny random model.

    python benchmarks/batch_memory.py                    1,000 and 10,000 rows; exit code 1 if they differ by over 20 %

Every row has a picture of 40 distinct ones, top-k and embeddings in the table and KV in shards (deleted at the end). The
engine's store of prompts is bounded by 32 MiB, which 1,000 rows fill: with 512 MiB the difference between the two
would be that of a store half full and a full one. The peak is the process's own, from the kernel, after the model is loaded
and warm.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

STORE = 32 * 2**20  # bytes of prompts
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def work(rows, folder):
    """One job in this process."""
    import checkpoints
    import torch

    from mmprefill import PrefillConfig, Prefiller, run_job

    torch.set_num_threads(1)
    for i in range(40):
        checkpoints.picture(i).save(folder / f"p{i}.png")
    with (folder / "in.jsonl").open("w") as file:
        for i in range(rows):
            print(json.dumps({"prompt": f"what is {i % 97}", "images": [f"p{i * 7 % 40}.png"]}), file=file)
    config = PrefillConfig(prefix_bytes=STORE)
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached("smolvlm"), config=config) as prefiller:
        report = run_job(
            folder / "in.jsonl", folder / "out", prefiller=prefiller, emit=("topk", "embeddings", "kv"), part_rows=128
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    told = {
        "rows": rows,
        "ok": report.ok,
        "peak_mib": peak,
        "seconds": round(report.seconds, 1),
        "bytes": report.nbytes,
    }
    print(json.dumps(told))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs=2, default=[1_000, 10_000])
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        work(int(arguments.serve[0]), Path(arguments.serve[1]))
        return 0
    found = []
    for rows in arguments.rows:
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, __file__, "--serve", str(rows), scratch]
            run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found.append(json.loads(run.stdout.splitlines()[-1]))
        print(f"{rows} rows: {found[-1]['peak_mib']} MiB, {found[-1]['seconds']} s", file=sys.stderr)
    apart = found[1]["peak_mib"] / found[0]["peak_mib"] - 1
    print(json.dumps({"runs": found, "apart": round(apart, 3)}))
    return 1 if abs(apart) > 0.2 else 0


if __name__ == "__main__":
    raise SystemExit(main())
