"""Mistakes on the command line that are told, by the option that has them, before a model is loaded."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from pathlib import Path

# Numbers, as argparse takes them: it names the option in front of what these say.


def positive(text: str) -> int:
    """A count: 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be positive and whole, got {text!r}")
    return int(text)


def port(text: str) -> int:
    """A TCP port; 0 lets the system choose."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}")
    return int(text)


def not_negative(text: str) -> float:
    """A bound: 0 or more."""
    with suppress(ValueError):
        if (number := float(text)) >= 0:  # nor NaN
            return number
    raise argparse.ArgumentTypeError(f"must not be negative, got {text!r}")


# Files and folders.


def check_images(given: Seq[str]) -> None:
    """Each is a picture from elsewhere (an address, base64), or a file that is there."""
    from mmprefill.sources import is_base64_picture

    for each in given:
        elsewhere = "://" in each or each[:5].lower() in ("data:", "file:") or is_base64_picture(each)
        if not elsewhere and not os.path.exists(each):  # noqa: PTH110  Path.exists raises for names that are too long
            shown = each if len(each) <= 120 else f"{each[:40]}…"
            raise ValueError(f"--image {shown}: no such file")


def check_outputs(save: Path | None, trace: Path | None) -> None:
    """`--save` is a folder or will be one, and `--trace` a file in a folder that is there."""
    if save is not None and save.exists() and not save.is_dir():
        raise ValueError(f"--save {save}: a file; give a folder, which need not be there yet")
    if trace is not None and (trace.is_dir() or not trace.parent.is_dir()):
        raise ValueError(
            f"--trace {trace}: {'a folder' if trace.is_dir() else 'in no folder that is there'}; give a file"
        )


def check_plot(path: Path | None) -> None:
    """`--plot`, where it is given, is a kind of file that can be drawn, and what draws it is installed."""
    if path is not None:
        from mmprefill import plots

        plots.check(path)


@contextmanager
def reading(option: str, path: Path) -> Iterator[None]:
    """A file of JSON that cannot be read is told by the option that named it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path}: not UTF-8; give a JSONL file, one JSON object a line") from error
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ValueError(
            f"{option} {error.filename or path}: {why}; give a JSONL file, one JSON object a line"
        ) from error
