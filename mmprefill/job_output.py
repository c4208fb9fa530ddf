"""What rows become: records for the tables, tensors and KV artefacts for the files beside them."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from mmprefill.errors import EngineClosedError
from mmprefill.job_rows import Row, failure
from mmprefill.job_settings import JobSettings, extra
from mmprefill.job_state import part_name, write_whole
from mmprefill.pipeline.kv_store import ShardWriter
from mmprefill.prefiller import Prefiller
from mmprefill.results import PrefillResult
from mmprefill.types import Choice

Record = dict[str, Any]
Outcome = PrefillResult | BaseException
HEADER = 64 * 2**10  # room for what a file holds beside its tensors
_TOP = {"top_ids": "list<int64>", "top_tokens": "list<string>", "top_logprobs": "list<float32>"}


class StopJob(Exception):
    """The job cannot go on, though no row is to blame; says why."""


@dataclass
class Budget:
    """Bytes that may still be written. Safe to use from several threads."""

    left: int | None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def take(self, count: int) -> None:
        """Reserve bytes before they are written.

        Raises:
            StopJob: if there are not so many.
        """
        with self._lock:
            if self.left is None:
                return
            if count > self.left:
                raise StopJob(f"the disk budget is used up: {count} bytes to write, {self.left} left")
            self.left -= count

    def give(self, count: int) -> None:
        """What was reserved and not written."""
        with self._lock:
            if self.left is not None:
                self.left += count


@dataclass
class Served:
    """A group of rows, done: a record per row, in its order, and the files that were written."""

    records: list[Record] = field(default_factory=list)
    errors: list[Record] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    tokens: int = 0
    reused_tokens: int = 0
    pictures: int = 0
    reused_pictures: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Output:
    """Makes records and files of results.

    Args:
        prefiller: decodes and scores.
        folder: where files go.
        settings: what is wanted.
        budget: bytes that may be written.
    """

    def __init__(self, prefiller: Prefiller, folder: Path, settings: JobSettings, budget: Budget) -> None:
        self._prefiller, self._folder, self._settings, self._budget = prefiller, folder, settings, budget

    def serve(self, start: int, number: int, rows: Seq[Row], outcomes: Seq[Outcome]) -> Served:
        """Everything that is wanted of a group of a part; a row that cannot be emitted fails alone."""
        served, tensors, reserved = Served(), dict[str, Tensor](), 0
        shards = ShardWriter(partial(self._shard_name, start, number), self._settings.kv_shard)
        made = zip(self._texts(outcomes), self._scores(outcomes), strict=True)
        for row, outcome, (text, scores) in zip(rows, outcomes, made, strict=True):
            if isinstance(outcome, BaseException):
                served.errors.append(failure(row, outcome))
                continue
            try:
                for each in (text, scores):
                    if isinstance(each, BaseException):
                        raise each
                record = {"index": row.index, "id": row.id, "prompt_tokens": len(outcome.token_ids)}
                record |= self._small(outcome, scores) | ({"text": text} if "text" in self._settings.emit else {})
                mine = self._large(outcome)
                if "kv" in self._settings.emit:
                    reserved += self._reserve(outcome)
                    record["kv"] = self._name(Path(shards.add(outcome)))
            except Exception as error:
                if is_fatal(error):
                    raise
                served.errors.append(failure(row, error))
                continue
            tensors |= {f"{row.index}.{name}": tensor for name, tensor in mine.items()}
            served.records.append(record)
            _count(served, outcome)
        shards.flush()
        self._budget.give(reserved - sum(path.stat().st_size for path in shards.files))
        served.files += shards.files
        if tensors:
            self._save_tensors(start, number, tensors, served)
        return served

    def _texts(self, outcomes: Seq[Outcome]) -> list[Any]:
        if "text" not in self._settings.emit:
            return [None] * len(outcomes)
        most = self._settings.max_new_tokens
        found = self._together(outcomes, lambda them: self._prefiller.decode_many(them, most))
        return [each if isinstance(each, BaseException) else each.text for each in found]

    def _scores(self, outcomes: Seq[Outcome]) -> Seq[Any]:
        if "scores" not in self._settings.emit:
            return [None] * len(outcomes)
        return self._together(outcomes, lambda them: self._prefiller.score_results(them, self._settings.choices))

    def _together(self, outcomes: Seq[Outcome], make: Callable[[Seq[Outcome]], Seq[Any]]) -> Seq[Any]:
        """What is made of all at once; what cannot be is made one by one, so that only the row that is at fault fails."""
        try:
            return make(outcomes)
        except Exception as error:
            if is_fatal(error):
                raise
            return [error] if len(outcomes) == 1 else [self._together([each], make)[0] for each in outcomes]

    def _small(self, result: PrefillResult, choices: Seq[Choice]) -> Record:
        """Columns of the table."""
        s, record = self._settings, Record()
        if "topk" in s.emit:
            best = result.top_tokens(s.top)
            record["top_ids"] = [each.id for each in best]
            record["top_tokens"] = [each.text for each in best]
            record["top_logprobs"] = [each.logprob for each in best]
        if "scores" in s.emit:
            scores = [each.logprob for each in choices]
            record["scores"] = scores
            record["best"] = s.choices[max(range(len(scores)), key=scores.__getitem__)]
        if "embeddings" in s.emit and s.pooling != "none":
            record["embedding"] = result.pooled(s.pooling, s.layer).float().tolist()
        return record

    def _large(self, result: PrefillResult) -> dict[str, Tensor]:
        """Tensors of the files beside it."""
        s, tensors = self._settings, dict[str, Tensor]()
        if "logits" in s.emit:
            tensors["logits"] = result.next_token_logits
        if "embeddings" in s.emit and s.pooling == "none":
            tensors["embeddings"] = result.hidden_states[s.layer]
        if "hidden" in s.emit:
            tensors |= {f"hidden.{layer}": result.hidden_states[layer] for layer in s.hidden_layers}
        return {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
        }

    def _reserve(self, result: PrefillResult) -> int:
        """Take from the budget what a row's KV may come to; returns it."""
        hidden = sum(states.nbytes for states in result.hidden_states.values())
        size = result.kv_bytes + result.next_token_logits.nbytes + hidden + HEADER
        self._budget.take(size)
        return size

    def _shard_name(self, start: int, group: int, number: int) -> Path:
        folder = self._folder / "kv"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{part_name(start)}-{group:03d}-{number:03d}.kv.safetensors"

    def _save_tensors(self, start: int, number: int, tensors: dict[str, Tensor], served: Served) -> None:
        data = save(tensors, {"format": "pt"})
        self._budget.take(len(data))
        path = self._folder / "tensors" / f"{part_name(start)}-{number:03d}.safetensors"
        write_whole(path, data)
        served.files.append(path)
        for record in served.records:
            record["tensors"] = self._name(path)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()


def write_table(folder: Path, start: int, records: Seq[Record], settings: JobSettings, budget: Budget) -> Path:
    """The table of a part."""
    path = folder / "rows" / f"{part_name(start)}.{settings.format}"
    data = b"".join(pieces([records], columns(settings), settings.format))
    budget.take(len(data))
    write_whole(path, data)
    return path


def read_table(path: Path) -> list[Record]:
    """The records of a part's table."""
    if path.suffix == ".parquet":
        records: list[Record] = extra("pyarrow.parquet", "reading Parquet").read_table(path).to_pylist()
        return records
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def columns(settings: JobSettings) -> dict[str, str]:
    """Columns of the table and their types, as Arrow names them."""
    found = {"index": "int64", "id": "string", "prompt_tokens": "int64"}
    emit = set(settings.emit)
    pooled = settings.pooling != "none"
    found |= _TOP if "topk" in emit else {}
    found |= {"scores": "list<float32>", "best": "string"} if "scores" in emit else {}
    found |= {"embedding": "list<float32>"} if "embeddings" in emit and pooled else {}
    found |= {"text": "string"} if "text" in emit else {}
    found |= {"kv": "string"} if "kv" in emit else {}
    large = emit & {"logits", "hidden"} or ("embeddings" in emit and not pooled)
    return found | ({"tensors": "string"} if large else {})


ERROR_COLUMNS = {"index": "int64", "id": "string", "error": "string", "message": "string"}


def pieces(batches: Iterable[Seq[Record]], types: dict[str, str], form: str) -> Iterator[bytes]:
    """A table as the bytes of a file; of JSONL no more than a batch is in memory, of Parquet what is compressed."""
    if form == "jsonl":
        for batch in batches:
            yield "".join(json.dumps({name: each.get(name) for name in types}) + "\n" for each in batch).encode()
        return
    arrow, parquet = extra("pyarrow", "writing Parquet"), extra("pyarrow.parquet", "writing Parquet")
    schema, buffer = arrow.schema([(name, _arrow_type(arrow, kind)) for name, kind in types.items()]), io.BytesIO()
    with parquet.ParquetWriter(buffer, schema) as writer:
        for batch in batches:
            named = {name: [_printable(each.get(name)) for each in batch] for name in types}
            writer.write_table(arrow.table(named, schema=schema))
    yield buffer.getvalue()


def _printable(value: Any) -> Any:
    """Arrow takes no lone surrogates."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _arrow_type(arrow: Any, kind: str) -> Any:
    inner = kind.removeprefix("list<").removesuffix(">")
    plain = {"int64": arrow.int64, "float32": arrow.float32, "string": arrow.string}[inner]()
    return arrow.list_(plain) if inner != kind else plain


def is_fatal(error: BaseException) -> bool:
    """Whether no further row can be served: the engine or its device is gone, the disk is full, the job was stopped."""
    lost = getattr(torch, "AcceleratorError", EngineClosedError)
    return isinstance(error, (EngineClosedError, StopJob, OSError, lost)) or not isinstance(error, Exception)


def _count(served: Served, result: PrefillResult) -> None:
    served.tokens += len(result.token_ids)
    served.reused_tokens += result.reuse.tokens
    served.pictures += len(result.media)
    served.reused_pictures += result.reuse.pictures
    for stage, seconds in result.seconds.items():
        served.seconds[stage] = served.seconds.get(stage, 0.0) + seconds
