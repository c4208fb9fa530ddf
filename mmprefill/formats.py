"""Encoded pictures: which formats are read, and what their headers say before anything is decoded.

Plugins of Pillow are called directly. `Image.open` would warn about or refuse sizes by a process-wide limit, and
neither that limit nor the warning filters can be changed for one thread.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)

from mmprefill.config import MediaLimits
from mmprefill.errors import MediaError, MediaLimitError

try:
    from PIL import AvifImagePlugin
except ImportError:  # Pillow before 11.3
    _HAS_AVIF = False
else:
    _HAS_AVIF = bool(features.check("avif"))

_MAX_READS = 500_000  # of Pillow on one file, about a second; real files of 64 MiB take tens of thousands
_TILE_WIDTH, _TILE_LENGTH = 322, 323  # TIFF tags


class _Survey(NamedTuple):
    """What a header declares."""

    frames: int
    size: tuple[int, int] | None = None  # None: left to the plugin, which allocates nothing before it is checked


class _Format(NamedTuple):
    matches: Callable[[bytes], bool]
    survey: Callable[[bytes, int], _Survey]
    open: Callable[[io.BytesIO], ImageFile.ImageFile]


def open_picture(data: bytes, limits: MediaLimits) -> ImageFile.ImageFile:
    """Open an encoded picture whose header keeps the limits; its raster is not decoded yet.

    Raises:
        MediaError: empty, of no accepted format, or with a damaged header.
        MediaLimitError: more bytes, pixels or frames than allowed.
    """
    check_bytes(len(data), limits)
    name = sniff(data)
    if name is None:
        raise MediaError(f"not a picture: {len(data)} bytes, {describe(data)}; accepted formats: {', '.join(FORMATS)}")
    with reading(f"{name} picture of {len(data)} bytes"):
        survey = FORMATS[name].survey(data, limits.max_frames)
        _check_frames(survey.frames, limits)
        if survey.size is not None:
            check_raster(name, survey.size, limits)
        picture = FORMATS[name].open(_MeteredFile(data))
        check_raster(name, picture.size, limits)
        if isinstance(picture, TiffImagePlugin.TiffImageFile):
            _check_tile(picture, limits)
        elif not isinstance(picture, GifImagePlugin.GifImageFile):  # would count by seeking; surveyed above
            _check_frames(getattr(picture, "n_frames", 1), limits)
    return picture


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever Pillow raises on foreign bytes into a MediaError about `what`."""
    try:
        yield
    except MediaError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise MediaLimitError(f"{what}: {error} This limit is PIL.Image.MAX_IMAGE_PIXELS") from error
    except MemoryError as error:
        raise MediaError(f"{what}: needs more memory than there is") from error
    except Exception as error:  # plugins raise almost anything
        raise MediaError(f"damaged or truncated {what}: {error or type(error).__name__}") from error


def check_bytes(count: int, limits: MediaLimits) -> None:
    """Raises MediaLimitError when a picture has more encoded bytes than allowed."""
    if count > limits.max_bytes:
        raise MediaLimitError(f"{count} bytes or more; at most {limits.max_bytes} are accepted (MediaLimits.max_bytes)")


def check_size(size: tuple[int, int], limits: MediaLimits) -> None:
    """Raises MediaError when a picture (width, height) is empty, MediaLimitError when it is larger than allowed."""
    width, height = size
    shown = f"{width} x {height} pixels"
    if width <= 0 or height <= 0:
        raise MediaError(f"an empty picture of {shown}")
    if width * height > limits.max_pixels:
        raise MediaLimitError(f"{shown}; at most {limits.max_pixels} are accepted (MediaLimits.max_pixels)")
    if max(size) > limits.max_side:
        raise MediaLimitError(f"{shown}; sides of at most {limits.max_side} are accepted (MediaLimits.max_side)")


def check_raster(name: str | None, size: tuple[int, int], limits: MediaLimits) -> None:
    """`check_size`, and Pillow's own limit, without its warning, for plugins that apply that by themselves."""
    check_size(size, limits)
    own_limit = Image.MAX_IMAGE_PIXELS
    if name in ("GIF", "TIFF") and own_limit is not None and size[0] * size[1] > own_limit:
        raise MediaLimitError(f"{size[0]} x {size[1]} pixels; Pillow reads {name} up to {own_limit} (MAX_IMAGE_PIXELS)")


def _check_frames(count: int, limits: MediaLimits) -> None:
    if count > limits.max_frames:
        raise MediaLimitError(f"more than {limits.max_frames} frames or pages (MediaLimits.max_frames)")


def _check_tile(picture: TiffImagePlugin.TiffImageFile, limits: MediaLimits) -> None:
    # libtiff allocates a whole tile, even where the picture is smaller
    width, length = picture.tag_v2.get(_TILE_WIDTH, 1), picture.tag_v2.get(_TILE_LENGTH, 1)
    if width * length > limits.max_pixels:
        raise MediaLimitError(
            f"tiles of {width} x {length} pixels; at most {limits.max_pixels} (MediaLimits.max_pixels)"
        )


class _MeteredFile(io.BytesIO):
    """Ends a file that is chopped into absurdly many segments: Pillow handles each one in Python, and keeps some."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > _MAX_READS:
            raise MediaLimitError(f"more than {_MAX_READS} segments or chunks in one file")
        return super().read(size)


def sniff(data: bytes) -> str | None:
    """Name of the accepted format that the first bytes belong to."""
    head = bytes(data[:64])
    return next((name for name, kind in FORMATS.items() if kind.matches(head)), None)


def describe(data: bytes) -> str:
    """What bytes that are no accepted picture look like, for messages; never their content."""
    if not data:
        return "empty"
    head = bytes(data[:512])
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for magic, kind in _FOREIGN:
        if start.startswith(magic):
            return f"looks like {kind}"
    if head[4:8] == b"ftyp":
        return "looks like HEIC or a video"
    if all(byte in b"\t\n\r" or 0x20 <= byte < 0x7F for byte in head):
        return "looks like text"
    return "of an unknown kind"


_FOREIGN = (
    (b"<!doctype html", "HTML"),
    (b"<html", "HTML"),
    (b"<svg", "SVG"),
    (b"<", "XML, SVG or HTML"),
    (b"{", "JSON"),
    (b"[", "JSON"),
    (b"data:", "a data URI; give it as a str"),
    (b"%pdf", "PDF"),
    (b"%!ps", "PostScript"),
    (b"8bps", "Photoshop"),
    (b"icns", "ICNS"),
    (b"\0\0\1\0", "ICO"),
    (b"\0\0\0\x0cjp  ", "JPEG 2000"),
    (b"pk\3\4", "ZIP"),
    (b"\x1f\x8b", "gzip"),
    (b"\x93numpy", "a NumPy file"),
    (b"version https://git-lfs", "a Git LFS pointer"),
)


def _single(_data: bytes, _most: int) -> _Survey:
    return _Survey(1)


def _survey_gif(data: bytes, most: int) -> _Survey:
    """Frames, and the first one's canvas: Pillow widens the screen to hold the frame, and may fill it on opening."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position, frames = 13 + _colour_table(flags), 0
    while frames <= most and position < len(data) and data[position] != 0x3B:
        if data[position] == 0x2C:
            x, y, w, h, flags = struct.unpack_from("<HHHHB", data, position + 1)
            if frames == 0:
                width, height = max(width, x + w), max(height, y + h)
            frames += 1
            position = _after_blocks(data, position + 11 + _colour_table(flags))
        else:
            position = _after_blocks(data, position + 2) if data[position] == 0x21 else position + 1
    return _Survey(frames, (width, height))


def _colour_table(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _after_blocks(data: bytes, position: int) -> int:
    while position < len(data) and data[position]:
        position += 1 + data[position]
    return position + 1


def _survey_tiff(data: bytes, most: int) -> _Survey:
    """Pages, by the chain of directories; a chain that bites its tail counts as endless."""
    order = "<" if data[:2] == b"II" else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    count_type, offset_type, entry, start = ("Q", "Q", 20, 8) if big else ("H", "I", 12, 4)
    count_size = struct.calcsize(count_type)
    (position,) = struct.unpack_from(order + offset_type, data, start)
    pages = 0
    while position and pages <= most:
        pages += 1
        if position + count_size > len(data):
            break
        (entries,) = struct.unpack_from(order + count_type, data, position)
        following = position + count_size + entries * entry
        if following + struct.calcsize(offset_type) > len(data):
            break
        (position,) = struct.unpack_from(order + offset_type, data, following)
    return _Survey(pages)


def _survey_webp(data: bytes, _most: int) -> _Survey:
    """The canvas, which the plugin allocates on opening."""
    kind = data[12:16]
    if kind == b"VP8X":
        return _Survey(1, (1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")))
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return _Survey(1, (1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)))
    width, height = struct.unpack_from("<HH", data, 26)
    return _Survey(1, (width & 0x3FFF, height & 0x3FFF))


FORMATS: dict[str, _Format] = {
    # JpegImageFile, not the factory: it would look for further pictures of an MPO
    "JPEG": _Format(lambda head: head.startswith(b"\xff\xd8\xff"), _single, JpegImagePlugin.JpegImageFile),
    "PNG": _Format(lambda head: head.startswith(b"\x89PNG\r\n\x1a\n"), _single, PngImagePlugin.PngImageFile),
    "GIF": _Format(lambda head: head[:6] in (b"GIF87a", b"GIF89a"), _survey_gif, GifImagePlugin.GifImageFile),
    "TIFF": _Format(
        lambda head: head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), _survey_tiff, TiffImagePlugin.TiffImageFile
    ),
    "BMP": _Format(lambda head: head.startswith(b"BM"), _single, BmpImagePlugin.BmpImageFile),
    "PPM": _Format(
        lambda head: head[:1] == b"P" and head[1:2] in b"123456" and head[2:3].isspace(),
        _single,
        PpmImagePlugin.PpmImageFile,
    ),
}
if features.check("webp"):
    FORMATS["WEBP"] = _Format(
        lambda head: head[:4] == b"RIFF" and head[8:12] == b"WEBP", _survey_webp, WebPImagePlugin.WebPImageFile
    )
if _HAS_AVIF:
    FORMATS["AVIF"] = _Format(
        lambda head: head[4:8] == b"ftyp" and (b"avif" in head[8:] or b"avis" in head[8:]),
        _single,
        AvifImagePlugin.AvifImageFile,
    )
