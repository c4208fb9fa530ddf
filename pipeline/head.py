"""Logits for hidden states, as the composite model makes them: with whatever it does around its output layer."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from mmprefill.encoders.families import Family
from mmprefill.pipeline.attention import masks
from mmprefill.pipeline.merge import replaced

_FAR = (1.0, 1e2, 1e4)  # hidden states: what caps or clamps logits shows where they are large
# By model, whether its logits are what the output layer gives, as it is.
_bare: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def logits_of(family: Family, hidden: Tensor) -> Tensor:
    """Logits [1, n, V] in float32 for hidden states [1, n, D]: by the output layer alone where that was seen to be the same.

    The way through the composite model costs a millisecond, a tenth of a short text's step on a small model.
    """
    model = family.model
    if model not in _bare:
        _bare[model] = _is_bare(family)
    return (model.get_output_embeddings()(hidden) if _bare[model] else _composite(family, hidden)).float()


def _composite(family: Family, hidden: Tensor) -> Tensor:
    """The composite model's own logits, with a decoder that returns `hidden`: the trick of `merge.py` backwards."""
    output = BaseModelOutputWithPast(last_hidden_state=hidden)
    ids = torch.zeros(1, hidden.shape[1], dtype=torch.long, device=family.device)
    ids += _plain_token(family)
    with replaced(family.decoder, "forward", lambda *_, **__: output), masks("record"):
        logits: Tensor = family.model(input_ids=ids, use_cache=False).logits
    return logits


def _is_bare(family: Family) -> bool:
    head = family.model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    row = torch.randn(1, 1, head.in_features, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([row * far for far in _FAR], 1).to(family.device, family.dtype)
    try:
        alone = head(rows)
    except RuntimeError:  # a head of another dtype, for which the model converts
        return False
    return torch.equal(alone, _composite(family, rows))


def _plain_token(family: Family) -> int:
    """A token id that stands for no medium."""
    taken = set(family.placeholders.values())
    return next(i for i in range(len(taken) + 1) if i not in taken)
