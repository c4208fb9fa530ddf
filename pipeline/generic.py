"""The generic path: one request at a time through the model's own forward, with its own cache class.

For models whose layers mix along the row (hybrids), and for whatever else the probe was not sure of. Equally exact.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmprefill.encoders.families import Family
from mmprefill.pipeline.merge import composite_inputs, decoder_arguments
from mmprefill.types import Prepared


@dataclass(frozen=True)
class GenericOutput:
    """What one plain forward left.

    Attributes:
        cache: the model's cache, filled.
        logits: [1, V] of the last position, or [T, V] where asked; float32.
        hidden: wanted hidden states, layer -> [T, D].
        places: the positions that the decoder received, [P, T]; host memory.
    """

    cache: Any
    logits: Tensor
    hidden: dict[int, Tensor]
    places: Tensor


def run(family: Family, prepared: Prepared, encoded: Mapping[str, Any]) -> GenericOutput:
    """Prefill one request with a plain forward of the composite model."""
    request = prepared.request
    inputs = composite_inputs(family, prepared, encoded)
    positions = decoder_arguments(family, dict(inputs)).get("position_ids")
    if positions is None:
        positions = torch.arange(len(prepared.input_ids), device=family.device)[None]
    cache = DynamicCache(config=family.text_config)
    arguments: dict[str, Any] = {"use_cache": True, "cache": cache}
    if not request.all_logits and "logits_to_keep" in inspect.signature(type(family.model).forward).parameters:
        arguments["logits_to_keep"] = 1
    if request.hidden_states:
        arguments["output_hidden_states"] = True
    inputs = composite_inputs(family, prepared, encoded)  # a fresh dict: forward keeps the one that it is given
    output = family.model(**inputs, **arguments)
    logits = output.logits[0].float()
    return GenericOutput(
        cache=cache,
        logits=logits if request.all_logits else logits[-1:],
        hidden={layer: output.hidden_states[layer][0] for layer in request.hidden_states},
        places=positions.reshape(-1, positions.shape[-1]).cpu(),
    )
