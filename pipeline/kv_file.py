"""The container of KV artefacts: a safetensors file whose header is believed in nothing.

    length | {"__metadata__": {...}, "layers.0.keys": ..., ...} | tensors, widest dtype first

Metadata is ours to give meaning to (`kv_store.py`: one request, `kv_shard.py`: many). Here: what tiles the file, and how
it gets there whole.
"""

from __future__ import annotations

import json
import math
import os
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mmprefill.errors import ArtefactError
from mmprefill.files import write_atomically
from mmprefill.pipeline.manifest import MOST_AXES, TensorEntry, build, strict_json

KEY = "mmprefill"  # of the metadata: a manifest
INDEX = f"{KEY}.shard"  # of a shard: what is in it
MARK = "#"  # FILE#N: request N of a shard
STRANGE = "a safetensors file without a manifest of mmprefill (a model's weights?)"
MOST_HEADER = 32 << 20  # bytes; some four million token ids
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


# Writing.


def write(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Path:
    """A file with these tensors, on the host and contiguous; an existing one is replaced in one step.

    Raises:
        ArtefactError: if the path is something else than a regular file, or the header would be too long to be read.
        OSError: if the file cannot be written; nothing is left behind.
    """
    check_target(path)
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps every tensor aligned
    header = _header(metadata, {name: tensors[name] for name in order})
    if len(header) > MOST_HEADER:
        raise ArtefactError(f"{path}: a header of {len(header)} bytes; at most {MOST_HEADER} are read back")
    prefix = len(header).to_bytes(8, "little") + header
    write_atomically(path, chain([prefix], (raw(tensors[name]) for name in order)))
    return path


def check_target(path: Path) -> None:
    """Only a regular file is replaced.

    Raises:
        ArtefactError: naming what the path is instead.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise ArtefactError(f"{path} is {kind_of(mode)}; an artefact is written to a regular file only")


def kind_of(mode: int) -> str:
    """What a path is that is no regular file, in words."""
    named = {
        stat.S_IFDIR: "a directory",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return named.get(stat.S_IFMT(mode), "a device")


def entry_of(tensor: Tensor) -> TensorEntry:
    """What the manifest says of a tensor."""
    return TensorEntry(NAMES[tensor.dtype], tuple(tensor.shape), zlib.crc32(raw(tensor)))


def on_host(tensor: Tensor) -> Tensor:
    """The tensor as `write` takes it."""
    return tensor.detach().cpu().contiguous()


def raw(tensor: Tensor) -> memoryview:
    """A contiguous host tensor's bytes, without a copy."""
    return tensor.flatten().view(torch.uint8).numpy().data


def _header(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        dtype, shape = NAMES[tensor.dtype], tuple(tensor.shape)
        start, end = end, end + size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


# Reading.


@dataclass(frozen=True)
class Slot:
    """A tensor as the safetensors header places it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def open_regular(path: Path) -> BinaryIO:
    """Open a file that is one.

    Raises:
        ValueError: for what is none.
        OSError: if it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not make us wait for a writer
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ValueError(f"it is {kind_of(mode)}, not a file")
    return os.fdopen(descriptor, "rb")


def read_header(file: BinaryIO, size: int) -> tuple[dict[str, str], dict[str, Slot]]:
    """Metadata, and where the tensors lie; offsets must tile the rest of the file exactly.

    Raises:
        ValueError: saying what is wrong; nothing that the file claims is allocated before.
    """
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, MOST_HEADER):
        if start.startswith((b"PK", b"\x80")):  # asked last: a header's length may begin with these bytes
            raise ValueError("it looks like a pickle or an archive; only safetensors files are read")
        raise ValueError(f"a header of {length} bytes in a file of {size}: not a safetensors file, or cut short")
    found = strict_json(file.read(length).decode())
    if not isinstance(found, dict):
        raise ValueError("the header is not a JSON object")
    about = found.pop("__metadata__", None)
    if not isinstance(about, dict) or not all(isinstance(text, str) for text in about.values()):
        raise ValueError(STRANGE)
    slots = {name: build(Slot, each, f"tensor {name[:80]!r}") for name, each in found.items()}
    _check_slots(slots, size - 8 - length)
    return about, slots


def _check_slots(slots: Mapping[str, Slot], size: int) -> None:
    end = 0
    for name, slot in sorted(slots.items(), key=lambda each: each[1].data_offsets):
        if slot.dtype not in DTYPES or len(slot.shape) > MOST_AXES:
            raise ValueError(f"tensor {name[:80]!r} has dtype {slot.dtype[:80]!r} and {len(slot.shape)} axes")
        if slot.data_offsets != (end, end + size_of(slot.dtype, slot.shape)):
            raise ValueError(
                f"tensor {name[:80]!r} of {slot.dtype} {slot.shape} cannot lie at bytes {slot.data_offsets}"
            )
        end = slot.data_offsets[1]
    if end != size:
        raise ValueError(f"{size} bytes of tensors, {end} expected: cut short or appended to")


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * DTYPES[dtype].itemsize
