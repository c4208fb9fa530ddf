"""Draws synthetic scenes, asks questions about them and writes both as an image folder with a JSONL file.

    python samples/make_scenes.py OUT --questions 2000 --seed 7

OUT/pictures/*.png and OUT/questions.jsonl; a line is {"id", "kind", "images", "question", "answer", "held_out"}. The
same seed gives the same bytes. Everything works in memory too: `make_scene`, `draw`, `ask`, `ask_pair`, `ask_text`.

Places are on a grid of 112 x 112, whatever the size of the picture; y grows downwards.
"""

import argparse
import json
import math
import random
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

GRID = 112
COLOURS = {
    "red": (212, 32, 36),
    "orange": (245, 138, 20),
    "yellow": (250, 224, 40),
    "green": (36, 156, 60),
    "blue": (34, 72, 214),
    "purple": (146, 48, 176),
    "white": (248, 248, 248),
    "black": (16, 16, 18),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
SIZES = ("small", "large")
RADII = {"small": (7.0, 8.2), "large": (12.5, 15.0)}
DIGITS = "0123456789"
LETTERS = "ACEFHKLMPRTX"
HELD_OUT = (("red", "star"), ("blue", "triangle"), ("green", "ring"), ("yellow", "cross"), ("purple", "square"))
TRAINED = tuple((c, s) for c in COLOURS for s in SHAPES if (c, s) not in HELD_OUT)
MAX_OBJECTS = 6
KINDS = ("colour", "shape", "size", "yes/no", "count", "relation", "digit", "letter", "compare", "describe", "text")
SINGLE = KINDS[:8]  # asked about one picture with a short answer
SHARES = {
    "colour": 12,
    "shape": 10,
    "size": 8,
    "yes/no": 12,
    "count": 12,
    "relation": 14,
    "digit": 7,
    "letter": 5,
    "compare": 10,
    "describe": 4,
    "text": 6,
}  # of a data set's questions, per cent
WORDS = ("zero", "one", "two", "three", "four", "five", "six")


@dataclass(slots=True)
class Thing:
    """One object: what it is and where."""

    colour: str
    shape: str
    size: str
    x: float
    y: float
    r: float = 0.0
    angle: float = 0.0

    @property
    def pair(self) -> tuple[str, str]:
        """What it is, without its size."""
        return self.colour, self.shape

    @property
    def name(self) -> str:
        """The pair in words."""
        return f"{self.colour} {self.shape}"


@dataclass(slots=True)
class Glyph:
    """One printed digit or letter."""

    char: str
    x: float
    y: float
    height: float

    @property
    def kind(self) -> str:
        """`digit` or `letter`."""
        return "digit" if self.char in DIGITS else "letter"


@dataclass(slots=True)
class Scene:
    """What is in a picture, before it is drawn."""

    things: list[Thing]
    glyphs: list[Glyph] = field(default_factory=list)
    width: int = GRID
    height: int = GRID


@dataclass(slots=True)
class Asked:
    """A question, its one right answer, and what training may point at: the objects behind the words of both."""

    kind: str
    question: str
    answer: str
    targets: tuple[tuple[str, str], ...] = ()
    named: tuple["Pointed", ...] = ()  # words of the question, and the objects that they fit
    shown: tuple["Pointed", ...] = ()  # words of the answer, and the objects that they are read from

    @property
    def held_out(self) -> bool:
        """Whether a target is a pair that is never drawn in training."""
        return any(pair in HELD_OUT for pair in self.targets)


Pointed = tuple[str, tuple[Thing | Glyph, ...]]


# ---------------------------------------------------------------------------------------------------------- scenes
def _place(
    rng: random.Random, r: float, taken: list[tuple[float, float, float]], spread_x: list[float]
) -> tuple | None:
    """A centre that leaves everything else clearly visible and, between objects, x and y apart enough to order them."""
    for _ in range(40):
        x, y = rng.uniform(r + 1.5, GRID - r - 1.5), rng.uniform(r + 1.5, GRID - r - 1.5)
        if all((x - a) ** 2 + (y - b) ** 2 > (0.92 * (r + s)) ** 2 for a, b, s in taken) and all(
            abs(x - a) > 4 for a in spread_x
        ):
            return x, y
    return None


def make_scene(
    rng: random.Random,
    pairs: tuple = TRAINED,
    count: int | None = None,
    must: tuple = (),
    glyphs: tuple[str, ...] | None = None,
    native: float = 0.85,
    most: int = MAX_OBJECTS,
) -> Scene:
    """A random scene; `must` are (colour, shape) pairs that it holds, `native` the share of pictures of 112 x 112."""
    count = max(len(must), min(most, count or rng.choices(range(1, MAX_OBJECTS + 1), (7, 15, 22, 22, 18, 16))[0]))
    if glyphs is None:
        glyphs = tuple(rng.choice(s) for s, p in ((DIGITS, 0.5), (LETTERS, 0.4)) if rng.random() < p)
    scene, taken, xs = Scene([]), [], []
    for char in glyphs:
        h = rng.uniform(17, 22)
        if spot := _place(rng, h * 0.62, taken, []):
            scene.glyphs.append(Glyph(char, *spot, h))
            taken.append((*spot, h * 0.62))
    alike = rng.random() < 0.3  # scenes where the same colour or shape comes back are the interesting ones to count
    for i in range(count):
        if i < len(must):
            colour, shape = must[i]
        else:
            colour, shape = rng.choice(pairs)
            if alike and scene.things:
                other = rng.choice(scene.things)
                same = rng.choice([p for p in pairs if (p[0] == other.colour) or (p[1] == other.shape)])
                colour, shape = same
        size = rng.choice(SIZES) if i < 4 else ("small" if rng.random() < 0.7 else "large")
        r = rng.uniform(*RADII[size])
        if spot := _place(rng, r, taken, xs):
            scene.things.append(Thing(colour, shape, size, *spot, r, rng.uniform(-0.3, 0.3)))
            taken.append((*spot, r))
            xs.append(spot[0])
    if rng.random() >= native:
        area, aspect = rng.uniform(90, 240) ** 2, math.exp(rng.uniform(-0.28, 0.28))
        scene.width, scene.height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
    return scene


# --------------------------------------------------------------------------------------------------------- drawing
def _outline(shape: str, r: float, angle: float) -> list[tuple[float, float]]:
    if shape == "square":
        polar = [(r, math.pi / 4 + k * math.pi / 2) for k in range(4)]
    elif shape == "triangle":
        polar = [(r * 1.1, -math.pi / 2 + k * 2 * math.pi / 3) for k in range(3)]
    elif shape == "star":
        polar = [(r * (1.12 if k % 2 == 0 else 0.46), -math.pi / 2 + k * math.pi / 5) for k in range(10)]
    else:  # a cross
        a = 0.34 * r
        corners = [
            (-a, -r),
            (a, -r),
            (a, -a),
            (r, -a),
            (r, a),
            (a, a),
            (a, r),
            (-a, r),
            (-a, a),
            (-r, a),
            (-r, -a),
            (-a, -a),
        ]
        polar = [(math.hypot(x, y), math.atan2(y, x)) for x, y in corners]
    return [(p * math.cos(t + angle), p * math.sin(t + angle)) for p, t in polar]


@lru_cache(maxsize=512)
def _glyph_mask(char: str, pixels: int, bold: bool, angle: int) -> Image.Image:
    font = ImageFont.load_default(pixels * 1.38)  # Pillow's own font: the same everywhere; capitals are 0.72 em high
    stroke = max(1, pixels // 22) if bold else 0
    box = font.getbbox(char, stroke_width=stroke)
    image = Image.new("L", (box[2] - box[0] + 2, box[3] - box[1] + 2))
    ImageDraw.Draw(image).text((1 - box[0], 1 - box[1]), char, fill=255, font=font, stroke_width=stroke)
    return image.rotate(angle, Image.Resampling.BILINEAR, expand=True)


def _background(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """A muted gradient with blotches: never as saturated, bright or dark as an object."""
    base, low = rng.uniform(80, 185), rng.uniform(-18, 18, (3,))
    cells = rng.uniform(-22, 22, (4, 4, 1)) + rng.uniform(-9, 9, (4, 4, 3))
    small = np.clip(base + low + cells * rng.choice([0.25, 1.0]), 70, 195).astype(np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def _tint(rng: np.random.Generator, colour: str) -> tuple[int, int, int]:
    return tuple(int(v) for v in np.clip(np.array(COLOURS[colour]) + rng.uniform(-14, 14, 3), 0, 255))


def draw(scene: Scene, seed: int, noisy: bool = True) -> Image.Image:
    """The picture of a scene; `seed` decides background, tints and noise. Without noise a PNG is far smaller."""
    rng = np.random.default_rng(seed)
    w, h = scene.width, scene.height
    sx, sy = 2 * w / GRID, 2 * h / GRID  # drawn at twice the size, then halved: anti-aliased
    unit = math.sqrt(sx * sy)
    image = Image.fromarray(_background(rng, 2 * w, 2 * h))
    pen = ImageDraw.Draw(image)
    for t in scene.things:
        fill, x, y, r = _tint(rng, t.colour), t.x * sx, t.y * sy, t.r * unit
        edge = tuple(int(v * 0.72) for v in fill) if rng.random() < 0.5 else None
        if t.shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=fill, outline=edge, width=2)
        elif t.shape == "ring":
            pen.ellipse((x - r, y - r, x + r, y + r), outline=fill, width=max(3, round(r * 0.36)))
        else:
            points = [(x + a, y + b) for a, b in _outline(t.shape, r, t.angle)]
            pen.polygon(points, fill=fill, outline=edge, width=2)
    for g in scene.glyphs:
        _print(rng, image, pen, g.char, g.x * sx, g.y * sy, g.height * unit)
    image = image.reduce(2)
    if not noisy:
        return image
    noise = rng.uniform(0, 9)
    pixels = np.asarray(image) + rng.standard_normal((h, w, 3), np.float32) * np.float32(noise)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _print(
    rng: np.random.Generator, image: Image.Image, pen: ImageDraw.ImageDraw, char: str, x: float, y: float, h: float
) -> None:
    mask = _glyph_mask(char, 2 * round(h / 2), bool(rng.random() < 0.6), int(rng.integers(-4, 5)) * 2)
    card = bool(rng.random() < 0.75)  # else straight onto the background, in the ink that stands out
    dark = bool(rng.random() < 0.5) if card else sum(image.getpixel((int(x), int(y)))) > 3 * 125
    ink, paper = ((25, 25, 30), (232, 230, 222)) if dark else ((240, 240, 235), (40, 42, 50))
    if card:
        s = h * 0.66
        pen.rounded_rectangle((x - s, y - s, x + s, y + s), radius=h * 0.15, fill=paper)
    image.paste(ink, (round(x - mask.width / 2), round(y - mask.height / 2)), mask)


# ------------------------------------------------------------------------------------------------------- questions
def _plural(noun: str) -> str:
    return {"cross": "crosses"}.get(noun, noun + "s")


def _an(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def _matches(thing: Thing, size: str | None = None, colour: str | None = None, shape: str | None = None) -> bool:
    return size in (None, thing.size) and colour in (None, thing.colour) and shape in (None, thing.shape)


def _words(size: str | None, colour: str | None, shape: str | None, rng: random.Random) -> str:
    return " ".join(w for w in (size, colour, shape or rng.choice(("object", "object", "thing", "shape"))) if w)


def refer(rng: random.Random, scene: Scene, thing: Thing, hide: tuple[str, ...] = ()) -> str | None:
    """Words that fit this object and no other in the scene, without the hidden attributes."""
    ways = []
    for parts in (
        ("shape",),
        ("colour",),
        ("colour", "shape"),
        ("size", "shape"),
        ("size", "colour"),
        ("size", "colour", "shape"),
        ("size",),
    ):
        if not any(p in hide for p in parts):
            values = {p: getattr(thing, p) for p in parts}
            if sum(_matches(t, **values) for t in scene.things) == 1:
                ways.append(values)
    if not ways:
        return None
    values = rng.choice(ways[:3])
    return _words(values.get("size"), values.get("colour"), values.get("shape"), rng)


ASK = {
    "colour": (
        "What colour is the {a}?",
        "What color is the {a}?",
        "Which colour is the {a}?",
        "Which color does the {a} have?",
        "The {a} is what colour?",
        "Tell me the colour of the {a}.",
        "What is the colour of the {a}?",
        "Name the color of the {a}.",
        "Can you tell what color the {a} is?",
        "Give the colour of the {a}.",
    ),
    "shape": (
        "What shape is the {a}?",
        "Which shape is the {a}?",
        "What is the shape of the {a}?",
        "What kind of shape is the {a}?",
        "Name the shape of the {a}.",
        "The {a} has which shape?",
        "Tell me what shape the {a} is.",
        "What form does the {a} have?",
        "Can you name the shape of the {a}?",
    ),
    "size": (
        "What size is the {a}?",
        "How big is the {a}?",
        "Is the {a} small or large?",
        "Is the {a} large or small?",
        "Tell me the size of the {a}.",
        "Which size does the {a} have?",
        "How large is the {a}?",
        "Give the size of the {a}.",
    ),
    "yes/no": (
        "Is there {a}?",
        "Do you see {a}?",
        "Can you see {a}?",
        "Is {a} in the picture?",
        "Does the picture show {a}?",
        "Is there {a} in the image?",
        "Does the scene contain {a}?",
        "Is {a} present?",
        "Can {a} be seen here?",
    ),
    "count": (
        "How many {a} are there?",
        "How many {a} do you see?",
        "Count the {a}.",
        "What is the number of {a}?",
        "How many {a} are in the picture?",
        "How many {a} can you see?",
        "Tell me how many {a} there are.",
        "Give the number of {a}.",
        "How many {a} does the image show?",
    ),
    "digit": (
        "Which digit is printed?",
        "What digit is printed?",
        "Which digit do you see?",
        "What number is printed in the picture?",
        "Read the digit.",
        "Which digit is shown?",
        "What is the digit in the picture?",
        "Tell me the digit.",
        "Which number can you read?",
        "Name the printed digit.",
    ),
    "letter": (
        "Which letter is printed?",
        "What letter is printed?",
        "Which letter do you see?",
        "Read the letter.",
        "Which letter is shown?",
        "What is the letter in the picture?",
        "Tell me the letter.",
        "Name the printed letter.",
        "Which letter can you read?",
    ),
    "describe": (
        "Describe the scene.",
        "Describe the picture.",
        "What is in the picture?",
        "What do you see?",
        "List all objects.",
        "List everything in the image.",
        "Tell me what the picture shows.",
        "Name all objects in the picture.",
        "What does the image show?",
    ),
}
SIDES = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
SIDE_WORDS = {
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "above": ("above", "higher than", "over"),
    "below": ("below", "lower than", "under"),
}
EXTREMES = {
    "left of": ("leftmost {o}", "{o} furthest to the left", "{o} at the far left"),
    "right of": ("rightmost {o}", "{o} furthest to the right", "{o} at the far right"),
    "above": ("topmost {o}", "highest {o}", "{o} nearest to the top"),
    "below": ("bottommost {o}", "lowest {o}", "{o} nearest to the bottom"),
}
CLEAR = 12.0  # a relation is asked about only where it holds, or fails, by this much
NEVER = 4.0


def _along(side: str, a: Thing, b: Thing) -> float:
    """How far a lies from b towards that side."""
    dx, dy = SIDES[side]
    return (a.x - b.x) * dx + (a.y - b.y) * dy


def _about(asked: Asked, name: str, *things: Thing) -> Asked:
    """The question names these objects, and the answer is read from them."""
    asked.named, asked.shown = ((name, things),), ((asked.answer, things),)
    return asked


def _ask_colour(rng: random.Random, scene: Scene, thing: Thing) -> Asked | None:
    if name := refer(rng, scene, thing, hide=("colour",)):
        text = rng.choice(ASK["colour"]).format(a=name)
        return _about(Asked("colour", text, thing.colour, (thing.pair,)), name, thing)
    return None


def _ask_shape(rng: random.Random, scene: Scene, thing: Thing) -> Asked | None:
    if name := refer(rng, scene, thing, hide=("shape",)):
        text = rng.choice(ASK["shape"]).format(a=name)
        return _about(Asked("shape", text, thing.shape, (thing.pair,)), name, thing)
    return None


def _ask_size(rng: random.Random, scene: Scene, thing: Thing) -> Asked | None:
    if name := refer(rng, scene, thing, hide=("size",)):
        text = rng.choice(ASK["size"]).format(a=name)
        return _about(Asked("size", text, thing.size, (thing.pair,)), name, thing)
    return None


def _query(rng: random.Random, thing: Thing) -> dict[str, str]:
    parts = rng.choices(
        (("shape",), ("colour",), ("colour", "shape"), ("size", "shape"), ("size", "colour", "shape")), (3, 3, 6, 2, 2)
    )[0]
    return {p: getattr(thing, p) for p in parts}


def _untold(query: dict[str, str]) -> bool:
    """Whether the query names a held-out pair: never asked about in vain, or training would teach that."""
    return (query.get("colour"), query.get("shape")) in HELD_OUT


def _ask_yes_no(rng: random.Random, scene: Scene, thing: Thing) -> Asked | None:
    query, answer = _query(rng, thing), "yes"
    if rng.random() < 0.56:  # near misses: one attribute of something that is there, changed
        for _ in range(6):
            changed = rng.choice(list(query))
            query = _query(rng, thing) if answer == "no" else query
            query |= {changed: rng.choice({"size": SIZES, "colour": tuple(COLOURS), "shape": SHAPES}[changed])}
            answer = "no"
            if not any(_matches(t, **query) for t in scene.things) and not _untold(query):
                break
        else:
            return None
    form = rng.choice(ASK["yes/no"])
    name = _words(query.get("size"), query.get("colour"), query.get("shape"), rng)
    fitting = (t for t in scene.things if _matches(t, **query))
    return _about(
        Asked("yes/no", form.format(a=_an(name)), answer, (thing.pair,) if answer == "yes" else ()), name, *fitting
    )


def _ask_count(rng: random.Random, scene: Scene, thing: Thing) -> Asked | None:
    parts = rng.choices(
        ((), ("shape",), ("colour",), ("size",), ("size", "shape"), ("colour", "shape")), (4, 5, 4, 3, 2, 1)
    )[0]
    query = {p: getattr(thing, p) for p in parts}
    if query and rng.random() < 0.12:
        part = parts[-1]
        query[part] = rng.choice({"size": SIZES, "colour": tuple(COLOURS), "shape": SHAPES}[part])
        if _untold(query):
            return None
    number = sum(_matches(t, **query) for t in scene.things)
    if number == 1 and rng.random() < 0.5:
        return None
    shape = query.get("shape")
    noun = _plural(shape) if shape else rng.choice(("objects", "objects", "things", "shapes"))
    words = " ".join(w for w in (query.get("size"), query.get("colour"), noun) if w)
    fitting = [t for t in scene.things if _matches(t, **query)]
    targets = tuple(t.pair for t in fitting)
    return _about(Asked("count", rng.choice(ASK["count"]).format(a=words), str(number), targets), words, *fitting)


def _ask_relation(rng: random.Random, scene: Scene, thing: Thing) -> Asked | None:
    others = [t for t in scene.things if t is not thing]
    if not others:
        return None
    form = rng.choices(
        (_relation_yes_no, _relation_which, _relation_side, _relation_extreme, _relation_nearest), (30, 16, 18, 22, 14)
    )[0]
    return form(rng, scene, thing, others)


def _relation_yes_no(rng: random.Random, scene: Scene, thing: Thing, others: list[Thing]) -> Asked | None:
    other, side = rng.choice(others), rng.choice(list(SIDES))
    a, b, d = refer(rng, scene, thing), refer(rng, scene, other), _along(side, thing, other)
    if not (a and b) or abs(d) < CLEAR:
        return None
    form = rng.choice(
        (
            "Is the {a} {s} the {b}?",
            "Is the {a} {s} the {b}?",
            "Does the {a} lie {s} the {b}?",
            "Can the {a} be found {s} the {b}?",
        )
    )
    text = form.format(a=a, b=b, s=rng.choice(SIDE_WORDS[side]))
    return Asked("relation", text, "yes" if d > 0 else "no", (thing.pair, other.pair), ((a, (thing,)), (b, (other,))))


def _relation_which(rng: random.Random, scene: Scene, thing: Thing, others: list[Thing]) -> Asked | None:
    """Exactly one object lies on that side of this one."""
    name, side = refer(rng, scene, thing), rng.choice(list(SIDES))
    along = sorted(((_along(side, o, thing), o) for o in others), key=lambda x: -x[0])
    if not name or along[0][0] < CLEAR or (len(along) > 1 and along[1][0] > -NEVER):
        return None
    form = rng.choice(
        (
            "What is {s} the {a}?",
            "Which object is {s} the {a}?",
            "What lies {s} the {a}?",
            "Name the object {s} the {a}.",
        )
    )
    found = along[0][1]
    text = form.format(a=name, s=rng.choice(SIDE_WORDS[side]))
    pointed = ((name, (thing,)),), ((found.name, (found,)),)
    return Asked("relation", text, found.name, (thing.pair, found.pair), *pointed)


def _relation_side(rng: random.Random, scene: Scene, thing: Thing, others: list[Thing]) -> Asked | None:
    other, sideways = rng.choice(others), rng.random() < 0.5
    a, b = refer(rng, scene, thing), refer(rng, scene, other)
    d = _along("right of" if sideways else "below", thing, other)
    if not (a and b) or abs(d) < CLEAR:
        return None
    if sideways:
        text = rng.choice(
            (
                "Is the {a} to the left or to the right of the {b}?",
                "Is the {a} left or right of the {b}?",
                "On which side of the {b} is the {a}, left or right?",
            )
        )
        answer = "right" if d > 0 else "left"
    else:
        text = rng.choice(
            (
                "Is the {a} above or below the {b}?",
                "Does the {a} lie above or below the {b}?",
                "Is the {a} above the {b} or below it?",
            )
        )
        answer = "below" if d > 0 else "above"
    named = (a, (thing,)), (b, (other,))
    return Asked("relation", text.format(a=a, b=b), answer, (thing.pair, other.pair), named)


def _relation_extreme(rng: random.Random, scene: Scene, thing: Thing, others: list[Thing]) -> Asked | None:
    side = rng.choice(list(SIDES))
    order = sorted(scene.things, key=lambda t: -_along(side, t, thing))
    if _along(side, order[0], order[1]) < 8:
        return None
    which = rng.choice(EXTREMES[side]).format(o=rng.choice(("object", "thing", "shape")))
    form = rng.choice(("What is the {w}?", "Which object is the {w}?", "Name the {w}.", "Tell me what the {w} is."))
    shown = ((order[0].name, (order[0],)),)
    return Asked("relation", form.format(w=which), order[0].name, (order[0].pair,), shown=shown)


def _relation_nearest(rng: random.Random, scene: Scene, thing: Thing, others: list[Thing]) -> Asked | None:
    name = refer(rng, scene, thing)
    order = sorted((math.hypot(o.x - thing.x, o.y - thing.y), i) for i, o in enumerate(others))
    if not name or (len(order) > 1 and order[1][0] < order[0][0] * 1.35):
        return None
    near = others[order[0][1]]
    form = rng.choice(
        (
            "What is nearest to the {a}?",
            "Which object is nearest to the {a}?",
            "What is closest to the {a}?",
            "Which object is closest to the {a}?",
            "Name the object nearest to the {a}.",
        )
    )
    pointed = ((name, (thing,)),), ((near.name, (near,)),)
    return Asked("relation", form.format(a=name), near.name, (thing.pair, near.pair), *pointed)


_ASKERS = {
    "colour": _ask_colour,
    "shape": _ask_shape,
    "size": _ask_size,
    "yes/no": _ask_yes_no,
    "count": _ask_count,
    "relation": _ask_relation,
}


def ask(rng: random.Random, scene: Scene, kind: str, thing: Thing | None = None) -> Asked | None:
    """One question of a kind about one picture (about that object, if given), or None where the scene allows none."""
    if kind in ("digit", "letter"):
        found = [g for g in scene.glyphs if g.kind == kind]
        if len(found) != 1:
            return None
        return Asked(kind, rng.choice(ASK[kind]), found[0].char, shown=((found[0].char, (found[0],)),))
    if kind == "describe":
        parts = describe(scene)
        return Asked(
            kind,
            rng.choice(ASK[kind]),
            ", ".join(words for words, _ in parts),
            tuple(t.pair for t in scene.things),
            shown=tuple((words, (item,)) for words, item in parts),
        )
    if not scene.things:
        return None
    for _ in range(4):
        if asked := _ASKERS[kind](rng, scene, thing or rng.choice(scene.things)):
            return asked
    return None


def describe(scene: Scene) -> list[tuple[str, Thing | Glyph]]:
    """All objects from left to right, then what is printed, in words."""
    parts = [(f"{t.size} {t.name}", t) for t in sorted(scene.things, key=lambda t: t.x)]
    return parts + [(f"{g.kind} {g.char}", g) for g in sorted(scene.glyphs, key=lambda g: g.kind)]


def ask_pair(rng: random.Random, first: Scene, second: Scene) -> Asked | None:
    """One question that takes both pictures."""
    for _ in range(6):
        form = rng.choices(
            (_more_objects, _more_of, _both_have, _which_has, _same_colour, _same_digit), (20, 15, 20, 16, 17, 12)
        )[0]
        if asked := form(rng, first, second):
            return asked
    return None


def _verdict(a: int, b: int) -> str:
    return "first" if a > b else "second" if b > a else "same"


def _more_objects(rng: random.Random, first: Scene, second: Scene) -> Asked | None:
    text = rng.choice(
        (
            "Which picture has more objects?",
            "Which picture shows more objects, the first or the second?",
            "Which of the two pictures has more objects?",
            "Which image contains more objects?",
            "Are there more objects in the first or in the second picture?",
        )
    )
    answer = _verdict(len(first.things), len(second.things))
    return Asked("compare", text, answer, shown=((answer, (*first.things, *second.things)),))


def _query_pair(
    rng: random.Random, first: Scene, second: Scene, parts: tuple[str, ...]
) -> tuple[dict[str, str], list[Thing], list[Thing]]:
    thing = rng.choice((*first.things, *second.things))
    query = {p: getattr(thing, p) for p in parts}
    return query, *([t for t in s.things if _matches(t, **query)] for s in (first, second))


def _more_of(rng: random.Random, first: Scene, second: Scene) -> Asked | None:
    query, a, b = _query_pair(rng, first, second, rng.choice((("shape",), ("colour",))))
    if len(a) == len(b) and rng.random() < 0.5:
        return None
    noun = _plural(query["shape"]) if "shape" in query else f"{query['colour']} objects"
    text = rng.choice(
        (
            "Which picture has more {n}?",
            "Which picture shows more {n}, the first or the second?",
            "Which image contains more {n}?",
            "Are there more {n} in the first or in the second picture?",
        )
    )
    return _about(Asked("compare", text.format(n=noun), _verdict(len(a), len(b))), noun, *a, *b)


def _both_have(rng: random.Random, first: Scene, second: Scene) -> Asked | None:
    query, a, b = _query_pair(rng, first, second, rng.choice((("shape",), ("colour",), ("colour", "shape"))))
    both = bool(a and b)
    if both and rng.random() < 0.3:
        return None
    name = _words(None, query.get("colour"), query.get("shape"), rng)
    text = rng.choice(
        (
            "Do both pictures show {n}?",
            "Is there {n} in both pictures?",
            "Do both images have {n}?",
            "Can you see {n} in both pictures?",
        )
    )
    return _about(Asked("compare", text.format(n=_an(name)), "yes" if both else "no"), name, *a, *b)


def _which_has(rng: random.Random, first: Scene, second: Scene) -> Asked | None:
    query, a, b = _query_pair(rng, first, second, rng.choice((("shape",), ("colour", "shape"), ("colour", "shape"))))
    name = _words(None, query.get("colour"), query.get("shape"), rng)
    text = rng.choice(
        ("Which picture has {n}?", "Which picture shows {n}?", "In which picture is {n}?", "Which image contains {n}?")
    )
    answer = "both" if a and b else "first" if a else "second"
    return _about(Asked("compare", text.format(n=_an(name)), answer), name, *a, *b)


def _same_colour(rng: random.Random, first: Scene, second: Scene) -> Asked | None:
    shapes = [s for s in SHAPES if all(sum(t.shape == s for t in x.things) == 1 for x in (first, second))]
    if not shapes:
        return None
    shape = rng.choice(shapes)
    a, b = (next(t for t in x.things if t.shape == shape) for x in (first, second))
    if a.colour != b.colour and rng.random() < 0.2:
        return None
    text = rng.choice(
        (
            "Is the {n} the same colour in both pictures?",
            "Does the {n} have the same color in both pictures?",
            "Are the {m} of the two pictures the same colour?",
            "Is the color of the {n} the same in both images?",
        )
    )
    answer = "yes" if a.colour == b.colour else "no"
    return _about(Asked("compare", text.format(n=shape, m=_plural(shape)), answer), shape, a, b)


def _same_digit(rng: random.Random, first: Scene, second: Scene) -> Asked | None:
    digits = [[g for g in s.glyphs if g.kind == "digit"] for s in (first, second)]
    if not all(len(d) == 1 for d in digits) or (digits[0][0].char != digits[1][0].char and rng.random() < 0.3):
        return None
    text = rng.choice(
        (
            "Do both pictures show the same digit?",
            "Is the same digit printed in both pictures?",
            "Is the printed digit the same in both images?",
        )
    )
    answer = "yes" if digits[0][0].char == digits[1][0].char else "no"
    return Asked("compare", text, answer, shown=((answer, (*digits[0], *digits[1])),))


def make_pair(
    rng: random.Random, pairs: tuple = TRAINED, native: float = 0.85, most: int = MAX_OBJECTS
) -> tuple[Scene, Scene]:
    """Two scenes that often share something, so that every answer of a comparison is about as likely."""
    first = make_scene(rng, pairs, native=native, most=most)
    must = [t.pair for t in rng.sample(first.things, min(len(first.things), rng.choice((0, 1, 1, 2))))]
    count = None if rng.random() < 0.75 else max(len(first.things), 1)
    digit = tuple(g.char for g in first.glyphs if g.kind == "digit" and rng.random() < 0.5) or None
    second = make_scene(rng, pairs, count, tuple(must), digit, native, most)
    return (first, second) if rng.random() < 0.5 else (second, first)


def ask_one_of(rng: random.Random, scenes: tuple[Scene, Scene], kind: str) -> Asked | None:
    """A question about one of two pictures."""
    which = rng.randrange(2)
    asked = ask(rng, scenes[which], kind)
    if asked and asked.kind not in ("describe",):
        name = ("first", "second")[which]
        noun = rng.choice(("picture", "image"))
        text = asked.question.replace(" in the picture", "").replace(" in the image", "")
        asked.question = f"In the {name} {noun}, {text[0].lower()}{text[1:]}"
    return asked


# ------------------------------------------------------------------------------------------------------- text only
def told(rng: random.Random, scene: Scene) -> tuple[str, bool]:
    """A scene in words, and whether the words give the order from left to right."""
    ordered = rng.random() < 0.5
    things = sorted(scene.things, key=lambda t: t.x) if ordered else scene.things
    names = [_an(f"{t.size} {t.name}") for t in things]
    listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    if ordered:
        return rng.choice(
            (
                "From left to right there are {l}.",
                "A picture shows, from left to right, {l}.",
                "Imagine a row of objects, from left to right: {l}.",
            )
        ).format(l=listed), True
    return rng.choice(
        (
            "There is {l}.",
            "A scene has {l}.",
            "A picture shows {l}.",
            "Imagine a picture with {l}.",
            "On a table lie {l}.",
        )
    ).format(l=listed), False


def ask_told(rng: random.Random, scene: Scene, ordered: bool) -> Asked | None:
    """One question that the words of `told` answer."""
    if ordered and rng.random() < 0.35 and len(scene.things) > 1:
        side = rng.choice(("left of", "right of"))
        row = sorted(scene.things, key=lambda t: t.x)
        if rng.random() < 0.5:
            thing, other = rng.sample(row, 2)
            a, b = refer(rng, scene, thing), refer(rng, scene, other)
            if not (a and b):
                return None
            text = f"Is the {a} {rng.choice(SIDE_WORDS[side])} the {b}?"
            right = _along(side, thing, other) > 0
            return Asked("text", text, "yes" if right else "no", named=((a, (thing,)), (b, (other,))))
        which, found = rng.choice(EXTREMES[side][:2]).format(o="object"), row[0 if side == "left of" else -1]
        return Asked("text", f"What is the {which}?", found.name, shown=((found.name, (found,)),))
    if asked := ask(rng, scene, rng.choice(("colour", "colour", "shape", "size", "yes/no", "count"))):
        asked.kind = "text"
    return asked


def ask_text(rng: random.Random, pairs: tuple = TRAINED) -> Asked:
    """A described scene and a question about it, in one text."""
    while True:
        scene = make_scene(rng, pairs, glyphs=())
        words, ordered = told(rng, scene)
        if asked := ask_told(rng, scene, ordered):
            asked.question = f"{words} {asked.question}"
            return asked


# -------------------------------------------------------------------------------------------------------- data sets
def kinds_of(rng: random.Random, number: int) -> list[str]:
    """How many questions of which kind: by SHARES, to the nearest whole question, shuffled."""
    total, kinds = sum(SHARES.values()), []
    for i, kind in enumerate(SHARES):
        kinds += [kind] * (round(number * sum(list(SHARES.values())[: i + 1]) / total) - len(kinds))
    rng.shuffle(kinds)
    return kinds


def make_question(
    rng: random.Random, kind: str, held_out: bool = False, native: float = 0.85
) -> tuple[Asked, list[Scene]]:
    """One question with the scenes it is about; `held_out` asks about a pair that was never drawn in training."""
    if held_out:
        kind = rng.choice(("colour", "shape", "size", "yes/no", "count", "relation"))
    while True:
        if kind == "text":
            return ask_text(rng), []
        if kind == "compare":
            scenes = list(make_pair(rng, native=native))
            asked = ask_pair(rng, *scenes)
        else:
            must = (rng.choice(HELD_OUT),) if held_out else ()
            chars = (rng.choice(DIGITS if kind == "digit" else LETTERS),) if kind in ("digit", "letter") else None
            if chars and rng.random() < 0.4:
                chars += (rng.choice(LETTERS if kind == "digit" else DIGITS),)
            scenes = [make_scene(rng, must=must, glyphs=chars, native=native)]
            asked = ask(rng, scenes[0], kind, scenes[0].things[0] if held_out and scenes[0].things else None)
        if asked and asked.held_out == held_out:
            return asked, scenes


def write_dataset(out: Path, number: int, held_out: int, seed: int, noisy: float = 1.0) -> None:
    """`number` questions by SHARES and `held_out` more about held-out pairs; `noisy` is the share of noisy pictures."""
    rng = random.Random(f"dataset {seed}")
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    kinds = kinds_of(rng, number) + [""] * held_out
    with (out / "questions.jsonl").open("w", encoding="utf-8") as lines:
        for i, kind in enumerate(kinds):
            asked, scenes = make_question(rng, kind, held_out=not kind)
            names = []
            for k, scene in enumerate(scenes):
                image = draw(scene, rng.getrandbits(48), rng.random() < noisy)
                names.append(f"pictures/{i:05d}{'ab'[k]}.png")
                image.save(out / names[-1], optimize=True)
            record = {
                "id": f"{i:05d}",
                "kind": asked.kind,
                "images": names,
                "question": asked.question,
                "answer": asked.answer,
                "held_out": asked.held_out,
            }
            lines.write(json.dumps(record) + "\n")
            if (i + 1) % 100 == 0 or i + 1 == len(kinds):
                print(f"\r{i + 1} of {len(kinds)} questions", end="", flush=True)
    print()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--questions", type=int, default=300, help="questions over trained (colour, shape) pairs [%(default)s]"
    )
    parser.add_argument("--held-out", type=int, default=0, help="further questions about held-out pairs [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same files [%(default)s]")
    parser.add_argument(
        "--noisy",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of the pictures; PNGs without noise are small [%(default)s]",
    )
    args = parser.parse_args()
    write_dataset(args.out, args.questions, args.held_out, args.seed, args.noisy)


if __name__ == "__main__":
    main()
