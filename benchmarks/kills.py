"""kill -9 while KV is written and while a batch job runs: what is under its name is whole, and resume gives a clean run.

    python benchmarks/kills.py artefacts --kills 200       a process that saves is killed; the name always holds one of two
    python benchmarks/kills.py job --kills 60              a job is killed and started again until it is done; repeated

Both fork a process in which a tiny random model is loaded already. Ends with one line of JSON; exit code 1 if anything was
accepted that should not have been.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import checkpoints
import torch
from job_checks import failures, files, records, simple, write

import mmprefill
from mmprefill import Prefiller

NEAR = 1e-4


# Artefacts: one file and a shard, each overwritten again and again.


def artefacts(folder, kills, seed):
    """Counts kills, those that left a draft, and files that were not one of the two that were saved."""
    torch.set_num_threads(1)
    with checkpoints.quiet(), Prefiller.from_pretrained(checkpoints.cached("smolvlm")) as prefiller:
        first = prefiller.prefill("what", images=[checkpoints.picture(1)])
        rows = len(first.token_ids)  # a few MB of hidden states, so that most of the time is writing
        results = [dataclasses.replace(first, hidden_states={1: torch.randn(rows, 20_000)}, id=name) for name in "ab"]
        path, shard = folder / "x.kv.safetensors", folder / "y.kv.safetensors"
        wanted = {each.id: content(mmprefill.load(each.save(path))) for each in results}
        mmprefill.save_shard(results, shard)
        chance, told = random.Random(seed), {"kills": 0, "drafts_left": 0, "wrong": 0}
        for _ in range(kills):
            child = saver(results, path, shard)
            time.sleep(chance.random() * 0.2)
            os.kill(child, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "it should still have been saving"
            told["kills"] += 1
            told["wrong"] += not whole(path, shard, wanted)
            left = [each for each in folder.iterdir() if each not in (path, shard)]
            told["drafts_left"] += len(left)  # under a name of their own, which nothing reads
            for each in left:
                each.unlink()
    return told


def content(artefact):
    return artefact.manifest, {name: artefact.tensor(name).clone() for name in artefact.manifest.tensors}


def same(mine, theirs):
    return mine[0] == theirs[0] and all(torch.equal(mine[1][name], theirs[1][name]) for name in theirs[1])


def whole(path, shard, wanted):
    found = [mmprefill.load(path), *mmprefill.load_shard(shard)]
    return all(same(content(each), wanted[each.manifest.id]) for each in found)


def saver(results, path, shard):
    """A child that saves until it is killed; returns when it has saved once."""
    before = path.stat().st_ino
    child = os.fork()
    if child == 0:
        try:
            for i in range(100_000):
                results[i % 2].save(path)
                mmprefill.save_shard(results if i % 2 else results[::-1], shard)
        finally:
            os._exit(1)
    while path.stat().st_ino == before:
        time.sleep(0.001)
    return child


# A job: killed at any instant, gone on with, and compared with one clean run.


def job(folder, kills, seed):
    """Counts kills, finished jobs, and those whose output differs from that of the clean run."""
    data = folder / "data"
    data.mkdir()
    for i in range(4):
        checkpoints.picture(i).save(data / f"p{i}.png")
    rows = simple(18)
    rows[7]["images"] = ["missing.png"]
    source = write(data / "in.jsonl", rows)
    script = [sys.executable, str(ROOT / "tests" / "job_killed.py"), str(checkpoints.cached("smolvlm")), str(source)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT),
                   "JOB_KILLED_PATIENCE": "600"}  # fmt: skip
    command = [*script, str(folder), str(kills), str(seed)]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    told = json.loads(run.stdout.splitlines()[-1])
    done = [folder / str(number) for number in range(told["folders"])]
    wrong = sum(not equal(each, folder / "clean") for each in done)
    return {"kills": told["killed"], "finished": len(done), "wrong": wrong}


def equal(mine, clean):
    """The same files, rows, errors and, up to rounding, numbers."""
    if files(mine) != files(clean) or failures(mine) != failures(clean):
        return False
    pairs = list(zip(records(mine), records(clean), strict=True))
    return all(near(a, b) for a, b in pairs) and all(
        near_tensors(content(mmprefill.load(mine / a["kv"]))[1], content(mmprefill.load(clean / b["kv"]))[1])
        for a, b in pairs
    )


def near(mine, theirs):
    numbers = [abs(a - b) for a, b in zip(mine["top_logprobs"], theirs["top_logprobs"], strict=True)]
    rest = [{name: value for name, value in each.items() if name != "top_logprobs"} for each in (mine, theirs)]
    return max(numbers) <= NEAR and rest[0] == rest[1]


def near_tensors(mine, theirs):
    return mine.keys() == theirs.keys() and all(
        (mine[name].double() - theirs[name].double()).abs().max() <= NEAR for name in mine
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["artefacts", "job"])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        told = {"artefacts": artefacts, "job": job}[arguments.what](Path(scratch), arguments.kills, arguments.seed)
    print(json.dumps({"what": arguments.what, **told, "seconds": round(time.perf_counter() - started)}))
    return 1 if told["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
