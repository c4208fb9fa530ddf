"""Rows from wherever they lie, and requests from rows. Files are read as a stream, pictures are not decoded here."""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import json
import posixpath
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

from mmprefill.errors import MediaError, MediaFetchError, MediaForbiddenError, RequestError
from mmprefill.job_settings import JobSettings, extra
from mmprefill.sources import is_base64_picture
from mmprefill.types import Request

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".jp2", ".avif")
TABLES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
BATCH = 64  # rows read at once from columnar files
Values = Mapping[str, Any]


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
        text = json.dumps([self.id, self.values, str(self.error or "")], sort_keys=True, default=_digestible)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _digestible(value: Any) -> str:
    return hashlib.blake2b(value, digest_size=16).hexdigest() if isinstance(value, bytes) else repr(value)


@dataclass(frozen=True)
class Input:
    """One file or folder: `kind` is "jsonl", "csv", "parquet", "folder" or "dataset"."""

    path: str
    kind: str

    @property
    def base(self) -> str:
        """Where relative picture paths start."""
        if self.kind in ("folder", "dataset"):
            return self.path
        return posixpath.dirname(self.path) if is_remote(self.path) else str(Path(self.path).parent)


def is_remote(path: str) -> bool:
    """Whether a path is one of fsspec's."""
    return "://" in path


# Finding the input.


def find(inputs: str | Path | Seq[str | Path]) -> list[Input]:
    """Files and folders that paths and globs name, each glob's in the order of their names.

    Raises:
        ValueError: naming what is not there or cannot be read as rows.
    """
    given = [inputs] if isinstance(inputs, (str, Path)) else list(inputs)
    found = [each for path in given for each in _found(str(path))]
    if not found:
        raise ValueError("no input: name a file, a folder or a glob")
    return found


def _found(path: str) -> list[Input]:
    if is_remote(path):
        return [_table(each) for each in _remote_glob(path)]
    if Path(path).exists():
        return [_folder(Path(path)) if Path(path).is_dir() else _table(path)]
    matches = sorted(glob.glob(path, recursive=True))  # noqa: PTH207  the pattern may be absolute
    if not matches:
        raise ValueError(f"{path}: no such file or folder, and no glob that matches one")
    return [_folder(Path(each)) if Path(each).is_dir() else _table(each) for each in matches]


def _remote_glob(path: str) -> list[str]:
    if not set(path) & set("*?["):
        return [path]
    files = extra("fsspec", f"{path}").open_files(path, "rb")
    scheme = path.partition("://")[0]
    matches = sorted(f"{scheme}://{file.path.removeprefix(f'{scheme}://')}" for file in files)
    if not matches:
        raise ValueError(f"{path}: matches no file")
    return matches


def _folder(path: Path) -> Input:
    marks = ("dataset_info.json", "state.json", "dataset_dict.json")
    return Input(str(path), "dataset" if any((path / mark).is_file() for mark in marks) else "folder")


def _table(path: str) -> Input:
    kind = TABLES.get(posixpath.splitext(path)[1].lower())
    if kind is None:
        raise ValueError(f"{path}: rows are read from {', '.join(TABLES)} files, folders of pictures and datasets")
    return Input(path, kind)


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """A file of this machine, or of whatever fsspec reaches."""
    if is_remote(path):
        with extra("fsspec", path).open(path, "rb") as file:
            yield file
    else:
        with Path(path).open("rb") as file:
            yield file


# Reading.


def rows(inputs: Seq[Input], settings: JobSettings) -> Iterator[Row]:
    """The rows that the settings choose, in the order of the input; an id that came before makes a row an error."""
    mapping, seen = Columns(settings), set[bytes]()
    every = enumerate((values, each) for each in inputs for values in _read(each, settings, mapping))
    first, step = settings.shard or (0, 1)
    for index, (values, source) in islice(islice(every, first, None, step), settings.limit):
        row = _row(index, values, source, mapping)
        mark = hashlib.blake2b(row.id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if mark in seen:
            error = RequestError(f"row {index}: id {row.id!r} was used by an earlier row")
            row = Row(index, row.id, row.values, row.base, row.error or error)
        seen.add(mark)
        yield row


def _row(index: int, values: Values | Exception, source: Input, mapping: Columns) -> Row:
    if isinstance(values, Exception):
        return Row(index, f"row-{index}", {}, source.base, values)
    try:
        return Row(index, mapping.id(index, values), values, source.base)
    except RequestError as error:
        return Row(index, f"row-{index}", values, source.base, error)


def _read(source: Input, settings: JobSettings, mapping: Columns) -> Iterator[Values | Exception]:
    readers: dict[str, Callable[[str], Iterable[Values | Exception]]] = {
        "jsonl": _read_jsonl,
        "csv": _read_csv,
        "parquet": _read_parquet,
        "folder": _read_folder,
        "dataset": partial(_read_dataset, split=settings.split),
    }
    found = readers[source.kind](source.path)
    if source.kind == "jsonl":  # every row has columns of its own
        yield from found
        return
    for number, values in enumerate(found):
        if number == 0 and not isinstance(values, Exception):
            mapping.check(values, source.path)
        yield values


def _read_jsonl(path: str) -> Iterator[Values | Exception]:
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parsed(line, f"{path}, line {number}")


def _parsed(line: bytes, where: str) -> Values | Exception:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        return RequestError(f"{where}: not JSON: {error}")
    return values if isinstance(values, dict) else RequestError(f"{where}: not a JSON object")


def _read_csv(path: str) -> Iterator[Values | Exception]:
    with opened(path) as file, _long_fields():
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")
        reader = csv.DictReader(text, delimiter="\t" if path.lower().endswith(".tsv") else ",")
        for values in reader:
            if None in values or None in values.values():
                yield RequestError(f"{path}, line {reader.line_num}: not as many fields as the header has")
            else:
                yield {name: value if value != "" else None for name, value in values.items()}


@contextmanager
def _long_fields() -> Iterator[None]:
    """A picture as base64 is longer than the module's limit, which is the process's."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _read_parquet(path: str) -> Iterator[Values]:
    parquet = extra("pyarrow.parquet", "reading Parquet")
    with opened(path) as file:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=BATCH):
            yield from batch.to_pylist()


def _read_folder(path: str) -> Iterator[Values]:
    """A row per picture: `image`, `id` (its path in the folder) and `label` (the name of the folder that holds it)."""
    for file in sorted(each for each in Path(path).rglob("*") if each.suffix.lower() in PICTURES and each.is_file()):
        name = file.relative_to(path).as_posix()
        yield {"image": name, "id": name, "label": file.parent.name}


def _read_dataset(path: str, split: str | None) -> Iterator[Values]:
    """Through Arrow: the dataset's own way would decode pictures, and stop at the first that is broken."""
    for batch in _dataset(path, split).with_format("arrow").iter(BATCH):
        yield from batch.to_pylist()


def _dataset(path: str, split: str | None) -> Any:
    found = extra("datasets", "a Hugging Face dataset").load_from_disk(path)
    if isinstance(found, dict):
        names = list(found)
        if split is None and len(names) > 1:
            raise ValueError(f"{path}: choose a split: {', '.join(names)}")
        if split is not None and split not in names:
            raise ValueError(f"{path}: no split {split!r}; there are {', '.join(names)}")
        found = found[split or names[0]]
    return found


def count(inputs: Seq[Input], settings: JobSettings) -> int | None:
    """How many rows there are, where that can be told without reading them all; None else."""
    counts = [_count(each, settings.split) for each in inputs]
    if None in counts:
        return None
    first, step = settings.shard or (0, 1)
    mine = len(range(first, sum(each or 0 for each in counts), step))
    return min(mine, settings.limit or mine)


def _count(source: Input, split: str | None) -> int | None:
    if source.kind == "folder":
        return sum(1 for _ in _read_folder(source.path))
    if source.kind == "dataset":
        return len(_dataset(source.path, split))
    if source.kind == "parquet":
        with opened(source.path) as file:
            return int(extra("pyarrow.parquet", "reading Parquet").ParquetFile(file).metadata.num_rows)
    if source.kind == "jsonl" and not is_remote(source.path):
        with opened(source.path) as file:
            return sum(1 for line in file if line.strip())
    return None


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
        pictures = [resolved(each, row) for each in _pictures(self._picture_value(row), row)]
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
                raise RequestError(f"row {row.id!r}: the prompt cannot be made: {error}") from error
        column = s.prompt_column or "prompt"
        value = row.values.get(column)
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


def _pictures(value: Any, row: Row) -> list[Any]:
    """Every form in which a column may hold pictures, as a list."""
    if value is None or value == "":
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):  # several in one field of a CSV
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RequestError(f"row {row.id!r}: the list of pictures is not JSON: {error}") from error
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
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), (list, tuple)):
        return message
    return {**message, "content": [_part(part, left, row) for part in message["content"]]}


def _part(part: Any, left: Iterator[Any], row: Row) -> Any:
    if not isinstance(part, Mapping):
        return part
    part = {key: value for key, value in part.items() if value is not None}  # Parquet gives every part every key
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
    messages = request.messages or ()
    parts = [p for m in messages if isinstance(m, Mapping) and isinstance(m.get("content"), list) for p in m["content"]]
    pictures = [*request.images, *(p.get("image") for p in parts if isinstance(p, Mapping) and "image" in p)]
    keys = [_digestible(each) if isinstance(each, bytes) else str(each)[:512] for each in pictures]
    return "\n".join(keys), request.prompt if isinstance(request.prompt, str) else repr(messages)[:4096]


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
