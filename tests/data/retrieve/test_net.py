from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import random
import socket
from collections.abc import Callable

import pytest
from multidict import CIMultiDict
from PIL import Image

from holdfast.data.retrieve.images import ImageLimits, NotAnImage, clean_image, sniff
from holdfast.data.retrieve.net import PublicResolver, Refused, checked_url, host_of, is_public, opts_out


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
        *(
            "::ffff:127.0.0.1%lo",
            "64:ff9b::10.0.0.1%eth0",
            "2002:7f00:1::%1",
            "64:ff9b:1::7f00:1",
            "::ffff:0:127.0.0.1",
        ),
        *("2001:0:7f00:1::", "2001:0:808:808::80ff:fffe", "fec0::1"),  # Teredo: server private, client private
        "not an address",
    ],
)
def test_private_addresses(address: str, tried: Callable[..., None]) -> None:
    tried("addresses")
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


# Spellings that some resolver or HTTP library takes for an address. None of them is how an address is printed.
DISGUISED = [
    *("2130706433", "0", "1", "127.1", "127.0.1", "1.2.3", "0177.0.0.1", "012.0.0.1", "127.0.0.01", "08.8.8.8"),
    *("0x7f.1", "0x7f000001", "0X7F000001", "0x7f.0x0.0x0.0x1", "127.0.0.0x1", "0x", "0x.0x.0x.0x", "017700000001"),
    *("127.0.0.1.", "127.0.0.1..", "8.8.8.8.", "2130706433.", "127.1.", "256.256.256.256", "1.2.3.4.5", "4294967296"),
    *(
        "１２７.０.０.１",
        "127。0。0。1",
        "127．0．0．1",
        "127｡0｡0｡1",
        "①②⑦.0.0.1",
        "８.８.８.８",
        "127.0.0.１",
        "𝟏𝟐𝟕.0.0.1",
        "٣.0.0.1",
    ),
    *(
        "127%2e0%2e0%2e1",
        "%31%32%37.0.0.1",
        "127.0.0.1%00",
        "127.0.0.1%20",
        "8.8.8.8%2e",
        "%6c%6f%63%61%6c%68%6f%73%74",
    ),
    *("[::1%25lo]", "[::1%lo]", "[::ffff:127.0.0.1%25lo]", "[64:ff9b::7f00:1%251]", "[2606:2800:220:1::1%25eth0]"),
    *("[v1.127.0.0.1]", "[127.0.0.1]", "[::1", "::1", "127.0.0.1\\.a.test", "a.test\\127.0.0.1", "127.0.0.1 .a.test"),
]


@pytest.mark.parametrize("allow_private", [False, True])
@pytest.mark.parametrize("host", DISGUISED)
def test_an_address_in_disguise_is_refused(host: str, allow_private: bool, tried: Callable[..., None]) -> None:
    for link, base in itertools.product((f"http://{host}/x.jpg", f"https://{host}:8080"), (None, "http://a.test/b")):
        tried("addresses")
        with pytest.raises(Refused) as refused:
            checked_url(link, base, allow_private=allow_private)
        assert refused.value.reason == "bad-url"
    with pytest.raises(Refused):
        checked_url(f"//{host}/x.jpg", "http://a.test/b", allow_private=allow_private)


def test_every_way_to_write_loopback_is_refused(tried: Callable[..., None]) -> None:
    """All that ``inet_aton`` reads as 127.0.0.1: one to four numbers, each decimal, octal or hexadecimal."""
    spellings = (str, lambda number: f"0{number:o}", lambda number: f"0x{number:x}", lambda number: f"0X{number:08X}")
    count = 0
    for numbers in ([127, 0, 0, 1], [127, 0, 1], [127, 1], [2130706433]):
        for chosen in itertools.product(spellings, repeat=len(numbers)):
            host = ".".join(spell(number) for spell, number in zip(chosen, numbers, strict=True))
            assert socket.inet_aton(host) == bytes([127, 0, 0, 1])
            with pytest.raises(Refused):
                checked_url(f"http://{host}/")
            count += 1
    tried("addresses", count)


@pytest.mark.parametrize(
    "host",
    [
        *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:7f00:1]", "[::127.0.0.1]", "[64:ff9b::127.0.0.1]"),
        *("[2002:7f00:1::]", "[2002:a9fe:a9fe::1]", "[::1]", "[::]", "[fe80::1]", "127.0.0.1", "0.0.0.0", "10.0.0.1"),
    ],
)
def test_a_private_address_that_is_written_out_is_refused(host: str, tried: Callable[..., None]) -> None:
    for link, base in ((f"http://{host}/", None), (f"//{host}:8080/x", "https://a.test/")):
        tried("addresses")
        with pytest.raises(Refused) as refused:
            checked_url(link, base)
        assert refused.value.reason == "private-address"
    checked_url(f"http://{host}/", allow_private=True)


@pytest.mark.parametrize("host", ["2130706433", "127.1", "0x7f.1", "012.0.0.1", "8.8.8.8."])
def test_no_number_reaches_the_system_s_resolver(host: str, tried: Callable[..., None]) -> None:
    """Whatever an HTTP library makes of a link: a number in place of a name is not looked up."""
    tried("addresses")
    asked: list[str] = []

    def lookup(name: str, port: int, family: int) -> list[tuple[int, str]]:
        asked.append(name)
        return [(socket.AF_INET, "93.184.216.34")]

    for allow_private in (False, True):
        with pytest.raises(Refused):
            asyncio.run(PublicResolver(allow_private=allow_private, lookup=lookup).resolve(host, 80))
    assert not asked


@pytest.mark.parametrize(
    "host",
    [
        *("8.8.8.8", "93.184.216.34", "[2606:2800:220:1::1]", "[::ffff:8.8.8.8]", "a.test", "a.test.", "A.TEST"),
        *("1.a.test", "8.8.8.8.nip.test", "0x7f.test", "3com.test", "a_b.test", "a--b.test", "bücher.test", "雾.test"),
        *("xn--bcher-kva.test", "1e3", "v1.2a", "0xg", "deadbeef", "localhost"),
    ],
)
def test_names_and_canonical_addresses_are_let_through(host: str) -> None:
    checked_url(f"http://{host}/x.jpg")
    assert checked_url(f"http://{host}:8080/x.jpg").port == 8080


def test_no_link_whatever_makes_a_parser_fall_over(tried: Callable[..., None]) -> None:
    """One link that raises something else would end every fetch of its folder."""
    pieces = ["http://", "//", "[", "]", "::1", "127.0.0.1", "%25", "xn--", "a.test", "@", ":80", "/x", "?q", "#f"]
    pieces += [
        "0x7f",
        "é",
        "雾",
        "１",
        "。",
        "\u0130",
        "ß",
        "..",
        ".",
        "\\",
        " ",
        "\x00",
        "\ud800",
        "\u202e",
        "1" * 300,
    ]
    known = ["http://é:80]雾\u0130[@", "http://１[]0x7f雾@//?", "http://]@é:80[@"]  # yarl raises IndexError
    draw = random.Random(0)
    made = ["http://" + "".join(draw.choices(pieces, k=draw.randint(1, 8))) for _ in range(20_000)]
    for link in known + made:
        host_of(link)
        for base in (None, "http://a.test/b"):
            with contextlib.suppress(Refused):
                checked_url(link, base)
    tried("addresses", len(known) + len(made))


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
