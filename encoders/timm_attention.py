"""Attention layers of timm's towers in fp32 on a CPU: rotated in one pass, in place, then attended by `tower_attention.py`.

timm rotates queries and keys in sixteen operations a layer: a quarter of a small tower's time. What a layer computes is
found by running it, not by its name; what the stand-in is not made for takes the stock way.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmprefill.encoders import kernels
from mmprefill.encoders.stand_in import NOT_LIKE_IT, StandIn, hooked, put
from mmprefill.encoders.tower_attention import tower_attention

_ROWS = 7  # of the probe's pictures
_RUN = ("qkv", "norm", "proj")  # the others are the identity: norms of heads that are none, dropout


class TimmAttention(StandIn):
    """Stands in for the `forward` of a layer that makes queries, keys and values of one width in one product."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.heads = int(self.module.num_heads)
        self.width = int(self.module.qkv.out_features) // (3 * self.heads)
        self.prefix = int(getattr(module, "num_prefix_tokens", 0))
        self._parts: dict[str, Any] = dict(module._modules)
        self._known: tuple[Tensor, int, Tensor | None] | None = None  # angles, their version, what is made of them

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        """What the stock forward takes: hidden [B, n, D], and `rope` [n - prefix, 2 W] perhaps, sines before cosines."""
        rope, others = named.get("rope"), {**named, "rope": None}
        plain = len(inputs) == 1 and not any(value is not None and value is not False for value in others.values())
        if plain and self._served(inputs[0]):
            turns = None if rope is None else self._turns(rope, inputs[0])
            if rope is None or turns is not None:
                return self.run(inputs[0], turns)
        made: Tensor = type(self.module).forward(self.module, *inputs, **named)
        return made

    def run(self, hidden: Tensor, turns: Tensor | None) -> Tensor:
        """hidden [B, n, D], turns complex [n - prefix, W / 2] -> [B, n, D]."""
        qkv, norm, proj = (self._parts[name] for name in _RUN)
        made: Tensor = qkv(hidden).contiguous().view(*hidden.shape[:2], 3, self.heads, self.width)
        if turns is not None:
            pairs = torch.view_as_complex(made.view(*made.shape[:-1], -1, 2))
            pairs[:, self.prefix :, :2] *= turns[:, None, None]
        query, key, value = made.permute(2, 0, 3, 1, 4)
        out, _ = tower_attention(self.module, query, key, value, None, is_causal=False)
        back: Tensor = proj(norm(out.flatten(2)))
        return back

    def _served(self, hidden: Any) -> bool:
        if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.device.type != "cpu":
            return False
        if kernels.traced() or torch.is_grad_enabled() or self.module.training or self.module._modules != self._parts:
            return False
        skipped = (part for name, part in self._parts.items() if part is not None and name not in _RUN)
        # a hook of the product may keep what is written over
        return not self._parts["qkv"]._forward_hooks and not any(part.training or hooked(part) for part in skipped)

    def _turns(self, rope: Any, hidden: Tensor) -> Tensor | None:
        """What `rope` turns pairs by, complex [n - prefix, W / 2], if it is in the precision of the products; made once for
        angles that are the same each time."""
        shape = hidden.shape[1] - self.prefix, 2 * self.width
        if not isinstance(rope, Tensor) or rope.shape != shape or not rope.dtype == hidden.dtype == torch.float32:
            return None
        version, known = -1 if rope.is_inference() else rope._version, self._known
        if known is None or known[0] is not rope or known[1] != version or version < 0:
            known = self._known = rope, version, _turns(rope)
        return known[2]


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
    """Frozen, in fp32 on a CPU, of such parts, which nothing watches, and with no weights but theirs: a bias beside the
    product that is zero now would not be seen."""
    parts, heads = module._modules, getattr(module, "num_heads", None)
    if not {*_RUN, "q_norm", "k_norm"} <= {*parts} or not isinstance(heads, int):
        return False
    qkv, own = parts["qkv"], [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if own or not isinstance(qkv, nn.Linear) or qkv.out_features % (6 * heads) or module.training or hooked(module):
        return False
    if any(part is not None and hooked(part) for part in parts.values()):
        return False
    return all(p.device.type == "cpu" and p.dtype == torch.float32 and not p.requires_grad for p in module.parameters())


@torch.no_grad()
def _same(found: TimmAttention) -> bool:
    """Whether it computes what the layer does, on random pictures with and without angles."""
    module, draw = found.module, torch.Generator().manual_seed(0)
    stock = type(module).forward
    hidden = torch.randn(2, found.prefix + _ROWS, module.qkv.in_features, generator=draw)
    angles = torch.randn(_ROWS, found.width // 2, generator=draw).repeat_interleave(2, -1)
    rope = torch.cat([angles.sin(), angles.cos()], -1)
    try:
        ways: list[dict[str, Tensor]] = [{}, {"rope": rope}] if "rope" in inspect.signature(stock).parameters else [{}]
        pairs = [(stock(module, hidden, **way), found(hidden, **way)) for way in ways]
        return all(float((got - wanted).norm()) <= 1e-4 * float(wanted.norm()) for wanted, got in pairs)
    except NOT_LIKE_IT:
        return False
