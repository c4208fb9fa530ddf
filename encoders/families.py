"""What differs between model families, read from the loaded model wherever it can be.

There is no list of families here. Where the decoder sits, which token ids are placeholders, which keyword arguments its
towers take and which layers it has are looked up; whether the packed path holds is decided by `mmprefill.pipeline.probe`,
which runs the mechanism once on the model itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mmprefill.errors import UnsupportedModelError

MEDIA = ("image", "video")
# Layer kinds whose only mixing along the row is attention that goes through AttentionInterface.
PACKABLE = frozenset({"full_attention", "sliding_attention", "chunked_attention", "dummy"})


@dataclass(frozen=True)
class Family:
    """One loaded model, as the pipeline needs to see it.

    Attributes:
        model: the composite model (…ForConditionalGeneration).
        base: the module that owns the towers and `get_image_features`; may be `model` itself.
        decoder: the bare text decoder (embeds in, last hidden state out).
        placeholders: medium -> token id of its placeholder.
        features: medium -> the model's own feature function, where it has one.
    """

    model: Any
    base: Any
    decoder: Any
    placeholders: dict[str, int]
    features: dict[str, Callable[..., Any]]

    @property
    def name(self) -> str:
        """The checkpoint's model type."""
        return str(self.model.config.model_type)

    @property
    def text_config(self) -> Any:
        """Config of the decoder."""
        return self.model.config.get_text_config(decoder=True)

    def takes(self, medium: str) -> frozenset[str]:
        """Names of the tensors that a medium's feature function consumes."""
        return self._taken.get(medium, frozenset())

    @cached_property
    def _taken(self) -> dict[str, frozenset[str]]:
        return {medium: _named(function) for medium, function in self.features.items()}

    @cached_property
    def takes_encoded(self) -> bool:
        """Whether the composite forward accepts precomputed media (`mm_encoder_outputs`)."""
        return "mm_encoder_outputs" in inspect.signature(type(self.model).forward).parameters

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the decoder's embeddings."""
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Device of the decoder's embeddings."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device


def _named(function: Callable[..., Any]) -> frozenset[str]:
    names = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in names if p.kind is not p.VAR_KEYWORD and p.name != "self")


def objection(model_class: type, kinds: Sequence[str]) -> str:
    """Why a model with layers of these kinds cannot be packed, as far as its class and config tell; "" if it may."""
    strange = sorted(set(kinds) - PACKABLE)
    if strange:
        return f"layers of kind {', '.join(strange)} mix along the row"
    if "mm_encoder_outputs" not in inspect.signature(model_class.forward).parameters:  # type: ignore[attr-defined]
        return "its forward takes no encoded media (mm_encoder_outputs)"
    return ""


def describe(model: Any) -> Family:
    """Find decoder, placeholders and feature functions of a loaded model.

    Raises:
        UnsupportedModelError: for a model that has no decoder-only KV cache.
    """
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{config.model_type}: an encoder-decoder has no decoder-only KV cache to hand out")
    base = getattr(model, "model", model)
    return Family(model, base, _decoder(model, base), _placeholders(config), _feature_functions(base))


def _decoder(model: Any, base: Any) -> Any:
    """The innermost text decoder: what turns `inputs_embeds` into a last hidden state."""
    found = next((getattr(base, n) for n in ("language_model", "text_model") if hasattr(base, n)), None)
    if found is None:
        getter = getattr(model, "get_decoder", None)
        found = getter() if getter else None
    if found is None or found is model or found is base:
        raise UnsupportedModelError(f"{model.config.model_type}: no text decoder found inside {type(model).__name__}")
    return found.model if hasattr(found, "lm_head") and hasattr(found, "model") else found


def _placeholders(config: Any) -> dict[str, int]:
    found = {}
    for medium in MEDIA:
        value = getattr(config, f"{medium}_token_id", None)
        if value is None:
            value = getattr(config, f"{medium}_token_index", None)
        if isinstance(value, int):
            found[medium] = value
    return found


def _feature_functions(base: Any) -> dict[str, Callable[..., Any]]:
    functions = {medium: getattr(base, f"get_{medium}_features", None) for medium in MEDIA}
    return {medium: function for medium, function in functions.items() if function is not None}
