"""The artefact: a prefilled request as a `.safetensors` file, or many as one, and back into an engine.

    {"__metadata__": {"mmprefill": <manifest>}, "layers.0.keys": ..., ...}
    {"__metadata__": {"mmprefill.shard": {ids}, "mmprefill.0": <manifest>, ...}, "0/layers.0.keys": ..., ...}

What is stored is what a transformers cache holds after the prompt, without its batch axis: full layers all rows,
sliding ones their last window - 1, hybrids their convolution and recurrent states. A file is complete under its name or
not there at all; every tensor is compared with its checksum whenever it is read.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from mmprefill.errors import ArtefactError, UnsupportedModelError
from mmprefill.pipeline import decode, kv_fit
from mmprefill.pipeline.kv_cache import SequenceKV, hand_over
from mmprefill.pipeline.kv_file import INDEX, KEY, MARK, MOST_HEADER, check_target, entry_of, on_host, write
from mmprefill.pipeline.kv_read import Artefact, copied, load
from mmprefill.pipeline.manifest import (
    FORMAT,
    KEYED,
    KINDS,
    RECURRENT,
    Identity,
    LayerKind,
    Manifest,
    MediaEntry,
    Positions,
    TensorEntry,
    canonical,
    config_digest,
    digest,
)
from mmprefill.types import MediaItem

if TYPE_CHECKING:
    from mmprefill.results import PrefillResult, Session

_ENTRY = 256  # bytes of a header for the name and place of a tensor, at most


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
    check_target(path)
    text, tensors = stored(result)
    return write(path, {KEY: text}, tensors)


def stored(result: PrefillResult) -> tuple[str, dict[str, Tensor]]:
    """A result as its manifest and its tensors, on the host.

    Raises:
        UnsupportedModelError: for a cache layer whose states are not known here.
    """
    identity = identity_of(result.session)
    tensors = {name: on_host(tensor) for name, tensor in _tensors_of(result, identity.layers).items()}
    return _manifest_of(result, identity, {name: entry_of(t) for name, t in tensors.items()}).to_json(), tensors


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


def save_shard(results: Iterable[PrefillResult], path: str | Path) -> Path:
    """Write results as one file; an existing one is replaced in one step.

    Raises:
        ArtefactError: if the path is something else than a regular file, or the header would be too long to be read.
        UnsupportedModelError: for a cache layer whose states are not known here.
        OSError: if the file cannot be written; nothing is left behind.
    """
    path = Path(path)
    check_target(path)
    return _write(path, [(result.id, *stored(result)) for result in results])


def _write(path: Path, each: Seq[tuple[str, str, Mapping[str, Tensor]]]) -> Path:
    fields = {"format": 1, "ids": [id for id, _, _ in each]}
    about = {INDEX: canonical({**fields, "checksum": digest(fields)})}
    about |= {f"{KEY}.{number}": text for number, (_, text, _) in enumerate(each)}
    tensors = {f"{number}/{name}": t for number, (_, _, named) in enumerate(each) for name, t in named.items()}
    return write(path, about, tensors)


class ShardWriter:
    """Puts results into shards of bounded size, one after another.

    Args:
        name: the path of shard n.
        most: bytes of tensors in a shard; a result that has more is alone in its own.
    """

    def __init__(self, name: Callable[[int], Path], most: int) -> None:
        self._name, self._most = name, most
        self._held: list[tuple[str, str, Mapping[str, Tensor]]] = []
        self._bytes = self._header = 0
        self.files: list[Path] = []

    def add(self, result: PrefillResult) -> str:
        """Take a result; returns where it will be: the name of its shard, and its place there.

        Raises:
            UnsupportedModelError: as `save_shard`; also OSError, if the shard that was full cannot be written.
        """
        text, tensors = stored(result)
        size = sum(tensor.nbytes for tensor in tensors.values())
        header = 2 * len(text) + _ENTRY * len(tensors)  # quotes are escaped, being a string in JSON
        if self._held and (self._bytes + size > self._most or self._header + header > MOST_HEADER):
            self.flush()
        self._held.append((result.id, text, tensors))
        self._bytes, self._header = self._bytes + size, self._header + header
        return f"{self._name(len(self.files))}{MARK}{len(self._held) - 1}"

    def flush(self) -> None:
        """Write what is held."""
        if self._held:
            self.files.append(_write(self._name(len(self.files)), self._held))
            self._held, self._bytes, self._header = [], 0, 0


# Back into an engine.


def resume(session: Session, source: str | Path | Artefact) -> dict[str, Any]:
    """An artefact as the fields of a `PrefillResult` in a running engine (all but `session`), nothing recomputed.

    Raises:
        ArtefactError: if it is damaged, or was made by another model, config, dtype or processor, or holds what this
            model cannot have made (dtypes, heads, widths, vocabulary, length); says what differs.
    """
    artefact = source if isinstance(source, Artefact) else load(source)
    identity = identity_of(session)
    if artefact.manifest.compatibility != identity.digest:
        differences = artefact.manifest.identity.differences(identity)
        raise ArtefactError(f"{artefact.path} was made for another model: {'; '.join(differences)}")
    return session.lane.call(_resumed, session, artefact)


def _resumed(session: Session, artefact: Artefact) -> dict[str, Any]:
    started = time.perf_counter()
    _check_fit(session, artefact)
    manifest, device, packed = artefact.manifest, session.family.device, session.route.packed
    return {
        "id": manifest.id,
        "token_ids": torch.tensor(manifest.token_ids),
        "positions": artefact.positions.clone(),
        "next_position": manifest.positions.next,
        "next_token_logits": copied(artefact.next_token_logits, device),
        "emitted": _sequence(artefact, device) if packed else artefact.cache(device),
        "hidden_states": {layer: copied(states, device) for layer, states in artefact.hidden_states.items()},
        "media": tuple(MediaItem(m.medium, bytes.fromhex(m.digest), m.size, m.frames) for m in manifest.media),
        "spans": tuple(m.spans for m in manifest.media),
        "seconds": {"load": time.perf_counter() - started},
        "route": "packed" if packed else "generic",
        "attention": manifest.attention,
    }


def _check_fit(session: Session, artefact: Artefact) -> None:
    """The manifest claims its model; shapes and dtypes are compared with those that this model makes."""
    forms = kv_fit.remembered(session.family)
    if forms is None:
        cache, logits = kv_fit.one_token(session.family, session.route.plan)
        layers = identity_of(session).layers
        states = (
            (i, _states_of(layer, kind)) for i, (layer, kind) in enumerate(zip(cache.layers, layers, strict=True))
        )
        own = {f"layers.{i}.{name}": state for i, named in states for name, state in named.items()}
        forms = kv_fit.remember(session.family, {"next_token_logits": logits, **own})
    found = list(itertools.islice(kv_fit.differences(artefact.manifest, forms, session.bundle.context), 3))
    if found:
        raise ArtefactError(f"{artefact.place} does not fit this model: {'; '.join(found)}")


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
