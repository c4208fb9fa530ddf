"""Full attention of a vision tower on a CPU, in tiles that stay in cache.

torch's CPU kernel for bf16 attention reaches a third of the rate of its matrix multiplications at a tower's shapes
(1,024 patches, heads of 64). Two batched products per tile of queries, with the scores between them small enough for the
cache, run up to 1.5x as fast; a SmolVLM tower as a whole 1.05x. Scores are rounded to bf16 on the way, as in
transformers' eager attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "mmprefill_tower"
QUERIES, HEADS = 256, 6  # per tile: scores of 256 x 1,024 x 6 heads are 3 MB
FEWEST = 1024  # keys below which torch's own kernel is as fast


def tower_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Attention of one tower layer: query, key, value [B, H, n, W] -> [B, n, H, W].

    Whatever the tiles are not made for (masks, causal towers, dropout, short rows, other devices and dtypes) goes to
    transformers' sdpa attention.
    """
    causal = arguments.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    plain = (
        attention_mask is not None or causal or arguments.get("dropout") or arguments.get("position_bias") is not None
    )
    alike = query.shape == key.shape and key.shape[-1] == value.shape[-1]
    if plain or not alike or key.shape[2] < FEWEST or query.device.type != "cpu" or query.dtype != torch.bfloat16:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    return tiled(query, key, value, arguments.get("scaling")), None


def tiled(query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None) -> Tensor:
    """Full attention [B, H, n, W] -> [B, n, H, W], a tile of queries and heads at a time."""
    batch, heads, rows, width = query.shape
    out = query.new_empty(batch, rows, heads, width)
    query = query * (width**-0.5 if scaling is None else scaling)
    for b in range(batch):
        for h in range(0, heads, HEADS):
            keys, values = key[b, h : h + HEADS].transpose(1, 2), value[b, h : h + HEADS]
            for start in range(0, rows, QUERIES):
                weights = torch.bmm(query[b, h : h + HEADS, start : start + QUERIES], keys).softmax(-1)
                out[b, start : start + QUERIES, h : h + HEADS] = torch.bmm(weights, values).transpose(0, 1)
    return out


AttentionInterface.register(NAME, tower_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def install(base: nn.Module, decoder: nn.Module) -> None:
    """Give every part of a model outside its decoder the tiled attention, where it has transformers' sdpa now."""
    inside = {id(module) for module in decoder.modules()}
    kept = {id(decoder.config), id(base.config)}
    for module in base.modules():
        config = getattr(module, "config", None)
        if config is None or id(module) in inside or id(config) in kept:
            continue
        if getattr(config, "_attn_implementation", "") == "sdpa":
            config._attn_implementation = NAME
