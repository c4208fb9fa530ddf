"""Rows per second of the batch job with scores as output, beside two competent transformers loops on the same rows.

    python benchmarks/batch_scores.py MODEL                            300 rows over 60 pictures, then all different
    python benchmarks/batch_scores.py MODEL --rows 40 --pictures 8     something small

Systems: `job` is `mmprefill.run_job`; `one` reads, processes and runs one row at a time; `padded` sorts rows by length,
reads and processes them in DataLoader workers, and runs left-padded batches. Each has a process of its own; their repeats
alternate. All start from picture files and prompts and end with log-probabilities of every choice; loading the model and
one warm-up are outside the clock. Scores are compared with those of `one`. Processor seconds are those of the process and
its workers: on a busy machine they tell more than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from PIL import Image

WORDS = (
    "left right colour shape number largest smallest object picture behind under above near far count which what how"
)
BATCH, WORKERS = 8, 1  # of the padded loop: the best of what was tried on two cores


# The rows.


def make_rows(folder: Path, rows: int, pictures: int, seed: int = 3) -> Path:
    """Crops of the photographs as files, and questions about them in no order."""
    draw = random.Random(seed)
    sources = [Image.open(path).convert("RGB") for path in sorted((ROOT / "samples" / "photos").glob("*.jpg"))]
    for i in range(pictures):
        image = sources[i % len(sources)]
        width, height = draw.randint(224, 800), draw.randint(224, 600)
        scale = min(image.width / width, image.height / height) * draw.uniform(0.6, 1)
        left = draw.randint(0, int(image.width - scale * width))
        top = draw.randint(0, int(image.height - scale * height))
        box = (left, top, left + int(width * scale), top + int(height * scale))
        image.crop(box).resize((width, height)).save(folder / f"{i:03d}.jpg", quality=92)
    shown = [i % pictures for i in range(rows)]
    draw.shuffle(shown)
    lines = [
        {
            "id": f"r{i}",
            "prompt": " ".join(draw.choices(WORDS.split(), k=draw.randint(5, 40))) + "?",
            "image": f"{shown[i]:03d}.jpg",
        }
        for i in range(rows)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


def messages(row):
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["prompt"]}]}]


# The systems: a function of the path of the rows -> scores by row.


def job(model, choices):
    from mmprefill import Prefiller, run_job
    from mmprefill.models import load

    bundle = load(model)
    _ = bundle.fingerprint

    def run(path):
        with tempfile.TemporaryDirectory() as out, Prefiller(bundle) as prefiller:
            started = time.perf_counter()
            report = run_job(path, out, prefiller=prefiller, emit=("scores",), choices=choices)
            seconds = time.perf_counter() - started
            assert report.failed == 0, report.errors
            tables = sorted(Path(out, "rows").iterdir())
            scores = [json.loads(line)["scores"] for table in tables for line in table.read_text().splitlines()]
        return seconds, scores

    return run


class Rows(torch.utils.data.Dataset):
    """Rows as the padded loop reads them."""

    def __init__(self, path):
        self.path = path
        self.rows = [json.loads(line) for line in path.read_text().splitlines()]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return i, self.rows[i], Image.open(self.path.parent / self.rows[i]["image"]).convert("RGB")


class Collate:
    """Processes a batch in the worker."""

    def __init__(self, processor):
        self.processor = processor

    def __call__(self, items):
        texts = [self.processor.apply_chat_template(messages(row), add_generation_prompt=True) for _, row, _ in items]
        pictures = [[picture] for _, _, picture in items]
        inputs = self.processor(text=texts, images=pictures, return_tensors="pt", padding=True, padding_side="left")
        return [i for i, _, _ in items], dict(inputs)


def loop(model, choices, *, batch, workers):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    stock = AutoModelForImageTextToText.from_pretrained(model, dtype="auto").eval()
    ids = [processor.tokenizer(choice, add_special_tokens=False).input_ids for choice in choices]

    def run(path):
        started, data = time.perf_counter(), Rows(path)
        order = list(range(len(data)))
        if batch > 1:  # tokens differ by the text alone: every picture takes as many
            lengths = [len(processor.tokenizer(row["prompt"]).input_ids) for row in data.rows]
            order.sort(key=lengths.__getitem__)
        groups = [order[i : i + batch] for i in range(0, len(order), batch)]
        loader = torch.utils.data.DataLoader(
            data, batch_sampler=groups, collate_fn=Collate(processor), num_workers=workers
        )
        scores = [None] * len(data)
        for rows, inputs in loader:
            for row, found in zip(rows, scored(stock, inputs, ids), strict=True):
                scores[row] = found
        return time.perf_counter() - started, scores

    return run


@torch.inference_mode()
def scored(model, inputs, choices):
    """Log-probabilities of the choices for every row of a batch; longer ones go on from the cache, side by side."""
    inputs = {name: t.to(model.dtype) if t.is_floating_point() else t for name, t in inputs.items()}
    longest = max(map(len, choices))
    output = model(**inputs, use_cache=longest > 1, logits_to_keep=1)
    first = output.logits[:, -1].float().log_softmax(-1)
    scores = torch.stack([first[:, ids[0]] for ids in choices], 1)
    if longest > 1:
        rows, count = len(first), len(choices)
        cache = output.cache if getattr(output, "cache", None) is not None else output.past_key_values
        cache.batch_repeat_interleave(count)
        padded = torch.tensor([[*ids[:-1], *[0] * (longest - len(ids))] for ids in choices]).repeat(rows, 1)
        mask = torch.cat([inputs["attention_mask"].repeat_interleave(count, 0), torch.ones_like(padded)], 1)
        more = model(input_ids=padded, attention_mask=mask, cache=cache, use_cache=True).logits.float().log_softmax(-1)
        more = more.reshape(rows, count, longest - 1, -1)
        for j, ids in enumerate(choices):
            for k, token in enumerate(ids[1:]):
                scores[:, j] += more[:, j, k, token]
    return scores.tolist()


SYSTEMS = {
    "job": job,
    "one": lambda model, choices: loop(model, choices, batch=1, workers=0),
    "padded": lambda model, choices: loop(model, choices, batch=BATCH, workers=WORKERS),
}


# Side by side.


def serve(system, model, choices):
    """The worker: paths come in, seconds and scores go out."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    run = SYSTEMS[system](model, choices)
    for line in sys.stdin:
        before = processor_seconds()
        seconds, scores = run(Path(line.strip()))
        told = {"seconds": seconds, "cpu": processor_seconds() - before, "scores": scores}
        print(json.dumps(told), flush=True)


def processor_seconds():
    return sum(os.times()[:4])


class Worker:
    def __init__(self, system, model, choices, threads):
        command = [sys.executable, __file__, str(model), "--serve", system, "--choices", *choices]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, path):
        print(path, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("a benchmark process died")


def compare(arguments, pictures):
    """Every system on one set of rows; medians, and how far scores are from those of `one`."""
    with tempfile.TemporaryDirectory() as scratch:
        path = make_rows(Path(scratch), arguments.rows, pictures)
        (Path(scratch) / "warm").mkdir()
        warm = make_rows(Path(scratch) / "warm", 4, 2)
        workers = {
            name: Worker(name, arguments.model, arguments.choices, arguments.threads) for name in arguments.systems
        }
        try:
            for worker in workers.values():
                worker.ask(warm)
            told = {name: [] for name in workers}
            for _ in range(arguments.repeats):
                for name, worker in workers.items():
                    told[name].append(worker.ask(path))
                    print(
                        f"{pictures} pictures, {name}: {told[name][-1]['seconds']:.1f} s, "
                        f"{told[name][-1]['cpu']:.1f} s of processors",
                        file=sys.stderr,
                    )
        finally:
            for worker in workers.values():
                worker.process.kill()
                worker.process.wait()
    return [record(name, each, told, arguments.rows, pictures) for name, each in told.items()]


def record(name, runs, told, rows, pictures):
    base = told.get("one", runs)[0]["scores"]
    apart = [
        abs(a - b)
        for mine, theirs in zip(runs[0]["scores"], base, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    best = sum(max(a) - max_at(a, b) < 1e-9 for a, b in zip(runs[0]["scores"], base, strict=True))
    middle = statistics.median(run["seconds"] for run in runs)
    return {
        "pictures": pictures, "system": name, "rows_per_s": round(rows / middle, 3),
        "seconds": [round(run["seconds"], 2) for run in runs], "cpu": [round(run["cpu"], 2) for run in runs],
        "most_apart": round(max(apart), 4), "mean_apart": round(statistics.mean(apart), 5), "same_best": best,
    }  # fmt: skip


def max_at(mine, theirs):
    """My score of their best choice."""
    return mine[max(range(len(theirs)), key=theirs.__getitem__)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--pictures", type=int, nargs="+", help="default: a fifth of the rows, then as many as rows")
    parser.add_argument("--choices", nargs="+", default=["a", "b", "c", "d"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--serve", choices=SYSTEMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.model, arguments.choices)
        return
    found = [
        each
        for pictures in arguments.pictures or (max(1, arguments.rows // 5), arguments.rows)
        for each in compare(arguments, pictures)
    ]
    print(
        "| pictures | system | rows/s | x the faster loop | processor s a row | score apart: most, mean | same best |"
    )
    print("|---|---|---|---|---|---|---|")
    for each in found:
        loops = [o["rows_per_s"] for o in found if o["pictures"] == each["pictures"] and o["system"] != "job"]
        ratio = f"{each['rows_per_s'] / max(loops):.2f}" if loops else "-"
        print(
            f"| {each['pictures']} | {each['system']} | {each['rows_per_s']:.2f} | {ratio} "
            f"| {statistics.median(each['cpu']) / arguments.rows:.2f} "
            f"| {each['most_apart']:.3f}, {each['mean_apart']:.4f} | {each['same_best']} of {arguments.rows} |"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
