"""Linear layers on a CPU: weights packed once for oneDNN, activations computed inside the multiplication.

torch's own linear reorders a bf16 weight in every call, and takes MKL for fp32. Packed at load the same multiplication
runs up to 1.25x as fast from a hundred rows up, twice as fast at sixteen, and what comes out of it is activated before
it leaves the registers. A packed layer keeps its place, name and hooks in the stock model; its parameter holds the
packed weight, which replaces the plain one, and its state dict gives the plain one back. Where oneDNN has no kernels for
the weights' dtype, layers compute in fp32 instead (`widen.py`).

Projections that share an input are not joined: at 90 rows it would save a sixth of the small ones, at the sizes of
steps nothing. Nor are residuals added inside: at 1,024 rows that saves nothing either.
"""

from __future__ import annotations

import copy
import ctypes
import mmap
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmprefill.encoders.families import Family
from mmprefill.pipeline import activation, norm, packed_attention, widen
from mmprefill.pipeline.activation import Activation

FEWEST = 2**16  # weights in a layer worth packing: below, the call itself is what takes the time
PLAIN: Activation = ("none", "")
_KNOWN: dict[Activation, Callable[[Tensor], Tensor]] = {
    ("gelu", "none"): F.gelu,
    ("gelu", "tanh"): partial(F.gelu, approximate="tanh"),
    ("swish", ""): F.silu,
    ("relu", ""): F.relu,
}


_PLAIN = {wide: plain for plain, wide in widen.KINDS.items()}


class PackedLinear(nn.Linear):
    """A linear layer of a stock model after `pack`, for inference: `weight` is a parameter in oneDNN's own layout."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]; what needs gradients, or comes in another dtype, takes torch's own way."""
        return multiply(self, input)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[prefix + "weight"] = self.weight.to_dense()

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("this layer's weight is packed; load weights before an engine is made, or unpack the model")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        plain = nn.Linear.__new__(nn.Linear)
        plain.__dict__ = {**self.__dict__, "_parameters": {**self._parameters, "weight": _plain(self)}}
        return copy.deepcopy(plain, memo)


def multiply(layer: nn.Linear, input: Tensor, inside: Activation = PLAIN) -> Tensor:
    """A packed layer on an input [..., in], activated."""
    if _foreign(layer, input):
        plain = F.linear(input, layer.weight.to_dense(), layer.bias)
        return plain if inside == PLAIN else _KNOWN[inside](plain)
    name, algorithm = inside
    made: Tensor = torch.ops.mkldnn._linear_pointwise.default(input, layer.weight, layer.bias, name, [], algorithm)
    return made


def _multiply_by(layer: nn.Linear, input: Tensor, factor: Tensor) -> Tensor:
    """A packed layer on an input, times a factor of the output's shape."""
    if _foreign(layer, input):
        return F.linear(input, layer.weight.to_dense(), layer.bias) * factor
    made: Tensor = torch.ops.mkldnn._linear_pointwise.binary(input, factor, layer.weight, layer.bias, "mul")
    return made


def _foreign(layer: nn.Linear, input: Tensor) -> bool:
    return input.dtype != layer.weight.dtype or (input.requires_grad and torch.is_grad_enabled())


def pack(model: nn.Module, later: Collection[nn.Module] = ()) -> int:
    """Pack every linear layer that is large, plain, frozen and in evaluation mode; fuse MLPs made of such layers. Where
    `widen` helps, such linear layers and convolutions are widened instead.

    Left alone: subclasses and adapters, layers with hooks or parametrisations, weights that something else shares (tied
    embeddings), devices other than CPU, dtypes that neither oneDNN multiplies nor `widen` helps, and what is in `later`.
    A model can be packed twice without harm.

    Returns:
        How many layers were packed now.
    """
    owners = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    plain = [each for each in model.modules() if each not in later and _packable(each)]
    layers = [cast("nn.Linear", each) for each in plain if owners[id(each.weight)] == 1]
    layers.sort(key=lambda each: -each.weight.numel())  # the largest is in memory twice while little else is
    packed = [each for each in layers if type(each) is nn.Linear and not widen.wants(each.weight.dtype)]
    widened = [each for each in layers if widen.wants(each.weight.dtype)]
    fusable: dict[Any, bool] = {}
    fused = [each for each in layers if each in packed or activation.preferred(each.weight.dtype)]
    for mlp in [module for module in model.modules() if set(module.children()) & set(fused)]:
        _fuse(mlp, fused, fusable)
    files = _mapped_files() if packed else []
    for layer in packed:
        weight = layer.weight.detach()
        _set(layer, PackedLinear, torch.ops.mkldnn._reorder_linear_weight(weight))
        _forget(weight, files)
    for layer in widened:
        layer.__class__ = cast("type[nn.Linear]", widen.KINDS[type(layer)])
    return len(packed) + len(widened)


def pack_towers_later(family: Family) -> None:
    """Pack a model but for its towers, and those when one of its feature functions is first called: the weights of a
    tower that never sees a picture stay in their file."""
    inside = {family.model.get_output_embeddings(), *family.decoder.modules()}
    towers = {module for module in family.base.modules() if module not in inside}
    pack(family.model, towers if family.features and family.takes_encoded else ())
    ready = cache(partial(pack, family.model))

    def after_packing(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*inputs: Any, **named: Any) -> Any:
            ready()
            return function(*inputs, **named)

        return call

    family.features.update({medium: after_packing(function) for medium, function in family.features.items()})


def unpack(model: nn.Module) -> list[nn.Module]:
    """Give every packed or widened layer and every fused MLP of a model its plain form; returns what was changed."""
    changed: list[nn.Module] = []
    for layer in model.modules():
        if isinstance(layer, PackedLinear):
            _set(layer, nn.Linear, layer.weight.to_dense())
            changed.append(layer)
        elif type(layer) in _PLAIN:
            layer.__class__ = _PLAIN[type(layer)]
            changed.append(layer)
        if isinstance(vars(layer).get("forward"), _Fused):
            del layer.forward
    return changed


@contextmanager
def unpacked(model: nn.Module) -> Iterator[None]:
    """Within the block the model is as it was loaded."""
    changed, norms, layers = unpack(model), norm.undo(model), packed_attention.undo(model)
    try:
        yield
    finally:
        packed_attention.redo(layers)
        if changed:
            pack(model)
        if norms:
            norm.fuse(model)


def _set(layer: nn.Linear, kind: type[nn.Linear], weight: Tensor) -> None:
    layer.__class__ = kind
    layer._parameters["weight"] = nn.Parameter(weight, requires_grad=False)


def _mapped_files() -> list[tuple[int, int]]:
    """Address ranges of files that are mapped into memory, as transformers loads checkpoints on Linux. Of whatever name:
    in the hub's cache a checkpoint is a link to a file that is called by its digest."""
    with suppress(OSError):
        lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
        ranges = [fields[0].split("-") for fields in lines if fields[4] != "0"]  # the inode
        return [(int(start, 16), int(end, 16)) for start, end in ranges]
    return []


def _forget(weight: Tensor, files: Seq[tuple[int, int]]) -> None:
    """Let go of the pages of a checkpoint that a weight was read from: while any other weight is in use, the whole file
    stays mapped, and would be a second copy in resident memory. Whoever still reads them reads them from the file."""
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end and any(low <= start and end <= high for low, high in files):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _plain(layer: nn.Linear) -> nn.Parameter:
    return nn.Parameter(layer.weight.to_dense(), requires_grad=False)


def _packable(module: nn.Module) -> bool:
    if type(module) not in widen.KINDS or module.training or "forward" in vars(module) or _hooked(module):
        return False
    weight = cast("Tensor", module.weight)
    frozen = not any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return frozen and weight.device.type == "cpu" and weight.numel() >= FEWEST and _served(weight.dtype)


def _served(dtype: torch.dtype) -> bool:
    if widen.wants(dtype):
        return True
    packs = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return bool(packs) and dtype in (torch.float32, torch.bfloat16)


def _hooked(module: nn.Module) -> bool:
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return any(getattr(module, name, None) for name in hooks)


# MLPs: act(first(x)) into last, or act(gate(x)) * up(x) into down.


class _Fused:
    """Stands in for an MLP's `forward` as long as its layers are what they were."""

    def __init__(self, mlp: nn.Module, names: Seq[str], known: Activation) -> None:
        self.mlp, self.names, self.activation = mlp, names, known

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        first, *up, last = _layers(self.mlp, self.names)
        changed = any(type(layer) not in _MADE_HERE or _hooked(layer) for layer in (first, *up))
        if changed or len(inputs) != 1 or named:
            return type(self.mlp).forward(self.mlp, *inputs, **named)
        (input,) = inputs
        if activation.preferred(input.dtype):
            if _foreign(first, input):
                return type(self.mlp).forward(self.mlp, input)
            hidden = first(input)
            activation.activate(hidden, self.activation, *(layer(input) for layer in up))
            return last(hidden)
        hidden = multiply(first, input, self.activation)
        for layer in up:
            hidden = _multiply_by(layer, input, hidden)
        return last(hidden)


_MADE_HERE = PackedLinear, widen.WidenedLinear


def _layers(mlp: nn.Module, names: Seq[str]) -> list[nn.Linear]:
    return [cast("nn.Linear", mlp._modules[name]) for name in names]


def _fuse(mlp: nn.Module, packable: Collection[nn.Module], fusable: dict[Any, bool]) -> None:
    """Replace the forward of a module that is one of the two kinds, as its own forward on random input shows."""
    if _hooked(mlp) or "forward" in vars(mlp):
        return
    names = [name for name, child in mlp.named_children() if isinstance(child, nn.Linear)]
    others = [c for c in mlp.children() if not isinstance(c, (nn.Linear, nn.Dropout, nn.Identity))]
    if not (2 <= len(names) <= 3 and len(others) == 1 and all(mlp._modules[name] in packable for name in names)):
        return
    known = _known(others[0])
    if known is None:
        return
    kind = type(mlp), tuple(names), known, _own(mlp)
    if kind not in fusable:
        fusable[kind] = _same(mlp, names, known)
    if fusable[kind]:
        mlp.forward = _Fused(mlp, names, known)


def _own(mlp: nn.Module) -> tuple[Any, ...]:
    """What a module's forward may depend on beside its layers: one class may be sparse in some places, dense in others."""
    plain = ((name, value) for name, value in vars(mlp).items() if isinstance(value, (bool, int, float, str)))
    tensors = *mlp.parameters(recurse=False), *mlp.buffers(recurse=False)
    return (*sorted(plain), *map(id, tensors))


# What a module of another kind says to the probe.
_NOT_LIKE_IT = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)


@torch.no_grad()
def _known(module: nn.Module) -> Activation | None:
    """Which of oneDNN's activations a module computes."""
    line = torch.linspace(-8, 8, 257)
    try:
        made = module(line)
        same = (name for name, known in _KNOWN.items() if (made - known(line)).abs().max() < 1e-6)
        return next(same, None)
    except _NOT_LIKE_IT:
        return None


@torch.no_grad()
def _same(mlp: nn.Module, names: Seq[str], known: Activation) -> bool:
    twin = copy.deepcopy(mlp).float()
    first, *up, last = _layers(twin, names)
    try:
        input = torch.randn(1, 2, first.in_features, generator=torch.Generator().manual_seed(0))
        hidden = _KNOWN[known](first(input))
        for layer in up:
            hidden = hidden * layer(input)
        return bool(torch.allclose(twin(input), last(hidden), rtol=1e-4, atol=1e-5))
    except _NOT_LIKE_IT:
        return False
