"""Rows as they lie in files and folders, wherever those are; read as a stream, pictures not decoded."""

from __future__ import annotations

import csv
import glob
import io
import json
import posixpath
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from mmprefill.errors import RequestError
from mmprefill.job_settings import JobSettings, extra

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".jp2", ".avif")
TABLES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
QUOTES = " (a quote that is not closed, or one inside a field that is not doubled?)"
BATCH = 64  # rows read at once from columnar files
HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?", re.ASCII)
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Input:
    """One file or folder: `kind` is "jsonl", "csv", "parquet", "folder", "dataset" or "hub" (a dataset's id)."""

    path: str
    kind: str

    @property
    def base(self) -> str:
        """Where relative picture paths start."""
        if is_remote(self.path):
            return posixpath.dirname(self.path)
        path = Path(self.path).absolute()
        return str(path if self.kind in ("folder", "dataset") else path.parent)


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
    if not matches and _is_hub_id(path):
        return [Input(path, "hub")]
    if not matches:
        raise ValueError(f"{path}: no such file or folder, and no glob that matches one")
    return [_folder(Path(each)) if Path(each).is_dir() else _table(each) for each in matches]


def _is_hub_id(path: str) -> bool:
    """OWNER/NAME, with :CONFIG behind it if need be; not what looks like a table, nor what lies in a folder that is here."""
    found = HUB_ID.fullmatch(path)
    return bool(found) and not path.endswith(tuple(TABLES)) and not Path(path).parent.exists()


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


def read(source: Input, split: str | None) -> Iterable[Values | Exception]:
    """The rows of one file or folder by column; what is no row is the error that says so."""
    readers: dict[str, Callable[[str], Iterable[Values | Exception]]] = {
        "jsonl": _read_jsonl,
        "csv": _read_csv,
        "parquet": _read_parquet,
        "folder": _read_folder,
        "dataset": partial(_read_dataset, split=split),
        "hub": partial(_read_dataset, split=split),
    }
    return readers[source.kind](source.path)


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
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        # strict: else a quote that is never closed makes one field of the rest of the file, without a word
        reader = csv.DictReader(text, delimiter="\t" if path.lower().endswith(".tsv") else ",", strict=True)
        try:
            _ = reader.fieldnames  # reads the header
        except csv.Error as error:
            raise ValueError(f"{path}, {_lines(1, reader.reader.line_num)}: not CSV: {error}{QUOTES}") from error
        while (values := _next_of(reader, path)) is not None:
            yield values


def _next_of(reader: csv.DictReader[str], path: str) -> Values | Exception | None:
    """The next row, or why it is none; after such a one the reader goes on with the next line."""
    first = reader.reader.line_num + 1  # the inner one's count: the outer one's stands still where a row fails
    try:
        values = next(reader, None)
    except csv.Error as error:
        return RequestError(f"{path}, {_lines(first, reader.reader.line_num)}: not CSV: {error}{QUOTES}")
    return None if values is None else _fields(values, f"{path}, {_lines(first, reader.reader.line_num)}")


def _lines(first: int, last: int) -> str:
    return f"line {first}" if first >= last else f"lines {first} to {last}"


def _fields(values: Mapping[Any, Any], where: str) -> Values | Exception:
    if None in values or None in values.values():
        return RequestError(f"{where}: not as many fields as the header has")
    if not all(value.isascii() or value.encode("utf-8", "ignore").decode() == value for value in values.values()):
        return RequestError(f"{where}: not UTF-8")
    return {name: value if value != "" else None for name, value in values.items()}


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
    for file in _pictures_in(Path(path)):
        name = file.relative_to(path).as_posix()
        yield {"image": name, "id": name, "label": file.parent.name}


def _pictures_in(folder: Path) -> Iterator[Path]:
    """In the order of their paths, and no more of them in memory than the names of a folder."""
    for name in sorted(each.name for each in folder.iterdir()):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            yield from _pictures_in(path)
        elif path.suffix.lower() in PICTURES and path.is_file():
            yield path


def _read_dataset(path: str, split: str | None) -> Iterator[Values]:
    """Through Arrow: the dataset's own way would decode pictures, and stop at the first that is broken."""
    for batch in _dataset(path, split).with_format("arrow").iter(BATCH):
        yield from batch.to_pylist()


def _dataset(path: str, split: str | None) -> Any:
    datasets = extra("datasets", "a Hugging Face dataset")
    found = datasets.load_from_disk(path) if Path(path).exists() else _from_hub(datasets, path)
    if isinstance(found, dict):
        names = list(found)
        if split is None and len(names) > 1:
            raise ValueError(f"{path}: choose a split: {', '.join(names)}")
        if split is not None and split not in names:
            raise ValueError(f"{path}: no split {split!r}; there are {', '.join(names)}")
        found = found[split or names[0]]
    return found


def _from_hub(datasets: Any, path: str) -> Any:
    """All splits of a dataset of the hub, downloaded once and kept by `datasets`."""
    named = HUB_ID.fullmatch(path)
    assert named is not None
    try:
        return datasets.load_dataset(named[1], named[2])
    except (OSError, ValueError, RuntimeError) as error:  # not there, not allowed, not reachable, several configs
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{path}: no such file or folder here, and no dataset that the hub would give us: {said}"
        ) from error


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
    if source.kind in ("dataset", "hub"):
        return len(_dataset(source.path, split))
    if source.kind == "parquet":
        with opened(source.path) as file:
            return int(extra("pyarrow.parquet", "reading Parquet").ParquetFile(file).metadata.num_rows)
    if source.kind == "jsonl" and not is_remote(source.path):
        with opened(source.path) as file:
            return sum(1 for line in file if line.strip())
    return None
