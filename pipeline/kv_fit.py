"""Whether stored KV has the shapes and dtypes of a running model: its manifest is anybody's claim, as its numbers are.

What fits is seen rather than computed: one token goes through the model, and what it left is compared. Latent attention,
widths that differ per layer and recurrent states then need no special case.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmprefill.encoders.families import Family
from mmprefill.pipeline import decode
from mmprefill.pipeline.head import logits_of
from mmprefill.pipeline.kv_cache import LayerPlan, SequenceKV, hand_over
from mmprefill.pipeline.kv_file import NAMES
from mmprefill.pipeline.manifest import Manifest
from mmprefill.pipeline.prefill import hidden_after

_ROWS = {"keys": 1, "values": 1, "indexer_keys": 0}  # axes that count tokens; the manifest's own check covers those
_FREE = "indexer_position_ids"  # there or not, as the request was numbered


@dataclass(frozen=True)
class Form:
    """Dtype and shape of a tensor without a batch axis, as safetensors names them; None for the axis of tokens."""

    dtype: str
    shape: tuple[int | None, ...]

    @classmethod
    def of(cls, name: str, dtype: str, shape: tuple[int, ...]) -> Form:
        """The form of a layer's state of that name."""
        return cls(dtype, tuple(None if axis == _ROWS.get(name) else size for axis, size in enumerate(shape)))

    def __str__(self) -> str:
        return f"{self.dtype} {'x'.join('*' if size is None else str(size) for size in self.shape)}"


@torch.no_grad()
def one_token(family: Family, plan: LayerPlan | None) -> tuple[DynamicCache, Tensor]:
    """The cache and the logits [V] that a text token leaves; on the thread of the model's lane."""
    taken = set(family.placeholders.values())
    token = next(i for i in range(family.text_config.vocab_size) if i not in taken)
    if plan is None:
        cache = DynamicCache(config=family.text_config)
        return cache, decode.plain_logits(family, cache, [token], 0)[-1]
    kv = SequenceKV(1)
    hidden = hidden_after(family, plan, [(kv, [token], 0)], stored=True)
    return hand_over(family.text_config, kv), logits_of(family, hidden[:, -1:])[0, -1]


_forms: weakref.WeakKeyDictionary[Any, dict[str, Form]] = weakref.WeakKeyDictionary()


def remembered(family: Family) -> dict[str, Form] | None:
    """What a model's tensors look like, once that was seen."""
    return _forms.get(family.model)


def remember(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Form]:
    """Note what a model's own tensors `layers.{i}.{name}` and logits look like."""
    forms = {
        name: Form.of(name.split(".")[-1], NAMES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in tensors.items()
        if not name.endswith(_FREE)
    }
    _forms[family.model] = forms
    return forms


def differences(manifest: Manifest, here: Mapping[str, Form], context: int) -> Iterator[str]:
    """What in a stored prefill the model could not have made, in words."""
    if manifest.length > context:
        yield f"{manifest.length} tokens (the model takes {context})"
    names = {name for name in manifest.tensors if name.startswith("layers.") and not name.endswith(_FREE)}
    for name in sorted(names | here.keys()):
        entry, own = manifest.tensors.get(name), here.get(name)
        form = entry and Form.of(name.split(".")[-1], entry.dtype, entry.shape)
        if form != own:
            yield f"{name} {form or 'missing'} (here {own or 'none'})"
