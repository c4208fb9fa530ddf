"""One short request at a time, beside transformers: each in a process of its own, in turns, the other one idle meanwhile.

    python benchmarks/alone.py                         the bundled model: texts, and a picture, in fp32 and bf16
    python benchmarks/alone.py FOLDER --words 8 16     another checkpoint

A turn is six requests, of which the first two are not counted. Of what is counted the table shows medians. "alone" is one
blocking `Prefiller.prefill`, every prompt new; transformers' side is its chat template, its processor and one forward with
the last position's logits. Threads of one process that both multiply matrices would disturb each other (GNU's OpenMP puts
their teams to sleep after every operation), so that neither is measured beside the other in one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SIDE = 112  # of a picture, in pixels
TURN, WARM = 6, 2


def main() -> None:
    arguments = parser().parse_args()
    if arguments.system:
        serve(SYSTEMS[arguments.system](arguments.model, arguments.dtype[0]), arguments.words[0], arguments.picture)
        return
    print("| request | dtype | tokens | transformers, ms | mmprefill, ms | ratio |\n|---|---|---|---|---|---|")
    cases = [(words, False) for words in arguments.words] + ([(arguments.words[-1], True)] if arguments.picture else [])
    for (words, picture), dtype in product(cases, arguments.dtype):
        plain, ours, tokens = measured(arguments, words, dtype, picture)
        what = f"{words} words" + (" and a picture" if picture else "")
        print(f"| {what} | {dtype} | {tokens} | {plain:.1f} | {ours:.1f} | {plain / ours:.2f} |", flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", nargs="?", help="folder of a checkpoint; default: the bundled model")
    made.add_argument("--words", type=int, nargs="+", default=[4, 8, 40], help="words in the texts (default 4 8 40)")
    made.add_argument("--dtype", nargs="+", default=["fp32", "bf16"])
    made.add_argument("--no-picture", dest="picture", action="store_false", help="texts only")
    made.add_argument("--turns", type=int, default=25)
    made.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)  # the processes that this one starts
    return made


def measured(arguments: argparse.Namespace, words: int, dtype: str, picture: bool) -> tuple[float, float, int]:
    """Median milliseconds of transformers and of mmprefill, and the tokens of a request."""
    options = ["--words", str(words), "--dtype", dtype, *([] if picture else ["--no-picture"])]
    model = [arguments.model] if arguments.model else []
    processes = [
        subprocess.Popen([sys.executable, __file__, *model, *options, "--system", system], text=True, bufsize=1,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for system in SYSTEMS
    ]  # fmt: skip
    seconds: list[list[float]] = [[], []]
    for turn in range(arguments.turns + 1):
        for process, kept in zip(processes, seconds, strict=True):
            print(turn, file=process.stdin)
            answer = json.loads(process.stdout.readline())  # type: ignore[union-attr]
            kept += answer["seconds"] if turn else []
    for process in processes:
        process.communicate()
    plain, ours = (statistics.median(kept) * 1e3 for kept in seconds)
    return plain, ours, answer["tokens"]


def serve(run: Callable[[str, list], int], words: int, picture: bool) -> None:
    """A process of one system: a turn for each line of stdin."""
    for line in sys.stdin:
        seconds = []
        for number in range(TURN):
            key = int(line) * TURN + number
            text, pictures = " ".join((f"{key} is how many of these there are " * words).split()[:words]), []
            if picture:
                pictures = [picture_of(key)]
            started = time.perf_counter()
            tokens = run(text, pictures)
            seconds.append(time.perf_counter() - started)
        print(json.dumps({"seconds": seconds[WARM:], "tokens": tokens}), flush=True)


def picture_of(key: int):
    """Noise, another for each request."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(key).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))


def transformers(model: str | None, dtype: str) -> Callable[[str, list], int]:
    import torch

    from mmprefill.models import load

    bundle = load(model, dtype=dtype)

    def run(text: str, pictures: list) -> int:
        parts = [*({"type": "image", "image": each} for each in pictures), {"type": "text", "text": text}]
        inputs = bundle.processor.apply_chat_template(
            [{"role": "user", "content": parts}],
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
        )  # fmt: skip
        if pictures:
            inputs = inputs.to(bundle.model.dtype)  # of pixels
        with torch.no_grad():
            bundle.model(**inputs, use_cache=True, logits_to_keep=1).logits[0, -1].float()
        return int(inputs["input_ids"].shape[1])

    return run


def mmprefill(model: str | None, dtype: str) -> Callable[[str, list], int]:
    from mmprefill import Prefiller, Request

    prefiller = Prefiller.from_pretrained(model, dtype=dtype)
    return lambda text, pictures: len(prefiller.prefill(Request(prompt=text, images=pictures, reuse=False)).token_ids)


SYSTEMS = {"transformers": transformers, "mmprefill": mmprefill}

if __name__ == "__main__":
    main()
