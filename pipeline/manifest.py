"""What a KV artefact says about itself: records, strict JSON, and the hash that says which engine may use it.

No tensor is touched here. Reading believes nothing: every field has a type, unknown and missing ones are refused, and
what can be derived (tensor names, shapes, row counts, both digests) is derived and compared. Errors are plain
`ValueError`s; whoever knows the file's name adds it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
FORMAT = 1
MOST_AXES = 8  # of a tensor; a product over more could be made slow on purpose
WINDOWED = frozenset({"sliding_attention", "chunked_attention", "hybrid_sliding"})
KEYED = WINDOWED | {"full_attention", "indexed_attention", "hybrid"}
RECURRENT = frozenset({"conv", "linear_attention", "hybrid", "hybrid_sliding"})
KINDS = KEYED | RECURRENT | {"dummy"}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file.

    Attributes:
        dtype: as safetensors names it ("BF16").
        shape: without a batch axis.
        crc32: of its bytes. It finds damage, not forgery: a forger would write the sum as well.
    """

    dtype: str
    shape: tuple[int, ...]
    crc32: int


@dataclass(frozen=True)
class LayerKind:
    """What a layer is, whatever was prefilled.

    Attributes:
        kind: transformers' layer type.
        window: sliding window or attention chunk, for the kinds that have one.
        states: convolution and recurrent states that it may hold, for the kinds that have them.
    """

    kind: str
    window: int | None = None
    states: int | None = None

    def rows(self, tokens: int) -> int:
        """Tokens whose keys are stored: a window's last `window - 1`, since the next token brings the last one."""
        if self.kind not in KEYED:
            return 0
        return tokens if self.window is None else min(tokens, self.window - 1)


@dataclass(frozen=True)
class MediaEntry:
    """One picture or video: `types.MediaItem` without its source (a path or a signed URL is nobody else's business)."""

    medium: str
    digest: str
    size: tuple[int, int]
    frames: int
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Identity:
    """What must be equal for KV to be valid in an engine.

    Attributes:
        model_type: transformers' name of the family.
        weights: `ModelBundle.fingerprint`.
        config: digest of the model's config, without what does not change the numbers (paths, versions).
        processor: `ModelBundle.processor_digest`.
        dtype: of the decoder.
        layers: the decoder's layers.
    """

    model_type: str
    weights: str
    config: str
    processor: str
    dtype: str
    layers: tuple[LayerKind, ...]

    @property
    def digest(self) -> str:
        """The compatibility hash."""
        return digest({"format": FORMAT, **dataclasses.asdict(self)})

    def differences(self, here: Identity) -> list[str]:
        """What differs from the identity of an engine, in words."""
        found = [
            f"{name.replace('_', ' ')} {theirs} (here {ours})"
            for name in ("model_type", "dtype", "weights", "config", "processor")
            if (theirs := getattr(self, name)) != (ours := getattr(here, name))
        ]
        if len(self.layers) != len(here.layers):
            return [*found, f"{len(self.layers)} layers (here {len(here.layers)})"]
        pairs = enumerate(zip(self.layers, here.layers, strict=True))
        return found + [f"layer {i} {_words(a)} (here {_words(b)})" for i, (a, b) in pairs if a != b][:3]


@dataclass(frozen=True)
class Positions:
    """How tokens are numbered: `scheme` is "1d" or "mrope", `rows` what the decoder takes, `next` the next position."""

    scheme: str
    rows: int
    next: int


@dataclass(frozen=True)
class Manifest:
    """Everything about an artefact but its numbers.

    Attributes:
        format: version of this layout.
        producer: versions of the packages that wrote it.
        id: the request's id.
        model: hub id, or the name of the checkpoint's folder (never its path).
        revision: hub revision asked for.
        identity: what an engine must share to use it.
        compatibility: digest of `identity`.
        token_ids: the prompt, placeholders expanded.
        media: pictures and videos, in order.
        positions: numbering of the tokens.
        attention: "causal", "spans" (media spans that attend both ways) or "model" (the model's own forward decided).
        rows: tokens whose keys are stored, by layer.
        tensors: what the file holds.
        quantisation: None; no other value is read yet.
        shards: "whole"; no other value is read yet.
        approximations: names of the approximations used; empty for exact KV.
    """

    format: int
    producer: dict[str, str]
    id: str
    model: str
    revision: str | None
    identity: Identity
    compatibility: str
    token_ids: tuple[int, ...]
    media: tuple[MediaEntry, ...]
    positions: Positions
    attention: str
    rows: tuple[int, ...]
    tensors: dict[str, TensorEntry]
    quantisation: str | None = None
    shards: str = "whole"
    approximations: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states are in the file."""
        return tuple(sorted(int(name.partition(".")[2]) for name in self.tensors if name.startswith("hidden.")))

    def to_json(self) -> str:
        """The manifest as JSON that carries its own checksum."""
        fields = dataclasses.asdict(self)
        return canonical({**fields, "checksum": digest(fields)})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse and check.

        Raises:
            ValueError: saying what is wrong.
        """
        fields = strict_json(text)
        if not isinstance(fields, dict):
            raise ValueError("the manifest is not a JSON object")
        if (version := fields.get("format")) != FORMAT or type(version) is not int:
            raise ValueError(f"format version {version!r}; this release reads {FORMAT}")
        if fields.pop("checksum", None) != digest(fields):
            raise ValueError("the manifest does not match its checksum")
        manifest = build(cls, fields, "manifest")
        _check(manifest)
        return manifest

    def state_names(self, layer: int) -> list[str]:
        """Names of a layer's tensors, without the `layers.{i}.` in front."""
        prefix = f"layers.{layer}."
        return [name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix)]


def _check(manifest: Manifest) -> None:
    if manifest.quantisation is not None or manifest.shards != "whole":
        raise ValueError(
            f"quantisation {manifest.quantisation!r}, shards {manifest.shards!r}: only plain whole files are read"
        )
    if manifest.compatibility != manifest.identity.digest:
        raise ValueError("the compatibility hash does not belong to the identity beside it")
    if not manifest.token_ids:
        raise ValueError("it has no tokens")
    if manifest.positions.scheme not in ("1d", "mrope") or not 0 < manifest.positions.rows <= 4:
        raise ValueError(f"unknown position scheme {manifest.positions.scheme!r} of {manifest.positions.rows} rows")
    _check_media(manifest)
    layers, length = manifest.identity.layers, manifest.length
    for i, layer in enumerate(layers):
        _check_kind(i, layer)
    if manifest.rows != tuple(layer.rows(length) for layer in layers):
        raise ValueError(
            f"rows per layer {_short(manifest.rows)} do not follow from {length} tokens and the layers' windows"
        )
    _check_tensors(manifest)


def _check_media(manifest: Manifest) -> None:
    for item in manifest.media:
        bytes.fromhex(item.digest)
        if any(not start < end <= manifest.length for start, end in item.spans):
            raise ValueError(
                f"a {item.medium}'s tokens {_short(item.spans)} lie outside the prompt of {manifest.length}"
            )


def _check_kind(i: int, layer: LayerKind) -> None:
    if layer.kind not in KINDS:
        raise ValueError(f"layer {i} is of unknown kind {layer.kind!r}")
    if (layer.window is not None) != (layer.kind in WINDOWED) or layer.window == 0:
        raise ValueError(f"layer {i} is {layer.kind} with window {layer.window}")
    if (layer.states is not None) != (layer.kind in RECURRENT) or not (layer.states is None or 0 < layer.states <= 64):
        raise ValueError(f"layer {i} is {layer.kind} with {layer.states} states")


def _check_tensors(manifest: Manifest) -> None:
    """Names are exactly those that layers and outputs ask for, and shapes agree with tokens and rows."""
    length, left = manifest.length, dict(manifest.tensors)
    _take(left, "next_token_logits", (None,), ("F32",))
    _take(left, "position_ids", (None, length), ("I64",))
    for layer in manifest.hidden_layers:
        _take(left, f"hidden.{layer}", (length, None))
    for i, (kind, rows) in enumerate(zip(manifest.identity.layers, manifest.rows, strict=True)):
        for name, shape in _states(kind, rows):
            optional = name.startswith(("conv_states", "recurrent_states", "indexer_position_ids"))
            if not optional or f"layers.{i}.{name}" in left:
                _take(left, f"layers.{i}.{name}", shape)
        if (
            kind.kind in KEYED
            and manifest.tensors[f"layers.{i}.keys"].shape[0] != manifest.tensors[f"layers.{i}.values"].shape[0]
        ):
            raise ValueError(f"layer {i} has keys and values of different head counts")
    if left:
        raise ValueError(f"unexpected tensors {_short(sorted(left))}")


def _states(layer: LayerKind, rows: int) -> Iterable[tuple[str, tuple[int | None, ...] | None]]:
    """Names and shapes of the tensors of a layer; None where a size, or a whole shape, is free."""
    if layer.kind in KEYED:
        yield from (("keys", (None, rows, None)), ("values", (None, rows, None)))
    if layer.kind == "indexed_attention":
        yield from (("indexer_keys", (rows, None)), ("indexer_position_ids", (None, rows)))
    for j in range(layer.states or 0):
        yield from ((f"conv_states.{j}", None), (f"recurrent_states.{j}", None))


def _take(
    left: dict[str, TensorEntry], name: str, shape: tuple[int | None, ...] | None, dtypes: tuple[str, ...] | None = None
) -> None:
    if name not in left:
        raise ValueError(f"tensor {name!r} is missing")
    found = left.pop(name)
    fits = shape is None or (
        len(shape) == len(found.shape) and all(a is None or a == b for a, b in zip(shape, found.shape, strict=True))
    )
    if not fits or (dtypes and found.dtype not in dtypes):
        wanted = "x".join("*" if size is None else str(size) for size in shape or ())
        raise ValueError(f"tensor {name!r} is {found.dtype} {_short(found.shape)}, expected {dtypes or ''} {wanted}")


# Strict JSON.


def canonical(value: Any) -> str:
    """JSON that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """128-bit digest of a JSON value, hex."""
    return hashlib.blake2b(canonical(value).encode(), digest_size=16).hexdigest()


def strict_json(text: str) -> Any:
    """JSON without duplicate keys, NaN and infinities.

    Raises:
        ValueError: also for nesting that is too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in names if names.count(name) > 1)[:80]!r}")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def build(hint: type[T], value: Any, where: str) -> T:
    """A record from parsed JSON, by its type hints: dataclasses, tuples, dicts, optionals, str and int (>= 0).

    Raises:
        ValueError: for a wrong type, and for missing and unknown fields.
    """
    return cast(T, _build(hint, value, where))


def _build(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _record(hint, value, where)
    origin, args = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return None if value is None else _build(args[0], value, where)
    if origin is tuple and type(value) is list:
        return _tuple(args, value, where)
    if origin is dict and type(value) is dict:
        return {key: _build(args[1], each, f"{where}.{key[:80]}") for key, each in value.items()}
    if (hint is str and type(value) is str) or (hint is int and _is_size(value)):
        return value
    raise ValueError(f"{where} cannot be {_short(value)}")


_hints = functools.cache(get_type_hints)  # slow, and asked for once per record


def _record(hint: Any, value: Any, where: str) -> Any:
    hints = _hints(hint)
    if type(value) is not dict or value.keys() != hints.keys():
        wrong = value.keys() ^ hints.keys() if type(value) is dict else type(value).__name__
        raise ValueError(f"{where}: fields missing or unknown: {_short(wrong)}")
    return hint(**{name: _build(each, value[name], f"{where}.{name}") for name, each in hints.items()})


def _tuple(args: tuple[Any, ...], value: list[Any], where: str) -> tuple[Any, ...]:
    if args[1:] != (Ellipsis,):
        if len(value) != len(args):
            raise ValueError(f"{where} needs {len(args)} entries, not {len(value)}")
        return tuple(_build(each, entry, where) for each, entry in zip(args, value, strict=True))
    if args[0] is int and all(map(_is_size, value)):  # token ids: no call per entry
        return tuple(value)
    return tuple(_build(args[0], entry, f"{where}[{i}]") for i, entry in enumerate(value))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _words(layer: LayerKind) -> str:
    return f"{layer.kind} of window {layer.window}" if layer.window else layer.kind


def config_digest(settings: Mapping[str, Any]) -> str:
    """Digest of a model's config, without names, paths and versions, and without the dtype (compared by itself)."""
    return hashlib.blake2b(json.dumps(_numbers(settings), sort_keys=True).encode(), digest_size=16).hexdigest()


def _numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if not k.startswith("_") and k not in ("transformers_version", "dtype")}
        return {key: _numbers(each) for key, each in kept.items()}
    return [_numbers(each) for each in value] if isinstance(value, list) else value
