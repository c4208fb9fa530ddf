"""What a batch job is asked to do; a contradiction is a ValueError before anything is loaded."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from string import Formatter
from typing import Any

from mmprefill.errors import MMPrefillError

EMITS = ("kv", "topk", "logits", "scores", "embeddings", "hidden", "text")
FORMATS = ("jsonl", "parquet")
POOLINGS = ("last", "mean", "none")
# What changes no row's values.
_HOW = ("limit", "part_rows", "window", "retries", "retry_failed", "kv_shard", "max_errors", "disk_budget", "deadline")


@dataclass(frozen=True)
class JobSettings:
    """What is made of which rows, and how.

    Attributes:
        emit: any of `EMITS`.
        format: of the tables, "jsonl" or "parquet"; tensors go to safetensors files either way.
        image_column: pictures: one, a list, or none; default "images" or "image".
        prompt_column: the user turn; default "prompt".
        messages_column: chat messages instead of a prompt; default "messages". A picture part without a source takes the
            next picture of the image column.
        id_column: the row's id; default "id", or the row's position where there is none.
        prompt: a prompt made of columns instead, as "Is this {label}?".
        split: which split of a Hugging Face dataset.
        choices: what `scores` compares.
        top: how many next tokens `topk` lists.
        max_new_tokens: most tokens of `text`.
        layer: the layer of `embeddings`, numbered as `Request.hidden_states`.
        pooling: "last" or "mean": one vector a row, in the table; "none": one a token, in the tensor files.
        hidden_layers: the layers of `hidden`.
        limit: only so many rows.
        shard: (i, n): only every n-th row, from the i-th on (counted from 0).
        part_rows: rows of one part of the output; what a killed job may have to do again.
        window: most rows in flight.
        retries: how often a picture is fetched again after the network failed.
        retry_failed: rows that failed in an earlier run are done again.
        kv_shard: most bytes of KV in one file, unless a row alone has more.
        max_errors: the job stops when more rows than this have failed; None never.
        disk_budget: most bytes of output; the job stops before it would write more.
        deadline: seconds for one row.
    """

    emit: tuple[str, ...] = ("topk",)
    format: str = "jsonl"
    image_column: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    id_column: str | None = None
    prompt: str | None = None
    split: str | None = None
    choices: tuple[str, ...] = ()
    top: int = 5
    max_new_tokens: int = 64
    layer: int = -1
    pooling: str = "last"
    hidden_layers: tuple[int, ...] = (-1,)
    limit: int | None = None
    shard: tuple[int, int] | None = None
    part_rows: int = 256
    window: int = 48
    retries: int = 2
    retry_failed: bool = False
    kv_shard: int = 256 * 2**20
    max_errors: int | None = None
    disk_budget: int | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        for name in ("emit", "choices", "hidden_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_output()
        self._check_numbers()
        named = [name for name in ("prompt", "prompt_column", "messages_column") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(f"a row has one prompt: give one of {' and '.join(named)}")
        odd = [name for name in self.template_columns if not name or set(name) & set(".[{")]
        if odd:
            raise ValueError(
                f"a prompt template takes plain column names in braces, got {odd[0]!r}; {{{{ writes a brace"
            )

    def _check_output(self) -> None:
        unknown = [each for each in self.emit if each not in EMITS]
        if unknown or not self.emit:
            raise ValueError(f"emit takes any of {', '.join(EMITS)}; got {', '.join(unknown) or 'nothing'}")
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {self.format!r}")
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")
        object.__setattr__(self, "emit", tuple(each for each in EMITS if each in self.emit))  # whatever their order
        if ("scores" in self.emit) != bool(self.choices):
            raise ValueError("scores and choices go together: emit scores, and list the choices")

    def _check_numbers(self) -> None:
        for name in ("top", "max_new_tokens", "limit", "part_rows", "window", "kv_shard", "disk_budget", "deadline"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:  # nor NaN
                raise ValueError(f"{name} must be positive and finite, got {value!r}")
        for name in ("retries", "max_errors"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, got {value!r}")
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            raise ValueError(f"shard i/n needs 0 <= i < n, got {self.shard[0]}/{self.shard[1]}")

    @property
    def template_columns(self) -> list[str]:
        """The columns that the prompt template names.

        Raises:
            ValueError: if it is no template.
        """
        try:
            fields = list(Formatter().parse(self.prompt or ""))
        except ValueError as error:
            raise ValueError(
                f"prompt {self.prompt!r} is no template: {error}; {{{{ and }}}} write single braces"
            ) from error
        inner = [spec for _, _, spec, _ in fields if spec and "{" in spec]  # a field within a field's format
        return [name for _, name, _, _ in fields if name is not None] + inner

    @property
    def layers(self) -> tuple[int, ...]:
        """Every layer whose hidden states have to be kept."""
        wanted = self.hidden_layers if "hidden" in self.emit else ()
        return tuple(dict.fromkeys((*wanted, self.layer) if "embeddings" in self.emit else wanted))

    @property
    def meaning(self) -> dict[str, Any]:
        """What the output depends on, as JSON would give it back."""
        found = {name: value for name, value in asdict(self).items() if name not in _HOW}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """What differs, in words."""
    names = dict.fromkeys((*theirs, *ours))
    return [
        f"{name} was {theirs.get(name)!r}, is {ours.get(name)!r}"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


def extra(module: str, what: str) -> Any:
    """A module of the extra `data`.

    Raises:
        MMPrefillError: if it is not installed; it names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MMPrefillError(f"{what} needs {package}: pip install 'mmprefill[data]'") from error
