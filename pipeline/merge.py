"""Text rows + media rows -> Sequence, by recording what the decoder would receive.

No merge is written here per family: the composite model's own `forward` runs with its decoder replaced by a recorder,
and the arguments that the decoder would have been called with are the sequence.

That puts an instance attribute on the model for the length of a call: only the lane that owns the model may do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmprefill.encoders.families import Family
from mmprefill.encoders.vision import placeholder_rows
from mmprefill.errors import PlaceholderError, RequestError, UnsupportedModelError
from mmprefill.pipeline.attention import RecordedMask, evaluate, masks
from mmprefill.pipeline.positions import legal_edges
from mmprefill.streams import sent
from mmprefill.types import MaskFunction, Prepared, Sequence

# Arguments of a decoder that we set ourselves, or that only matter outside a packed step.
_OURS = frozenset(
    {"inputs_embeds", "position_ids", "attention_mask", "input_ids", "cache", "past_key_values", "use_cache",
     "return_dict", "logits_to_keep", "output_attentions", "output_hidden_states", "cache_position", "labels"}
)  # fmt: skip


@contextmanager
def replaced(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within the block, calls of `module.name` go to `function`; the class stays as it is."""
    setattr(module, name, function)
    try:
        yield
    finally:
        delattr(module, name)


class _Recorded(Exception):
    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def decoder_arguments(family: Family, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the decoder would be called with, for one request's inputs to the composite model."""

    def record(*_: Any, **arguments: Any) -> None:
        raise _Recorded(arguments)

    try:
        with replaced(family.decoder, "forward", record), masks("record"):
            family.model(**inputs, use_cache=False)
    except _Recorded as done:
        return done.arguments
    raise UnsupportedModelError(f"{family.name}: the model's forward never called its decoder")


def merge(family: Family, prepared: Prepared, encoded: Mapping[str, Any] | None) -> Sequence:
    """Build the sequence of one request.

    Args:
        family: the loaded model.
        prepared: the request after intake.
        encoded: medium -> output of the model's own feature function for this request's media; None leaves the media out,
            so that only rows behind the last placeholder mean anything.

    Raises:
        PlaceholderError: if a medium's rows and placeholders differ in number.
        UnsupportedModelError: if the model hands its decoder something that cannot be packed.
    """
    inputs = composite_inputs(family, prepared, encoded)
    try:
        got = decoder_arguments(family, inputs)
    except UnsupportedModelError:
        raise
    except ValueError as error:  # GLM-4V with a picture and a video, for one, in transformers 5.24
        raise RequestError(f"request {prepared.id!r}: the model itself refused it: {error}") from error
    embeds = got["inputs_embeds"]
    positions = got.get("position_ids")
    if positions is None:
        positions = torch.arange(embeds.shape[1], device=embeds.device)[None]
    rules = _rules(family, got.get("attention_mask"), embeds)
    return Sequence(
        prepared=prepared,
        embeds=embeds,
        positions=positions,
        places=positions.reshape(-1, positions.shape[-1]).to("cpu", non_blocking=True),
        extras=extras_of(family, got),
        rules=rules,
        edges=legal_edges(rules, embeds.shape[1], embeds.device) if rules else None,
    )


def merge_text(family: Family, prepared: Prepared, tokens: int) -> Sequence | None:
    """The first `tokens` of a request, all of them text, without its media; None where text sees what comes after it."""
    whole = prepared.inputs["input_ids"].shape
    cut = {name: tensor[:, :tokens] for name, tensor in prepared.inputs.items() if tensor.shape == whole}
    sequence = merge(family, replace(prepared, inputs=cut), {})
    return None if sequence.rules else replace(sequence, prepared=prepared)


def text_stands_alone(family: Family, prepared: Prepared, sequence: Sequence) -> bool:
    """Whether a request's text rows and positions are the same without its media, as they are in nearly every family.

    Ovis fills in the tokens around a picture, too; there nothing may be prefilled before, or without, the pictures.
    """
    try:
        bare = merge(family, prepared, None)
    except (RequestError, UnsupportedModelError, RuntimeError, IndexError):
        return False
    media = torch.isin(prepared.input_ids, torch.tensor(list(family.placeholders.values())))
    text = sent(~media, family.device)
    same_rows = torch.equal(bare.embeds[:, text], sequence.embeds[:, text])
    return same_rows and bool((bare.positions == sequence.positions).all())


def composite_inputs(family: Family, prepared: Prepared, encoded: Mapping[str, Any] | None) -> dict[str, Any]:
    """The composite model's arguments with each encoded medium in place of its pixels; None drops every pixel."""
    for medium, output in (encoded or {}).items():
        check_rows(family, prepared, medium, output)
    gone = family.features if encoded is None else encoded
    pixels = {name for medium in gone for name in family.takes(medium) if not name.endswith("grid_thw")}
    device = family.device
    # Grids stay: positions are computed from them.
    inputs = {name: sent(tensor, device) for name, tensor in prepared.inputs.items() if name not in pixels}
    return {**inputs, "mm_encoder_outputs": dict(encoded)} if encoded else inputs


def check_rows(family: Family, prepared: Prepared, medium: str, output: Any) -> None:
    """Placeholders and rows must agree per medium, not in total."""
    rows = row_count(output)
    wanted = placeholder_rows(family, prepared, medium)
    if rows is not None and rows != wanted:
        raise PlaceholderError(
            f"request {prepared.id!r}: {wanted} {medium} placeholder tokens but the {medium} tower made {rows} rows"
        )


def row_count(output: Any) -> int | None:
    """Rows of the decoder's embedding space in a feature output; None where it is not projected yet."""
    pooled = getattr(output, "pooler_output", None)
    if pooled is None:
        return None
    parts = pooled if isinstance(pooled, (list, tuple)) else [pooled]
    return sum(int(part.numel() // part.shape[-1]) for part in parts)


def extras_of(family: Family, got: Mapping[str, Any]) -> dict[str, Any]:
    """Per-layer inputs and other tensors for the decoder; flags and empty values are left out."""
    extras = {}
    for name, value in got.items():
        if name in _OURS or value is None or isinstance(value, (bool, int, float, str)):
            continue
        if not _is_tensors(value):
            raise UnsupportedModelError(f"{family.name}: its decoder takes {name!r} of {type(value).__name__}")
        extras[name] = value
    return extras


def _is_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_tensors(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_tensors(v) for v in value)
    return isinstance(value, Tensor)


def _rules(family: Family, mask: Any, embeds: Tensor) -> dict[str, MaskFunction]:
    """Mask functions that a plain causal mask with the layer's window does not express, by layer kind."""
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        return {}
    by_kind = mask if isinstance(mask, Mapping) else {"": mask}
    by_kind = {kind: rule for kind, rule in by_kind.items() if rule is not None}
    if not all(isinstance(rule, RecordedMask) for rule in by_kind.values()):
        raise UnsupportedModelError(f"{family.name}: it builds its attention mask outside transformers' mask interface")
    if all(looks_back_only(rule, embeds.shape[1], embeds.device) for rule in by_kind.values()):
        return {}
    return by_kind


def looks_back_only(rule: MaskFunction, length: int, device: torch.device, tile: int = 1024) -> bool:
    """Whether no query sees a later key, so that causal attention with the layer's own window is the same."""
    index = torch.arange(length, device=device)
    for start in range(0, length, tile):
        rows = index[start : start + tile, None]
        if bool((evaluate(rule, rows, index[None]) & (index[None] > rows)).any()):
            return False
    return True
