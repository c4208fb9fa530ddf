"""A JSONL of requests, as `mmprefill run --requests` takes it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmprefill.encoders.messages import check_text
from mmprefill.types import Request

_FIELDS = frozenset({"id", "prompt", "messages", "input_ids", "images", "videos", "answer"})


@dataclass(frozen=True)
class Asked:
    """A request, and the answer that is expected of it, if the file says so."""

    request: Request
    expected: str | None = None


def read_requests(path: Path) -> Iterator[Asked]:
    """Requests of a JSONL file, a line each: `prompt` with `images`, or `messages`, or `input_ids`; optional `id`, `answer`.

    Picture paths are relative to the file.

    Raises:
        ValueError: naming the line that is not a request.
        OSError, UnicodeDecodeError: for a file that cannot be read, or is not UTF-8.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):  # JSON may hold other line ends
        if not line.strip():
            continue
        try:
            yield _asked(path.parent, json.loads(line))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not a request: {error}") from error


def _asked(folder: Path, fields: Mapping[str, Any]) -> Asked:
    unknown = sorted(set(fields) - _FIELDS)
    if unknown:
        raise ValueError(f"unknown fields {', '.join(unknown)}; known are {', '.join(sorted(_FIELDS))}")
    known = dict(fields)
    answer = known.pop("answer", None)
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"answer must be text, got {type(answer).__name__}")
    check_text("answer", answer or "")
    for name in ("images", "messages"):
        if not isinstance(known.get(name, []), list):
            raise ValueError(f"{name} must be a list, got {type(known[name]).__name__}")
    if "images" in known:
        known["images"] = [_beside(folder, source) for source in known["images"]]
    if "messages" in known:
        known["messages"] = [_message(folder, message) for message in known["messages"]]
    return Asked(Request(**known), answer)


def _message(folder: Path, message: Any) -> Any:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [_part(folder, part) for part in message["content"]]}


def _part(folder: Path, part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return part
    return {key: value if key == "type" else _beside(folder, value) for key, value in part.items()}


def _beside(folder: Path, source: Any) -> Any:
    """A path relative to the file, where there is one; anything else as it is."""
    if not isinstance(source, str) or "://" in source or source.startswith("data:"):
        return source
    beside = folder / source
    there = len(source) < 4096 and os.path.exists(beside)  # noqa: PTH110  Path.exists raises for names that are too long
    return beside if there else source
