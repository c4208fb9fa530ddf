"""Rows of the input, and requests from rows."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mmprefill.errors import MediaError, MediaFetchError, MediaForbiddenError, RequestError
from mmprefill.job_files import Input, Values, is_remote, opened, read
from mmprefill.job_settings import JobSettings
from mmprefill.sources import is_base64_picture
from mmprefill.types import Request


@dataclass(frozen=True)
class Row:
    """One row of the input.

    Attributes:
        index: its position in the input, over all files.
        id: from its id column, or made of its position.
        values: by column; empty where it could not be read.
        base: the folder or remote prefix that relative picture paths start from.
        error: why it cannot be used, if so.
    """

    index: int
    id: str
    values: Values
    base: str = ""
    error: Exception | None = None

    @property
    def digest(self) -> bytes:
        """Of id and content; a picture that is a path counts by its name."""
        kind = type(self.error).__name__  # not its message, which has the input's path
        text = json.dumps([self.id, self.values, kind], sort_keys=True, default=_digestible)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def failure(row: Row, error: BaseException) -> dict[str, Any]:
    """The record of a row that failed."""
    return {"index": row.index, "id": row.id, "error": type(error).__name__, "message": str(error)}


def _digestible(value: Any) -> str:
    return hashlib.blake2b(value, digest_size=16).hexdigest() if isinstance(value, bytes) else repr(value)


def rows(inputs: Seq[Input], settings: JobSettings) -> Iterator[Row]:
    """The rows that the settings choose, in the order of the input; an id that came before makes a row an error."""
    first, step = settings.shard or (0, 1)
    return islice(islice(_every(inputs, settings), first, None, step), settings.limit)


def _every(inputs: Seq[Input], settings: JobSettings) -> Iterator[Row]:
    mapping = Columns(settings)
    found = ((values, each) for each in inputs for values in _checked(each, settings, mapping))
    with _Seen() as seen:
        for index, (values, source) in enumerate(found):
            row = _row(index, values, source, mapping)
            if not seen.add(row.id):
                error = RequestError(f"row {index}: id {row.id!r} was used by an earlier row")
                row = replace(row, error=row.error or error)
            yield row


class _Seen:
    """Ids that came by, by their digests; beyond some number of them on disk, in a file that has no name."""

    def __init__(self, most: int = 2**18) -> None:
        self._most, self._marks = most, set[bytes]()
        self._rest: sqlite3.Connection | None = None

    def add(self, id: str) -> bool:
        """Note an id; whether it is new."""
        mark = hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if mark in self._marks:
            return False
        if len(self._marks) < self._most:
            self._marks.add(mark)
            return True
        if self._rest is None:
            self._rest = sqlite3.connect("", isolation_level=None, check_same_thread=False)
            self._rest.executescript(
                "PRAGMA journal_mode=OFF; CREATE TABLE ids (mark BLOB PRIMARY KEY) WITHOUT ROWID; BEGIN"
            )
        return self._rest.execute("INSERT OR IGNORE INTO ids VALUES (?)", (mark,)).rowcount == 1

    def __enter__(self) -> _Seen:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rest is not None:
            self._rest.close()


def _row(index: int, values: Values | Exception, source: Input, mapping: Columns) -> Row:
    if isinstance(values, Exception):
        return Row(index, f"row-{index}", {}, source.base, values)
    try:
        return Row(index, mapping.id(index, values), values, source.base)
    except RequestError as error:
        return Row(index, f"row-{index}", values, source.base, error)


def _checked(source: Input, settings: JobSettings, mapping: Columns) -> Iterator[Values | Exception]:
    """A file's rows; where all have the same columns, the first tells whether those that are needed are there."""
    for number, values in enumerate(read(source, settings.split)):
        if number == 0 and source.kind != "jsonl" and not isinstance(values, Exception):
            mapping.check(values, source.path)
        yield values


# From a row to a request.


class Columns:
    """Which column is what."""

    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings

    def check(self, values: Values, path: str) -> None:
        """Columns that the settings name are there, and some prompt is.

        Raises:
            ValueError: with the columns that there are.
        """
        s = self._settings
        named = [s.image_column, s.prompt_column, s.messages_column, s.id_column, *s.template_columns]
        missing = [name for name in named if name is not None and name not in values]
        if missing:
            raise ValueError(f"{path}: no column {missing[0]!r}; there are {', '.join(values)}")
        if s.prompt is None and self._prompt_of(values) is None and self._messages_of(values) is None:
            raise ValueError(
                f"{path}: no column 'prompt' or 'messages' among {', '.join(values)}; name one, or give a prompt"
            )

    def id(self, index: int, values: Values) -> str:
        """The row's id.

        Raises:
            RequestError: if the column is missing or holds neither text nor a whole number.
        """
        column = self._settings.id_column
        value = values.get(column or "id")
        if value is None and column is None:
            return f"row-{index}"
        if not isinstance(value, (str, int)) or isinstance(value, bool):
            kind = "nothing" if value is None else type(value).__name__
            raise RequestError(f"row {index}: an id is text or a whole number; column {column or 'id'!r} holds {kind}")
        return str(value)

    def request(self, row: Row) -> Request:
        """The row as a request; pictures of remote inputs as `Remote`.

        Raises:
            RequestError: saying what is missing or wrong.
        """
        s, values = self._settings, row.values
        pictures = [resolved(each, row) for each in _pictures(self._picture_value(row))]
        options: dict[str, Any] = {"id": row.id, "hidden_states": s.layers, "deadline": s.deadline}
        column = None if s.prompt is not None else self._messages_of(values)
        if column is not None:
            return Request(messages=_messages(values[column], pictures, row), **options)
        return Request(prompt=self._prompt(row), images=pictures, **options)

    def _prompt_of(self, values: Values) -> str | None:
        name = self._settings.prompt_column or "prompt"
        return name if name in values else None

    def _messages_of(self, values: Values) -> str | None:
        s = self._settings
        if s.prompt_column is not None:
            return None
        name = s.messages_column or "messages"
        given = values.get(name) is not None or s.messages_column is not None
        return name if name in values and given else None

    def _picture_value(self, row: Row) -> Any:
        column = self._settings.image_column
        if column is not None:
            if column not in row.values:
                raise RequestError(f"row {row.id!r}: no column {column!r}; there are {', '.join(row.values)}")
            return row.values[column]
        found = row.values.get("images")
        return found if found is not None else row.values.get("image")

    def _prompt(self, row: Row) -> str:
        s = self._settings
        if s.prompt is not None:
            missing = [name for name in s.template_columns if row.values.get(name) is None]
            if missing:
                raise RequestError(f"row {row.id!r}: the prompt needs column {missing[0]!r}, which is empty or missing")
            try:
                return s.prompt.format_map(row.values)
            except (ValueError, TypeError) as error:
                raise RequestError(f"row {row.id!r}: prompt {s.prompt!r} cannot be filled: {error}") from error
        column = s.prompt_column or "prompt"
        if column not in row.values:
            there = ", ".join(map(str, row.values)) or "none"
            raise RequestError(f"row {row.id!r}: no column {column!r}; there are {there}")
        value = row.values[column]
        if not isinstance(value, str):
            found = "nothing" if value is None else type(value).__name__
            raise RequestError(f"row {row.id!r}: column {column!r} must hold text, holds {found}")
        return value


@dataclass(frozen=True)
class Remote:
    """A picture beside a remote input."""

    url: str

    def load(self, most: int) -> bytes:
        """Its bytes.

        Raises:
            MediaError: if there is none, or it has more bytes than `most`.
            MediaFetchError: if the storage failed; trying again may help.
        """
        try:
            with opened(self.url) as file:
                data = file.read(most + 1)
        except FileNotFoundError as error:
            raise MediaError(f"{self.url}: no such file") from error
        except OSError as error:
            raise MediaFetchError(f"{self.url}: {error}") from error
        return data


def _pictures(value: Any) -> list[Any]:
    """Every form in which a column may hold pictures, as a list."""
    if value is None or value == "":
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):  # several in one field of a CSV
        with suppress(ValueError):  # a file may be named so
            value = json.loads(value)
    return list(value) if isinstance(value, (list, tuple)) else [value]


def resolved(source: Any, row: Row) -> Any:
    """A picture's source; a relative path starts beside the input.

    Raises:
        RequestError: for what is no picture in any form.
    """
    if isinstance(source, Mapping):
        if source.get("bytes") is not None:
            return source["bytes"]
        source = source.get("path")
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str) or not source.strip():
        raise RequestError(f"row {row.id!r}: a picture is a path, bytes or a URL; found {type(source).__name__}")
    if "://" in source or source[:5].lower() in ("data:", "file:") or is_base64_picture(source):
        return source
    if not is_remote(row.base):
        return Path(row.base) / source
    if ".." in source.split("/") or source.startswith("/"):
        raise MediaForbiddenError(f"row {row.id!r}: {source!r} does not lie beside the input")
    return Remote(f"{row.base}/{source}")


def _messages(value: Any, pictures: Seq[Any], row: Row) -> list[Any]:
    """Messages with their pictures resolved; parts without a source take the pictures of the row in order."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RequestError(f"row {row.id!r}: the messages are not JSON: {error}") from error
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"row {row.id!r}: messages must be a list, got {type(value).__name__}")
    left = iter(pictures)
    made = [_message(message, left, row) for message in value]
    surplus = len(list(left))
    if surplus:
        raise RequestError(f"row {row.id!r}: {surplus} picture(s) more than the messages have places for")
    return made


def _message(message: Any, left: Iterator[Any], row: Row) -> Any:
    if not isinstance(message, Mapping):
        return message
    message = {key: value for key, value in message.items() if value is not None}  # Parquet gives all of them every key
    if not isinstance(message.get("content"), (list, tuple)):
        return message
    return {**message, "content": [_part(part, left, row) for part in message["content"]]}


def _part(part: Any, left: Iterator[Any], row: Row) -> Any:
    if not isinstance(part, Mapping):
        return part
    part = {key: value for key, value in part.items() if value is not None}
    if part.get("type") != "image":
        return part
    keys = [key for key in part if key != "type"]
    if keys:
        return {"type": "image", "image": resolved(part[keys[0]], row)} if len(keys) == 1 else part
    source = next(left, None)
    if source is None:
        raise RequestError(f"row {row.id!r}: fewer pictures than the messages have places for")
    return {"type": "image", "image": source}


def affinity(request: Request) -> tuple[str, str]:
    """Rows that sort side by side share pictures, then the beginning of their prompt."""
    contents = [m.get("content") for m in request.messages or () if isinstance(m, Mapping)]
    parts = [part for each in contents if isinstance(each, list) for part in each if isinstance(part, Mapping)]
    pictures = [*request.images, *(part["image"] for part in parts if "image" in part)]
    texts = [
        each for each in (request.prompt, *contents, *(part.get("text") for part in parts)) if isinstance(each, str)
    ]
    keys = [_digestible(each) if isinstance(each, bytes) else str(each)[:512] for each in pictures]
    return "\n".join(keys), "\n".join(texts)


def with_remotes(request: Request, most: int) -> Request:
    """The request with its remote pictures fetched.

    Raises:
        MediaError: or MediaFetchError, as `Remote.load`.
    """

    def fetched(source: Any) -> Any:
        return source.load(most) if isinstance(source, Remote) else source

    if request.messages is None:
        return replace(request, images=[fetched(each) for each in request.images])
    messages = [
        {**m, "content": [{**p, "image": fetched(p["image"])} if isinstance(p, Mapping) and "image" in p else p
                          for p in m["content"]]}
        if isinstance(m, Mapping) and isinstance(m.get("content"), list) else m
        for m in request.messages
    ]  # fmt: skip
    return replace(request, messages=messages)
