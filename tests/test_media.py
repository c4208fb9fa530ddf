"""Media intake: every source gives the right pixels, or a typed error that says which picture and why."""

import base64
import io
import os
import resource
import struct
import subprocess
import sys
import threading
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps, features

from mmprefill import sources
from mmprefill.config import MediaLimits
from mmprefill.errors import MediaError, MediaForbiddenError, MediaLimitError
from mmprefill.media import Picture, Pixels, load_picture

LIMITS = MediaLimits()
WHITE = (255, 255, 255)


def rgb(source, **limits):
    return load_picture(source, MediaLimits(**limits)).pixels


def encoded(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(height, width, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, *, depth=8, colour=2, raw=b"", before=b""):
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    tail = png_chunk(b"IDAT", zlib.compress(raw)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + before + tail


def gif_frames(count, *, size=(2, 2), frame=(2, 2)):
    head = b"GIF89a" + struct.pack("<HH", *size) + b"\x80\0\0" + bytes(6)
    plain = encoded(Image.new("L", (2, 2)), "GIF")
    raster = plain[plain.index(b",\0\0\0\0") + 10 : -1]
    return head + (b"," + struct.pack("<HHHH", 0, 0, *frame) + b"\0" + raster) * count + b";"


# The record


def test_picture_is_owned_contiguous_and_frozen():
    """Pixels are [H, W, 3] uint8, C-contiguous, owned and read-only; the size is that of the array."""
    picture = load_picture(noise(5, 7)[::-1, ::-1], LIMITS)
    assert (picture.height, picture.width) == (5, 7)
    flags = picture.pixels.flags
    assert picture.pixels.dtype == np.uint8 and flags.c_contiguous and flags.owndata and not flags.writeable
    with pytest.raises(ValueError):
        picture.pixels[0, 0] = 0


def test_to_pil_gives_a_fresh_image():
    """Writing to `to_pil()` changes neither the picture nor the next `to_pil()`."""
    picture = load_picture(noise(4, 4), LIMITS)
    picture.to_pil().putpixel((0, 0), (1, 2, 3))
    assert np.array_equal(np.asarray(picture.to_pil()), picture.pixels)
    assert picture.to_pil().mode == "RGB"


def test_digest_covers_size_and_pixels():
    """Equal pixels have equal digests; another shape of the same bytes, or one other bit, has not."""
    pixels = noise(4, 6)
    first = load_picture(pixels, LIMITS)
    assert len(first.digest) == 32
    assert first == load_picture(encoded(Image.fromarray(pixels)), LIMITS)
    other = pixels.copy()
    other[3, 5, 2] ^= 1
    digests = {load_picture(p, LIMITS).digest for p in (pixels, pixels.reshape(6, 4, 3), other)}
    assert len(digests) == 3


def test_array_is_copied():
    """Changing the caller's array afterwards does not change the picture, nor does loading change the array."""
    pixels = noise(3, 3)
    picture = load_picture(pixels, LIMITS)
    pixels[:] = 0
    assert picture.pixels.any()


# The same picture from every entry


def every_entry(data, folder, name="picture"):
    path = folder / name
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    return {
        "path": path,
        "str path": str(path),
        "file URL": path.as_uri(),
        "bytes": data,
        "bytearray": bytearray(data),
        "memoryview": memoryview(data),
        "file object": io.BytesIO(data),
        "data URI": f"data:image/png;base64,{text}",
        "base64": text,
        "PIL lazy": Image.open(io.BytesIO(data)),
        "PIL path": Image.open(path),
    }


@pytest.mark.parametrize("value", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_orientation_from_every_entry(tmp_path, value, format):
    """All eight orientations equal Pillow's transpose, from every entry (A5)."""
    image = Image.fromarray(noise(16, 24))
    image.paste((250, 10, 10), (0, 0, 6, 16))
    exif = Image.Exif()
    exif[0x0112] = value
    data = encoded(image, format, exif=exif, **({"lossless": True} if format == "WEBP" else {}))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert expected.shape == ((24, 16, 3) if value >= 5 else (16, 24, 3))
    for name, source in every_entry(data, tmp_path).items():
        assert np.array_equal(rgb(source), expected), name
        if name.startswith("PIL"):
            source.close()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM",
        b"Exif\0\0",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x0f\1\7\0\xff\xff\xff\x7f\0\0\0\0" * 9,
        b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\x09\0\0\0\0\0\0\0",
    ],
)
def test_damaged_exif_is_ignored(format, exif):
    """Broken EXIF is no reason to refuse sound pixels, nor to warn."""
    image = Image.fromarray(noise(4, 5))
    assert np.array_equal(rgb(encoded(image, format, exif=exif)), rgb(encoded(image, format)))


def test_orientation_where_others_write_it():
    """Orientation in big-endian EXIF, in XMP and in ImageMagick's text chunk counts as in Pillow."""
    image = Image.fromarray(noise(4, 6))
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"
    xmp = b'<rdf:Description tiff:Orientation="6"/>'
    text = b"Raw profile type exif\0\nexif\n  32\n" + exif.hex().encode()
    rows = b"".join(b"\0" + row.tobytes() for row in noise(4, 6))
    for data in (
        encoded(image, exif=exif),
        encoded(image, "JPEG", exif=exif),
        encoded(image, "JPEG", xmp=xmp),
        encoded(image, "WEBP", lossless=True, xmp=xmp),
        png(6, 4, raw=rows, before=png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)),
        png(6, 4, raw=rows, before=png_chunk(b"tEXt", text)),
    ):
        lazy = Image.open(io.BytesIO(data))
        expected = np.asarray(ImageOps.exif_transpose(lazy).convert("RGB"))
        assert expected.shape == (6, 4, 3)
        assert np.array_equal(rgb(data), expected)


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM", "GIF", "WEBP", "JPEG", "AVIF"])
def test_accepted_formats(format):
    """Every accepted format gives what Pillow decodes."""
    if format == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    data = encoded(Image.fromarray(noise(9, 8)), format)
    assert np.array_equal(rgb(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_adobe_deflate", "packbits"])
def test_tiff_compressions(compression):
    """TIFF decodes from memory by libtiff as well as raw."""
    pixels = noise(20, 30)
    assert np.array_equal(rgb(encoded(Image.fromarray(pixels), "TIFF", compression=compression)), pixels)


# Thin pictures and layouts


@pytest.mark.parametrize("size", [(499, 1), (1, 499), (1, 1), (3, 300), (300, 3), (3, 3)])
def test_thin_pictures_keep_their_layout(size):
    """One or three pixels high: arrays and PIL images agree, nothing is transposed (A1, A2)."""
    pixels = noise(size[1], size[0])
    for source in (pixels, Image.fromarray(pixels), Pixels(pixels, "HWC"), encoded(Image.fromarray(pixels))):
        assert np.array_equal(rgb(source), pixels)
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    for source in (torch.from_numpy(planes), Pixels(planes, "CHW"), Pixels(torch.from_numpy(pixels), "HWC")):
        assert np.array_equal(rgb(source), pixels)


def test_ambiguous_shape_follows_the_stated_layout():
    """(3, 300, 3) is HWC as an array, CHW as a tensor, and what `Pixels` says otherwise (A2)."""
    values = noise(3, 300)
    assert rgb(values).shape == (3, 300, 3)
    assert rgb(torch.from_numpy(values)).shape == (300, 3, 3)
    assert rgb(Pixels(values, "CHW")).shape == (300, 3, 3)
    assert rgb(Pixels(torch.from_numpy(values), "HWC")).shape == (3, 300, 3)


@pytest.mark.parametrize(
    "source",
    [
        np.zeros((3, 40, 50), np.uint8),
        torch.zeros((40, 50, 3), dtype=torch.uint8),
        np.zeros((40, 50, 2), np.uint8),
        np.zeros((1, 40, 50, 3), np.uint8),
        np.zeros(40, np.uint8),
        np.zeros((), np.uint8),
        Pixels(np.zeros((40, 50), np.uint8), "HWC"),
        Pixels(np.zeros((40, 50, 3), np.uint8), "HW"),
        Pixels([[1, 2]], "HW"),
        Pixels(None, "HWC"),
    ],
    ids=lambda source: type(source).__name__,
)
def test_unstated_layouts_are_refused(source):
    """A shape that does not fit the layout is refused with the way to state it."""
    with pytest.raises(MediaError, match="Pixels"):
        rgb(source)


def test_unknown_layout_is_refused_when_written():
    """`Pixels` refuses a layout that it does not know."""
    with pytest.raises(ValueError, match="WHC"):
        Pixels(np.zeros((2, 2)), "WHC")


def test_grey_arrays_are_replicated():
    """[H, W], [H, W, 1], [1, H, W] and tensors of them become grey RGB (A4)."""
    grey = noise(40, 50, 1)
    expected = np.repeat(grey, 3, axis=2)
    for source in (
        grey,
        grey[..., 0],
        torch.from_numpy(grey[..., 0]),
        torch.from_numpy(grey.transpose(2, 0, 1).copy()),
    ):
        assert np.array_equal(rgb(source), expected)


def test_views_with_negative_strides():
    """Flipped and sliced views give their own pixels."""
    pixels = noise(8, 10, 4)
    assert np.array_equal(rgb(pixels[::-1, ::-2, 2::-1]), pixels[::-1, ::-2, 2::-1])
    assert np.array_equal(rgb(torch.from_numpy(pixels[..., :3]).permute(2, 0, 1)), pixels[..., :3])


# Depth and range

RAMP = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)


def big_endian_tiff(samples):
    height, width = samples.shape
    entries = [
        (256, 3, 1, width << 16),
        (257, 3, 1, height << 16),
        (258, 3, 1, 16 << 16),
        (259, 3, 1, 1 << 16),
        (262, 3, 1, 1 << 16),
        (273, 4, 1, 8),
        (277, 3, 1, 1 << 16),
        (278, 3, 1, height << 16),
        (279, 4, 1, samples.size * 2),
    ]
    raster = samples.astype(">u2").tobytes()
    directory = struct.pack(">H", len(entries)) + b"".join(struct.pack(">HHII", *e) for e in entries) + bytes(4)
    return b"MM\0*" + struct.pack(">I", 8 + len(raster)) + raster + directory


@pytest.mark.parametrize(
    "source",
    [
        RAMP,
        RAMP.astype(">u2"),
        torch.from_numpy(RAMP),
        Image.fromarray(RAMP),
        Image.fromarray(RAMP.astype(">u2")),
        Image.fromarray(RAMP.astype(np.int32)),
        encoded(Image.fromarray(RAMP)),
        encoded(Image.fromarray(RAMP), "TIFF"),
        encoded(Image.fromarray(RAMP.astype(np.int32)), "PPM"),
        big_endian_tiff(RAMP),
    ],
    ids=["array", "array >u2", "tensor", "I;16", "I;16B", "I", "PNG", "TIFF II", "PPM", "TIFF MM"],
)
def test_deep_grey_keeps_all_levels(source):
    """A 16-bit ramp keeps its 256 levels (A7)."""
    assert np.array_equal(rgb(source)[..., 1], np.arange(256, dtype=np.uint8).reshape(16, 16))


def test_deep_colour_agrees_between_array_and_file():
    """16-bit RGB from an array equals the same samples from a PNG."""
    samples = np.random.default_rng(3).integers(0, 65536, (4, 5, 3), dtype=np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    assert np.array_equal(rgb(png(5, 4, depth=16, raw=rows)), rgb(samples))


def test_twelve_bit_tiff_uses_its_range():
    """12-bit grey is scaled by its own range, not as dark 16-bit."""
    header = b"II*\0" + struct.pack("<I", 11)
    raster = bytes([0xFF, 0xF8, 0x00])  # 0xFFF, 0x800
    tags = [(256, 2), (257, 1), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1), (278, 1), (279, 3)]
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", t, 4, 1, v) for t, v in tags) + bytes(4)
    assert rgb(header + raster + directory)[0, :, 0].tolist() == [255, 128]


def test_integers_beyond_16_bit_are_refused():
    """32-bit samples have no range to scale by."""
    with pytest.raises(MediaError, match=r"0\.\.65535"):
        rgb(Image.fromarray(np.full((2, 2), 70_000, np.int32)))


def test_one_bit():
    """1-bit images are black and white, by file, PIL image and bool array."""
    bits = np.eye(9, dtype=bool)
    expected = np.repeat((bits * 255).astype(np.uint8)[..., None], 3, axis=2)
    image = Image.fromarray(bits)
    assert image.mode == "1"
    for source in (bits, torch.from_numpy(bits), image, encoded(image), encoded(image, "TIFF"), encoded(image, "PPM")):
        assert np.array_equal(rgb(source), expected)


def test_float_range_is_decided_by_dtype():
    """Floats in [0, 1] are scaled once; dark uint8 stays dark (A20)."""
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for dtype in (np.float32, np.float64):
        assert np.array_equal(rgb((levels / 255).astype(dtype))[..., 0], levels)
    assert np.array_equal(rgb(torch.from_numpy(levels) / 255)[..., 0], levels)
    assert (rgb(np.ones((4, 5, 3), np.uint8)) == 1).all()
    assert (rgb(np.ones((4, 5, 3), np.float32)) == 255).all()
    assert (rgb(torch.ones(3, 4, 5, dtype=torch.bfloat16, requires_grad=True)) == 255).all()
    assert (rgb(np.full((4, 5), 0.5, np.float16)) == 128).all()


@pytest.mark.parametrize(
    "samples",
    [
        np.full((4, 5, 3), 200.0, np.float32),
        np.full((4, 5, 3), -0.5, np.float32),
        np.full((4, 5, 3), np.nan, np.float32),
        np.array([[0.0, np.nan]]),
        np.full((4, 5), np.inf),
        np.full((4, 5), 1.0001),
        torch.full((3, 4, 5), 2.0),
        Image.fromarray(np.full((4, 5), 7.0, np.float32)),
    ],
)
def test_floats_out_of_range_are_refused(samples):
    """Floats outside [0, 1], NaN included, are refused (A20)."""
    with pytest.raises(MediaError, match=r"\[0, 1\]"):
        rgb(samples)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint32, np.complex64, object, "U1"])
def test_dtypes_without_a_range_are_refused(dtype):
    """Other dtypes say nothing about white."""
    with pytest.raises(MediaError, match="uint8"):
        rgb(np.zeros((4, 5, 3), dtype))


def test_tensors_without_values_are_refused():
    """A meta or sparse tensor is a bad picture, not a crash."""
    with pytest.raises(MediaError, match="no plain values"):
        rgb(torch.zeros(3, 4, 5, device="meta"))
    with pytest.raises(MediaError):
        rgb(torch.zeros(3, 4, 5).to_sparse())


# Colour and transparency


def test_palette_is_expanded():
    """A palette image gives colours, not indices (A9)."""
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 150, 100])
    image.putpixel((1, 0), 1)
    for source in (image, encoded(image), encoded(image, "GIF"), encoded(image, "BMP"), encoded(image, "TIFF")):
        assert rgb(source)[0].tolist() == [[10, 20, 30], [200, 150, 100]]


@pytest.mark.parametrize("background", [WHITE, (10, 20, 30), (0, 0, 0)])
def test_clear_pixels_show_the_background(background):
    """Whatever lies under alpha 0 is hidden, from every kind of transparency (A8)."""
    rgba = Image.new("RGBA", (2, 2), (200, 0, 0, 0))
    grey_alpha = Image.new("LA", (2, 2), (77, 0))
    palette = Image.new("P", (2, 2))
    palette.putpalette([200, 0, 0, 0, 0, 200])
    keyed = {
        "RGB key": encoded(Image.new("RGB", (2, 2), (255, 0, 0)), transparency=(255, 0, 0)),
        "RGB key 0": encoded(Image.new("RGB", (2, 2), 0), transparency=(0, 0, 0)),
        "L key": encoded(Image.new("L", (2, 2), 9), transparency=9),
        "L key 0": encoded(Image.new("L", (2, 2), 0), transparency=0),
        "1 key 0": encoded(Image.new("1", (2, 2), 0), transparency=0),
        "1 key 1": encoded(Image.new("1", (2, 2), 1), transparency=1),
        "I;16 key": encoded(Image.fromarray(np.full((2, 2), 4660, np.uint16)), transparency=4660),
        "I;16 key 0": encoded(Image.fromarray(np.zeros((2, 2), np.uint16)), transparency=0),
        "P key 0": encoded(palette, transparency=0),
        "P bytes": encoded(palette, transparency=b"\0\x80"),
        "GIF": encoded(palette, "GIF", transparency=0),
        "RGB16 key": png(1, 1, depth=16, raw=b"\0" + b"\x12\x34" * 3, before=png_chunk(b"tRNS", b"\x12\x34" * 3)),
        "L2 key": png(1, 1, depth=2, colour=0, raw=b"\0\x80", before=png_chunk(b"tRNS", b"\0\2")),
        "L4 key": png(1, 1, depth=4, colour=0, raw=b"\0\x50", before=png_chunk(b"tRNS", b"\0\5")),
    }
    images = {name: Image.open(io.BytesIO(data)) for name, data in keyed.items()}
    plain = {
        "RGBA": rgba,
        "RGBA PNG": encoded(rgba),
        "WEBP": encoded(rgba, "WEBP", lossless=True, exact=True),
        "RGBa": rgba.convert("RGBa"),
        "LA": grey_alpha,
        "LA PNG": encoded(grey_alpha),
        "La": grey_alpha.convert("La"),
        "PA": rgba.convert("PA"),
        "array": np.asarray(rgba),
        "tensor": torch.from_numpy(np.array(rgba)).permute(2, 0, 1),
        "float": np.asarray(rgba, np.float32) / 255,
        "16-bit": np.array(rgba, np.uint16) * 257,
    }
    for name, source in [*keyed.items(), *images.items(), *plain.items()]:
        assert (rgb(source, background=background) == background).all(), name


def test_pixels_beside_the_key_stay():
    """Only the transparent colour is replaced."""
    pixels = np.array([[[255, 0, 0], [255, 0, 1], [0, 0, 0]]], np.uint8)
    data = encoded(Image.fromarray(pixels), transparency=(255, 0, 0))
    assert rgb(data)[0].tolist() == [[255, 255, 255], [255, 0, 1], [0, 0, 0]]


def test_partial_alpha_is_mixed():
    """Half transparent red over white, from PIL and from an array alike."""
    image = Image.new("RGBA", (3, 2), (200, 0, 100, 128))
    expected = [round((c * 128 + 255 * 127) / 255) for c in (200, 0, 100)]
    for source in (image, np.asarray(image), encoded(image)):
        assert (rgb(source) == expected).all()


def test_palette_alpha_bytes():
    """A palette with an alpha per entry is mixed per entry (A8)."""
    image = Image.new("P", (3, 1))
    image.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200])
    image.putdata([0, 1, 2])
    pixels = rgb(encoded(image, transparency=b"\0\x80\xff"))
    assert pixels[0].tolist() == [[255, 255, 255], [127, 227, 127], [0, 0, 200]]


def test_cmyk():
    """CMYK becomes RGB as Pillow converts it."""
    image = Image.new("CMYK", (8, 8), (0, 255, 128, 0))
    data = encoded(image, "TIFF")
    assert rgb(image)[0, 0].tolist() == [255, 0, 127]
    assert np.array_equal(rgb(data), rgb(image))
    jpeg = encoded(image, "JPEG", quality=95)
    assert np.array_equal(rgb(jpeg), np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB")))


@pytest.mark.parametrize("mode", ["YCbCr", "HSV", "LAB", "RGBX"])
def test_other_modes(mode):
    """Other modes of Pillow are converted by Pillow."""
    image = Image.fromarray(noise(4, 4)).convert(mode)
    assert np.array_equal(rgb(image), np.asarray(image.convert("RGB")))


def test_first_frame_of_animations():
    """Animated and multi-page files give their first frame; a PIL image the frame that it stands at."""
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    for format in ("GIF", "PNG", "WEBP", "TIFF"):
        options = {"lossless": True} if format == "WEBP" else {}
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
        assert (rgb(data) == (255, 0, 0)).all(), format
    with Image.open(io.BytesIO(data)) as image:
        image.seek(1)
        assert (rgb(image) == (0, 255, 0)).all()
        assert image.tell() == 1


# PIL objects


def test_pil_images_are_not_mutated():
    """Mode, size, palette, info and pixels of the caller's image stay as they were."""
    palette = Image.new("P", (4, 4))
    palette.putpalette([200, 0, 0, 0, 0, 200])
    palette.info["transparency"] = b"\0\x80"
    rotated = Image.fromarray(noise(4, 6))
    rotated.getexif()[0x0112] = 6

    def state(image):
        return (
            image.mode,
            image.size,
            dict(image.info),
            image.tobytes(),
            image.getpalette("RGBA"),
            dict(image.getexif()),
        )

    for image in (palette, rotated, Image.new("RGBA", (3, 3), (1, 2, 3, 4)), Image.new("1", (3, 3))):
        before = state(image)
        first = rgb(image)
        assert state(image) == before
        assert np.array_equal(rgb(image), first)


def test_lazy_image_from_many_threads():
    """One lazily opened image, loaded by many threads at once, gives every one of them the same pixels (A18)."""
    data = encoded(Image.fromarray(noise(300, 300)))
    expected = noise(300, 300)
    with ThreadPoolExecutor(6) as pool:
        for _ in range(8):
            image = Image.open(io.BytesIO(data))
            barrier = threading.Barrier(6)

            def load(_, image=image, barrier=barrier):
                barrier.wait()
                return rgb(image)

            assert all(np.array_equal(pixels, expected) for pixels in pool.map(load, range(6)))
    assert not sources._locks


def test_closed_and_truncated_pil_images_are_typed_errors():
    """A lazy image whose file is closed or cut off is a MediaError."""
    data = encoded(Image.fromarray(noise(40, 40)))
    closed = Image.open(io.BytesIO(data))
    closed.close()
    cut = Image.open(io.BytesIO(data[: len(data) // 2]))
    for image in (closed, cut):
        with pytest.raises(MediaError, match="PIL image"):
            rgb(image)


# Damage, and what is no picture


def test_truncated_files_are_bad_pictures():
    """Every format cut in the middle is a MediaError of that item, not a grey picture (A11)."""
    image = Image.fromarray(noise(64, 64))
    for format in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM", "WEBP"):
        data = encoded(image, format)
        with pytest.raises(MediaError, match=r"^request 'r1', picture 2 .*" + format) as caught:
            load_picture(data[: len(data) // 2], LIMITS, item="request 'r1', picture 2")
        assert not isinstance(caught.value, MediaLimitError), format
    with pytest.raises(MediaError, match="truncated"):
        rgb(encoded(image, "JPEG")[:-128])
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><p>403", "HTML"),
        (b"\xef\xbb\xbf  <HTML>", "HTML"),
        (b'{"error": 1}', "JSON"),
        (b"just text", "text"),
        (b"%PDF-1.7", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "PostScript"),
        (b"8BPS\0\1", "Photoshop"),
        (b"\0\0\1\0\1\0", "ICO"),
        (b"PK\3\4", "ZIP"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
        (b"\0\1\2\3\xff", "unknown"),
    ],
)
def test_no_picture_says_what_it_looks_like(tmp_path, data, kind):
    """The message has the item, the source, the byte count, the kind of the first bytes and what is accepted (A12)."""
    path = tmp_path / "photo.jpg"
    path.write_bytes(data)
    with pytest.raises(MediaError, match=kind) as caught:
        load_picture(path, LIMITS, item="request 'r1', picture 2")
    message = str(caught.value)
    assert message.startswith(f"request 'r1', picture 2 (path '{path}')")
    assert f"{len(data)} bytes" in message and "JPEG" in message


@pytest.mark.parametrize("source", [None, [], [None], {}, 7, 1.5, object(), True, Picture])
def test_wrong_types_are_typed_errors(source):
    """None, an empty list and other types name the item and what is accepted (A22)."""
    with pytest.raises(MediaError, match=r"^row 5 \(.*accepted: a path, bytes"):
        load_picture(source, LIMITS, item="row 5")


@pytest.mark.parametrize(
    "source",
    [
        np.zeros((0, 10, 3), np.uint8),
        np.zeros((10, 0)),
        torch.zeros(3, 0, 5),
        Image.new("RGB", (0, 5)),
        png(0, 4),
        b"P6 0 4 255 ",
    ],
    ids=["array", "2-D", "tensor", "PIL", "PNG", "PPM"],
)
def test_empty_pictures_are_typed_errors(source):
    """A side of zero is an error of the item (A22)."""
    with pytest.raises(MediaError, match=r"^row 5"):
        load_picture(source, LIMITS, item="row 5")


# Text


def test_base64_shapes():
    """Prefix or none, line breaks, missing padding, URL-safe alphabet, upper-case MIME: all the same picture (A14)."""
    pixels = noise(7, 9, seed=4)
    data = encoded(Image.fromarray(pixels))
    data += bytes(-len(data) % 3 + 1)  # what follows the end is no part of a PNG, but makes the base64 need padding
    plain, url_safe = base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode()
    assert "+" in plain and "/" in plain and "=" in plain
    wrapped = base64.encodebytes(data).decode()
    escaped = plain.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    shapes = [
        plain,
        wrapped,
        wrapped.replace("\n", "\r\n"),
        plain.rstrip("="),
        url_safe,
        url_safe.rstrip("="),
        f"\n{plain}\n",
    ]
    heads = ["data:image/png;base64,", "DATA:IMAGE/PNG;BASE64,", "data:;base64,", "data:image/png;charset=x;base64,"]
    for source in [*shapes, *(head + shape for head in heads for shape in shapes), heads[0] + escaped]:
        assert np.array_equal(rgb(source), pixels), source[:60]
    from_percent = "data:image/png," + "".join(f"%{byte:02X}" for byte in data)
    assert np.array_equal(rgb(from_percent), pixels)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_bare_base64_of_every_format(format):
    """Bare base64 is known by its content; a JPEG's starts like an absolute path (A14)."""
    data = encoded(Image.fromarray(noise(7, 9)), format)
    assert np.array_equal(rgb(base64.b64encode(data).decode(), allowed_roots=()), rgb(data))


@pytest.mark.parametrize(
    "uri",
    [
        "data:image/png;base64,",
        "data:image/png;base64,====",
        "data:image/png;base64,\n",
        "data:,",
        "data:image/png;base64",
        "data:",
        "data:image/png;base64,abcde",
        "data:image/png;base64,ab=cdefg",
        "data:image/png;base64,äöü",
        "data:text/html;base64,PGh0bWw+",
        "data:image/png;base64,%%%",
    ],
)
def test_bad_data_uris(uri):
    """An empty, broken or foreign payload is refused early, and never read as a path (A14)."""
    with pytest.raises(MediaError, match=r"^picture \(data URI"):
        rgb(uri)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "What is this?",
        "no/such/file.png",
        "photo",
        "iVBORw0K",
        "x" * 5000,
        "a\0b",
        "~/x.png",
        "aGVsbG8gd29ybGQgaGVsbG8gd29ybGQgaGVsbG8gd29ybGQ=",
    ],
)
def test_text_that_is_nothing_says_so(text):
    """A str that is no URL, data URI, path or base64 is refused in those words."""
    if text == "":
        with pytest.raises(MediaError):
            rgb(text)
        return
    with pytest.raises(MediaError, match="no such file, and neither a URL, nor a data URI, nor base64") as caught:
        rgb(text)
    assert len(str(caught.value)) < 500


def test_payloads_stay_out_of_messages():
    """Neither a message nor `source` carries a payload, a query or a password."""
    data = encoded(Image.fromarray(noise(9, 9)))
    payload = base64.b64encode(data).decode()
    for source in (payload, f"data:image/png;base64,{payload}"):
        assert payload[40:80] not in load_picture(source, LIMITS).source
    with pytest.raises(MediaForbiddenError) as caught:
        rgb("https://user:secret@example.org/a.png?signature=secret#secret")
    assert "secret" not in str(caught.value) and "example.org/a.png" in str(caught.value)


@pytest.mark.parametrize("scheme", ["ftp", "s3", "gopher", "javascript", "HTTPX"])
def test_other_schemes_are_refused(scheme):
    """Only http, https, file and data are schemes."""
    with pytest.raises(MediaForbiddenError, match=scheme):
        rgb(f"{scheme}://example.org/a.png")


def test_urls_are_off_by_default():
    """Without `allow_urls` nothing is fetched (I1)."""
    with pytest.raises(MediaForbiddenError, match="allow_urls"):
        rgb("https://example.org/a.png")
    with pytest.raises(MediaForbiddenError, match="allow_urls"):
        rgb("HTTP://EXAMPLE.ORG/a.png")


# Files


def small_png(path):
    path.write_bytes(encoded(Image.new("RGB", (2, 2), (1, 2, 3))))
    return path


def test_two_thousand_files_with_256_descriptors(tmp_path):
    """Files are closed before their picture is returned (A17)."""
    paths = [small_png(tmp_path / f"{i}.png") for i in range(20)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        before = len(os.listdir("/proc/self/fd"))
        pictures = [load_picture(paths[i % 20], LIMITS) for i in range(2000)]
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(set(pictures)) == 1


def test_allowed_roots(tmp_path):
    """Under a root: yes. Beside it, above it, by a link out of it, or by a prefix of its name: no."""
    root, outside = tmp_path / "root", tmp_path / "root2"
    root.mkdir()
    outside.mkdir()
    inside, secret = small_png(root / "a.png"), small_png(outside / "b.png")
    (root / "out.png").symlink_to(secret)
    (root / "outdir").symlink_to(outside)
    (root / "in.png").symlink_to(inside)
    (tmp_path / "link").symlink_to(root)
    limits = {"allowed_roots": (tmp_path / "link",)}
    for path in (
        inside,
        str(inside),
        inside.as_uri(),
        root / "in.png",
        tmp_path / "link" / "a.png",
        root / ".." / "root" / "a.png",
    ):
        assert rgb(path, **limits).shape == (2, 2, 3)
    for path in (
        secret,
        str(secret),
        secret.as_uri(),
        root / "out.png",
        root / "outdir" / "b.png",
        root / ".." / "root2" / "b.png",
    ):
        with pytest.raises(MediaForbiddenError, match="allowed_roots"):
            rgb(path, **limits)
    with pytest.raises(MediaForbiddenError, match="allowed_roots"):
        rgb(inside, allowed_roots=())


def test_roots_do_not_tell_what_exists(tmp_path):
    """Outside the roots a missing and an existing file get the same answer."""
    (tmp_path / "root").mkdir()
    answers = []
    for path in (small_png(tmp_path / "a.png"), tmp_path / "b.png"):
        with pytest.raises(MediaForbiddenError) as caught:
            rgb(path, allowed_roots=(tmp_path / "root",))
        answers.append(str(caught.value).replace("b.png", "a.png"))
    assert answers[0] == answers[1]


def test_swapped_folder_is_noticed(tmp_path, monkeypatch):
    """A folder that becomes a link between the check and the opening does not lead out of the root."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "sub").mkdir(parents=True)
    outside.mkdir()
    small_png(root / "sub" / "a.png")
    small_png(outside / "a.png")
    real_open = os.open

    def swapping_open(path, flags):
        (root / "sub").rename(root / "old")
        (root / "sub").symlink_to(outside)
        return real_open(path, flags)

    monkeypatch.setattr(os, "open", swapping_open)
    with pytest.raises(MediaForbiddenError, match="replaced"):
        rgb(root / "sub" / "a.png", allowed_roots=(root,))


def test_only_regular_files(tmp_path):
    """A folder, a pipe, a socket or a device is refused at once; nothing hangs."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero", "/dev/tty", "file:///dev/zero", str(tmp_path)):
        with pytest.raises(MediaForbiddenError, match="regular file"):
            rgb(path)


def test_file_urls():
    """A file URL is a path on this machine and nothing else."""
    for url in ("file://host/etc/x.png", "file:relative.png", "file://../x.png"):
        with pytest.raises(MediaForbiddenError, match="absolute path"):
            rgb(url)
    with pytest.raises(MediaError, match="no such file"):
        rgb("file:///no/such/file.png")


def test_missing_and_unreadable_paths(tmp_path):
    """A missing file, a file as a folder, a loop of links: errors that name the path."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "none.png", small_png(tmp_path / "a.png") / "b", tmp_path / "loop", tmp_path / ("x" * 400)):
        with pytest.raises(MediaError, match="path"):
            rgb(path)


def test_file_objects(tmp_path):
    """A file object is read from its start and left where it was; text files and failing ones are typed errors."""
    data = encoded(Image.fromarray(noise(5, 5)))
    buffer = io.BytesIO(data)
    buffer.seek(7)
    assert np.array_equal(rgb(buffer), noise(5, 5)) and buffer.tell() == 7

    class Stream:
        def __init__(self):
            self.rest = io.BytesIO(data)

        def read(self, size):
            return self.rest.read(min(size, 10))

    assert np.array_equal(rgb(Stream()), noise(5, 5))

    class Broken:
        def read(self, size):
            raise RuntimeError("no")

    closed = io.BytesIO(data)
    closed.close()
    for source in (io.StringIO("text"), Broken(), closed):
        with pytest.raises(MediaError, match="file object"):
            rgb(source)


# Limits


def test_limits_come_before_the_raster():
    """A 65-byte header of 144 or 400 megapixels is refused before anything is decoded, without a warning (A16, I7)."""
    before = Image.MAX_IMAGE_PIXELS
    for side in (12_000, 20_000, 2**31 - 1):
        for source in (png(side, side), gif_frames(1, size=(min(side, 65535),) * 2)):
            with pytest.raises(MediaLimitError, match="max_pixels"):
                rgb(source)
    assert before == Image.MAX_IMAGE_PIXELS


def test_bombs_under_a_raised_limit():
    """Where our limit allows more than Pillow's own does, Pillow's limit neither warns nor stops a PNG."""
    rows = (b"\0" + bytes(12_000 // 8)) * 7_500
    assert rgb(png(12_000, 7_500, depth=1, colour=0, raw=rows), max_pixels=10**9).shape == (7_500, 12_000, 3)


@pytest.mark.parametrize(
    "data",
    [
        gif_frames(1, size=(2, 2), frame=(10_000, 10_000)),
        b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\x7f\0" * 2 + bytes(8),
        b"RIFF\x1e\0\0\0WEBPVP8L\x0a\0\0\0\x2f" + b"\xff\xff\xff\x0f" + bytes(8),
        b"RIFF\x1e\0\0\0WEBPVP8 \x0a\0\0\0\0\0\0\x9d\x01\x2a\xff\x3f\xff\x3f" + bytes(8),
        b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, 30_000, 30_000, 1, 24, 0, 0, 0, 0, 0, 0),
        b"P6 30000 30000 255\n",
    ],
    ids=["GIF frame", "VP8X", "VP8L", "VP8", "BMP", "PPM"],
)
def test_declared_size_of_every_format(data):
    """The size that a header declares is refused whatever the format, also of a frame beyond the screen."""
    with pytest.raises(MediaLimitError, match="max_pixels"):
        rgb(data)


def test_tiff_tiles_are_limited():
    """A small TIFF with a huge tile would have libtiff allocate the tile."""
    tags = [
        (256, 8),
        (257, 8),
        (258, 8),
        (259, 8),
        (262, 1),
        (277, 1),
        (322, 30_000),
        (323, 30_000),
        (324, 8),
        (325, 8),
    ]
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", t, 4, 1, v) for t, v in tags) + bytes(4)
    with pytest.raises(MediaLimitError, match="tiles"):
        rgb(b"II*\0" + struct.pack("<I", 8) + directory)


def test_bytes_sides_and_pixels():
    """Each limit is exact, and named in the message, for files, arrays, tensors and PIL images alike."""
    pixels = noise(10, 20)
    data = encoded(Image.fromarray(pixels))
    assert rgb(data, max_bytes=len(data), max_pixels=200, max_side=20).shape == (10, 20, 3)
    text = base64.b64encode(data).decode()
    for source in (data, io.BytesIO(data), f"data:image/png;base64,{text}", text):
        with pytest.raises(MediaLimitError, match="max_bytes"):
            rgb(source, max_bytes=len(data) - 1)
    for source in (data, pixels, torch.from_numpy(pixels.transpose(2, 0, 1).copy()), Image.fromarray(pixels)):
        with pytest.raises(MediaLimitError, match="max_pixels"):
            rgb(source, max_pixels=199)
        with pytest.raises(MediaLimitError, match="max_side"):
            rgb(source, max_side=19)


def test_large_files_are_not_read(tmp_path):
    """A sparse file of a terabyte is refused by its size; an endless stream by what was read."""
    with (tmp_path / "big.png").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(MediaLimitError, match="max_bytes"):
        rgb(tmp_path / "big.png")
    with open("/dev/zero", "rb") as endless, pytest.raises(MediaLimitError, match="max_bytes"):
        rgb(endless, max_bytes=1000)
    with pytest.raises(MediaLimitError, match="max_bytes"):
        rgb("data:image/png;base64," + "A" * 10_000, max_bytes=1000)


def tiff_pages(count, *, loop=False):
    body = bytearray(b"II*\0" + struct.pack("<I", 8))
    for page in range(count):
        tags = [(256, 1), (257, 1), (258, 8), (259, 1), (262, 1), (273, 4), (277, 1), (278, 1), (279, 1)]
        following = len(body) + 2 + 12 * len(tags) + 4
        last = page == count - 1
        body += struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", t, 4, 1, v) for t, v in tags)
        body += struct.pack("<I", (8 if loop else 0) if last else following)
    return bytes(body)


def test_frames_and_pages_are_counted_within_bounds():
    """Frames are limited in GIF, TIFF, APNG and WebP; 10^5 frames cost as little as the limit does."""
    frames = [Image.new("RGB", (2, 2), (50 * i, 0, 255 - 50 * i)) for i in range(5)]
    for format in ("GIF", "TIFF", "PNG", "WEBP"):
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
        assert rgb(data, max_frames=5).shape == (2, 2, 3)
        with pytest.raises(MediaLimitError, match="max_frames"):
            rgb(data, max_frames=4)
    assert rgb(gif_frames(1000)).shape == (2, 2, 3)
    assert rgb(tiff_pages(1000)).shape == (1, 1, 3)
    for data in (gif_frames(100_000), tiff_pages(2000), tiff_pages(3, loop=True)):
        with pytest.raises(MediaLimitError, match="max_frames"):
            rgb(data)


def test_files_of_a_million_segments():
    """Headers chopped into absurdly many parts end by a limit, not after minutes."""
    for data in (
        b"\xff\xd8" + b"\xff\xe1\0\2" * 300_000,
        b"\xff\xd8\xff" + b"\xff\xd0\xff\xe1\0\2" * 300_000,
        png(2, 2, before=png_chunk(b"tEXt", b"k\0") * 300_000),
        png(2, 2, raw=bytes(14), before=png_chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(900_000))) * 300),
        gif_frames(1)[:-2] + b"\1\0" * 1_000_000,
        b"GIF89a\2\0\2\0\0\0\0" + b"!\xff\0" * 1_000_000,
    ):
        with pytest.raises(MediaError):
            rgb(data)


def test_jpeg_scans_are_limited():
    """A progressive JPEG whose last scan is repeated a thousand times is refused; each would pass over all pixels."""
    data = encoded(Image.new("RGB", (64, 64)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    assert rgb(data).shape == (64, 64, 3)
    with pytest.raises(MediaLimitError, match="scans"):
        rgb(data[:last] + data[last:-2] * 1000 + data[-2:])


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_text_and_profile_bombs(kind):
    """A compressed chunk that unfolds to 200 MB is refused or skipped, not unfolded."""
    bomb = zlib.compress(bytes(200_000_000), 1)
    fields = {b"zTXt": b"k\0\0", b"iTXt": b"k\0\1\0\0\0", b"iCCP": b"k\0\0"}[kind]
    try:
        pixels = rgb(png(1, 1, raw=b"\0\1\2\3", before=png_chunk(kind, fields + bomb)))
    except MediaError:
        return
    assert pixels.tolist() == [[[1, 2, 3]]]


# Hostile bytes


def seeds():
    image = Image.fromarray(noise(12, 10))
    exif = Image.Exif()
    exif[0x0112] = 6
    yield from (encoded(image, format, exif=exif) for format in ("JPEG", "PNG", "WEBP", "TIFF"))
    yield from (encoded(image, format) for format in ("GIF", "BMP", "PPM"))
    yield encoded(image, "TIFF", compression="tiff_lzw")
    yield encoded(image.convert("P"), transparency=b"\0\x80")
    yield encoded(image, "GIF", save_all=True, append_images=[image.rotate(90)])
    yield gif_frames(3)


def test_hostile_bytes_give_a_picture_or_a_media_error():
    """Flipped, cut and stretched files end in a picture or a MediaError, with all warnings as errors."""
    random = np.random.default_rng(11)
    for seed in seeds():
        for _ in range(120):
            data = bytearray(seed)
            for _ in range(random.integers(1, 6)):
                data[random.integers(0, min(len(data), 200 if random.random() < 0.7 else len(data)))] = random.integers(
                    0, 256
                )
            if random.random() < 0.3:
                del data[random.integers(8, len(data)) :]
            try:
                picture = load_picture(bytes(data), MediaLimits(max_pixels=1_000_000))
            except MediaError:
                continue
            assert picture.pixels.shape[2] == 3


# What the module leaves alone


def test_no_heavy_imports():
    """Importing media loads neither torch nor transformers."""
    code = "import sys, mmprefill.media; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


def test_warning_filters_are_left_alone():
    """Loading changes no warning filter, which all threads share."""
    before = list(warnings.filters)
    rgb(encoded(Image.new("P", (2, 2)), transparency=b"\0\1"))
    assert warnings.filters == before
