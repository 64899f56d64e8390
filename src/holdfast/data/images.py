"""From the bytes of a file to the evaluation view: uint8 pixels, upright, RGB, one size.

Whatever the file holds is turned into what a person sees: the EXIF rotation is applied, transparent parts lie on
white, 16-bit grey keeps its upper byte, of an animation the first frame is taken. After that the pixels are those of
OpenCLIP's evaluation transform before it becomes a float tensor: shorter side resized, centre crop.
"""

from __future__ import annotations

import hashlib
import io
import struct
import warnings
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from holdfast.errors import UserError
from holdfast.files import read_regular

# Larger pictures are refused before a single pixel is decoded: they are bombs, or scans that nobody meant to train on.
MAX_PIXELS = 64_000_000
# Longer files are refused before they are read. MAX_PIXELS with four channels, uncompressed, are fewer bytes.
MAX_BYTES = 256 << 20

# Formats are named, because some of Pillow's other readers start external programs.
_READ = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"}
)
# Pictures too, of formats that are not read or under names that nobody looks for: named, and never passed over.
OTHER_SUFFIXES = frozenset(
    {".heic", ".heif", ".hif", ".avifs", ".jxl", ".jxr", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx", ".apng", ".pfm"}
    | {".svg", ".eps", ".psd", ".xcf", ".tga", ".ico", ".pcx", ".xbm", ".xpm", ".sgi", ".qoi", ".dds", ".exr", ".hdr"}
    | {".dng", ".raw", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".srw", ".pef"}
)
CONVERT = "convert it to JPEG or PNG"
_HEIC = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})  # brands of the container

INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
SQUASH = "squash"  # FILTER:squash resizes both sides, whatever the shape of the picture

# What Pillow's readers raise on truncated files, broken chunks and headers that lie.
_BROKEN = (
    *(OSError, ValueError, SyntaxError, IndexError, KeyError, TypeError, EOFError, ArithmeticError, RuntimeError),
    *(MemoryError, struct.error, zlib.error, Image.DecompressionBombError),
)

# Our own limit is below the one at which Pillow warns, and is an error.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class BadImage(Exception):  # noqa: N818 - it names the thing
    """A file that is no readable picture, and why. Counted, named and skipped up to a limit."""

    kind = "unreadable"  # what it is counted as


class UnsafeName(BadImage):
    """A name within a source that points outside it."""

    kind = "unsafe name"


@cache
def formats() -> tuple[str, ...]:
    """The formats that are read; a build of Pillow may lack some.

    Pillow imports all its readers for that: not before a picture is opened.
    """
    Image.init()
    return tuple(name for name in _READ if name in Image.OPEN)


def read_picture(path: Path) -> bytes:
    """The bytes of a picture file; an OSError where it is no regular file, or a longer one than any picture."""
    return read_regular(path, MAX_BYTES)


@contextmanager
def decoding() -> Generator[None]:
    """Whatever Pillow raises on a broken picture is a :class:`BadImage`."""
    try:
        yield
    except _BROKEN as error:
        raise BadImage(f"cannot be decoded: {error}") from error


def interpolation_filter(name: str) -> Image.Resampling:
    """Pillow's filter of an interpolation: ``FILTER``, ``FILTER:EDGE`` or ``FILTER:squash``."""
    word, _, framing = name.partition(":")
    if word not in INTERPOLATIONS or (":" in name and framing != SQUASH and not _is_edge(framing)):
        raise UserError(
            f"unknown interpolation {name[:50]!r}",
            expected=f"{', '.join(INTERPOLATIONS)}; with :EDGE to crop a larger picture, with :{SQUASH} to crop none",
        )
    return INTERPOLATIONS[word]


def _is_edge(framing: str) -> bool:
    return framing.isascii() and framing.isdigit() and len(framing) <= 5 and not framing.startswith("0")


def open_image(content: bytes) -> Image.Image:
    """The picture in ``content`` with its header read and checked, and nothing decoded yet."""
    if not content:
        raise BadImage("the file is empty")
    try:
        image = Image.open(io.BytesIO(content), formats=formats())
    except Image.DecompressionBombError as error:
        raise BadImage(f"more than {MAX_PIXELS:,} pixels: refused as an image bomb") from error
    except _BROKEN as error:
        heic = content[4:8] == b"ftyp" and content[8:12] in _HEIC  # also where it is called .jpg
        raise BadImage(f"HEIC is not read: {CONVERT}" if heic else "no picture in a known format") from error
    width, height = image.size
    if width < 1 or height < 1:
        raise BadImage(f"{width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise BadImage(f"{width} x {height} pixels, more than {MAX_PIXELS:,}: refused as an image bomb")
    return image


def is_animated(image: Image.Image) -> bool:
    """True for an animation; the second view of a stereo photograph does not make it one."""
    return image.format != "MPO" and bool(getattr(image, "is_animated", False))


def to_rgb(image: Image.Image) -> Image.Image:
    """Decode to upright RGB; a truncated or broken picture is a :class:`BadImage`."""
    from PIL import ImageOps

    with decoding():
        if is_animated(image):
            image.seek(0)
        image.load()
        image = ImageOps.exif_transpose(image)
        return _convert(image)


def _convert(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # 16-bit grey, as such or widened by the reader
        values = np.asarray(image).astype(np.int64)
        return Image.fromarray((np.clip(values, 0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise BadImage("floating-point pixels, whose range is unknown")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layered = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered).convert("RGB")
    return image.convert("RGB")


def picture_id(image: Image.Image) -> str:
    """What a picture is known by: SHA-256 of its size and its upright RGB pixels, whatever file they came from.

    A picture saved again without loss is the same picture; one that was compressed again is a near copy, which the
    leak check finds (:mod:`holdfast.data.dedup`).
    """
    digest = hashlib.sha256(b"holdfast picture %d x %d\n" % image.size)
    digest.update(image.tobytes())
    return digest.hexdigest()


def evaluation_view(image: Image.Image, size: int, interpolation: str = "bicubic") -> np.ndarray:
    """Shorter side resized to ``size``, centre crop: uint8 [3, size, size].

    With ``FILTER:EDGE`` the shorter side is resized to EDGE (at least ``size``) before the crop; with ``FILTER:squash``
    both sides are resized to ``size``, and nothing is cropped.

    The rounding is torchvision's (``int`` of the longer side, ``round`` of the crop's corner), so that the pixels are
    those of OpenCLIP's transform.
    """
    width, height = image.size
    framing = interpolation.partition(":")[2]
    edge = max(size, int(framing)) if _is_edge(framing) else size
    short, long = min(width, height), int(edge * max(width, height) / min(width, height))
    if framing == SQUASH:
        short, long = width, size
    if edge * long > max(MAX_PIXELS, 4 * edge * edge):  # a line of pixels becomes a very long one
        raise BadImage(f"{width} x {height} pixels, {edge} x {long} when resized: refused as an image bomb")
    resized = (edge, long) if width == short else (long, edge)
    if resized != (width, height):
        image = image.resize(resized, interpolation_filter(interpolation))
    left, top = round((resized[0] - size) / 2.0), round((resized[1] - size) / 2.0)
    image = image.crop((left, top, left + size, top + size))
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))
