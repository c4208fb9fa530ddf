"""Attention of a vision tower: on a CPU fused, or in tiles that stay in cache; on CUDA all windows in one call.

torch's CPU kernel for bf16 attention reaches a third of the rate of its matrix multiplications at a tower's shapes
(1,024 patches, heads of 64). The fused kernel (`fused_attention.py`) runs at twice to three times its speed. Where there
is no such kernel, two batched products per tile of queries, with the scores between them small enough for the cache, run
up to 1.5x as fast as torch's. Scores of tiles are rounded to bf16 on the way, as in transformers' eager attention.

Towers that look at windows or at several pictures in one row call attention once per window, unless their config asks
for some flash attention: then they hand the boundaries over, which is what they are asked for here. On CUDA the boundaries
stay on the device (`varlen.py`): reading them would wait for it, once a layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from mmprefill.encoders import fused_attention, varlen
from mmprefill.encoders.fused_attention import Rows
from mmprefill.encoders.varlen import Bounds

NAME = "mmprefill_tower"
NAME_BOUNDS = "mmprefill_tower_flash"  # transformers looks for "flash" in the name before it hands over boundaries
QUERIES, HEADS = 256, 6  # per tile: scores of 256 x 1,024 x 6 heads are 3 MB
FEWEST = 1024  # keys below which torch's own kernel is as fast as the tiles


def tower_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Attention of one tower layer: query, key, value [B, H, n, W] -> [B, n, H, W].

    With `cu_seq_lens_q` (B is 1) each stretch between two boundaries attends to itself only. What neither kernel nor
    tiles are made for (masks, causal towers, dropout, other devices and dtypes) goes to transformers' sdpa attention.
    """
    bounds, longest = arguments.pop("cu_seq_lens_q", None), arguments.pop("max_length_q", None)
    for name in ("cu_seq_lens_k", "max_length_k"):
        arguments.pop(name, None)
    plain = _plain(module, attention_mask, arguments)
    if plain and bounds is not None and longest and varlen.serves(query, key, value):
        edges = bounds.to(query.device, torch.int32)
        within = Bounds(edges, edges, int(longest), int(longest))
        return varlen.attend(query, key, value, within, arguments.get("scaling"), causal=False), None
    pieces = [(0, query.shape[2])] if bounds is None else list(pairwise(bounds.tolist()))
    if plain:
        if fused_attention.serves(query, key, value) and not query.requires_grad:
            return _fused(query, key, value, pieces, arguments.get("scaling")), None
        if len(pieces) == 1 and _tileable(query, key, value):
            return tiled(query, key, value, arguments.get("scaling")), None
    if bounds is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)[0], None
    parts = [
        sdpa_attention_forward(
            module, query[:, :, start:end], key[:, :, start:end], value[:, :, start:end], None, **arguments
        )[0]
        for start, end in pieces
    ]
    return torch.cat(parts, 1), None


def _plain(module: nn.Module, mask: Tensor | None, arguments: Mapping[str, Any]) -> bool:
    """Whether every query sees every key of its piece, and nothing else happens."""
    causal = arguments.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    others = arguments.get("dropout") or arguments.get("position_bias") is not None
    return not (mask is not None or causal or others)


def _tileable(query: Tensor, key: Tensor, value: Tensor) -> bool:
    alike = query.shape == key.shape and key.shape[-1] == value.shape[-1]
    return alike and key.shape[2] >= FEWEST and query.device.type == "cpu" and query.dtype == torch.bfloat16


def _fused(query: Tensor, key: Tensor, value: Tensor, pieces: Seq[tuple[int, int]], scaling: float | None) -> Tensor:
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    same = len(pieces) == 1  # then keys may be more or fewer than queries
    rows = [
        Rows(
            query[b, :, start:end],
            key[b] if same else key[b, :, start:end],
            value[b] if same else value[b, :, start:end],
            out[b, start:end].transpose(0, 1),
        )
        for b in range(query.shape[0])
        for start, end in pieces
        if end > start
    ]
    fused_attention.attend(rows, scaling, causal=False)
    return out


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


for _name in (NAME, NAME_BOUNDS):
    AttentionInterface.register(_name, tower_attention)
    AttentionMaskInterface.register(_name, sdpa_mask)


def install(base: nn.Module, decoder: nn.Module) -> None:
    """Give every part of a model outside its decoder this attention, where it has transformers' sdpa now."""
    inside = {id(module) for module in decoder.modules()}
    kept = {id(decoder.config), id(base.config)}
    for module in base.modules():
        if id(module) in inside:
            continue
        if _embeds_patches(module):
            module.register_forward_hook(_laid_out)
        config = getattr(module, "config", None)
        if config is None or id(config) in kept:
            continue
        if getattr(config, "_attn_implementation", "") == "sdpa":
            config._attn_implementation = NAME_BOUNDS if _takes_bounds(module) else NAME


def _takes_bounds(tower: nn.Module) -> bool:
    """Whether a tower's attention knows boundaries between windows or pictures."""
    return any("cu_seqlens" in inspect.signature(module.forward).parameters for module in tower.modules())


def _embeds_patches(module: nn.Module) -> bool:
    fresh = _laid_out not in module._forward_hooks.values()
    return fresh and any(isinstance(child, nn.Conv2d) for child in module.children())


def _laid_out(_: nn.Module, __: Any, output: Any) -> Any:
    """A convolution's channels come first in memory; sums keep that, and every norm of the tower would copy its input."""
    return output.contiguous() if isinstance(output, Tensor) and output.device.type == "cpu" else output
