"""The checkpoint's own towers, in micro-batches of media of several requests.

A micro-batch concatenates the processor's tensors along their first axis and calls the model's own feature function
once. Nothing is padded: only requests whose tensors differ in the first axis alone share a call. The output is split
back by counting rows, and keeps the container (tensor, tuple or list) that the composite model expects.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmprefill.encoders.families import MEDIA, Family
from mmprefill.errors import MediaError, PlaceholderError
from mmprefill.streams import sent
from mmprefill.types import Prepared

_SPLITTABLE = frozenset({"last_hidden_state", "pooler_output", "deepstack_features", "hidden_states", "attentions"})


@dataclass(frozen=True)
class MediaInputs:
    """What one medium's feature function takes for one request.

    Attributes:
        medium: "image" or "video".
        tensors: the processor's tensors that the feature function consumes.
        rows: placeholder tokens of this medium in the request, i.e. rows the tower must make.
        request: the request's id, for messages.
    """

    medium: str
    tensors: Mapping[str, Tensor]
    rows: int
    request: str = ""

    @property
    def patches(self) -> int:
        """Work, in units that grow with the pixels: rows of flat patches, or pixels over 14 x 14."""
        pixels = next(t for name, t in self.tensors.items() if name.startswith("pixel_values"))
        return int(pixels.shape[0]) if pixels.dim() == 2 else max(1, pixels.numel() // (3 * 14 * 14))

    @property
    def shape_key(self) -> tuple[Any, ...]:
        """Equal for media that may share a call: all but the first axis."""
        return (self.medium, *((name, t.dtype, *t.shape[1:]) for name, t in sorted(self.tensors.items())))


def media_inputs(family: Family, prepared: Prepared) -> Iterator[MediaInputs]:
    """The media of a request, one entry per medium that it has.

    Raises:
        PlaceholderError: if pictures were given to a prompt without a placeholder for them.
    """
    for medium in family.features:
        tensors = {name: t for name, t in prepared.inputs.items() if name in family.takes(medium)}
        if not any(name.startswith("pixel_values") for name in tensors):
            continue
        rows = placeholder_rows(family, prepared, medium)
        if rows == 0:
            raise PlaceholderError(
                f"request {prepared.id!r}: {medium}s were given but the prompt has no place for them"
            )
        yield MediaInputs(medium, tensors, rows, prepared.id)


def placeholder_rows(family: Family, prepared: Prepared, medium: str) -> int:
    """Placeholder tokens that a medium's tower has to fill.

    A placeholder need not be the medium's own: the frames of a GLM-4V video take the picture's, so each item's own
    tokens are counted where they are known. InternVL and SmolVLM hand frames to the picture tower, as pictures.
    """
    own = {other for other in MEDIA if other == "image" or f"pixel_values_{other}s" in prepared.inputs}
    items = [item for item in prepared.media if item.medium == medium or item.medium not in own]
    if items and all(item.runs for item in items):
        return sum(end - start for item in items for start, end in item.runs)
    return int((prepared.input_ids == family.placeholders[medium]).sum())


def encode(family: Family, batch: Seq[MediaInputs]) -> list[Any]:
    """Run one micro-batch through the tower; returns one feature output per item.

    All items have the same `shape_key`. Runs on the lane that owns the tower.

    Raises:
        MediaError: if the tower refuses an item that is alone.
    """
    function = family.features[batch[0].medium]
    joined = {name: torch.cat([item.tensors[name] for item in batch]) for name in batch[0].tensors}
    try:
        output = function(**{name: _placed(family, tensor) for name, tensor in joined.items()}, return_dict=True)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, ValueError, IndexError) as error:  # Pixtral with a single row of features, for one
        if len(batch) > 1:
            raise
        medium = batch[0].medium
        raise MediaError(f"request {batch[0].request!r}: the {medium} tower refused its {medium}s: {error}") from error
    parts = split(output, [item.rows for item in batch])
    if parts is None:
        return [output] if len(batch) == 1 else [encode(family, [item])[0] for item in batch]
    return parts


def _placed(family: Family, tensor: Tensor) -> Tensor:
    """On the tower's device; pixels in its dtype, grids and sizes as they are."""
    return sent(tensor, family.device, family.dtype if tensor.is_floating_point() else None)


def split(output: Any, rows: Seq[int]) -> list[Any] | None:
    """A feature output of several requests, cut after the given numbers of rows; None if it has parts we cannot cut.

    Each part has memory of its own (one that is kept does not keep the others), and only what composite models read.
    """
    fields = {name: value for name, value in output.items() if value is not None}
    pooled = fields.get("pooler_output")
    if pooled is None or not set(fields) <= _SPLITTABLE:
        return None
    cuts = _cuts(pooled, rows)
    deep = fields.get("deepstack_features")
    if cuts is None or (deep is not None and any(len(level) != len(pooled) for level in deep)):
        return None
    parts = []
    for start, stop in cuts:
        part = copy.copy(output)
        for name in fields:
            part[name] = None
        part["pooler_output"] = _own(pooled[start:stop])
        if deep is not None:
            part["deepstack_features"] = [_own(level[start:stop]) for level in deep]
        parts.append(part)
    return parts


def _own(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.untyped_storage().nbytes() == value.numel() * value.element_size() else value.clone()
    return type(value)(_own(each) for each in value)


def _cuts(pooled: Any, rows: Seq[int]) -> list[tuple[int, int]] | None:
    """Ranges of entries (axis 0 of a tensor, items of a list) that make up the given numbers of rows."""
    sizes = [int(entry.numel() // entry.shape[-1]) for entry in pooled]
    cuts, start = [], 0
    for wanted in rows:
        stop, made = start, 0
        while stop < len(sizes) and made < wanted:
            made, stop = made + sizes[stop], stop + 1
        if made != wanted:
            return None
        cuts.append((start, stop))
        start = stop
    return cuts if start == len(sizes) else None
