"""The requests of `mmprefill bench`: a folder of pictures and `workload.json`, made up where none is given."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence as Seq
from pathlib import Path

from PIL import Image

from mmprefill.bench import REQUESTS
from mmprefill.verify import pictures


def check(folder: Path, variants: Seq[str], requests: int | None) -> None:
    """Raises ValueError, before anything is loaded, for a workload that has less than is asked of it."""
    file = folder / "workload.json"
    if not file.is_file():
        raise ValueError(f"--workload {folder}: no workload.json in it; without the option one is made up")
    try:
        rows, least = json.loads(file.read_text(encoding="utf-8")), requests or 1
    except ValueError as error:
        raise ValueError(f"--workload {file}: no JSON: {error}") from error
    for variant in variants:
        found = len(rows.get(variant, ()))
        if found < least:
            raise ValueError(
                f"--workload {folder}: variant {variant!r} has {found} requests, fewer than the {least} asked for; "
                "see --requests and --variants"
            )


def made_up(folder: Path, requests: int) -> Path:
    """A workload with as many requests, or more, about made-up pictures; under an empty folder.

    Never fewer than the usual ones: a shorter run takes the first of those, and can be set beside a whole one.
    """
    sources = [folder / f"source{i}.png" for i in range(6)]
    for path, picture in zip(sources, pictures(6, sizes=((480, 640),)), strict=True):
        Image.fromarray(picture).save(path)
    return make_workload(folder / "workload", sources, max(requests, REQUESTS))


def make_workload(folder: Path, sources: Seq[Path], requests: int = REQUESTS, seed: int = 7) -> Path:
    """Write pictures and `workload.json`, variant -> rows of a text and the name of its picture.

    Variant a: different pictures of 224-800 x 224-600 pixels; b: 4 pictures x 8 questions, shuffled; c: text only.
    """
    draw = random.Random(seed)  # noqa: S311 - a fixture, not a secret
    folder.mkdir(parents=True, exist_ok=True)
    images = [Image.open(path).convert("RGB") for path in sources]
    unique = [_crop(draw, images[i % len(images)], folder / f"u{i:02d}.png") for i in range(requests)]
    sizes = [(224, 224), (448, 336), (640, 480), (800, 600)]
    four = [_resized(images[i % len(images)], size, folder / f"f{i}.png") for i, size in enumerate(sizes)]
    texts = [_text(draw) for _ in range(requests)]
    order = [i % 4 for i in range(requests)]
    draw.shuffle(order)
    rows = {
        "a": [{"image": image, "text": text} for image, text in zip(unique, texts, strict=True)],
        "b": [{"image": four[i], "text": text} for i, text in zip(order, texts, strict=True)],
        "c": [{"image": None, "text": text} for text in texts],
    }
    (folder / "workload.json").write_text(json.dumps(rows))
    return folder


def _crop(draw: random.Random, image: Image.Image, path: Path) -> str:
    width, height = draw.randint(224, 800), draw.randint(224, 600)
    scale = min(image.width / width, image.height / height) * draw.uniform(0.6, 1)
    crop_width, crop_height = int(width * scale), int(height * scale)
    left, top = draw.randint(0, image.width - crop_width), draw.randint(0, image.height - crop_height)
    image.crop((left, top, left + crop_width, top + crop_height)).resize((width, height)).save(path)
    return path.name


def _resized(image: Image.Image, size: tuple[int, int], path: Path) -> str:
    image.resize(size).save(path)
    return path.name


def _text(draw: random.Random) -> str:
    """6-110 words of the standard library's source, as questions and documents mix."""
    words = Path(os.__file__).read_text(encoding="utf-8", errors="ignore").split()
    count, start = draw.randint(6, 110), draw.randint(0, len(words) - 300)
    return " ".join(words[start : start + count])
