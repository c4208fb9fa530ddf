"""Linear layers on a CPU: for each of a stock model the fastest of three ways, which its class stands for.

`packed.py` is oneDNN's, `tiled.py` a kernel of ours, and `widen.py` makes fp32 of what neither multiplies. A layer keeps
its place, name and hooks; MLPs are fused on top of them (`mlp.py`).

oneDNN's projections that share an input are not joined: at 90 rows it would save a sixth of the small ones, at the sizes
of steps nothing. Nor are residuals added inside: at 1,024 rows that saves nothing either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, cast

import torch
from torch import nn

from mmprefill.encoders import stand_in, timm_attention
from mmprefill.encoders.families import Family
from mmprefill.pipeline import mlp, packed, tiled, widen
from mmprefill.pipeline.packed import PackedLinear
from mmprefill.pipeline.tiled import TiledLinear

# Weights in a layer below which the call itself is what takes the time; oneDNN's costs more than a kernel of ours, and what
# small fp16 layers would gain (a quarter) is not worth that the bundled model then leaves verify's bounds by a hair.
FEWEST, FEWEST_PACKED = 2**12, 2**16
_PLAIN: dict[type[nn.Module], type[nn.Module]] = {wide: plain for plain, wide in widen.WIDENED.items()}
_PLAIN[TiledLinear] = nn.Linear


def pack(model: nn.Module, later: Collection[nn.Module] = ()) -> int:
    """Give every layer that is large, plain, frozen and in evaluation mode its fastest way; fuse MLPs made of such layers.

    Left alone: subclasses and adapters, layers with hooks or parametrisations, devices other than CPU, dtypes that no way
    is for, what is in `later`, and, where weights would be packed, those that something else shares (tied embeddings).
    A model can be packed twice without harm.

    Returns:
        How many layers were given one now.
    """
    owners = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    kinds = {layer: kind for layer in model.modules() if layer not in later and (kind := _kind(layer)) is not None}
    kinds = {layer: kind for layer, kind in kinds.items() if kind is not PackedLinear or owners[id(layer.weight)] == 1}
    active, fusable = [layer for layer, kind in kinds.items() if kind in mlp.FUSABLE], dict[Any, bool]()
    for module in [module for module in model.modules() if not {*active}.isdisjoint(module.children())]:
        mlp.fuse(module, active, fusable)
    packed.pack([cast("nn.Linear", layer) for layer, kind in kinds.items() if kind is PackedLinear])
    for layer, kind in kinds.items():
        layer.__class__ = kind
    return len(kinds)


def pack_towers_later(family: Family) -> None:
    """Pack a model but for its towers, and those, with timm's attention, when one of its feature functions is first
    called: the weights of a tower that never sees a picture stay in their file."""
    inside = {family.model.get_output_embeddings(), *family.decoder.modules()}
    towers = {module for module in family.base.modules() if module not in inside}
    pack(family.model, towers if family.features and family.takes_encoded else ())

    @cache
    def ready() -> None:
        pack(family.model)
        timm_attention.install(family.base, family.decoder)

    def after_packing(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*inputs: Any, **named: Any) -> Any:
            ready()
            return function(*inputs, **named)

        return call

    family.features.update({medium: after_packing(function) for medium, function in family.features.items()})


def unpack(model: nn.Module) -> list[nn.Module]:
    """Give every such layer of a model its plain form; returns what was changed."""
    changed: list[nn.Module] = []
    for layer in model.modules():
        if isinstance(layer, PackedLinear):
            packed.unpack(layer)
            changed.append(layer)
        elif type(layer) in _PLAIN:
            layer.__class__ = _PLAIN[type(layer)]
            changed.append(layer)
    return changed


@contextmanager
def unpacked(model: nn.Module) -> Iterator[None]:
    """Within the block the model is as it was loaded."""
    changed, others = unpack(model), stand_in.undo(model)
    try:
        yield
    finally:
        stand_in.put(others)
        if changed:
            pack(model, {*model.modules()} - {*changed})  # what waits for a picture goes on waiting


def _kind(module: nn.Module) -> type[nn.Module] | None:
    """What a layer becomes."""
    if type(module) not in widen.WIDENED or module.training or stand_in.hooked(module):
        return None
    weight = cast("torch.Tensor", module.weight)
    frozen = not any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    fewest = FEWEST_PACKED if weight.dtype == torch.float16 else FEWEST
    if not frozen or weight.device.type != "cpu" or weight.numel() < fewest:
        return None
    if type(module) is nn.Linear and tiled.preferred(weight.dtype):
        return TiledLinear
    if widen.wants(weight.dtype):
        return widen.WIDENED[type(module)]
    packable = type(module) is nn.Linear and packed.serves(weight.dtype) and weight.numel() >= FEWEST_PACKED
    return PackedLinear if packable else None
