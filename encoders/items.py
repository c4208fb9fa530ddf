"""A request's media taken apart and put together again: what the tower is asked for, one picture or video at a time.

Encoding items apart is exact (a tower never looks from one picture at another), and is what lets a picture be encoded
once however many requests show it. Where a processor's tensors cannot be cut per item, the request stays in one piece.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmprefill.encoders.vision import MediaInputs
from mmprefill.types import MediaItem, Prepared


@dataclass(frozen=True)
class Item:
    """What one tower call is asked for: one picture or video, or all of a request's that cannot be cut apart.

    Attributes:
        inputs: the processor's tensors.
        key: names content, tensor shapes and grids; equal keys have equal outputs.
        end: token after its last placeholder; prefilling may go up to its first one without it.
        start: its first placeholder token.
    """

    inputs: MediaInputs
    key: bytes
    start: int
    end: int


def items_of(prepared: Prepared, inputs: MediaInputs) -> list[Item]:
    """The items of one medium of a request, in the order of their placeholders."""
    media = [item for item in prepared.media if item.medium == inputs.medium]
    parts = _cut(inputs, media) if len(media) > 1 and all(item.runs for item in media) else None
    if parts is None:
        return [whole(prepared, inputs)]
    return [_item(part, [item], prepared) for part, item in zip(parts, media, strict=True)]


def whole(prepared: Prepared, inputs: MediaInputs) -> Item:
    """A request's media of one kind in one piece."""
    return _item(inputs, prepared.media, prepared)


def _item(inputs: MediaInputs, media: Seq[MediaItem], prepared: Prepared) -> Item:
    runs = [run for item in media for run in item.runs] or [(0, len(prepared.input_ids))]
    return Item(inputs, _key(inputs, media), min(start for start, _ in runs), max(end for _, end in runs))


def _key(inputs: MediaInputs, media: Seq[MediaItem]) -> bytes:
    """32 bytes over pixels, medium, and every tensor's name, shape and dtype; small tensors (grids, sizes) by value.

    Pixel tensors are a function of the pictures, their order and the processor, which is the engine's own, except for how
    far they are padded, which their shapes show. Where the order is not known they are hashed themselves.
    """
    digest = hashlib.blake2b(digest_size=32)
    ordered = all(item.runs for item in media)
    for item in sorted(media, key=lambda item: item.runs[:1]):
        digest.update(item.digest)
    for name, tensor in sorted(inputs.tensors.items()):
        digest.update(f"|{inputs.medium} {name} {tuple(tensor.shape)} {tensor.dtype}|".encode())
        if not (name.startswith("pixel_") and ordered):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.digest()


def _cut(inputs: MediaInputs, media: Seq[MediaItem]) -> list[MediaInputs] | None:
    rows = [sum(end - start for start, end in item.runs) for item in media]
    if sum(rows) != inputs.rows:
        return None
    cut = {name: _cut_tensor(name, tensor, inputs, rows) for name, tensor in inputs.tensors.items()}
    if any(parts is None for parts in cut.values()):
        return None
    return [
        MediaInputs(inputs.medium, {name: parts[i] for name, parts in cut.items() if parts}, count, inputs.request)
        for i, count in enumerate(rows)
    ]


def _cut_tensor(name: str, tensor: Tensor, inputs: MediaInputs, rows: Seq[int]) -> list[Tensor] | None:
    """One tensor per item: an entry each, patches by grid, or tiles in proportion to their rows."""
    if tensor.dim() and tensor.shape[0] == len(rows):
        return list(tensor.split(1))
    if not name.startswith("pixel_"):
        return None
    grid = next((t for other, t in inputs.tensors.items() if other.endswith("grid_thw")), None)
    if grid is not None and len(grid) == len(rows) and int(grid.prod(-1).sum()) == tensor.shape[0]:
        return list(tensor.split(grid.prod(-1).tolist()))
    axis = 1 if tensor.shape[0] == 1 else 0  # Idefics3 keeps a request's tiles behind an axis of 1
    if tensor.dim() < 3 + axis:
        return None
    tiles = [count * tensor.shape[axis] / sum(rows) for count in rows]
    return list(tensor.split([int(n) for n in tiles], axis)) if all(n.is_integer() for n in tiles) else None


def join(outputs: Seq[Any]) -> Any:
    """Feature outputs of several items as the one output that the composite model takes for the request."""
    if len(outputs) == 1:
        return outputs[0]
    whole = copy.copy(outputs[0])
    for name in list(whole.keys()):
        whole[name] = None
    whole["pooler_output"] = _join([output["pooler_output"] for output in outputs])
    if outputs[0].get("deepstack_features") is not None:
        levels = zip(*(output["deepstack_features"] for output in outputs), strict=True)
        whole["deepstack_features"] = [_join(level) for level in levels]
    return whole


def joinable(output: Any) -> bool:
    """Whether everything in a feature output is either joined by `join` or not read by composite models."""
    known = {"pooler_output", "deepstack_features", "last_hidden_state", "hidden_states", "attentions"}
    deep = output.get("deepstack_features")
    flat = deep is None or all(isinstance(level, (list, tuple, Tensor)) for level in deep)
    return output.get("pooler_output") is not None and flat and {k for k, v in output.items() if v is not None} <= known


def _join(parts: Seq[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return type(parts[0])(entry for part in parts for entry in part)


def nbytes(output: Any) -> int:
    """Bytes of the tensors in a feature output."""
    if isinstance(output, Tensor):
        return output.numel() * output.element_size()
    if isinstance(output, Mapping):
        return sum(map(nbytes, output.values()))
    return sum(map(nbytes, output)) if isinstance(output, (list, tuple)) else 0
