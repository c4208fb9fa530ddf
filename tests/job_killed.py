"""Kills a batch job at random instants and starts it again, with the model loaded once: every run is a fork.

python job_killed.py MODEL INPUT FOLDER KILLS SEED: a clean run in FOLDER/clean, killed ones in FOLDER/0, FOLDER/1, ...
"""

import faulthandler
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from mmprefill.job import run_job
from mmprefill.models import load
from mmprefill.prefiller import Prefiller

PATIENCE = float(os.environ.get("JOB_KILLED_PATIENCE", "40"))
SETTINGS = {"emit": ("kv", "topk", "logits"), "part_rows": 4, "window": 6}


def work(bundle, source, out):
    with Prefiller(bundle) as prefiller:
        run_job(source, out, prefiller=prefiller, **SETTINGS)


def killed_at_write(number, before):
    """This process dies around the n-th time that it makes a file or folder durable."""
    fsync, left = os.fsync, [number]

    def dying(descriptor):
        left[0] -= 1
        if not before:
            fsync(descriptor)
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if before:
            fsync(descriptor)

    os.fsync = dying


def forked(action):
    child = os.fork()
    if child:
        return child
    code = 1
    faulthandler.dump_traceback_later(PATIENCE, exit=True)  # a run takes seconds: this one hangs, and says where
    try:
        action()
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def main(model, source, folder, kills, seed):
    torch.set_num_threads(1)
    bundle, chance = load(model), random.Random(seed)
    _ = bundle.fingerprint
    started = time.perf_counter()
    assert os.waitpid(forked(lambda: work(bundle, source, folder / "clean")), 0)[1] == 0
    duration = time.perf_counter() - started
    done, killed = 0, 0
    while killed < kills:
        child = one_run(bundle, source, folder / str(done), chance, duration)
        status = os.waitpid(child, 0)[1]
        killed += os.WIFSIGNALED(status)
        done += status == 0
        assert status == 0 or os.WIFSIGNALED(status), f"a resumed job failed with status {status}"
    assert os.waitpid(forked(lambda: work(bundle, source, folder / str(done))), 0)[1] == 0
    print(json.dumps({"killed": killed, "folders": done + 1}))


def one_run(bundle, source, out, chance, duration):
    """Killed at a write or after some time; perhaps it is done before that."""
    at_write, number, before = chance.random() < 0.5, chance.randrange(1, 60), chance.random() < 0.5

    def action():
        if at_write:
            killed_at_write(number, before)
        work(bundle, source, out)

    child = forked(action)
    if not at_write:
        time.sleep(chance.uniform(0, duration))
        os.kill(child, signal.SIGKILL)
    return child


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
