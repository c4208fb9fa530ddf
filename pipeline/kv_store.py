"""The artefact: a prefilled request as one `.safetensors` file, and back.

    length | {"__metadata__": {"mmprefill": <manifest>}, "layers.0.keys": ..., ...} | tensors, widest dtype first

What is stored is what a transformers cache holds after the prompt, without its batch axis: full layers all rows,
sliding ones their last window - 1, hybrids their convolution and recurrent states. A file is complete under its name or
not there at all; every tensor is compared with its checksum whenever it is read.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from mmprefill.errors import ArtefactError, UnsupportedModelError
from mmprefill.files import write_atomically
from mmprefill.pipeline import decode, positions
from mmprefill.pipeline.kv_cache import SequenceKV, hand_over
from mmprefill.pipeline.manifest import (
    FORMAT,
    KEYED,
    KINDS,
    MOST_AXES,
    RECURRENT,
    WINDOWED,
    Identity,
    LayerKind,
    Manifest,
    MediaEntry,
    Positions,
    TensorEntry,
    build,
    config_digest,
    strict_json,
)
from mmprefill.types import MediaItem

if TYPE_CHECKING:
    from mmprefill.results import PrefillResult, Session

KEY = "mmprefill"
MOST_HEADER = 32 << 20  # bytes; some four million token ids
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


# Writing.


def save(result: PrefillResult, path: Path) -> Path:
    """Write a result as an artefact; an existing file is replaced in one step.

    Logits of every position (`all_logits`) and the sources of pictures are not stored.

    Raises:
        ArtefactError: if the path is something else than a regular file, or the manifest would be too long to be read.
        UnsupportedModelError: for a cache layer whose states are not known here.
        OSError: if the file cannot be written; nothing is left behind.
    """
    path = Path(path)
    _check_target(path)
    identity = identity_of(result.session)
    tensors = {name: _on_host(tensor) for name, tensor in _tensors_of(result, identity.layers).items()}
    entries = {n: TensorEntry(NAMES[t.dtype], tuple(t.shape), zlib.crc32(_bytes(t))) for n, t in tensors.items()}
    text = _manifest_of(result, identity, entries).to_json()
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps every tensor aligned
    header = _header(text, {name: entries[name] for name in order})
    if len(header) > MOST_HEADER:
        raise ArtefactError(f"{path}: a manifest of {len(header)} bytes; at most {MOST_HEADER} are read back")
    prefix = len(header).to_bytes(8, "little") + header
    write_atomically(path, chain([prefix], (_bytes(tensors[name]) for name in order)))
    return path


def _check_target(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise ArtefactError(f"{path} is {_kind_of(mode)}; an artefact is written to a regular file only")


def _kind_of(mode: int) -> str:
    named = {
        stat.S_IFDIR: "a directory",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return named.get(stat.S_IFMT(mode), "a device")


def identity_of(session: Session) -> Identity:
    """What the KV of a session's model depends on."""
    config: Any = session.family.model.config
    return Identity(
        model_type=session.family.name,
        weights=session.bundle.fingerprint,
        config=config_digest(json.loads(config.to_json_string())),
        processor=session.bundle.processor_digest,
        dtype=str(session.family.dtype).removeprefix("torch."),
        layers=tuple(
            LayerKind(kind, options.get("sliding_window"), options.get("number_of_states"))
            for kind, options in zip(*get_layer_types_and_kwargs(session.family.text_config), strict=True)
        ),
    )


def _tensors_of(result: PrefillResult, layers: tuple[LayerKind, ...]) -> dict[str, Tensor]:
    emitted = result.emitted
    cache = hand_over(result.session.family.text_config, emitted) if isinstance(emitted, SequenceKV) else emitted
    tensors = {"next_token_logits": result.next_token_logits, "position_ids": result.positions}
    tensors |= {f"hidden.{layer}": states for layer, states in result.hidden_states.items()}
    for i, (layer, kind) in enumerate(zip(cache.layers, layers, strict=True)):
        if kind.kind not in KINDS or type(layer) is not DYNAMIC_LAYER_TYPE_MAPPING[kind.kind]:
            raise UnsupportedModelError(
                f"{result.session.family.name}: layer {i} ({kind.kind}) keeps its state in {type(layer).__name__}, "
                "which cannot be stored"
            )
        tensors |= {f"layers.{i}.{name}": state for name, state in _states_of(layer, kind).items()}
    return tensors


def _states_of(layer: Any, kind: LayerKind) -> dict[str, Tensor]:
    """What a transformers cache layer of batch 1 holds, without the batch axis."""
    states: dict[str, Tensor] = {}
    if kind.kind in KEYED:
        states |= {"keys": layer.keys[0], "values": layer.values[0]}
    if kind.kind == "indexed_attention":
        states["indexer_keys"] = layer.indexer_keys[0]
        if layer.indexer_position_ids is not None:
            states["indexer_position_ids"] = layer.indexer_position_ids[:, 0]
    if kind.kind in RECURRENT:
        for name in ("conv_states", "recurrent_states"):
            held = getattr(layer, name).items()
            states |= {f"{name}.{j}": state[0] for j, state in held if state is not None}
    return states


def _manifest_of(result: PrefillResult, identity: Identity, entries: dict[str, TensorEntry]) -> Manifest:
    bundle, rows = result.session.bundle, decode._position_rows(result.session.family)
    spans = result.spans if len(result.spans) == len(result.media) else ((),) * len(result.media)
    return Manifest(
        format=FORMAT,
        producer={name: _version(name) for name in ("mmprefill", "torch", "transformers")},
        id=result.id,
        model=Path(bundle.source).name if Path(bundle.source).exists() else bundle.source,
        revision=bundle.revision,
        identity=identity,
        compatibility=identity.digest,
        token_ids=tuple(result.token_ids.tolist()),
        media=tuple(
            MediaEntry(item.medium, item.digest.hex(), item.size, item.frames, runs)
            for item, runs in zip(result.media, spans, strict=True)
        ),
        positions=Positions("mrope" if rows > 1 else "1d", rows, result.next_position),
        attention=result.attention,
        rows=tuple(layer.rows(len(result.token_ids)) for layer in identity.layers),
        tensors=entries,
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a source checkout that was never installed
        return "unknown"


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _bytes(tensor: Tensor) -> memoryview:
    """A contiguous host tensor's bytes, without a copy."""
    return tensor.flatten().view(torch.uint8).numpy().data


def _header(manifest: str, entries: Mapping[str, TensorEntry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {KEY: manifest}}
    end = 0
    for name, entry in entries.items():
        start, end = end, end + _size(entry.dtype, entry.shape)
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


# Reading.


@dataclass(frozen=True)
class _Slot:
    """A tensor as the safetensors header places it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Artefact:
    """A stored prefill. Tensors are read from a memory map when asked for, and compared with their checksums each time.

    What `tensor`, `states` and `layer` return is the map itself (read it, do not write to it); `cache` copies.
    The file may be replaced meanwhile by `save`, but must not be cut short in place.
    """

    def __init__(self, path: Path, manifest: Manifest, handle: Any, found: os.stat_result) -> None:
        self.path, self.manifest = path, manifest
        self._handle, self._found = handle, found

    def tensor(self, name: str) -> Tensor:
        """One tensor by its name in the file.

        Raises:
            KeyError: if there is none of that name.
            ArtefactError: if it is not what the manifest says.
        """
        entry = self.manifest.tensors[name]
        self._check_size()
        try:
            tensor: Tensor = self._handle.get_tensor(name)
        except (SafetensorError, RuntimeError, ValueError, OSError) as error:
            raise ArtefactError(f"{self.path}: tensor {name!r} cannot be read: {error}") from error
        if (NAMES.get(tensor.dtype), tuple(tensor.shape)) != (entry.dtype, entry.shape):
            raise ArtefactError(
                f"{self.path}: tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, not as the manifest says"
            )
        if zlib.crc32(_bytes(tensor)) != entry.crc32:
            raise ArtefactError(f"{self.path}: tensor {name!r} does not match its checksum; the file is damaged")
        return tensor

    def _check_size(self) -> None:
        """A map of a file that was cut short kills the process when it is read."""
        try:
            now = self.path.stat()
        except OSError:
            return  # removed or replaced: the map keeps what it had
        if (now.st_dev, now.st_ino) == (self._found.st_dev, self._found.st_ino) and now.st_size != self._found.st_size:
            raise ArtefactError(f"{self.path}: {now.st_size} bytes, was {self._found.st_size}; it changed while open")

    def states(self, i: int) -> dict[str, Tensor]:
        """All tensors of layer i, by name: "keys", "values", "conv_states.0", ..."""
        i = range(len(self.manifest.rows))[i]
        return {name: self.tensor(f"layers.{i}.{name}") for name in self.manifest.state_names(i)}

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values [G, rows, W] of layer i.

        Raises:
            ValueError: for a layer that keeps no keys.
        """
        kind = self.manifest.identity.layers[i].kind
        if kind not in KEYED:
            raise ValueError(f"layer {i} is {kind}: it keeps no keys and values, see states({i})")
        i = range(len(self.manifest.rows))[i]
        return self.tensor(f"layers.{i}.keys"), self.tensor(f"layers.{i}.values")

    @property
    def next_token_logits(self) -> Tensor:
        """[V] float32."""
        return self.tensor("next_token_logits")

    @property
    def positions(self) -> Tensor:
        """[P, T] int64."""
        found = self.tensor("position_ids")
        if positions.next_position(found) != self.manifest.positions.next:
            raise ArtefactError(
                f"{self.path}: next position {self.manifest.positions.next} does not follow from the positions"
            )
        return found

    @property
    def hidden_states(self) -> dict[int, Tensor]:
        """Layer -> [T, D], for the layers that were asked for."""
        return {layer: self.tensor(f"hidden.{layer}") for layer in self.manifest.hidden_layers}

    def verify(self) -> None:
        """Read everything.

        Raises:
            ArtefactError: naming the first tensor that is damaged.
        """
        for name in self.manifest.tensors:
            self.tensor(name)
        _ = self.positions

    def cache(self, device: str | torch.device = "cpu") -> DynamicCache:
        """A new transformers cache of batch 1, as the model's own forward would have left it; needs no engine."""
        cache = DynamicCache()
        cache.layer_class_to_replicate = None  # the layers are all there; none is added on demand
        cache.layers = [
            _restored(
                kind, {name: _copy(state, device) for name, state in self.states(i).items()}, self.manifest.length
            )
            for i, kind in enumerate(self.manifest.identity.layers)
        ]
        return cache

    def inputs(self, device: str | torch.device = "cpu") -> dict[str, Any]:
        """Arguments with which a plain `model.generate(**artefact.inputs(), max_new_tokens=n)` goes on.

        `generate` wants one token more than the cache holds: the most probable next token is appended to the prompt,
        and `n` counts from there.
        """
        first = int(self.next_token_logits.argmax())
        ids = torch.tensor([[*self.manifest.token_ids, first]], device=device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "cache": self.cache(device)}
        where = self.manifest.positions
        if where.rows > 1:  # only the last column counts: generate goes on from it
            inputs["position_ids"] = torch.full((where.rows, *ids.shape), where.next, device=device)
        return inputs


def load(path: str | Path) -> Artefact:
    """Open an artefact: its header is read and checked, its tensors are not touched yet.

    Raises:
        ArtefactError: if it is not a whole artefact of a format that is read here, saying what is wrong.
    """
    path = Path(path)
    try:
        with _open_regular(path) as file:
            found = os.fstat(file.fileno())
            text, slots = _read_header(file, found.st_size)
        manifest = Manifest.from_json(text)
        _compare(manifest, slots)
        return Artefact(path, manifest, safe_open(path, framework="pt"), found)
    except (OSError, ValueError, SafetensorError) as error:
        raise ArtefactError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _open_regular(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not make us wait for a writer
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ValueError(f"it is {_kind_of(mode)}, not a file")
    return os.fdopen(descriptor, "rb")


def _read_header(file: BinaryIO, size: int) -> tuple[str, dict[str, _Slot]]:
    """The manifest's text and where the tensors lie; offsets must tile the rest of the file exactly."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, MOST_HEADER):
        if start.startswith((b"PK", b"\x80")):  # asked last: a header's length may begin with these bytes
            raise ValueError("it looks like a pickle or an archive; only safetensors files are read")
        raise ValueError(f"a header of {length} bytes in a file of {size}: not a safetensors file, or cut short")
    raw = strict_json(file.read(length).decode())
    if not isinstance(raw, dict):
        raise ValueError("the header is not a JSON object")
    about = raw.pop("__metadata__", None)
    if not isinstance(about, dict) or about.keys() != {KEY} or not isinstance(about[KEY], str):
        raise ValueError("a safetensors file without a manifest of mmprefill (a model's weights?)")
    slots = {name: build(_Slot, each, f"tensor {name[:80]!r}") for name, each in raw.items()}
    _check_slots(slots, size - 8 - length)
    return about[KEY], slots


def _check_slots(slots: Mapping[str, _Slot], size: int) -> None:
    end = 0
    for name, slot in sorted(slots.items(), key=lambda each: each[1].data_offsets):
        if slot.dtype not in DTYPES or len(slot.shape) > MOST_AXES:
            raise ValueError(f"tensor {name[:80]!r} has dtype {slot.dtype[:80]!r} and {len(slot.shape)} axes")
        if slot.data_offsets != (end, end + _size(slot.dtype, slot.shape)):
            raise ValueError(
                f"tensor {name[:80]!r} of {slot.dtype} {slot.shape} cannot lie at bytes {slot.data_offsets}"
            )
        end = slot.data_offsets[1]
    if end != size:
        raise ValueError(f"{size} bytes of tensors, {end} expected: cut short or appended to")


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def _compare(manifest: Manifest, slots: Mapping[str, _Slot]) -> None:
    said = {name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()}
    there = {name: (slot.dtype, slot.shape) for name, slot in slots.items()}
    wrong = sorted(name for name in said.keys() | there.keys() if said.get(name) != there.get(name))
    if wrong:
        raise ValueError(
            f"tensor {wrong[0][:80]!r}: the manifest says {said.get(wrong[0])}, the header {there.get(wrong[0])}"
        )


def _copy(tensor: Tensor, device: str | torch.device) -> Tensor:
    return tensor.to(device, copy=True)


def _restored(kind: LayerKind, states: Mapping[str, Tensor], length: int) -> Any:
    """A transformers cache layer as it was: filled through its own initialisation, with the batch axis back."""
    layer = DYNAMIC_LAYER_TYPE_MAPPING[kind.kind](sliding_window=kind.window, number_of_states=kind.states)
    if kind.kind in KEYED:
        keys, values = states["keys"][None], states["values"][None]
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    if kind.kind in WINDOWED:
        layer.cumulative_length = length
    if kind.kind == "indexed_attention":
        layer.lazy_initialization_indexer(states["indexer_keys"][None])
        layer.indexer_keys = states["indexer_keys"][None]
        if "indexer_position_ids" in states:
            layer.indexer_position_ids = states["indexer_position_ids"][:, None]
    for j in range(kind.states or 0):
        _restore_recurrent(layer, j, states)
    return layer


def _restore_recurrent(layer: Any, j: int, states: Mapping[str, Tensor]) -> None:
    """Copied into the layer's own buffers: it marks their addresses as fixed for compiled decoding."""
    if f"conv_states.{j}" in states:
        layer.lazy_initialization(conv_states=states[f"conv_states.{j}"][None], state_idx=j)
        layer.conv_states[j].copy_(states[f"conv_states.{j}"][None])
        layer.has_previous_state[j] = True
    if f"recurrent_states.{j}" in states:
        layer.lazy_initialization(recurrent_states=states[f"recurrent_states.{j}"][None], state_idx=j)
        layer.recurrent_states[j].copy_(states[f"recurrent_states.{j}"][None])


# Back into an engine.


def resume(session: Session, source: str | Path | Artefact) -> dict[str, Any]:
    """An artefact as the fields of a `PrefillResult` in a running engine (all but `session`), nothing recomputed.

    Raises:
        ArtefactError: if it is damaged, or was made by another model, config, dtype or processor; says what differs.
    """
    artefact = source if isinstance(source, Artefact) else load(source)
    identity = identity_of(session)
    if artefact.manifest.compatibility != identity.digest:
        differences = artefact.manifest.identity.differences(identity)
        raise ArtefactError(f"{artefact.path} was made for another model: {'; '.join(differences)}")
    return session.lane.call(_resumed, session, artefact)


def _resumed(session: Session, artefact: Artefact) -> dict[str, Any]:
    started = time.perf_counter()
    manifest, device, packed = artefact.manifest, session.family.device, session.route.packed
    return {
        "id": manifest.id,
        "token_ids": torch.tensor(manifest.token_ids),
        "positions": artefact.positions.clone(),
        "next_position": manifest.positions.next,
        "next_token_logits": _copy(artefact.next_token_logits, device),
        "emitted": _sequence(artefact, device) if packed else artefact.cache(device),
        "hidden_states": {layer: _copy(states, device) for layer, states in artefact.hidden_states.items()},
        "media": tuple(MediaItem(m.medium, bytes.fromhex(m.digest), m.size, m.frames) for m in manifest.media),
        "spans": tuple(m.spans for m in manifest.media),
        "seconds": {"load": time.perf_counter() - started},
        "route": "packed" if packed else "generic",
        "attention": manifest.attention,
    }


def _sequence(artefact: Artefact, device: torch.device) -> SequenceKV:
    """Stored KV of the packed path. Rows that fell out of a window are zeros: no later token looks at them."""
    length = artefact.manifest.length
    kv = SequenceKV(length, length)
    for i, rows in enumerate(artefact.manifest.rows):
        if artefact.manifest.identity.layers[i].kind in KEYED:
            kv.layers[i] = (
                _padded(artefact.tensor(f"layers.{i}.keys"), length - rows, device),
                _padded(artefact.tensor(f"layers.{i}.values"), length - rows, device),
            )
    return kv


def _padded(tensor: Tensor, missing: int, device: torch.device) -> Tensor:
    buffer = torch.zeros(
        1, tensor.shape[0], missing + tensor.shape[1], tensor.shape[2], dtype=tensor.dtype, device=device
    )
    buffer[0, :, missing:] = tensor
    return buffer
