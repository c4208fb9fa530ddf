"""Encoded bytes from whatever names or holds them: paths, text, URLs, buffers, file objects."""

from __future__ import annotations

import base64
import errno
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from mmprefill import formats
from mmprefill.config import MediaLimits
from mmprefill.errors import MediaError, MediaForbiddenError
from mmprefill.fetch import Fetcher, describe_url

ACCEPTED = (
    "a path, bytes, a binary file object, a data URI, base64 text, an http(s) URL, a PIL image, a numpy array or a "
    "torch tensor"
)
_READ_SIZE = 2**20
_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*(?=://)", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/]*")
_STANDARD_ALPHABET = str.maketrans("-_", "+/")


def read_source(source: Any, limits: MediaLimits, fetcher: Fetcher | None = None) -> bytes:
    """Encoded bytes of a path, buffer, file object or text, at most `max_bytes` of them.

    Raises:
        MediaError: nothing that bytes can be read from, or it cannot be read.
        MediaLimitError: more than `max_bytes`.
        MediaForbiddenError: a path, URL or scheme that is not allowed.
        MediaFetchError: the network failed.
    """
    if isinstance(source, str):
        return _read_text(source.strip(), limits, fetcher)
    if isinstance(source, os.PathLike):
        return _read_path(os.fsdecode(source), limits, missing="no such file")
    if isinstance(source, bytes | bytearray | memoryview):
        formats.check_bytes(memoryview(source).nbytes, limits)
        return bytes(source)
    if callable(getattr(source, "read", None)):
        return _read_file(source, limits)
    raise MediaError(f"no picture; accepted: {ACCEPTED}")


def describe_source(source: Any) -> str:
    """What `read_source` was given, for messages: never the payload, a query or a password."""
    if isinstance(source, str):
        return _describe_text(source.strip())
    if isinstance(source, os.PathLike):
        return f"path {os.fsdecode(source)!r}"
    if isinstance(source, bytes | bytearray | memoryview):
        return f"{memoryview(source).nbytes} bytes"
    return "None" if source is None else f"a {type(source).__name__}"


def _describe_text(text: str) -> str:
    if text[:5].lower() == "data:":
        return f"data URI {text[5:45].partition(',')[0]!r} of {len(text)} characters"
    if text[:5].lower() == "http:" or text[:6].lower() == "https:":
        return describe_url(text)
    if is_base64_picture(text):
        return f"base64 text of {len(text)} characters"
    return f"str {text!r}" if len(text) <= 120 else f"str {text[:40]!r}… of {len(text)} characters"


def _read_text(text: str, limits: MediaLimits, fetcher: Fetcher | None) -> bytes:
    if text[:5].lower() == "data:":
        return _read_data_uri(text, limits)
    if text[:5].lower() == "file:":
        return _read_file_url(text, limits)
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme[0].lower() in ("http", "https"):
        return (fetcher or Fetcher(limits)).fetch(text)
    if scheme is not None:
        raise MediaForbiddenError(f"scheme {scheme[0]!r} is not accepted; http, https, file and data are")
    if is_base64_picture(text):
        return decode_base64(text, limits)
    missing = f"no such file, and neither a URL, nor a data URI, nor base64 of a picture; accepted: {ACCEPTED}"
    return _read_path(text, limits, missing=missing)


def _read_data_uri(uri: str, limits: MediaLimits) -> bytes:
    head, comma, _ = uri[:256].partition(",")
    if not comma:
        raise MediaError("a data URI without a comma in its first 256 characters")
    _check_text(uri, limits)
    payload = uri[len(head) + 1 :]
    if head.rstrip().lower().endswith(";base64"):
        return decode_base64(unquote(payload) if "%" in payload else payload, limits)
    data = unquote_to_bytes(payload)
    formats.check_bytes(len(data), limits)
    return data


def decode_base64(text: str, limits: MediaLimits) -> bytes:
    """Bytes of base64 in the standard or the URL-safe alphabet, with or without line breaks and padding.

    Raises:
        MediaError: empty, or no base64.
        MediaLimitError: more than `max_bytes`, told from the text where that is far too long.
    """
    _check_text(text, limits)
    digits = "".join(text.split()).rstrip("=").translate(_STANDARD_ALPHABET)
    if not digits:
        raise MediaError("an empty base64 payload")
    if len(digits) % 4 == 1 or not _BASE64.fullmatch(digits):
        raise MediaError(f"the payload of {len(text)} characters is not valid base64")
    data = base64.b64decode(digits + "=" * (-len(digits) % 4))
    formats.check_bytes(len(data), limits)
    return data


def is_base64_picture(text: str) -> bool:
    """Whether text starts as base64 of a picture does. Asked before a path: a JPEG's "/9j/4AAQ..." looks like one."""
    start = "".join(text[:128].split())[:48].translate(_STANDARD_ALPHABET)
    if len(start) < 32 or not _BASE64.fullmatch(start.rstrip("=")):
        return False
    return formats.sniff(base64.b64decode(start[: len(start) // 4 * 4])) is not None


def _check_text(text: str, limits: MediaLimits) -> None:
    # base64 takes 4 characters for 3 bytes; what is left up to 8 is room for line breaks
    formats.check_bytes(len(text) // 2 - 1024, limits)


def _read_file_url(url: str, limits: MediaLimits) -> bytes:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise MediaError(f"not a valid URL: {error}") from error
    if parts.netloc.lower() not in ("", "localhost") or not parts.path.startswith("/"):
        raise MediaForbiddenError("a file URL must name an absolute path on this machine")
    return _read_path(unquote(parts.path), limits, missing="no such file")


def _read_path(path: str, limits: MediaLimits, *, missing: str) -> bytes:
    try:
        return _read_resolved(os.path.realpath(path), limits)
    except MediaError:
        raise
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # ValueError: a NUL in it
        raise MediaError(missing) from error
    except OSError as error:
        raise MediaError(missing if error.errno == errno.ENAMETOOLONG else f"{error.strerror}") from error


def _read_resolved(path: str, limits: MediaLimits) -> bytes:
    """Content of a regular file under the allowed roots; what is checked is the open file, not only its name."""
    _check_root(path, limits)
    _check_regular(Path(path).stat())  # before opening, since a device may act on being opened
    descriptor = os.open(path, _OPEN_FLAGS)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        opened = os.fstat(descriptor)
        _check_regular(opened)
        # a folder on the way may have been swapped for a link between the check and the opening
        if os.path.realpath(path) != path or not os.path.samestat(Path(path).stat(), opened):
            raise MediaForbiddenError("the file was replaced while it was opened")
        formats.check_bytes(opened.st_size, limits)
        return _read_all(file, limits)


def _check_root(path: str, limits: MediaLimits) -> None:
    if limits.allowed_roots is None:
        return
    roots = [os.path.realpath(root) for root in limits.allowed_roots]
    if not any(os.path.commonpath([root, path]) == root for root in roots):
        raise MediaForbiddenError("read as a path, it is outside MediaLimits.allowed_roots")


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise MediaForbiddenError("not a regular file")


def _read_file(file: Any, limits: MediaLimits) -> bytes:
    """Content of a file object from its start, which is left where it was; from where it is when it cannot seek."""
    with exclusive(file):
        try:
            if not (hasattr(file, "seekable") and file.seekable()):
                return _read_all(file, limits)
            position = file.tell()
            file.seek(0)
            try:
                return _read_all(file, limits)
            finally:
                file.seek(position)
        except MediaError:
            raise
        except Exception as error:  # the caller's object: it may raise anything
            raise MediaError(f"the file object cannot be read: {type(error).__name__}: {error}") from error


def _read_all(file: Any, limits: MediaLimits) -> bytes:
    data = bytearray()
    while len(data) <= limits.max_bytes:
        chunk = file.read(min(_READ_SIZE, limits.max_bytes + 1 - len(data)))
        if not isinstance(chunk, bytes):
            raise MediaError(f"the file object gave {type(chunk).__name__}; bytes are needed: open it in binary mode")
        if not chunk:
            break
        data += chunk
    formats.check_bytes(len(data), limits)
    return bytes(data)


class _SharedLock:
    def __init__(self) -> None:
        self.lock, self.users = threading.Lock(), 0


# Process-wide, since engines may be given the same object. Empty while nothing is being loaded.
_locks: dict[int, _SharedLock] = {}
_guard = threading.Lock()


@contextmanager
def exclusive(shared: object) -> Iterator[None]:
    """One thread at a time per object; for those that can be neither hashed nor shared, as lazy PIL images."""
    with _guard:
        entry = _locks.setdefault(id(shared), _SharedLock())
        entry.users += 1
    try:
        with entry.lock:
            yield
    finally:
        with _guard:
            entry.users -= 1
            if entry.users == 0:
                del _locks[id(shared)]
