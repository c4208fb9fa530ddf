"""Stored KV, read back lazily: one request, or a shard of many.

A file's header is read and checked when it is opened, a manifest is parsed when its request is asked for, and a tensor is
read from the memory map when it is, and compared with its checksum each time.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from mmprefill.errors import ArtefactError
from mmprefill.pipeline import positions
from mmprefill.pipeline.kv_file import INDEX, KEY, MARK, NAMES, STRANGE, Slot, open_regular, raw, read_header, size_of
from mmprefill.pipeline.manifest import KEYED, WINDOWED, LayerKind, Manifest, build, digest, strict_json


class Artefact:
    """A stored prefill. Tensors are read from a memory map when asked for, and compared with their checksums each time.

    What `tensor`, `states` and `layer` return is the map itself (read it, do not write to it); `cache` copies.
    The file may be replaced meanwhile by `save`, but must not be cut short in place.
    """

    def __init__(self, path: Path, manifest: Manifest, handle: Any, found: os.stat_result, prefix: str = "") -> None:
        self.path, self.manifest = path, manifest
        self._handle, self._found, self._prefix = handle, found, prefix

    @property
    def place(self) -> str:
        """Its file, and in a shard its number there: what `load` takes."""
        return f"{self.path}{MARK}{self._prefix[:-1]}" if self._prefix else str(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(size_of(entry.dtype, entry.shape) for entry in self.manifest.tensors.values())

    def tensor(self, name: str) -> Tensor:
        """One tensor by its name in the file.

        Raises:
            KeyError: if there is none of that name.
            ArtefactError: if it is not what the manifest says.
        """
        entry = self.manifest.tensors[name]
        self._check_size()
        try:
            tensor: Tensor = self._handle.get_tensor(self._prefix + name)
        except (SafetensorError, RuntimeError, ValueError, OSError) as error:
            raise ArtefactError(f"{self.place}: tensor {name!r} cannot be read: {error}") from error
        if (NAMES.get(tensor.dtype), tuple(tensor.shape)) != (entry.dtype, entry.shape):
            raise ArtefactError(
                f"{self.place}: tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, not as the manifest says"
            )
        if zlib.crc32(raw(tensor)) != entry.crc32:
            raise ArtefactError(f"{self.place}: tensor {name!r} does not match its checksum; the file is damaged")
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
                f"{self.place}: next position {self.manifest.positions.next} does not follow from the positions"
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
                kind, {name: copied(state, device) for name, state in self.states(i).items()}, self.manifest.length
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

    Args:
        path: a file of one request, or `FILE#N` for the N-th request of a shard, counted from 0.

    Raises:
        ArtefactError: if it is not a whole artefact of a format that is read here, saying what is wrong.
    """
    file, number = place_of(Path(path))
    if number is not None:
        shard = load_shard(file)
        if number >= len(shard):
            raise ArtefactError(f"{path}: the shard holds {len(shard)} requests")
        return shard[number]
    with reading(file) as (about, slots, found):
        if about.keys() != {KEY}:
            raise ValueError(explained(file, about))
        return artefact_of(file, about[KEY], slots, safe_open(file, framework="pt"), found)


@contextmanager
def reading(path: Path) -> Iterator[tuple[dict[str, str], dict[str, Slot], os.stat_result]]:
    """A file's header and what the file was; whatever is wrong within the block is an `ArtefactError` that names it."""
    try:
        with open_regular(path) as file:
            found = os.fstat(file.fileno())
            about, slots = read_header(file, found.st_size)
        yield about, slots, found
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, ArtefactError):
            raise
        raise ArtefactError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def artefact_of(
    path: Path, text: str, slots: Mapping[str, Slot], handle: Any, found: os.stat_result, prefix: str = ""
) -> Artefact:
    """An artefact of a manifest that the file carries.

    Raises:
        ValueError: if the manifest is none, or says something else than the header.
    """
    manifest = Manifest.from_json(text)
    _compare(manifest, slots)
    return Artefact(path, manifest, handle, found, prefix)


def _compare(manifest: Manifest, slots: Mapping[str, Slot]) -> None:
    said = {name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()}
    there = {name: (slot.dtype, slot.shape) for name, slot in slots.items()}
    wrong = sorted(name for name in said.keys() | there.keys() if said.get(name) != there.get(name))
    if wrong:
        raise ValueError(
            f"tensor {wrong[0][:80]!r}: the manifest says {said.get(wrong[0])}, the header {there.get(wrong[0])}"
        )


def copied(tensor: Tensor, device: str | torch.device) -> Tensor:
    """A tensor of the map as one of its own."""
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


# Shards.


@dataclass(frozen=True)
class Index:
    """What a shard holds: ids of its requests, in order."""

    format: int
    ids: tuple[str, ...]


class Shard:
    """The requests of one file, in order: `len`, `shard[n]`, iteration; `shard.ids` names them."""

    def __init__(
        self, path: Path, ids: tuple[str, ...], texts: Seq[str], slots: Seq[Mapping[str, Slot]], handle: Any,
        found: os.stat_result,
    ) -> None:  # fmt: skip
        self.path, self.ids = path, ids
        self._texts, self._slots, self._handle, self._found = texts, slots, handle, found

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Artefact]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Artefact:
        """The artefact of a request; its tensors are not touched yet.

        Raises:
            IndexError: if there is none.
            ArtefactError: if its manifest does not hold.
        """
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.path} holds {len(self)} requests, there is no number {number}")
        number %= len(self)
        place = Path(f"{self.path}{MARK}{number}")
        try:
            made = artefact_of(
                self.path, self._texts[number], self._slots[number], self._handle, self._found, f"{number}/"
            )
            if made.manifest.id != self.ids[number]:
                raise ValueError(f"request {made.manifest.id!r} where {self.ids[number]!r} should be")
        except ValueError as error:
            raise ArtefactError(f"{place}: {error}") from error
        return made


def load_shard(path: str | Path) -> Shard:
    """Open a shard: its header is read and checked, its manifests and tensors are not touched yet.

    Raises:
        ArtefactError: if it is not a whole shard of a format that is read here, saying what is wrong.
    """
    path = Path(path)
    with reading(path) as (about, slots, found):
        ids = _index(about)
        texts = [about[f"{KEY}.{number}"] for number in range(len(ids))]
        return Shard(path, ids, texts, _by_request(slots, len(ids)), safe_open(path, framework="pt"), found)


def load_all(path: str | Path) -> Seq[Artefact] | Shard:
    """The artefacts of a file, whether it holds one or is a shard of many.

    Raises:
        ArtefactError: as `load` and `load_shard`.
    """
    file, number = place_of(Path(path))
    if number is None:
        with reading(file) as (about, _, _):
            many = INDEX in about
        if many:
            return load_shard(file)
    return [load(path)]


def _index(about: Mapping[str, str]) -> tuple[str, ...]:
    if INDEX not in about:
        raise ValueError("an artefact of one request, not a shard" if about.keys() == {KEY} else STRANGE)
    fields = strict_json(about[INDEX])
    if not isinstance(fields, dict):
        raise ValueError("the shard's index is not a JSON object")
    if (version := fields.get("format")) != 1 or type(version) is not int:
        raise ValueError(f"shard format {version!r}; this release reads 1")
    if fields.pop("checksum", None) != digest(fields):
        raise ValueError("the shard's index does not match its checksum")
    ids = build(Index, fields, "shard").ids
    if about.keys() != {INDEX, *(f"{KEY}.{number}" for number in range(len(ids)))}:
        raise ValueError(f"{len(about) - 1} manifests for {len(ids)} requests")
    return ids


def _by_request(slots: Mapping[str, Slot], count: int) -> list[dict[str, Slot]]:
    found: list[dict[str, Slot]] = [{} for _ in range(count)]
    for name, slot in slots.items():
        number, mark, own = name.partition("/")
        if not (
            mark and number.isascii() and number.isdecimal() and str(int(number)) == number and int(number) < count
        ):
            raise ValueError(f"tensor {name[:80]!r} belongs to none of the {count} requests")
        found[int(number)][own] = slot
    return found


def place_of(path: Path) -> tuple[Path, int | None]:
    """A path as the file and, for `FILE#N`, the number of the request in it; a file of just that name comes first."""
    name, mark, number = path.name.rpartition(MARK)
    if not (name and mark and number.isascii() and number.isdecimal()) or len(number) > 9 or os.path.lexists(path):
        return path, None
    return path.with_name(name), int(number)


def explained(path: Path, about: Mapping[str, str]) -> str:
    """Why a file is no artefact of one request."""
    if INDEX not in about:
        return STRANGE
    return f"a shard of {len(about) - 1} requests: name one as {path.name}{MARK}0, or open all with load_shard"
