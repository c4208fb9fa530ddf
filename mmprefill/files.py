"""Files that are whole or not there: written beside their place, synced, renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """The path holds the old content or the new one, whole, after a crash too; on disk when this returns."""
    draft = path.with_name(f".mmprefill-{secrets.token_hex(8)}.tmp")
    try:
        with draft.open("xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A rename is on disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """The user's own cache: under XDG_CACHE_HOME, else ~/.cache. For a user without a home it is a place where nothing can
    be kept, so that whoever writes there meets an OSError."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmprefill"
    except RuntimeError:
        return Path(os.devnull) / "mmprefill"
