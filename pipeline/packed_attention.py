"""Attention layers of a stock decoder in one kernel call: rotary embedding, storing K and V, attention (`kernels.cpp`).

transformers rotates queries and keys in ten operations, each a pass over memory, and a step of many short sequences
stores and attends them one by one. What a layer computes is found by running it, on a step like those it replaces; it
takes the stock way for everything but such steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmprefill.encoders import kernels
from mmprefill.encoders.fused_attention import Shape
from mmprefill.encoders.stand_in import NOT_LIKE_IT, StandIn, put
from mmprefill.pipeline.attention import FEWEST_FUSED, KEYWORD
from mmprefill.pipeline.kv_cache import LayerPlan, Piece, SequenceKV, StepCache
from mmprefill.pipeline.tiled import multiply_all

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
PAST, FIRST, ROWS = 20, 17, 26  # the probe's step: tokens stored before, rows of the sequence they belong to, of both
NORMS = ("q_norm", "k_norm")  # of each head, before it is rotated, in some families


class PackedAttention(StandIn):
    """Stands in for the `forward` of an attention layer whose heads have one width and are rotated whole.

    Args:
        module: the layer.
        scaling: factor of the scores.
        window: tokens that a query sees, where the layer says so; else the step knows.
    """

    def __init__(self, module: nn.Module, scaling: float, window: int | None) -> None:
        super().__init__(module)
        self.scaling, self.window = scaling, window
        self.layer, self.width = int(self.module.layer_idx), int(self.module.head_dim)
        self.heads, self.groups = (child.out_features // self.width for child in _projections(module)[:2])
        self.norms: list[Any] = [module._modules.get(name) for name in NORMS]
        self._sizes = [heads * self.width for heads in (self.heads, self.groups, self.groups)]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the stock forward takes; the kernel for a packed step that it serves."""
        step: Any = named.get(KEYWORD)
        tables: Any = named.get("position_embeddings")
        hidden: Any = inputs[0] if inputs else named.get("hidden_states")
        # a step of another kind watches what the stock layers do
        if named.get("cache") is step and type(step) is StepCache and self._served(hidden, tables):
            pieces = self._pieces(step, hidden)
            if pieces is not None:
                return self.run(step, pieces, hidden, *tables), None
        return type(self.module).forward(self.module, *inputs, **named)

    def run(self, step: StepCache, pieces: ctypes.Array[Any], hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """hidden [1, N, D], cos and sin [1, N, W] -> [1, N, D]; K and V of `pieces` are written."""
        module, heads = self.module, (hidden.shape[1], -1, self.width)
        query, key, value = multiply_all(hidden, _projections(module)[:3])
        if [t.shape[-1] for t in (query, key, value)] != self._sizes:  # the kernel would read past their ends
            raise ValueError(f"projections of layer {self.layer} give other sizes than {self._sizes}")
        if self.norms[0] is not None:
            query, key = (norm(t.view(heads)) for norm, t in zip(self.norms, (query, key), strict=True))
        out = hidden.new_empty(1, hidden.shape[1], self.heads * self.width)
        tensors = [t.contiguous() for t in (query, key, value, cos, sin)]
        shape = Shape(self.heads, self.groups, self.width, self.width, self.scaling, True)
        window = self.window or step.limits(self.layer)[0] or 0
        function = kernels.function("attend_packed", hidden.dtype)
        assert function is not None
        with kernels.recorded("attend"):
            function(
                *(t.data_ptr() for t in (*tensors, out)), pieces, len(step.pieces),
                ctypes.byref(shape), window, torch.get_num_threads(),
            )  # fmt: skip
        made: Tensor = module._modules["o_proj"](out)
        return made

    def _served(self, hidden: Any, tables: Any) -> bool:
        if not isinstance(hidden, Tensor) or torch.is_grad_enabled() or not isinstance(tables, tuple):
            return False
        shape = (1, hidden.shape[-2], self.width)
        layers = _projections(self.module)
        same = [self.module._modules.get(name) for name in NORMS] == self.norms
        if not same or [layer.out_features for layer in layers[:3]] != self._sizes:
            return False
        if any(layer._forward_hooks for layer in (*layers, *filter(None, self.norms))):
            return False  # the kernel writes over what a hook may have kept
        alike = hidden.shape[0] == 1 and all(t.shape == shape and t.dtype == hidden.dtype for t in tables)
        return alike and kernels.function("attend_packed", hidden.dtype) is not None

    def _pieces(self, step: StepCache, like: Tensor) -> ctypes.Array[Any] | None:
        """The kernel's `Piece`s; None where one of them needs a mask, is not stored, or is not worth packing its keys."""
        if not step.plainly(self.layer, -(-FEWEST_FUSED * self.groups // self.heads)):
            return None
        numbers: list[int] = []
        for piece in step.pieces:
            key, value = piece.kv.room(self.layer, like, self.groups, self.width)
            fits = (1, self.groups, piece.kv.capacity, self.width)
            if not all(t.shape == fits and t.dtype == like.dtype and t.is_contiguous() for t in (key, value)):
                return None  # stored by something else
            numbers += (piece.start, piece.rows, piece.done, piece.kv.capacity, key.data_ptr(), value.data_ptr())
        array: ctypes.Array[Any] = (ctypes.c_int64 * len(numbers))(*numbers)
        return array


def fuse(decoder: nn.Module, plan: LayerPlan) -> int:
    """Put the kernel behind every attention layer that it serves; returns how many. Twice does no harm."""
    return put(list(_layers(decoder, plan)))


def _projections(module: nn.Module) -> list[Any]:
    return [module._modules[name] for name in PROJECTIONS]


def _layers(decoder: nn.Module, plan: LayerPlan) -> Iterator[PackedAttention]:
    for module in decoder.modules():
        fused = _proven(module, plan) if _alike(module) else None
        if fused is not None:
            yield fused


def _alike(module: nn.Module) -> bool:
    """Frozen, on a CPU, of these parts only, with keys and values of one width, of which the kernel takes pairs."""
    parts, width = set(module._modules), getattr(module, "head_dim", None)
    own = "forward" in vars(module) or module._parameters or module.training
    if own or not set(PROJECTIONS) <= parts <= {*PROJECTIONS, *NORMS} or not isinstance(width, int) or width % 2:
        return False
    if getattr(getattr(module, "config", None), "clip_qkv", None) is not None:  # the probe's input is too small for it
        return False
    layers = _projections(module)
    if not all(isinstance(layer, nn.Linear) and layer.weight.device.type == "cpu" for layer in layers):
        return False
    query, key, value, out = layers
    whole = not query.out_features % width and not key.out_features % width
    same = key.out_features == value.out_features and query.out_features == out.in_features
    return whole and same and kernels.function("attend_packed", query.weight.dtype) is not None


class _Watched(StepCache):
    """A step that keeps what a layer tells the attention function."""

    def told(self, arguments: Mapping[str, Any]) -> None:
        """Called by `attention.py`."""
        self.arguments = arguments


@torch.no_grad()
def _proven(module: nn.Module, plan: LayerPlan) -> PackedAttention | None:
    """The stand-in, if on random input it gives what the layer gives, and stores what it stores."""
    draw = torch.Generator().manual_seed(0)
    dtype = next(module.parameters()).dtype

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    try:
        fused = PackedAttention(module, 1.0, None)
        hidden = random(1, ROWS, _projections(module)[0].in_features)
        places = torch.randint(0, 2**20, (1, ROWS), generator=draw)  # far ones too: some layers scale by position
        tables = random(1, ROWS, fused.width), random(1, ROWS, fused.width)
        past = random(1, fused.groups, PAST, fused.width), random(1, fused.groups, PAST, fused.width)
        step, stock = StepCache(_two(fused.layer, past), plan), _Watched(_two(fused.layer, past), plan)
        named = {"position_embeddings": tables, "attention_mask": None, "position_ids": places}
        wanted = type(module).forward(module, hidden, cache=stock, **named, **{KEYWORD: stock})[0]
        if any(stock.arguments.get(name) is not None for name in ("softcap", "s_aux")):
            return None
        fused.scaling = stock.arguments.get("scaling") or fused.width**-0.5
        fused.window = stock.arguments.get("sliding_window")
        pieces = fused._pieces(step, hidden)
        if pieces is None:
            return None
        pairs = [(fused.run(step, pieces, hidden, *tables), wanted)]
        for one, other in zip(step.pieces, stock.pieces, strict=True):
            end = one.done + one.rows
            pairs += zip(one.kv.view(fused.layer, end), other.kv.view(fused.layer, end), strict=True)
        return fused if all(_close(got, expected) for got, expected in pairs) else None
    except NOT_LIKE_IT:
        return None


def _two(layer: int, past: tuple[Tensor, Tensor]) -> list[Piece]:
    """A sequence that goes on, with room left, and a fresh one."""
    first, second = SequenceKV(PAST + FIRST + 2), SequenceKV(ROWS - FIRST)
    first.write(layer, *past)
    first.length = PAST
    return [Piece(0, FIRST, first), Piece(FIRST, ROWS - FIRST, second)]


def _close(got: Tensor, wanted: Tensor) -> bool:
    """What is rounded where is transformers' order, too: nearly every number is the same."""
    apart = float((got.float() - wanted.float()).norm() / wanted.float().norm())
    return got.dtype == wanted.dtype and apart <= max(1e-5, torch.finfo(wanted.dtype).eps / 8)
