"""The compiled kernels of `kernels.cpp`: built on first use, kept under the user's cache, called through ctypes.

Without a compiler, on another processor, or where anything goes wrong while compiling, there are none, and callers take
what torch has. MMPREFILL_KERNELS=0 in the environment does the same; any other value of it is the folder to keep them in.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence as Seq
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-w",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mfma",
)
_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bf16"}
_TIMEOUT = 120


def function(name: str, dtype: torch.dtype) -> Any:
    """The compiled function of that name for a dtype, or None."""
    suffix = _SUFFIXES.get(dtype)
    if suffix is None or (dtype == torch.bfloat16 and not _pairs()):
        return None
    return getattr(_library(), f"{name}_{suffix}", None)


@cache
def _pairs() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported())


@cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get("MMPREFILL_KERNELS") == "0" or "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return None
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        return None
    with suppress(OSError, subprocess.SubprocessError):
        return ctypes.CDLL(str(_compiled(compiler, [*_FLAGS, *(["-mavx512bf16"] if _pairs() else [])])))
    return None


def _compiled(compiler: str, flags: Seq[str]) -> Path:
    """The shared library, from the cache if this source was compiled before."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_TIMEOUT).stdout  # noqa: S603
    key = hashlib.sha256(b"\0".join([SOURCE.read_bytes(), version, " ".join(flags).encode()])).hexdigest()
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("MMPREFILL_KERNELS") or cache_home / "mmprefill")
    library = root / f"kernels-{key[:24]}.so"
    if not library.exists():
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:  # two processes may compile at once: each renames its own
            draft = Path(folder) / "kernels.so"
            command = [compiler, *flags, "-shared", str(SOURCE), "-o", str(draft)]
            subprocess.run(command, capture_output=True, check=True, timeout=_TIMEOUT)  # noqa: S603
            draft.rename(library)
    return library
