"""From bytes that came over the wire to a clean JPEG, or a reason why not."""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass

from PIL import Image, ImageOps

# Formats by their first bytes: what a server calls them is not asked. No SVG (scripts), no TIFF or EPS (old decoders).
_FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP")


class NotAnImage(Exception):  # noqa: N818 - a result, kept in the table of outcomes
    """Bytes that do not become a picture, and why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True)
class ImageLimits:
    """What a picture may be, and how it is stored."""

    max_pixels: int = 64_000_000
    min_side: int = 16  # smaller ones are spacers and tracking pixels
    longest_side: int = 512
    quality: int = 92


@dataclass(frozen=True)
class CleanImage:
    """A picture as it is stored. ``sha256`` is that of the stored JPEG."""

    jpeg: bytes
    width: int
    height: int
    source_format: str
    sha256: str


def sniff(content: bytes) -> str | None:
    """The format that the first bytes claim, or None."""
    if content[:3] == b"\xff\xd8\xff":
        return "JPEG"
    if content[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if content[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "WEBP"
    if (
        content[:2] == b"BM"
        and len(content) > 26
        and int.from_bytes(content[14:18], "little") in (12, 40, 64, 108, 124)
    ):
        return "BMP"
    return None


def clean_image(content: bytes, limits: ImageLimits) -> CleanImage:
    """Decode, turn upright, make RGB on white, shrink to the longest side, and encode anew.

    Nothing of the original file survives but its pixels: no metadata, no trailing data, no second file hidden in it.
    """
    kind = sniff(content)
    if kind is None:
        raise NotAnImage("not-an-image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of odd EXIF and of large pictures; size is checked below
            with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
                return _encoded(image, kind, limits)
    except NotAnImage:
        raise
    except Image.DecompressionBombError as error:
        raise NotAnImage("too-many-pixels") from error
    except Exception as error:  # a decoder fed with hostile bytes may raise anything; all of it means the same
        raise NotAnImage("broken-image") from error


def _encoded(image: Image.Image, kind: str, limits: ImageLimits) -> CleanImage:
    width, height = image.size
    if width * height > limits.max_pixels:
        raise NotAnImage("too-many-pixels")
    if min(width, height) < limits.min_side:
        raise NotAnImage("too-small")
    # The JPEG decoder can halve while it decodes; harmless for other formats.
    image.draft("RGB", (limits.longest_side, limits.longest_side))
    upright = ImageOps.exif_transpose(image)
    if upright.has_transparency_data:
        opaque = upright.convert("RGBA")
        white = Image.new("RGBA", opaque.size, "white")
        upright = Image.alpha_composite(white, opaque)
    small = upright.convert("RGB")
    small.thumbnail((limits.longest_side, limits.longest_side), Image.Resampling.LANCZOS)
    sink = io.BytesIO()
    small.save(sink, "JPEG", quality=limits.quality)
    jpeg = sink.getvalue()
    return CleanImage(jpeg, small.width, small.height, kind, hashlib.sha256(jpeg).hexdigest())
