"""One picture from anywhere -> contiguous RGB uint8, within limits.

Every source ends in the same steps: EXIF orientation, palette, bit depth, transparency.

- An animated or multi-page file gives its first frame; a PIL image the frame that it stands at.
- 16-bit samples keep their high byte, as Pillow itself does for 16-bit RGB.
- Layouts are stated, never guessed: a numpy array is [H, W] or [H, W, 1|3|4], a torch tensor [H, W] or [1|3|4, H, W],
  and anything else is given as `Pixels(array, layout)`. Four channels are RGBA.
- The range is a matter of dtype: bool, uint8 and uint16 use all of theirs, floats lie in [0, 1].

Shapes: H height, W width, C channels.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmprefill import formats
from mmprefill.config import MediaLimits
from mmprefill.errors import MediaError, MediaFetchError
from mmprefill.fetch import Fetcher
from mmprefill.sources import describe_source, exclusive, read_source

Layout = Literal["HWC", "CHW", "HW"]
U8 = NDArray[np.uint8]
RGB = tuple[int, int, int]

_ORIENTATION = 0x0112  # EXIF tag
_DEEP_GREY = ("I", "I;16", "I;16L", "I;16B", "I;16N")
_WITHOUT_ALPHA = ("1", "L", "RGB", "F", *_DEEP_GREY)  # but perhaps with one transparent colour
_WITH_ALPHA = ("P", "PA", "LA", "La", "RGBA", "RGBa")


@dataclass(frozen=True)
class Picture:
    """A decoded picture; equal to another when size and pixels are.

    Attributes:
        pixels: [H, W, 3] uint8 RGB in host memory, C-contiguous, owned, read-only.
        digest: 32 bytes of BLAKE2b over size and pixels.
        source: short description for messages, without payload or secrets.
    """

    pixels: U8 = field(compare=False, repr=False)
    digest: bytes
    source: str = field(compare=False)

    @property
    def width(self) -> int:
        """Columns."""
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        """Rows."""
        return int(self.pixels.shape[0])

    def to_pil(self) -> Image.Image:
        """The picture as a new PIL image in RGB, which may be written to."""
        return Image.fromarray(self.pixels).copy()


@dataclass(frozen=True, eq=False)
class Pixels:
    """An array or tensor with its layout stated, for those that the conventions would misread.

    Attributes:
        array: numpy array or torch tensor.
        layout: order of height, width and channels.
    """

    array: Any
    layout: Layout

    def __post_init__(self) -> None:
        if self.layout not in ("HWC", "CHW", "HW"):
            raise ValueError(f"Pixels.layout must be 'HWC', 'CHW' or 'HW', got {self.layout!r}")


def load_picture(source: Any, limits: MediaLimits, *, item: str = "picture", fetcher: Fetcher | None = None) -> Picture:
    """Load one picture; blocks, and may be called from any thread.

    Args:
        source: a path, bytes, a binary file object (read from its start where it can seek, and left where it was), data
            URI, base64 text, http(s) URL, PIL image, numpy array, torch tensor or `Pixels`. None of them is changed,
            except that a PIL image that was opened lazily is loaded.
        limits: sizes, folders and hosts that are allowed.
        item: what messages call the picture, such as "request 'r1', picture 2".
        fetcher: fetches URLs, by limits of its own; share one, since the rate per host is counted there. None makes
            one for this call.

    Raises:
        MediaError: no picture: not an image, damaged, empty, or of a type, layout or range that is not accepted.
        MediaLimitError: larger than a limit.
        MediaForbiddenError: a path or URL that is not allowed.
        MediaFetchError: the network failed.
    """
    name = _describe(source)
    try:
        return _picture(_load(source, limits, fetcher), name)
    except (MediaError, MediaFetchError) as error:
        raise type(error)(f"{item} ({name}): {error}") from error


def _picture(rgb_HWC: U8, source: str) -> Picture:
    pixels = np.array(rgb_HWC, dtype=np.uint8, order="C", copy=True)
    pixels.setflags(write=False)
    digest = hashlib.sha256()  # 2.4x blake2b on processors with SHA instructions
    for part in (memoryview(struct.pack("<QQ", *pixels.shape[:2])), pixels.data):
        digest.update(struct.pack("<Q", part.nbytes))
        digest.update(part)
    return Picture(pixels, digest.digest(), source)


def _load(source: Any, limits: MediaLimits, fetcher: Fetcher | None) -> U8:
    """[H, W, 3] RGB of any source."""
    if isinstance(source, Pixels):
        return _from_array(source.array, source.layout, limits)
    if isinstance(source, np.ndarray):
        return _from_array(source, "HW" if source.ndim == 2 else "HWC", limits)
    if _is_tensor(source):
        return _from_array(source, "HW" if source.ndim == 2 else "CHW", limits)
    if isinstance(source, Image.Image):
        return _from_pil(source, limits)
    return _decode(read_source(source, limits, fetcher), limits)


def _describe(source: Any) -> str:
    if isinstance(source, Pixels):
        return f"{_describe(source.array)}, layout {source.layout}"
    if isinstance(source, np.ndarray) or _is_tensor(source):
        kind = "numpy array" if isinstance(source, np.ndarray) else "torch tensor"
        return f"{kind} {list(source.shape)}, {source.dtype}"
    if isinstance(source, Image.Image):
        return f"PIL image {source.width} x {source.height}, {source.mode}"
    return describe_source(source)


def _is_tensor(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")  # whoever holds a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


# Encoded bytes and PIL images


def _decode(data: bytes, limits: MediaLimits) -> U8:
    with formats.open_picture(data, limits) as picture:
        what = f"{picture.format} picture of {len(data)} bytes"
        with formats.reading(what):
            depth = _depth(picture)
            picture.load()
            # a TIFF is turned by its plugin, which leaves no orientation behind
            return _oriented(_pil_to_rgb(picture, depth, limits.background), formats.read_orientation(picture.info))


def _from_pil(shared: Image.Image, limits: MediaLimits) -> U8:
    formats.check_raster(shared.format, shared.size, limits)
    with exclusive(shared), formats.reading("PIL image"):
        depth = _depth(shared)
        shared.load()
        orientation = _orientation(shared)
        mine = shared.copy()  # converting a palette with transparency writes to the palette
    with formats.reading("PIL image"):
        return _oriented(_pil_to_rgb(mine, depth, limits.background), orientation)


class _Depth(NamedTuple):
    """How the file packs samples, which Pillow tells only until it has loaded the raster."""

    key_scale: float = 1  # transparent colour as the file has it -> sample of the raster
    shift: int = 8  # deep grey -> uint8


_DEPTHS = {"L;2": _Depth(255 / 3), "L;4": _Depth(255 / 15), "RGB;16B": _Depth(1 / 256), "I;12": _Depth(shift=4)}


def _depth(picture: Image.Image) -> _Depth:
    tiles = getattr(picture, "tile", None)
    args: Any = tiles[0][3] if tiles else None
    return _DEPTHS.get(args[0] if isinstance(args, tuple) and args else args, _Depth())


def _orientation(picture: Image.Image) -> int:
    try:
        orientation = picture.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF is no reason to refuse sound pixels
        return 1
    return orientation if orientation in _TURNS else 1


# orientation -> transpose, then flip rows, flip columns
_TURNS = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}


def _oriented(image_HWC: U8, orientation: int) -> U8:
    transpose, flip_rows, flip_columns = _TURNS[orientation]
    turned = image_HWC.transpose(1, 0, 2) if transpose else image_HWC
    return turned[:: -1 if flip_rows else 1, :: -1 if flip_columns else 1]


def _pil_to_rgb(picture: Image.Image, depth: _Depth, background: RGB) -> U8:
    """[H, W, 3] of a loaded image, whose palette may be written to."""
    if picture.mode in _WITH_ALPHA:
        # Pillow has no direct way from La to RGBA
        straight = picture.convert("LA") if picture.mode == "La" else picture
        return _to_rgb(np.asarray(straight.convert("RGBA")), background)
    if picture.mode not in _WITHOUT_ALPHA:
        return np.asarray(picture.convert("RGB"))
    samples = np.asarray(picture)
    image = _deep_grey(samples, depth.shift) if picture.mode in _DEEP_GREY else _to_bytes(samples)
    clear_HW = _matches_key(samples, picture.info.get("transparency"), depth.key_scale)
    rgb = _to_rgb(image, background)
    return rgb if clear_HW is None else np.where(clear_HW[..., None], np.array(background, np.uint8), rgb)


def _matches_key(samples: NDArray[Any], key: Any, scale: float) -> NDArray[np.bool_] | None:
    """[H, W] where samples have the transparent colour of a tRNS chunk or a GIF; None without one. 0 is a colour."""
    if samples.ndim == 2 and isinstance(key, int):
        return np.asarray(samples == (bool(key) if samples.dtype == np.bool_ else int(key * scale)))
    if samples.ndim == 3 and isinstance(key, tuple) and len(key) == samples.shape[2]:
        return np.asarray((samples == [int(value * scale) for value in key]).all(axis=2))
    return None


def _deep_grey(samples_HW: NDArray[Any], shift: int) -> U8:
    """uint8 of 16-bit grey, which Pillow also keeps in 32-bit images."""
    low, high = int(samples_HW.min()), int(samples_HW.max())
    if low < 0 or high > 0xFFFF:
        raise MediaError(f"integer samples of {low}..{high}; 0..65535 is accepted")
    return (samples_HW >> shift).astype(np.uint8)


# Arrays and tensors


def _from_array(array: Any, layout: Layout, limits: MediaLimits) -> U8:
    if not (isinstance(array, np.ndarray) or _is_tensor(array)):
        raise MediaError(f"Pixels takes a numpy array or a torch tensor, not a {type(array).__name__}")
    if array.ndim != len(layout):
        raise MediaError(
            f"{array.ndim} dimensions; one picture has 2 or 3, and Pixels(array, layout) states their order"
        )
    extent = dict(zip(layout, map(int, array.shape), strict=True))
    if extent.get("C", 1) not in (1, 3, 4):
        found = f"{extent['C']} channels in layout {layout}"
        raise MediaError(f"{found}; 1, 3 or 4 are accepted, and Pixels(array, layout) states another layout")
    formats.check_size((extent["W"], extent["H"]), limits)
    host = _to_host(array)
    image = _to_bytes(host.transpose(1, 2, 0) if layout == "CHW" else host)
    return _to_rgb(image, limits.background)


def _to_host(array: Any) -> NDArray[Any]:
    if isinstance(array, np.ndarray):
        return np.asarray(array)
    try:
        tensor = array.detach().cpu()
        if tensor.is_floating_point() and tensor.element_size() < 4:
            tensor = tensor.float()  # numpy has no bfloat16
        return np.asarray(tensor.numpy())
    except (RuntimeError, TypeError) as error:
        raise MediaError(f"the tensor has no plain values: {error}") from error


def _to_bytes(samples: NDArray[Any]) -> U8:
    """uint8 of samples whose range follows from their dtype."""
    kind, size = samples.dtype.kind, samples.dtype.itemsize
    if kind == "b":
        return samples.astype(np.uint8) * np.uint8(255)
    if kind == "u" and size == 1:
        return samples
    if kind == "u" and size == 2:
        return (samples >> 8).astype(np.uint8)
    if kind != "f":
        raise MediaError(f"dtype {samples.dtype}; bool, uint8, uint16 and floats in [0, 1] are accepted")
    low, high = samples.min(), samples.max()
    if not (low >= 0 and high <= 1):  # NaN fails too
        raise MediaError(f"float samples of {low:g}..{high:g}; they must lie in [0, 1]")
    wide = samples.astype(np.promote_types(samples.dtype, np.float32))
    return np.asarray(np.rint(wide * 255), dtype=np.uint8)


def _to_rgb(image: U8, background: RGB) -> U8:
    """[H, W, 3] of [H, W] or [H, W, 1|3|4]; RGBA is laid over the background."""
    if image.ndim == 2:
        image = image[..., None]
    if image.shape[2] < 4:
        return np.broadcast_to(image, (*image.shape[:2], 3))
    layer = Image.fromarray(np.ascontiguousarray(image))
    canvas = Image.new("RGB", layer.size, background)
    canvas.paste(layer, mask=layer)
    return np.asarray(canvas)
