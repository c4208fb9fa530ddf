"""MLPs of the stock modules, act(first(x)) into last or act(gate(x)) * up(x) into down, with what is between the layers
computed inside them. What a module computes is found by running it, not by its name.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmprefill.encoders.stand_in import NOT_LIKE_IT, StandIn, hooked
from mmprefill.pipeline import packed, tiled
from mmprefill.pipeline.packed import ACTIVATIONS, PackedLinear
from mmprefill.pipeline.tiled import Activation, TiledLinear

FUSABLE = PackedLinear, TiledLinear  # layers that compute activations


class FusedMlp(StandIn):
    """Stands in for an MLP's `forward` as long as its parts are what they were, and nothing watches them."""

    def __init__(self, mlp: nn.Module, names: Seq[str], known: Activation) -> None:
        super().__init__(mlp)
        self.names, self.activation = names, known
        self.parts = list(mlp._modules.values())

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the stock forward takes."""
        *before, last = _layers(self.module, self.names)
        one = len(inputs) == 1 and not named and self._unchanged(last)
        hidden = self._hidden(inputs[0], *before) if one else None
        return type(self.module).forward(self.module, *inputs, **named) if hidden is None else last(hidden)

    def _unchanged(self, last: nn.Linear) -> bool:
        """Also in evaluation mode: dropout may be one of the parts."""
        skipped = (part for part in self.parts if part is not last)
        same = list(self.module._modules.values()) == self.parts
        return same and not any(part is not None and (part.training or hooked(part)) for part in skipped)

    def _hidden(self, input: Tensor, first: nn.Linear, up: nn.Linear | None = None) -> Tensor | None:
        kinds = {type(first), type(up or first)}
        if kinds == {TiledLinear}:
            return tiled.multiply(input, first, up, self.activation)
        if kinds != {PackedLinear}:
            return None
        hidden = packed.multiply(first, input, self.activation)
        return hidden if up is None else packed.multiply_by(up, input, hidden)


def fuse(mlp: nn.Module, layers: Collection[nn.Module], fusable: dict[Any, bool]) -> None:
    """Replace the forward of a module that is one of the two kinds, as its own forward on random input shows.

    Args:
        mlp: any module.
        layers: those that are, or will be, in `FUSABLE`.
        fusable: what was found of modules like it; added to.
    """
    if hooked(mlp):
        return
    names = [name for name, child in mlp.named_children() if isinstance(child, nn.Linear)]
    others = [c for c in mlp.children() if not isinstance(c, (nn.Linear, nn.Dropout, nn.Identity))]
    if not (2 <= len(names) <= 3 and len(others) == 1 and all(mlp._modules[name] in layers for name in names)):
        return
    known = _known(others[0])
    if known is None:
        return
    kind = type(mlp), tuple(names), known, _own(mlp)
    if kind not in fusable:
        fusable[kind] = _same(mlp, names, known)
    if fusable[kind]:
        mlp.forward = FusedMlp(mlp, names, known)


def _layers(mlp: nn.Module, names: Seq[str]) -> list[nn.Linear]:
    return [cast("nn.Linear", mlp._modules[name]) for name in names]


def _own(mlp: nn.Module) -> tuple[Any, ...]:
    """What a module's forward may depend on beside its layers: one class may be sparse in some places, dense in others."""
    plain = ((name, value) for name, value in vars(mlp).items() if isinstance(value, (bool, int, float, str)))
    tensors = *mlp.parameters(recurse=False), *mlp.buffers(recurse=False)
    return (*sorted(plain), *map(id, tensors))


# The probes look far out too: some MLPs, and some activations, clamp what is large.
_FAR = (1.0, 1e2, 1e4)


@torch.no_grad()
def _known(module: nn.Module) -> Activation | None:
    """Which of the activations a module computes."""
    line = torch.cat([torch.linspace(-8, 8, 257) * far for far in _FAR])
    try:
        made = module(line)
        same = (name for name, known in ACTIVATIONS.items() if torch.allclose(made, known(line), rtol=1e-6, atol=1e-6))
        return next(same, None)
    except NOT_LIKE_IT:
        return None


@torch.no_grad()
def _same(mlp: nn.Module, names: Seq[str], known: Activation) -> bool:
    twin = copy.deepcopy(mlp).float()
    first, *up, last = _layers(twin, names)
    try:
        for far in _FAR:
            input = torch.randn(1, 2, first.in_features, generator=torch.Generator().manual_seed(0)) * far
            hidden = ACTIVATIONS[known](first(input))
            for layer in up:
                hidden = hidden * layer(input)
            wanted = twin(input)
            if not torch.allclose(last(hidden), wanted, rtol=1e-4, atol=1e-5 * max(1.0, float(wanted.abs().max()))):
                return False
        return True
    except NOT_LIKE_IT:
        return False
