from __future__ import annotations

import io

import pytest
from multidict import CIMultiDict
from PIL import Image

from holdfast.data.retrieve.images import ImageLimits, NotAnImage, clean_image, sniff
from holdfast.data.retrieve.net import Refused, checked_url, is_public, opts_out


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.8.8.8",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.0.1",
            "169.254.169.254",
            "100.64.1.1",
        ),
        *("224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.7", "198.18.0.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2002:a00:1::", "::127.0.0.1"),
        "not an address",
    ],
)
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("gopher://a.test/", "scheme"),
        ("http://a.test\r\nX: y/", "bad-url"),
        ("http://a.test/" + "x" * 5000, "bad-url"),
        ("http://a.test:22/", "port"),
        ("http://a.test:99999/", "bad-url"),
        ("http://[fe80::1]/", "private-address"),
        ("http:///x", "bad-url"),
        ("http://u@a.test/", "credentials-in-url"),
    ],
)
def test_links_that_are_refused(link: str, reason: str) -> None:
    with pytest.raises(Refused) as refused:
        checked_url(link)
    assert refused.value.reason == reason


def test_links_that_are_followed() -> None:
    assert str(checked_url(" https://a.test/b c.jpg ")) == "https://a.test/b%20c.jpg"
    assert str(checked_url("../x.jpg", "http://a.test/b/c/d.jpg")) == "http://a.test/b/x.jpg"
    assert checked_url("//b.test/x.jpg", "https://a.test/").scheme == "https"
    assert checked_url("http://a.test:8080/").port == 8080


@pytest.mark.parametrize(
    ("header", "out"),
    [
        ("noai", True),
        ("index, follow, NoImageAI", True),
        ("noindex", True),
        ("none", True),
        ("holdfast: noai", True),
        ("otherbot: noindex, noai", False),
        ("otherbot: noindex, holdfast: noai", True),
        ("max-image-preview: large", False),
        ("unavailable_after: 25 Jun 2010 15:00:00 PST, noai", True),
        ("all", False),
        ("", False),
    ],
)
def test_opting_out(header: str, out: bool) -> None:
    assert opts_out(CIMultiDict([("X-Robots-Tag", header)])) is out


def test_every_header_line_counts() -> None:
    assert opts_out(CIMultiDict([("x-robots-tag", "otherbot: noindex"), ("X-ROBOTS-TAG", "noai")]))
    assert opts_out(CIMultiDict([("tdm-reservation", "1")]))
    assert not opts_out(CIMultiDict([("tdm-reservation", "0")]))


def _encoded(image: Image.Image, form: str, **given: object) -> bytes:
    sink = io.BytesIO()
    image.save(sink, form, **given)
    return sink.getvalue()


def test_pictures_are_decoded_and_encoded_anew() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    exif[0x010E] = "where the photographer lives"
    photo = _encoded(Image.new("RGB", (60, 40), "red"), "JPEG", exif=exif) + b"a zip file behind the picture"
    clean = clean_image(photo, ImageLimits())
    with Image.open(io.BytesIO(clean.jpeg)) as image:
        assert (image.size, image.mode, image.format) == ((40, 60), "RGB", "JPEG")
        assert not image.getexif()
    assert b"photographer" not in clean.jpeg
    assert b"zip file" not in clean.jpeg


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP", "BMP", "JPEG"])
def test_formats(form: str) -> None:
    content = _encoded(Image.new("RGB", (40, 40), "blue"), form)
    assert sniff(content) == form
    clean = clean_image(content, ImageLimits(longest_side=32))
    assert (clean.source_format, clean.width) == (form, 32)


def test_transparent_parts_lie_on_white() -> None:
    content = _encoded(Image.new("RGBA", (40, 40), (255, 0, 0, 0)), "PNG")
    with Image.open(io.BytesIO(clean_image(content, ImageLimits()).jpeg)) as image:
        assert min(image.getpixel((20, 20))) > 250


def test_bombs_and_rubbish_are_refused() -> None:
    limits = ImageLimits(max_pixels=10_000)
    cases = {
        "too-many-pixels": _encoded(Image.new("1", (200, 200)), "PNG"),
        "too-small": _encoded(Image.new("RGB", (1, 1)), "GIF"),
        "broken-image": _encoded(Image.effect_noise((60, 60), 50), "PNG")[:900],
        "not-an-image": b"%PDF-1.4",
    }
    for reason, content in cases.items():
        with pytest.raises(NotAnImage) as problem:
            clean_image(content, limits)
        assert problem.value.reason == reason
    header = bytearray(_encoded(Image.new("RGB", (20, 20)), "PNG"))
    header[16:24] = (1 << 30).to_bytes(4, "big") * 2  # a header that promises an exabyte of pixels
    with pytest.raises(NotAnImage):
        clean_image(bytes(header), ImageLimits())
    for content in (b"", b"\xff\xd8\xff", b"GIF89a", b"RIFF\0\0\0\0WEBP", b"BM" + b"\0" * 60, b"\x89PNG\r\n\x1a\n"):
        with pytest.raises(NotAnImage):
            clean_image(content, ImageLimits())
