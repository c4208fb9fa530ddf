"""Packed or generic? Decided by running the mechanism on the loaded model, not by a list of families.

Every layer's only mixing along the row must be attention that reaches `ragged_attention`; a convolution, a recurrent
state or a sparse index would leak from one sequence of the row into the next without any error. So: the layer kinds that
the config declares are all attention, every layer calls our function exactly once, masks that the decoder builds for
itself look back only, and two short texts packed equal the same texts alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmprefill.encoders.families import Family, objection
from mmprefill.errors import UnsupportedModelError
from mmprefill.pipeline import attention
from mmprefill.pipeline.kv_cache import LayerPlan, SequenceKV, StepCache
from mmprefill.pipeline.prefill import _pieces, forward, text_arguments


@dataclass(frozen=True)
class Route:
    """How a model is prefilled: `plan` is None for the generic path, and `reason` says why."""

    plan: LayerPlan | None
    reason: str = ""

    @property
    def packed(self) -> bool:
        """Whether several requests share a step."""
        return self.plan is not None


class _Watch(StepCache):
    """A step that notes what each layer stored and what its attention saw."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stored: dict[int, int] = {}
        self.seen: list[tuple[int, int]] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.stored[layer] = key.data_ptr()
        return super().update(key, value, layer, *args, **kwargs)

    def context(self, layer: int, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        self.seen.append((layer, key.data_ptr()))
        return super().context(layer, key, value)


def choose_route(family: Family) -> Route:
    """Packed if everything in the module's docstring holds, else generic with the reason.

    Leaves the packed attention installed on the decoder's config only if the route is packed.
    """
    plan = LayerPlan.of(family.text_config)
    against = objection(type(family.model), plan.kinds)
    if against:
        return Route(None, against)
    if any(getattr(m, "attn_temperature_tuning", False) and not m.use_rope for m in family.decoder.modules()):
        return Route(None, "some layers scale queries by their row index")
    before = family.decoder.config._attn_implementation
    try:
        attention.install(family.decoder.config)
        return Route(replace(plan, direct=_probe(family, plan)))
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, UnsupportedModelError) as error:
        family.decoder.config._attn_implementation = before
        return Route(None, f"the packed row failed its check: {str(error).splitlines()[0]}")


def _probe(family: Family, plan: LayerPlan) -> bool:
    """Run two short texts packed and alone; returns whether attention may read the buffers in place."""
    texts = _texts(family)
    with attention.masks("check"):
        watch, packed = _run(family, plan, texts)
    layers = [layer for layer, _ in watch.seen]
    if sorted(layers) != list(range(len(plan.kinds))):
        raise UnsupportedModelError(f"{len(set(layers))} of {len(plan.kinds)} layers call the attention interface")
    alone = torch.cat([_run(family, plan, [text])[1] for text in texts], 1)
    worst, scale = float((packed - alone).abs().max()), float(alone.abs().max())
    if not worst <= scale * (1e-3 if packed.dtype == torch.float32 else 0.1):
        raise UnsupportedModelError(f"packed and single rows differ by {worst:.2g}")
    return all(watch.stored.get(layer) == seen for layer, seen in watch.seen)


def _texts(family: Family) -> list[list[int]]:
    taken = set(family.placeholders.values())
    free = [i for i in range(family.text_config.vocab_size) if i not in taken]
    step = max(1, len(free) // 24)
    return [free[step : step * 12 : step], free[step * 12 : step * 20 : step]]


def _run(family: Family, plan: LayerPlan, texts: list[list[int]]) -> tuple[_Watch, Tensor]:
    ids = torch.tensor([i for text in texts for i in text], device=family.device)[None]
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None].to(family.device)
    watch = _Watch(_pieces((SequenceKV(len(text)), len(text), {}) for text in texts), plan)
    arguments = text_arguments(family, ids)
    output = forward(family, watch, arguments.pop("inputs_embeds"), positions, arguments)
    hidden: Tensor = output.last_hidden_state
    return watch, hidden
