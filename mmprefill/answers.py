"""Whether an answer to one of the questions of `samples/make_scenes.py` is right.

Short answers match exactly once case, outer spaces, a final full stop and a leading article are gone. A description is
the multiset of the objects it lists, separated by commas or "and".
"""

import re
from collections import Counter

__all__ = ["is_right", "normalise", "objects", "overlap"]

_ARTICLE = re.compile(r"^(a|an|the)\s+")


def normalise(answer: str) -> str:
    """The part of an answer that counts."""
    words = " ".join(answer.lower().split()).rstrip(".").strip()
    return _ARTICLE.sub("", words)


def objects(description: str) -> Counter[str]:
    """What a description lists: 'a red circle, a red circle and the digit 4' has two circles."""
    parts = re.split(r",\s*and\s+|,|\band\b", description)
    return Counter(name for part in parts if (name := normalise(part)))


def is_right(kind: str, answer: str, expected: str) -> bool:
    """Exact match; for a description, the same objects in any order."""
    if kind == "describe":
        return objects(answer) == objects(expected)
    return normalise(answer) == normalise(expected)


def overlap(answer: str, expected: str) -> float:
    """F1 of the objects that a description lists, for a softer figure than all or nothing."""
    a, b = objects(answer), objects(expected)
    return 2 * (a & b).total() / max(1, a.total() + b.total())
