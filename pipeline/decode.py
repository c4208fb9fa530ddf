"""What follows a prefill: generation from emitted KV. It reads the stored KV and never changes it: decoding grows a copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from mmprefill.encoders.families import Family
from mmprefill.pipeline.head import logits_of
from mmprefill.pipeline.kv_cache import LayerPlan, SequenceKV, hand_over
from mmprefill.pipeline.merge import replaced
from mmprefill.pipeline.prefill import hidden_after

Emitted = Any  # SequenceKV on the packed path, a transformers Cache on the generic one


def fresh_cache(family: Family, emitted: Emitted, *, own: bool = False) -> Any:
    """A transformers cache to decode from; the emitted one stays as it is. `own`: its tensors may be written into."""
    return (
        hand_over(family.text_config, emitted, own=own) if isinstance(emitted, SequenceKV) else copy.deepcopy(emitted)
    )


def plain_logits(family: Family, cache: Any, ids: Seq[int], next_position: int) -> Tensor:
    """Logits [n, V] in float32 after each of n tokens, through the model's own forward; the cache grows."""
    tokens = torch.tensor([list(ids)], device=family.device)
    positions = torch.arange(next_position, next_position + len(ids), device=family.device)[None]
    if _position_rows(family) > 1:
        positions = positions.expand(3, -1)[:, None]
    logits: Tensor = family.model(input_ids=tokens, cache=cache, position_ids=positions, use_cache=True).logits
    return logits[0].float()


def _position_rows(family: Family) -> int:
    """3 under M-RoPE, else 1."""
    return 3 if hasattr(family.base, "rope_deltas") or hasattr(family.base, "get_rope_index") else 1


def generate(
    family: Family, emitted: Emitted, prompt: Tensor, logits: Tensor, next_position: int, arguments: Mapping[str, Any]
) -> Tensor:
    """transformers' own `generate`, started behind the prompt.

    Its prefill is answered with what is stored, so that sampling, processors and stopping criteria act on the first
    token as on every other.

    Args:
        family: the loaded model.
        emitted: stored KV of the whole prompt.
        prompt: token ids [T].
        logits: next-token logits [V].
        next_position: position of the first new token.
        arguments: keyword arguments of `generate`.

    Returns:
        Sequences [n, T + new] as `generate` returns them.
    """
    cache = fresh_cache(family, emitted)

    def stored_prefill(input_ids: Tensor, *_: Any, **__: Any) -> CausalLMOutputWithPast:
        rows = input_ids.shape[0]
        if rows > 1:
            cache.batch_repeat_interleave(rows)
        return CausalLMOutputWithPast(logits=logits.expand(rows, 1, -1), cache=cache)

    extra: dict[str, Any] = {}
    if _position_rows(family) > 1:  # only the last column counts: generate goes on from it
        extra["position_ids"] = torch.full((3, 1, len(prompt)), next_position - 1, device=family.device)
    with replaced(family.model, "_prefill", stored_prefill):
        ids = prompt.to(family.device)[None]
        sequences: Tensor = family.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), cache=cache, **extra, **arguments
        )
    return sequences


def generate_greedily(
    family: Family, plan: LayerPlan, starts: Seq[tuple[SequenceKV, Tensor, int]], max_new_tokens: int, stops: Seq[int]
) -> list[list[int]]:
    """Decode several emitted caches together, greedily; each ends at a stop token or at its length.

    Args:
        family: the loaded model.
        plan: its layers.
        starts: per sequence its KV, next-token logits [V] and next position.
        max_new_tokens: most tokens per sequence.
        stops: token ids that end a sequence; the stop itself is part of the result.

    Returns:
        New token ids per sequence.
    """
    tokens = [[int(logits.argmax())] for _, logits, _ in starts]
    running = {
        i: (kv.grown(max_new_tokens), position)
        for i, (kv, _, position) in enumerate(starts)
        if max_new_tokens > 1 and tokens[i][0] not in stops
    }
    while running:
        parts = [(kv, tokens[i][-1:], position + len(tokens[i]) - 1) for i, (kv, position) in running.items()]
        best = logits_of(family, hidden_after(family, plan, parts, stored=True))[0].argmax(-1).tolist()
        for i, token in zip(list(running), best, strict=True):
            tokens[i].append(token)
            if tokens[i][-1] in stops or len(tokens[i]) == max_new_tokens:
                del running[i]
    return tokens
