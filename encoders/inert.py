"""Text that came from a user is inert: a control or placeholder token typed into it stays text.

Two renamings, both one character for one, so that every offset stays true:

1. before the chat template and the processor's expansion run, the first character of each control token inside user
   text becomes a private-use mark. Whatever is still readable as a control token afterwards is live;
2. when the processor calls its tokenizer, a copy takes over whose control tokens have secret names. The live ones are
   renamed, the marks turned back, and the whole prompt is tokenised at once, so that words merge as they always do.

    user text            what is <image>?          (an <image> was given too)
    rendered, hidden     <image> what is ?image>?  ? is a mark
    to the tokenizer     ####### what is <image>?  ####### is the secret name of <image>
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer

from mmprefill.errors import RequestError

_MARKS = (*range(0xE000, 0xF900), *range(0xF0002, 0xFFFFE))
_SECRETS = tuple(range(0x100000, 0x10FFFE))
_RESERVED = ("\U000f0000", "\U000f0001")  # transformers reads them as "the token that follows is user text"


class Controls:
    """The strings that a tokenizer, a chat template or a processor reads as control."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names) - {""}
        known = {*self.names, *_RESERVED}
        self.pattern = re.compile(_any_of(known))
        self._longest = max(map(len, known))
        self._heads = frozenset(name[:i] for name in self.names for i in range(1, len(name)))
        self._tails = frozenset(name[i:] for name in self.names for i in range(1, len(name)))

    def open_start(self, text: str) -> bool:
        """Whether `text` could complete a control token that what comes before it began."""
        return any(text[:i] in self._tails for i in range(1, self._longest))

    def open_end(self, text: str) -> bool:
        """Whether `text` could begin a control token that what follows it completes."""
        return any(text[-i:] in self._heads for i in range(1, self._longest))


def _any_of(names: Collection[str]) -> str:
    """A pattern for the longest of `names`, as a tree of shared beginnings: thousands of <unused17> cost one look."""
    branches: dict[str, list[str]] = {}
    for name in filter(None, names):
        branches.setdefault(name[0], []).append(name[1:])
    if not branches:
        return ""
    options = "|".join(re.escape(char) + _any_of(rest) for char, rest in sorted(branches.items()))
    return f"(?:{options})?" if "" in names else f"(?:{options})"


class Inert:
    """The marks of one request.

    Args:
        controls: what is hidden.
        texts: everything that will be hidden; marks are characters that occur in none of it.
    """

    def __init__(self, controls: Controls, texts: Iterable[str] = ()) -> None:
        self._controls = controls
        taken = {ord(char) for text in texts for char in text if char >= "\ue000"}
        self._free = (chr(code) for code in _MARKS if code not in taken)
        self._marks: dict[str, str] = {}

    @property
    def used(self) -> bool:
        """Whether anything was hidden."""
        return bool(self._marks)

    def hide(self, text: str) -> str:
        """`text` with no control token in it, nor a part of one at an end where a neighbour could complete it."""
        while self._controls.pattern.search(text):  # again: "<<image>" and the like
            text = self._controls.pattern.sub(lambda match: self._mark(match[0][0]) + match[0][1:], text)
        core = text.strip()  # templates trim
        start = text.find(core)
        end = start + len(core)
        if self._controls.open_end(core):
            text = text[: end - 1] + self._mark(text[end - 1]) + text[end:]
        if self._controls.open_start(core):
            text = text[:start] + self._mark(text[start]) + text[start + 1 :]
        return text

    def _mark(self, char: str) -> str:
        if char in self._marks.values():
            return char
        if char not in self._marks:
            mark = next(self._free, None)
            if mark is None:
                raise RequestError("the prompt uses every private-use character of Unicode beside a control token")
            self._marks[char] = mark
        return self._marks[char]

    def restore(self, text: str) -> str:
        """`text` with every mark turned back."""
        return text.translate({ord(mark): char for char, mark in self._marks.items()})


class RenamedTokenizer:
    """A copy of a fast tokenizer whose control tokens have secret names of the same length; ids are unchanged."""

    def __init__(self, tokenizer: Any, controls: Controls) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError(
                "the prompt holds a control token, and this checkpoint's tokenizer (not a fast one) cannot keep it "
                "apart from a live one; reword it, or pass Rendered(text)"
            )
        spec = json.loads(backend.to_str())
        tokens = [token["content"] for token in spec["added_tokens"] if token["content"] in controls.names]
        self._controls = controls
        self._names = {token: "".join(chr(secrets.choice(_SECRETS)) for _ in token) for token in tokens}
        self._known = re.compile("|".join(map(re.escape, self._names.values())) or "(?!)")
        _rename(spec, self._names)
        self._tokenizer = copy.copy(tokenizer)
        self._tokenizer._tokenizer = Tokenizer.from_str(json.dumps(spec))

    def __call__(self, text: str | list[str], inert: Inert, **kwargs: Any) -> Any:
        """Tokenise an expanded prompt: control tokens readable in it are live, those that `inert` hid are text."""
        texts = [text] if isinstance(text, str) else text
        renamed = [self._rename(each, inert) for each in texts]
        kwargs["padding"] = False  # it would look for a padding token under its old name
        return self._tokenizer(renamed[0] if isinstance(text, str) else renamed, **kwargs)

    def _rename(self, text: str, inert: Inert) -> str:
        if self._known.search(text):  # not by chance: one in 65,000 for each character of the shortest name
            raise RequestError("the prompt holds private-use characters that stand for a control token here")
        return inert.restore(self._controls.pattern.sub(lambda match: self._names.get(match[0], match[0]), text))


def _rename(spec: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens throughout a tokenizer.json, also where the base vocabulary and its merges would reach them."""
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = spec["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(token, token): index for token, index in model["vocab"].items()}
    elif "vocab" in model:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _names_a_token(merge, names)]


def _names_a_token(merge: str | list[str], names: Mapping[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names
