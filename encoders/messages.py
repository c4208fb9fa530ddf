"""Chat messages as callers write them -> checked messages of typed parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from mmprefill.errors import RequestError
from mmprefill.types import Request

# A closed list: templates write '<|' + role + '|>', and a role of "image" would be a placeholder.
ROLES = ("system", "developer", "user", "assistant", "model", "tool", "function", "observation", "ipython")
_KEYS = {"text": ("text",), "image": ("image", "url", "path", "base64"), "video": ("video",)}


@dataclass(frozen=True)
class Part:
    """A piece of a message.

    Attributes:
        kind: "text", "image" or "video".
        value: the text, the picture's source or the list of frame sources.
    """

    kind: str
    value: Any


@dataclass(frozen=True)
class Message:
    """One turn. `typed` says whether its content was a list of parts or a string."""

    role: str
    parts: tuple[Part, ...]
    typed: bool = True

    def for_template(self, hide: Callable[[str], str], typed: bool) -> dict[str, Any]:
        """The message as chat templates take it: text through `hide`, media without their sources."""
        if not typed:
            return {"role": self.role, "content": hide(self.parts[0].value)}
        return {"role": self.role, "content": [_for_template(part, hide) for part in self.parts]}


def _for_template(part: Part, hide: Callable[[str], str]) -> dict[str, Any]:
    return {"type": "text", "text": hide(part.value)} if part.kind == "text" else {"type": part.kind}


def user_turn(request: Request) -> tuple[Message, ...]:
    """A plain prompt as one user turn: pictures, videos, text."""
    media = [Part("image", source) for source in request.images] + [Part("video", frames) for frames in request.videos]
    return (Message("user", (*media, Part("text", request.prompt))),)


def checked(request: Request) -> tuple[Message, ...]:
    """The messages of a request.

    Raises:
        RequestError: naming request, message and part.
    """
    messages, name = request.messages, f"request {request.id!r}"
    if request.images or request.videos:
        raise RequestError(f"{name}: put pictures into the messages, not beside them")
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError(f"{name}: messages must be a non-empty list, got {_kind(messages)}")
    return tuple(_message(f"{name}, message {i + 1}", message) for i, message in enumerate(messages))


def check_text(where: str, text: str) -> None:
    """Half of a surrogate pair, as JSON that was cut off has it, is no character: every tokenizer refuses the whole text.

    Raises:
        RequestError: naming `where` and the place in the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half, place = text[error.start], error.start + 1
        raise RequestError(f"{where}: not text: character {place} is {half!r}, half of a surrogate pair") from error


def parts_of(messages: Seq[Message], kind: str) -> Iterator[Any]:
    """Values of all parts of a kind, in order."""
    return (part.value for message in messages for part in message.parts if part.kind == kind)


def _message(where: str, message: Any) -> Message:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise RequestError(f"{where}: a message is a mapping with 'role' and 'content', got {_kind(message)}")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise RequestError(f"{where}: role must be one of {', '.join(ROLES)}, got {role!r}")
    if isinstance(content, str):
        check_text(f"{where}, content", content)
        return Message(role, (Part("text", content),), typed=False)
    if not isinstance(content, (list, tuple)) or not content:
        raise RequestError(f"{where}: content must be a string or a non-empty list of parts, got {_kind(content)}")
    return Message(role, tuple(_part(f"{where}, part {i + 1}", part) for i, part in enumerate(content)))


def _part(where: str, part: Any) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _KEYS:
        raise RequestError(f"{where}: a part is a mapping of type 'text', 'image' or 'video', got {_kind(part)}")
    keys = [key for key in part if key != "type"]
    if len(keys) != 1 or keys[0] not in _KEYS[kind]:
        expected = " or ".join(map(repr, _KEYS[kind]))
        raise RequestError(f"{where}: a part of type {kind!r} takes the key {expected} beside 'type', got {keys}")
    value = part[keys[0]]
    if value is None or (kind == "text" and not isinstance(value, str)):
        raise RequestError(
            f"{where}: {keys[0]!r} must be {'a string' if kind == 'text' else 'given'}, got {_kind(value)}"
        )
    if kind == "text":
        check_text(where, value)
    return Part(kind, value)


def _kind(value: Any) -> str:
    """What a wrong value is, for a message; never its content, which may be large or secret."""
    if isinstance(value, Mapping):
        return (
            f"a mapping of type {value['type']!r}"
            if "type" in value
            else f"a mapping with keys {sorted(map(str, value))}"
        )
    return (
        f"an empty {type(value).__name__}" if isinstance(value, (list, tuple)) and not value else type(value).__name__
    )
