from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.transform import image_transform
from pictures import encode, picture
from PIL import Image

from holdfast.data import images
from holdfast.data.images import BadImage, evaluation_view, open_image, to_rgb
from holdfast.errors import UserError


def decode(content: bytes) -> np.ndarray:
    return np.asarray(to_rgb(open_image(content)))


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    size=st.integers(8, 64),
    interpolation=st.sampled_from(["bicubic", "bilinear"]),
)
def test_view_has_the_pixels_of_openclip(width: int, height: int, size: int, interpolation: str) -> None:
    image = picture(width * 100 + height, width, height)
    transform = image_transform(size, is_train=False, mean=(0, 0, 0), std=(1, 1, 1), interpolation=interpolation)
    expected = (transform(image) * 255).round().to(dtype=__import__("torch").uint8).numpy()
    assert np.array_equal(evaluation_view(image, size, interpolation), expected)


def test_exif_rotation_is_applied() -> None:
    image = picture(1, 40, 30)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    turned = decode(encode(image, "PNG", exif=exif))
    assert np.array_equal(turned, np.asarray(image.transpose(Image.Transpose.ROTATE_270)))


def test_sixteen_bit_grey_keeps_the_upper_byte() -> None:
    values = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    pixels = decode(encode(Image.fromarray(values), "PNG"))
    assert np.array_equal(pixels[..., 0], (values >> 8).astype(np.uint8))
    assert np.array_equal(pixels[..., 0], pixels[..., 2])


def test_transparent_parts_lie_on_white() -> None:
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert (decode(encode(image, "PNG")) == 255).all()


def test_palette_and_cmyk_become_rgb() -> None:
    image = Image.new("RGB", (16, 16), (200, 30, 40))
    palette = decode(encode(image.convert("P", palette=Image.Palette.ADAPTIVE), "PNG"))
    cmyk = decode(encode(image.convert("CMYK"), "JPEG", quality=95))
    assert np.abs(palette.astype(int) - np.asarray(image).astype(int)).max() <= 4
    assert np.abs(cmyk.astype(int) - np.asarray(image).astype(int)).max() <= 12


def test_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    content = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert images.is_animated(open_image(content))
    assert tuple(decode(content)[0, 0]) == (255, 0, 0)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"not a picture", "no picture"),
        (encode(picture(0, 200, 200))[:-400], "decoded"),
        (encode(picture(0), "PNG")[:60], "decoded"),
    ],
)
def test_broken_files_say_why(content: bytes, why: str) -> None:
    with pytest.raises(BadImage, match=why):
        to_rgb(open_image(content))


def test_bomb_is_refused_before_decoding() -> None:
    buffer = io.BytesIO()
    Image.new("1", (9000, 9000)).save(buffer, "PNG")
    assert len(buffer.getvalue()) < 20_000
    with pytest.raises(BadImage, match="bomb"):
        open_image(buffer.getvalue())
    huge = bytearray(encode(Image.new("1", (8, 8)), "BMP"))
    huge[18:26] = (60_000).to_bytes(4, "little") * 2  # a header that claims more than Pillow itself allows
    with pytest.raises(BadImage, match="bomb"):
        open_image(bytes(huge))


def test_postscript_is_not_opened() -> None:
    with pytest.raises(BadImage, match="known format"):
        open_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")


def test_unknown_interpolation() -> None:
    with pytest.raises(UserError, match="bicubic"):
        evaluation_view(picture(0), 8, "cubic")
