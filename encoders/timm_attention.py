"""Attention layers of timm's towers on a CPU: rotated in one pass, in place, then attended by `tower_attention.py`.

timm rotates queries and keys in sixteen operations a layer: a quarter of a small tower's time. What a layer computes is
found by running it, not by its name; what the stand-in is not made for takes the stock way.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmprefill.encoders.stand_in import StandIn, put
from mmprefill.encoders.tower_attention import tower_attention

_ROWS = 7  # of the probe's pictures


class TimmAttention(StandIn):
    """Stands in for the `forward` of a layer that makes queries, keys and values of one width in one product."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.heads = int(self.module.num_heads)
        self.width = int(self.module.qkv.out_features) // (3 * self.heads)
        self.prefix = int(getattr(module, "num_prefix_tokens", 0))
        self._rope: Tensor | None = None  # as given last, and as complex numbers
        self._turns: Tensor | None = None

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        """What the stock forward takes: hidden [B, n, D], and `rope` [n - prefix, 2 W] perhaps, sines before cosines."""
        rope, others = named.get("rope"), {**named, "rope": None}
        plain = len(inputs) == 1 and not any(value is not None and value is not False for value in others.values())
        if plain and self._served(inputs[0]) and (rope is None or self._known(rope, inputs[0])):
            return self.run(inputs[0], None if rope is None else self._turns)
        made: Tensor = type(self.module).forward(self.module, *inputs, **named)
        return made

    def run(self, hidden: Tensor, turns: Tensor | None) -> Tensor:
        """hidden [B, n, D], turns complex [n - prefix, W / 2] -> [B, n, D]."""
        parts = self.module._modules
        made: Tensor = parts["qkv"](hidden).contiguous().view(*hidden.shape[:2], 3, self.heads, self.width)
        if turns is not None:
            pairs = torch.view_as_complex(made.view(*made.shape[:-1], -1, 2))
            pairs[:, self.prefix :, :2] *= turns[:, None, None]
        query, key, value = made.permute(2, 0, 3, 1, 4)
        out, _ = tower_attention(self.module, query, key, value, None, is_causal=False)
        back: Tensor = parts["proj"](parts["norm"](out.flatten(2)))
        return back

    def _served(self, hidden: Any) -> bool:
        if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.device.type != "cpu":
            return False
        hooks = self.module._modules["qkv"]._forward_hooks  # may keep what is written over
        return not (torch.is_grad_enabled() or self.module.training or hooks)

    def _known(self, rope: Any, hidden: Tensor) -> bool:
        """Whether angles come in pairs, in the precision of the products; looked at once: they are the same each time."""
        if rope is not self._rope:
            shape = hidden.shape[1] - self.prefix, 2 * self.width
            alike = isinstance(rope, Tensor) and rope.shape == shape and rope.dtype == hidden.dtype == torch.float32
            self._rope, self._turns = rope, _turns(rope) if alike else None
        return self._turns is not None and len(self._turns) == hidden.shape[1] - self.prefix


def _turns(rope: Tensor) -> Tensor | None:
    """sin0 sin0 sin1 sin1 ... cos0 cos0 ... [n, 2 W] -> cos + i sin [n, W / 2]; None if the two of a pair differ."""
    sines, cosines = rope.chunk(2, -1)
    if not all(torch.equal(each[..., ::2], each[..., 1::2]) for each in (sines, cosines)):
        return None
    return torch.complex(cosines[..., ::2].contiguous(), sines[..., ::2].contiguous())


def install(base: nn.Module, decoder: nn.Module) -> int:
    """Put a stand-in before every such layer outside the decoder; returns how many. Twice does no harm."""
    return put(list(_layers(base, {*decoder.modules()})))


def _layers(base: nn.Module, inside: set[nn.Module]) -> Iterator[TimmAttention]:
    for module in base.modules():
        if module not in inside and _alike(module):
            found = TimmAttention(module)
            if _same(found):
                yield found


def _alike(module: nn.Module) -> bool:
    parts, heads = module._modules, getattr(module, "num_heads", None)
    if not {"qkv", "q_norm", "k_norm", "norm", "proj"} <= {*parts} or not isinstance(heads, int):
        return False
    qkv = parts["qkv"]
    if not isinstance(qkv, nn.Linear) or qkv.out_features % (6 * heads) or "forward" in vars(module):
        return False
    return not module.training and qkv.weight.device.type == "cpu" and not qkv.weight.requires_grad


@torch.no_grad()
def _same(found: TimmAttention) -> bool:
    """Whether it computes what the layer does, on random pictures with and without angles, in fp32."""
    module, draw = found.module, torch.Generator().manual_seed(0)
    dtype, stock = module.qkv.weight.dtype, type(module).forward
    hidden = torch.randn(2, found.prefix + _ROWS, module.qkv.in_features, generator=draw).to(dtype)
    angles = torch.randn(_ROWS, found.width // 2, generator=draw).repeat_interleave(2, -1)
    rope = torch.cat([angles.sin(), angles.cos()], -1)
    places = 1e-4 if dtype == torch.float32 else 0.05
    try:
        pairs = [(stock(module, hidden), found(hidden))]
        if "rope" in inspect.signature(stock).parameters and dtype == torch.float32:
            pairs.append((stock(module, hidden, rope=rope), found(hidden, rope=rope)))
        return all(float((got - wanted).norm()) <= places * float(wanted.norm()) for wanted, got in pairs)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):  # what another kind of layer says
        return False
