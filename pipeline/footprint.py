"""What a loaded model needs in memory, seen rather than computed: a few tokens and a picture go through it.

Widths are read from keys and values that the model made, not from its config: latent attention, shared layers and
windows then need no special case.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmprefill.encoders import vision
from mmprefill.pipeline.calibrate import Bench, plain_ids, step_of, tower_inputs
from mmprefill.pipeline.kv_cache import SequenceKV, StepCache, hand_over
from mmprefill.pipeline.prefill import _pieces, forward, text_arguments


@dataclass(frozen=True)
class LayerBytes:
    """Keys and values of one layer: bytes of a token, and how many of the last tokens a finished cache keeps (None: all)."""

    token: int
    kept: int | None = None


@dataclass(frozen=True)
class Footprint:
    """What a loaded model needs.

    Attributes:
        weights: bytes of parameters and buffers.
        layers: what its layers store, in order.
        step_token: transient bytes of one token in a step.
        patch: transient bytes of one patch in a tower call.
    """

    weights: int
    layers: tuple[LayerBytes, ...]
    step_token: int
    patch: int

    @property
    def token(self) -> int:
        """Bytes that a token occupies while its request is prefilled."""
        return sum(layer.token for layer in self.layers)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the finished cache of a prompt: `PrefillResult.kv_bytes`."""
        return sum(layer.token * min(tokens, tokens if layer.kept is None else layer.kept) for layer in self.layers)


@torch.no_grad()
def footprint(bench: Bench) -> Footprint:
    """Look at a few tokens and a picture in a loaded model; on the thread of its lane.

    Raises:
        ValueError: for a model on the generic path, whose caches are its own.
    """
    if bench.plan is None:
        raise ValueError(f"{bench.family.name} takes the generic path: its cache is its own, and no budgets apply")
    return Footprint(
        weights=weights_of(bench.family.model),
        layers=tuple(_layers(bench)),
        step_token=_step_bytes(bench),
        patch=_patch_bytes(bench),
    )


def weights_of(model: torch.nn.Module) -> int:
    """Bytes of parameters and buffers; what several modules share counts once."""
    sizes = {
        id(t) if t.is_mkldnn else t.data_ptr(): t.numel() * t.element_size()
        for t in [*model.parameters(), *model.buffers()]
    }
    return sum(sizes.values())


def _layers(bench: Bench, tokens: int = 4) -> Iterator[LayerBytes]:
    """Store a few tokens, and see how they would be handed over."""
    family, kv = bench.family, SequenceKV(tokens)
    assert bench.plan is not None
    arguments = text_arguments(family, plain_ids(family, tokens))
    step = StepCache(_pieces([(kv, tokens, {})]), bench.plan)
    forward(family, step, arguments.pop("inputs_embeds"), torch.arange(tokens, device=family.device)[None], arguments)
    kv.length = tokens
    cache = hand_over(family.text_config, kv)
    for layer, (key, value) in sorted(kv.layers.items()):
        row = (key.numel() * key.element_size() + value.numel() * value.element_size()) // tokens
        target: Any = cache.layers[layer]
        yield LayerBytes(row, target.sliding_window - 1 if getattr(target, "is_sliding", False) else None)


def _step_bytes(bench: Bench) -> int:
    """Transient bytes per token, from steps of two sizes; what they store is counted apart."""
    small, large = (_step_peak(bench, [64] * count) for count in (2, 6))
    return max((large - small) // 256, 1)


def _step_peak(bench: Bench, lengths: list[int]) -> int:
    step = step_of(bench, lengths, [SequenceKV(n) for n in lengths])
    step()  # makes the buffers
    return peak(bench.family.device, step)


def _patch_bytes(bench: Bench) -> int:
    """Transient bytes per patch of the largest made-up picture; 0 without a tower."""
    inputs = max(tower_inputs(bench), key=lambda each: each.patches, default=None)
    if inputs is None:
        return 0
    vision.encode(bench.family, [inputs])  # the first call packs weights
    return -(-peak(bench.family.device, lambda: vision.encode(bench.family, [inputs])) // inputs.patches)


def peak(device: torch.device, run: Callable[[], Any]) -> int:
    """The most bytes that a call holds at once, beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _Storages() as watch:
        run()
    most: int = watch.most
    return most


class _Storages(TorchDispatchMode):
    """Counts the bytes of storages that operations make, until they are freed; scratch inside a kernel is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.most = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if not getattr(function, "is_view", False):
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor):
                    self._saw(tensor.untyped_storage())
        return output

    def _saw(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._known:
            return
        self._known.add(address)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, address, size)

    def _freed(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size
