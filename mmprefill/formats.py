"""Encoded pictures: which formats are read, and what their headers say before anything is decoded.

Plugins of Pillow are called directly. `Image.open` would warn about or refuse sizes by a process-wide limit, and
neither that limit nor the warning filters can be changed for one thread.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

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

# Bounds on what costs time without making the picture larger; real files stay far below each.
_MAX_OPEN_READS = 50_000  # each segment or chunk before the raster takes a few
_MAX_LOAD_READS = 100_000  # the raster of a 64 MiB PNG takes about 25,000
_MAX_BMP_READS = 5_000_000  # some per run of a run-length encoded BMP; about five seconds
_MAX_SEGMENTS = 10_000  # of a JPEG
_MAX_SCANS = 100  # of a progressive JPEG, each a pass over all pixels; encoders write about ten
_MAX_BLOCKS = 500_000  # of a GIF, each up to 255 bytes
_MAX_PROFILES = 8  # of a PNG, each up to 1 MB when unpacked; more than one is an error already

_ORIENTATION = 0x0112
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
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
        file = _MeteredFile(data)
        picture = FORMATS[name].open(file)
        check_raster(name, picture.size, limits)
        file.reads_left = _MAX_BMP_READS if name == "BMP" else _MAX_LOAD_READS
        if isinstance(picture, TiffImagePlugin.TiffImageFile):
            _check_tile(picture, limits)
        elif not isinstance(picture, GifImagePlugin.GifImageFile):  # would count by seeking; surveyed above
            _check_frames(getattr(picture, "n_frames", 1), limits)
    return picture


def read_orientation(info: Mapping[Any, Any]) -> int:
    """EXIF orientation, 1 to 8, from the `info` of a picture; 1 where there is none or it is damaged.

    Reads one tag, with XMP's as second choice, as Pillow does; Pillow reads all tags, and warns of damage in any.
    """
    exif, profile = info.get("exif"), info.get("Raw profile type exif")
    try:
        if exif is None and isinstance(profile, str):  # written by ImageMagick
            exif = bytes.fromhex("".join(profile.split("\n")[3:]))
        value = _find_orientation(exif) if isinstance(exif, bytes) else None
    except (struct.error, ValueError):
        value = None
    if value is None:
        xmp = info.get("XML:com.adobe.xmp") or info.get("xmp") or b""
        match = _XMP_ORIENTATION.search(xmp.encode() if isinstance(xmp, str) else xmp)
        value = int(match[1]) if match else 1
    return value if 1 <= value <= 8 else 1


def _find_orientation(exif: bytes) -> int | None:
    data = re.sub(rb"^(Exif\0\0){1,2}", b"", exif)
    order = ">" if data[:2] == b"MM" else "<"
    (start,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, start)
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        tag, kind, values = struct.unpack_from(order + "HHI", data, entry)
        if tag == _ORIENTATION and values == 1 and kind in (1, 3, 4):
            (value,) = struct.unpack_from(order + {1: "B", 3: "H", 4: "I"}[kind], data, entry + 8)
            return int(value)
    return None


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
    """Ends files that are chopped into absurdly many parts, or whose parts overlap: Pillow copies each in Python."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads_left = _MAX_OPEN_READS
        self._bytes_left = 8 * len(data) + 2**20

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.reads_left -= 1
        self._bytes_left -= len(data)
        if self.reads_left < 0 or self._bytes_left < 0:
            raise MediaLimitError("too many segments, chunks or overlapping parts in one file")
        return data


class _Jpeg(JpegImagePlugin.JpegImageFile):
    def _read_dpi_from_exif(self) -> None:
        """Nothing: Pillow would read all of EXIF for a resolution that nobody asks for, and warn of damage there."""


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


def _survey_jpeg(data: bytes, _most: int) -> _Survey:
    position, scans = 2, 0
    for _ in range(_MAX_SEGMENTS):
        marker = _MARKER.search(data, position)
        if marker is None or marker[0] == b"\xff\xd9":
            return _Survey(1)
        scans += marker[0] == b"\xff\xda"
        if scans > _MAX_SCANS:
            raise MediaLimitError(f"more than {_MAX_SCANS} JPEG scans")
        position = marker.end()
        if marker[0] not in (b"\xff\x01", b"\xff\xd8"):  # these two have no length
            position += int.from_bytes(data[position : position + 2], "big")
    raise MediaLimitError(f"more than {_MAX_SEGMENTS} JPEG segments")


def _survey_png(data: bytes, _most: int) -> _Survey:
    if data.count(b"iCCP") > _MAX_PROFILES:
        raise MediaLimitError(f"more than {_MAX_PROFILES} colour profiles")
    return _Survey(1)


def _survey_gif(data: bytes, most: int) -> _Survey:
    """Frames, and the first one's canvas: Pillow widens the screen to hold the frame, and may fill it on opening."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position, frames = 13 + _colour_table(flags), 0
    for _ in range(_MAX_BLOCKS):
        if frames > most or position >= len(data) or data[position] == 0x3B:
            return _Survey(frames, (width, height))
        if data[position] == 0x2C:
            x, y, w, h, flags = struct.unpack_from("<HHHHB", data, position + 1)
            if frames == 0:
                width, height = max(width, x + w), max(height, y + h)
            frames += 1
            position = _after_blocks(data, position + 11 + _colour_table(flags))
        else:
            position = _after_blocks(data, position + 2) if data[position] == 0x21 else position + 1
    raise MediaLimitError(f"more than {_MAX_BLOCKS} GIF blocks")


def _colour_table(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _after_blocks(data: bytes, position: int) -> int:
    for _ in range(_MAX_BLOCKS):
        if position >= len(data) or not data[position]:
            return position + 1
        position += 1 + data[position]
    raise MediaLimitError(f"more than {_MAX_BLOCKS} GIF blocks")


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
    # not Pillow's JPEG factory, which would look for further pictures of an MPO
    "JPEG": _Format(lambda head: head.startswith(b"\xff\xd8\xff"), _survey_jpeg, _Jpeg),
    "PNG": _Format(lambda head: head.startswith(b"\x89PNG\r\n\x1a\n"), _survey_png, PngImagePlugin.PngImageFile),
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
