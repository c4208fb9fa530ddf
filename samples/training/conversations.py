"""What the bundled model learns from: conversations about scenes as batches of tokens, pictures and what they show."""

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import make_scenes as ms
import numpy as np
import torch
from torch import Tensor
from training.model import CELLS, PATCH, POOL, SIDE, SPECIAL, SYSTEM, build_processor
from transformers import PreTrainedTokenizerFast

MIX = {"colour": 7, "shape": 6, "size": 4, "yes/no": 12, "count": 24, "relation": 37, "digit": 5, "letter": 5}
CHARS = ms.DIGITS + ms.LETTERS
# Where one head of a layer is shown where to look, while it learns: (layer, head). A word of the question looks at the
# objects that it names; before a word of the answer, at the first and the last name in the question, and at what the word
# is read from. The very first token gets as much as each object that fits: all where nothing does, less the more there are,
# which is how to count.
LOOKS = {"names": (1, 0), "first": (2, 0), "last": (2, 1), "shows": (3, 0)}
COUNTED = ("yes", "no", "first", "second", "same", "both", *"0123456")


@dataclass
class Row:
    """A conversation so far."""

    tokens: list[int]
    marks: list[int]  # per token: the kind of question that it answers, else -1
    scenes: list[ms.Scene]  # that are drawn
    looks: dict[str, list[tuple[int, list[int]]]]  # per kind of look the places that look, each with those looked at
    spots: dict[int, int]  # where an object is to be found: its cell, or the word for it; by id()
    kept: list[ms.Scene]  # so that no id comes twice


class Writer:
    """Conversations as token ids, exactly as the chat template and the processor would make them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
        self.picture = [self.ids["image"]] * CELLS**2
        self.encode = lru_cache(maxsize=200_000)(self._encoder(tokenizer))
        self.user = [self.ids["head"], *self.words("user"), self.ids["body"]]
        self.assistant = [self.ids["head"], *self.words("assistant"), self.ids["body"]]

    @staticmethod
    def _encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], tuple[list[int], list[int]]]:
        def encode(text: str) -> tuple[list[int], list[int]]:
            made = tokenizer.backend_tokenizer.encode(text)
            return made.ids, [end for _, end in made.offsets]

        return encode

    def words(self, text: str) -> list[int]:
        """Its tokens."""
        return self.encode(text)[0]

    def start(self, rng: random.Random) -> Row:
        """The first tokens: sometimes a system message."""
        tokens = [self.ids["bos"]]
        if rng.random() < 0.06:
            tokens += [
                self.ids["head"],
                *self.words("system"),
                self.ids["body"],
                *self.words(rng.choice(SYSTEM)),
                self.ids["eot"],
            ]
        return Row(tokens, [-1] * len(tokens), [], {kind: [] for kind in LOOKS}, {}, [])

    def turn(self, row: Row, asked: ms.Asked, scenes: list[ms.Scene], text_first: bool, length: int) -> bool:
        """Adds a question, with the pictures that come with it, and its answer; not if that makes the row too long."""
        (question, ends), (answer, answer_ends) = self.encode(asked.question), self.encode(asked.answer)
        seen = self.picture * len(scenes)
        ask = [
            *self.user,
            *((*question, *seen) if text_first else (*seen, *question)),
            self.ids["eot"],
            *self.assistant,
        ]
        if len(row.tokens) + len(ask) + len(answer) + 1 > length:
            return False
        begin = len(row.tokens) + len(self.user)
        at, first = (begin, begin + len(question)) if text_first else (begin + len(seen), begin)
        for scene in scenes:
            for item in (*scene.things, *scene.glyphs):
                i, j = cell_of(item)
                row.spots[id(item)] = first + i * CELLS + j
            first += CELLS**2
        row.scenes += scenes
        row.tokens += ask
        row.marks += [-1] * len(ask)
        names = [self._name(row, asked, words, things, at, ends) for words, things in asked.named]
        self._answer(row, asked, answer_ends, names)
        row.tokens += [*answer, self.ids["eot"]]
        row.marks += [ms.KINDS.index(asked.kind)] * (len(answer) + 1)
        return True

    @staticmethod
    def _name(row: Row, asked: ms.Asked, words: str, things: tuple, at: int, ends: list[int]) -> int:
        """The last of these words looks at the objects that they fit."""
        end = asked.question.find(words) + len(words)
        place = at + next(k for k, e in enumerate(ends) if e >= end)
        row.looks["names"].append((place, [0, *(row.spots[id(t)] for t in things)]))
        return place

    @staticmethod
    def _answer(row: Row, asked: ms.Asked, ends: list[int], names: list[int]) -> None:
        """What comes before a word of the answer looks at the names in the question and at what the word is read from."""
        counts = [0] if asked.answer in COUNTED and asked.kind != "digit" else []
        begin = 0
        for words, things in asked.shown or [(asked.answer, ())]:
            begin = asked.answer.find(words, begin)
            for place in (len(row.tokens) + k - 1 for k, e in enumerate(ends) if begin < e <= begin + len(words)):
                if names:
                    row.looks["first"].append((place, names[:1]))
                    row.looks["last"].append((place, names[-1:]))
                if asked.shown:
                    row.looks["shows"].append((place, counts + [row.spots[id(t)] for t in things]))
            begin += len(words)

    def tell(self, row: Row, scene: ms.Scene, words: str) -> None:
        """Notes where a text that is about to be asked about names the objects."""
        _, ends = self.encode(words + " ")
        for thing in scene.things:
            end = words.find(f"{thing.size} {thing.name}") + len(f"{thing.size} {thing.name}")
            place = next(k for k, e in enumerate(ends) if e >= end)
            row.spots[id(thing)] = len(row.tokens) + len(self.user) + place


def cell_of(item: ms.Thing | ms.Glyph) -> tuple[int, int]:
    """Row and column of the cell that its centre is in."""
    size = PATCH * POOL
    return min(CELLS - 1, int(item.y / size)), min(CELLS - 1, int(item.x / size))


def _segment(
    rng: random.Random, writer: Writer, row: Row, kind: str, most: int
) -> tuple[list[ms.Scene], Callable[[], ms.Asked | None]]:
    """Scenes and a function that asks the next question about them."""
    mix = list(MIX), list(MIX.values())
    if kind == "one":
        scene = ms.make_scene(rng, most=most)
        return [scene], lambda: ms.ask(rng, scene, rng.choices(*mix)[0])
    if kind == "two":
        pair = ms.make_pair(rng, most=most)
        return list(
            pair
        ), lambda: ms.ask_pair(rng, *pair) if rng.random() < 0.75 else ms.ask_one_of(rng, pair, rng.choices(*mix)[0])
    scene = ms.make_scene(rng, glyphs=(), most=most)
    row.kept.append(scene)
    words, ordered = ms.told(rng, scene)
    writer.tell(row, scene, words)
    first = [words + " "]

    def ask() -> ms.Asked | None:
        if asked := ms.ask_told(rng, scene, ordered):
            asked.question = (first[0] if first else "") + asked.question
            first.clear()
        return asked

    return [], ask


def make_row(rng: random.Random, writer: Writer, length: int, long: bool, kind: str = "", most: int = 6) -> Row:
    """One conversation of at most `length` tokens; a long one brings new pictures every few turns."""
    row = writer.start(rng)
    while True:
        current = kind or rng.choices(("one", "two", "text"), (70, 22, 8))[0]
        seen, ask = _segment(rng, writer, row, current, most)
        turns = rng.choice((1, 1, 2, 3, 5, 8)) if long else 10**6
        describes = rng.random() < (0.15 if long else 0.6)
        asked_before: set[str] = set()
        pending, tries = seen, 0
        while turns and tries < 60:
            tries += 1
            last = describes and current == "one" and (turns == 1 or len(row.tokens) > length - 75)
            asked = ms.ask(rng, seen[0], "describe") if last and not pending else ask()
            if asked is None or asked.question in asked_before:
                continue
            if asked.kind in ("digit", "letter") and not asked.question.startswith("In the"):
                if asked.kind in asked_before:  # a second time it could be copied from the first
                    continue
                asked_before.add(asked.kind)
            if not writer.turn(row, asked, pending, bool(pending) and rng.random() < 0.1, length):
                return row
            asked_before.add(asked.question)
            pending, turns = [], turns - 1
            if last and asked.kind == "describe":
                describes = False
                if not long:
                    return row
        if not long:
            return row


@dataclass
class Batch:
    """One step's input. `shown_*` say what patches and cells show, for the heads that exist only in training."""

    pixels: Tensor  # [P, 3, SIDE, SIDE] uint8
    shown_patches: Tensor  # [P, 3, patches] colour, shape or character, size; -100 where unclear
    shown_cells: Tensor  # [P, 6, cells] centre here, colour, shape, size, character, (unused)
    offsets: Tensor  # [P, 2, cells] from the middle of the cell to the centre, in cells
    tokens: Tensor | None = None  # [B, T]
    marks: Tensor | None = None  # [B, T] kind where an answer is, else -1
    alone: Tensor | None = None  # [B] whether a row's turns see the pictures only, not each other
    looks: "dict[str, Pointed] | None" = None


@dataclass
class Pointed:
    """Tokens, and the ones that they should look at."""

    rows: Tensor  # [N]
    places: Tensor  # [N]
    wanted: Tensor  # [N, T] the share of attention that each token should get

    @classmethod
    def gather(cls, rows: list[list[tuple[int, list[int]]]], width: int) -> "Pointed":
        """From each row's places; not where a question comes before its picture."""
        found = [(b, at, to) for b, row in enumerate(rows) for at, to in row if to and all(k < at for k in to)]
        wanted = torch.zeros(len(found), width)
        for n, (_, _, to) in enumerate(found):
            wanted[n, to] = 1 / len(set(to))
        return cls(torch.tensor([b for b, _, _ in found]), torch.tensor([at for _, at, _ in found]), wanted)


def label(scene: ms.Scene) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What every patch and every cell shows."""
    n = SIDE // PATCH
    centres = (np.arange(n) + 0.5) * PATCH
    patches = np.zeros((3, n, n), np.int64)
    cells, offsets = np.full((5, CELLS, CELLS), -100, np.int64), np.zeros((2, CELLS, CELLS), np.float32)
    cells[0] = 0
    sx, sy = scene.width / SIDE, scene.height / SIDE
    unit = math.sqrt(sx * sy)
    for item in (*scene.things, *scene.glyphs):
        thing = isinstance(item, ms.Thing)
        r = item.r if thing else item.height * 0.6
        d = np.hypot((centres[None, :] - item.x) * sx / unit, (centres[:, None] - item.y) * sy / unit)
        inside, near = d < max(r * 0.75, 6.0), d < r + 5
        hole = thing and item.shape == "ring"
        if thing:
            colour, shape = list(ms.COLOURS).index(item.colour), ms.SHAPES.index(item.shape)
            values = (colour + 1, shape + 1, ms.SIZES.index(item.size) + 1)
        else:
            values = (len(ms.COLOURS) + 1, len(ms.SHAPES) + 1 + CHARS.index(item.char), 3)
        for plane, value in zip(patches, values, strict=True):
            plane[near & ~inside] = -100
            plane[inside] = value
        if hole and r > 10:
            patches[0][d < r * 0.4] = -100
        size, (i, j) = PATCH * POOL, cell_of(item)
        cells[:, i, j] = (
            (1, colour, shape, values[2] - 1, -100) if thing else (2, -100, -100, -100, CHARS.index(item.char))
        )
        offsets[:, i, j] = item.x / size - j - 0.5, item.y / size - i - 0.5
    return patches.reshape(3, -1), cells.reshape(5, -1), offsets.reshape(2, -1)


class Batches:
    """A process's share of batch i of the run, from the seed, i and the process's number alone."""

    def __init__(self, args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, rank: int):
        self.args, self.rank = args, rank
        self.writer, self.shrink = Writer(tokenizer), build_processor(tokenizer).image_processor

    def __getitem__(self, i: int) -> Batch:
        args = self.args
        rng = random.Random(f"train {args.seed} {i} {self.rank}")
        if i < args.seeing:
            return self.see(rng, [self.crowded(rng) for _ in range(args.pictures // args.processes)])
        long = (i - args.seeing) > 0.3 * (args.steps - args.seeing) and i % 12 == 0
        length = args.long if long else args.length
        budget = args.rows * args.length * (2 if long else 1) // length // args.processes
        most = min(ms.MAX_OBJECTS, 4 + int(14 * (i - args.seeing) / (args.steps - args.seeing)))  # few objects at first
        rows = [
            make_row(rng, self.writer, length, long, "" if long else self.kind(k, budget), most) for k in range(budget)
        ]
        batch = self.see(rng, [s for row in rows for s in row.scenes])
        width = max(len(r.tokens) for r in rows)
        share = 0.9 if i - args.seeing < 0.5 * (args.steps - args.seeing) else 0.5  # as if asked alone: learnt sooner
        batch.alone = torch.tensor([not long and rng.random() < share for _ in rows])
        pad = self.writer.ids["pad"]
        batch.tokens = torch.tensor([r.tokens + [pad] * (width - len(r.tokens)) for r in rows])
        batch.marks = torch.tensor([r.marks + [-1] * (width - len(r.marks)) for r in rows])
        if not long:
            batch.looks = {kind: Pointed.gather([r.looks[kind] for r in rows], width) for kind in LOOKS}
        return batch

    def kind(self, k: int, rows: int) -> str:
        """What the k-th conversation is about."""
        return "text" if k < rows * 0.06 else "two" if k < rows * 0.4 else "one"

    def crowded(self, rng: random.Random) -> ms.Scene:
        """As much to see as fits: the tower learns twice as fast from it."""
        return ms.make_scene(rng, count=rng.choice((5, 6)), glyphs=tuple(rng.choices(CHARS, k=rng.choice((2, 3, 4)))))

    def see(self, rng: random.Random, scenes: list[ms.Scene]) -> Batch:
        """Pictures as the processor makes them, and what they show."""
        pixels, labels = np.empty((len(scenes), SIDE, SIDE, 3), np.uint8), [label(s) for s in scenes]
        for k, scene in enumerate(scenes):
            image = ms.draw(scene, rng.getrandbits(48))
            if image.size != (SIDE, SIDE):
                made = self.shrink(image, do_rescale=False, do_normalize=False, return_tensors="pt").pixel_values
                pixels[k] = made[0, 0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8).numpy()
            else:
                pixels[k] = np.asarray(image)
        shown = [torch.from_numpy(np.stack([x[j] for x in labels])) for j in range(3)]
        return Batch(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), *shown)
