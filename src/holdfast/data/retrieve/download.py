"""One link: ask, follow a bounded number of redirects, read a bounded number of bytes in a bounded time."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from holdfast._version import __version__
from holdfast.data.retrieve.images import CleanImage, ImageLimits, NotAnImage, clean_image
from holdfast.data.retrieve.net import Lookup, PublicResolver, Refused, checked_url, opts_out, system_lookup
from holdfast.errors import UserError

_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 1 << 16

# What may be different the next time; everything else is final.
TRANSIENT = frozenset({"timeout", "connection", "dns", "http-408", "http-429", "http-5xx", "incomplete"})

# Which exception means what; the first that fits.
_FAILURES: tuple[tuple[type[Exception], str], ...] = (
    (TimeoutError, "timeout"),
    (aiohttp.ClientConnectorDNSError, "dns"),
    (aiohttp.ClientPayloadError, "incomplete"),
    (aiohttp.InvalidURL, "bad-url"),
    (aiohttp.ClientConnectorCertificateError, "certificate"),
    (aiohttp.ClientSSLError, "certificate"),
    (aiohttp.ClientResponseError, "bad-response"),
    (aiohttp.http.HttpProcessingError, "bad-response"),
    (aiohttp.ClientError, "connection"),
    (OSError, "connection"),
    (Exception, "bad-response"),  # aiohttp and yarl, fed with hostile hosts and headers, may raise anything
)


@dataclass(frozen=True)
class FetchLimits:
    """How much, how long, how many at once."""

    concurrency: int = 256
    per_host: int = 8
    connect_seconds: float = 10.0
    total_seconds: float = 30.0
    max_bytes: int = 20 << 20
    max_redirects: int = 5
    attempts: int = 3  # runs in which a link that failed for a passing reason is tried
    allow_private: bool = False
    image: ImageLimits = field(default_factory=ImageLimits)

    def __post_init__(self) -> None:
        small = {name: getattr(self, name) for name in ("concurrency", "per_host", "max_bytes", "attempts")}
        for name, value in small.items():
            if value < 1:
                raise UserError(f"--{name.replace('_', '-')} got {value}", expected="1 or more")
        if min(self.connect_seconds, self.total_seconds) <= 0:
            raise UserError(
                "a time limit must be above 0 seconds", found=f"{self.connect_seconds}, {self.total_seconds}"
            )


@dataclass(frozen=True)
class Outcome:
    """What became of one link: ``ok`` or the reason why not."""

    status: str
    body_sha256: str | None = None  # of the bytes that came
    image: CleanImage | None = None

    @property
    def transient(self) -> bool:
        """Whether a later run may try again."""
        return self.status in TRANSIENT


def open_session(limits: FetchLimits, lookup: Lookup = system_lookup) -> aiohttp.ClientSession:
    """A session that keeps no cookies, uses no proxy, follows nothing by itself and talks to public addresses only."""
    connector = aiohttp.TCPConnector(
        limit=limits.concurrency,
        resolver=PublicResolver(allow_private=limits.allow_private, lookup=lookup),
        ttl_dns_cache=60,
        # Many old image hosts have expired certificates; but a picture that a stranger put on the way is not worth it.
        ssl=ssl.create_default_context(),
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        timeout=aiohttp.ClientTimeout(total=limits.total_seconds, connect=limits.connect_seconds),
        headers={
            "User-Agent": f"holdfast/{__version__} (image retrieval for research)",
            "Accept": "image/*",
            "Accept-Encoding": "identity",
        },
        max_line_size=16_384,
        max_field_size=16_384,
    )


async def download(session: aiohttp.ClientSession, link: str, limits: FetchLimits, pool: Any) -> Outcome:
    """Fetch one link and clean its picture in ``pool``; never raises for what a server or a stranger can cause."""
    try:
        async with asyncio.timeout(limits.total_seconds):
            body = await _body(session, link, limits)
    except Refused as refused:
        return Outcome(refused.reason)
    except tuple(kind for kind, _ in _FAILURES) as error:
        return Outcome(next(status for kind, status in _FAILURES if isinstance(error, kind)))
    digest = hashlib.sha256(body).hexdigest()
    try:
        image = await asyncio.get_running_loop().run_in_executor(pool, clean_image, body, limits.image)
    except NotAnImage as problem:
        return Outcome(problem.reason, digest)
    return Outcome("ok", digest, image)


async def _body(session: aiohttp.ClientSession, link: str, limits: FetchLimits) -> bytes:
    url = checked_url(link, allow_private=limits.allow_private)
    for _ in range(limits.max_redirects + 1):
        async with session.get(url, allow_redirects=False) as response:
            if response.status in _REDIRECTS:
                target = response.headers.get("Location")
                if target is None:
                    raise Refused("bad-redirect")
                url = checked_url(target, str(url), allow_private=limits.allow_private)
                continue
            return await _read(response, limits)
    raise Refused("too-many-redirects")


async def _read(response: aiohttp.ClientResponse, limits: FetchLimits) -> bytes:
    if response.status != 200:
        raise Refused("http-5xx" if response.status >= 500 else f"http-{response.status}")
    if opts_out(response.headers):
        raise Refused("opted-out")
    if response.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
        raise Refused("compressed")  # not asked for, and the way to send a bomb
    if response.content_length is not None and response.content_length > limits.max_bytes:
        raise Refused("too-large")
    content = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK):
        content += chunk
        if len(content) > limits.max_bytes:
            raise Refused("too-large")
    return bytes(content)
