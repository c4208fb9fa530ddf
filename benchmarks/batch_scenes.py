"""Held-out scene questions through every form of output of the batch job, with the accuracy of the model.

    python benchmarks/batch_scenes.py                           2,000 fresh questions, the bundled model
    python benchmarks/batch_scenes.py --questions 40            something small

Accuracy is of the generated text and, where the answer is one of a few words (a colour, a shape, yes or no, a count), of the
best-scored choice. The forms are compared with each other: the log-probability of the best of `topk` follows from `logits`;
the embedding is the last row of `hidden`; KV that is loaded again goes on to the same text, in bf16 up to near ties.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from safetensors import safe_open

import mmprefill
from mmprefill import Prefiller, run_job
from mmprefill.answers import is_right
from mmprefill.job_settings import EMITS

CHOICES = ("yes", "no", "red", "orange", "yellow", "green", "blue", "purple", "white", "black", "circle", "square",
           "triangle", "star", "cross", "ring", "0", "1", "2", "3", "4", "5", "6")  # fmt: skip
RESUMED = 50  # rows whose KV is decoded again


def read(path):
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def tally(rows, questions):
    """Kind -> [rows, right by text, rows that a choice can answer, right by score]."""
    table = defaultdict(lambda: [0, 0, 0, 0])
    for row in rows:
        asked = questions[row["index"]]
        for kind in (asked["kind"], "all"):
            line = table[kind]
            line[0] += 1
            line[1] += is_right(asked["kind"], row["text"], asked["answer"])
            if asked["answer"] in CHOICES:
                line[2] += 1
                line[3] += row["best"] == asked["answer"]
    return table


def check(rows, out, prefiller, most):
    """Form -> rows in which it disagrees with another; "text" after KV was loaded again, of about `RESUMED` rows."""
    wrong, files = Counter(dict.fromkeys(("topk", "embeddings", "scores", "kv", "text"), 0)), {}
    for number, row in enumerate(rows):
        tensors = files.setdefault(row["tensors"], safe_open(out / row["tensors"], framework="pt"))
        logprobs = tensors.get_tensor(f"{row['index']}.logits").log_softmax(-1)
        last = tensors.get_tensor(f"{row['index']}.hidden.-1")[-1].float()
        wrong["topk"] += not math.isclose(float(logprobs[row["top_ids"][0]]), row["top_logprobs"][0], abs_tol=1e-4)
        wrong["embeddings"] += not bool((torch.tensor(row["embedding"]) - last).abs().max() <= 1e-4)
        wrong["scores"] += row["best"] != CHOICES[max(range(len(CHOICES)), key=row["scores"].__getitem__)]
        if number % max(1, len(rows) // RESUMED) == 0:
            again = prefiller.resume(out / row["kv"])
            wrong["kv"] += again.top_tokens(1)[0].id != row["top_ids"][0]
            wrong["text"] += again.generate(most).text != row["text"]
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the bundled one")
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=20_261)
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data, out = Path(scratch) / "data", Path(scratch) / "out"
        held_out = arguments.questions // 4
        command = [sys.executable, str(ROOT / "samples" / "make_scenes.py"), str(data), "--seed", str(arguments.seed),
                   "--questions", str(arguments.questions - held_out), "--held-out", str(held_out)]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        questions = read(data / "questions.jsonl")
        started = time.perf_counter()
        with Prefiller.from_pretrained(arguments.model) as prefiller:
            report = run_job(
                data / "questions.jsonl", out, prefiller=prefiller, prompt_column="question", emit=EMITS, choices=CHOICES,
                max_new_tokens=arguments.tokens, progress=True,
            )  # fmt: skip
            rows = [row for table in sorted((out / "rows").iterdir()) for row in read(table)]
            wrong = check(rows, out, prefiller, arguments.tokens)
        table = tally(rows, questions)
        seconds = time.perf_counter() - started
        whole = sum(
            1 for file in (out / "kv").iterdir() for each in mmprefill.load_shard(file) if each.verify() is None
        )
    print("\n".join(report.lines()))
    print("\n| kind | questions | right (text) | answered by a choice | right (scores) |\n|---|---|---|---|---|")
    for kind, (count, right, some, best) in sorted(table.items(), key=lambda each: (each[0] == "all", each[0])):
        print(
            f"| {kind} | {count} | {100 * right / count:.1f} % | {some} | {f'{100 * best / some:.1f} %' if some else '-'} |"
        )
    told = {
        "rows": len(rows),
        "failed": report.failed,
        "forms_disagree": dict(wrong),
        "kv_whole": whole,
        "seconds": round(seconds),
    }
    print(json.dumps({**told, "right": table["all"][1], "kinds": dict(table)}))
    return 1 if sum(wrong.values()) - wrong["text"] or report.failed or whole != len(rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
