"""The kernels of `kernels.cpp` and its headers: compiled on first use, kept under the user's cache, called through ctypes.

They are written for AVX-512 and for AVX2. Without a compiler, on another processor, or where anything goes wrong while
compiling, there are none, and callers take what torch has; the log says why. MMPREFILL_KERNELS=0 in the environment does
the same; any other value of it is the folder to keep them in.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from mmprefill.files import cache_folder, sync_folder

log = logging.getLogger("mmprefill")
SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-w", "-ffp-contract=off", "-mfma")
_AVX512 = ("-DLANES=16", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX2 = ("-DLANES=8", "-mavx2")
_PAIRS = ("-DPAIRS", "-mavx512bf16")
_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bf16"}
# What each function takes: addresses, whole numbers of 8 bytes, ints, floats.
_A, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
TAKES = {
    "attend": (_A, _N, _A, _I),
    "attend_packed": (_A, _A, _A, _A, _A, _A, _A, _N, _A, _N, _I),
    "normalise": (_A, _A, _A, _N, _N, _F, _I, _I),
    "multiply": (_A, _A, _N, _N, _N, _I, _I),
}
_TIMEOUT = 120


def function(name: str, dtype: torch.dtype) -> Any:
    """The compiled function of that name for a dtype; None if there is none, or while torch records what is computed."""
    return None if traced() else _found(name, dtype)


def traced() -> bool:
    """Whether torch compiles, exports or traces what runs: it sees operators, not what a kernel writes."""
    return bool(torch.compiler.is_compiling() or torch._C._get_tracing_state())


@cache
def _found(name: str, dtype: torch.dtype) -> Any:
    suffix = _SUFFIXES.get(dtype)
    return getattr(_library(), f"{name}_{suffix}", None) if suffix else None


def recorded(name: str) -> AbstractContextManager[Any]:
    """A span "mmprefill::NAME" for torch's profiler, where it watches: it sees none of a kernel by itself."""
    return record_function(f"mmprefill::{name}") if profiler._is_profiler_enabled else nullcontext()


def served() -> bool:
    """Whether there are kernels for this processor."""
    return bool(_instructions())


def _instructions() -> tuple[str, ...]:
    """What the compiler is told of this processor, as torch sees it (ATEN_CPU_CAPABILITY); nothing if it has no vectors
    that the kernels are written for."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX2":
        return _AVX2
    if "AVX512" not in capability:
        return ()
    return (*_AVX512, *_PAIRS) if torch.cpu._is_avx512_bf16_supported() else _AVX512


@cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get("MMPREFILL_KERNELS") == "0" or not served():
        log.info("no compiled kernels: switched off, or a processor with neither AVX-512 nor AVX2")
        return None
    try:
        return _loaded(_compiler(), [*_FLAGS, *_instructions()])
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()[-500:]
        log.warning("no compiled kernels, torch's own are slower: %s %s", error, detail)
        return None


def _compiler() -> list[str]:
    """The command, of several words perhaps (CXX="ccache g++")."""
    found = shlex.split(os.environ.get("CXX", ""))
    found = found or [path for path in map(shutil.which, ("g++", "c++", "clang++")) if path][:1]
    if not found:
        raise FileNotFoundError("no C++ compiler")
    return found


def _loaded(compiler: Seq[str], flags: Seq[str]) -> ctypes.CDLL:
    """The shared library, from the cache if this source was compiled before."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=_TIMEOUT).stdout  # noqa: S603
    command = [*compiler, *flags]
    sources = (path.read_bytes() for path in (*HEADERS, SOURCE))
    key = hashlib.sha256(b"\0".join([*sources, version, " ".join(command).encode()])).hexdigest()
    root = Path(os.environ.get("MMPREFILL_KERNELS") or cache_folder())
    library = root / f"kernels-{key[:24]}.so"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not library.exists():
        _compile(command, library)
    try:
        return _opened(library)
    except PermissionError:
        raise
    except OSError:  # damaged: another takes its place
        _compile(command, library)
        return _opened(library)


def _opened(library: Path) -> ctypes.CDLL:
    """Code that others could have written is not run."""
    for path in (library.parent, library):
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(f"{path} belongs to another user, or others may write to it")
    opened = ctypes.CDLL(str(library))
    for name, takes in TAKES.items():
        for suffix in _SUFFIXES.values():
            getattr(opened, f"{name}_{suffix}").argtypes = takes
    return opened


def _compile(command: Seq[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # two may compile at once: each renames its own
        draft = Path(folder) / "kernels.so"
        whole = [*command, "-shared", str(SOURCE), "-o", str(draft)]
        subprocess.run(whole, capture_output=True, check=True, timeout=_TIMEOUT)  # noqa: S603
        draft.chmod(0o600)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.rename(library)
    sync_folder(library.parent)
