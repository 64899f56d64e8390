"""Which addresses a downloader may talk to.

Links in captions are written by strangers: one that points at a router, a metadata service or this machine must not be
followed. The check is made on the addresses that a name resolves to, and the connection is made to exactly the
addresses that were checked, so that a name which answers differently the second time (DNS rebinding) gains nothing.

An address can also be written in ways that only the system's resolver understands: ``127.1``, ``0x7f.1``, ``012.0.0.1``
(octal: 10.0.0.1), full-width digits. HTTP libraries differ, from version to version too, in which of them they take for
names and which they connect to unchecked. Here a host that ends in a number is an IPv4 address in its one canonical
spelling, or it is refused.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urljoin

from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

Lookup = Callable[[str, int, int], Sequence[tuple[int, str]]]  # host, port, family -> (family, address)

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_LONGEST_URL = 4096
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_AUTHORITY = re.compile(r"[a-z][a-z0-9+.-]*://([^/?#]*)", re.IGNORECASE)
_PORT = re.compile(r":[0-9]*\Z")
_NAME = re.compile(r"[a-z0-9._-]+", re.IGNORECASE)  # what an internationalised name becomes is of these letters as well
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE)
_FULL_STOPS = str.maketrans("\u3002\uff0e\uff61", "...")  # what name lookups take for a dot


class Refused(Exception):  # noqa: N818 - a refusal is a result, kept in the table of outcomes
    """An address that must not be fetched, and why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet, also when it is wrapped in another."""
    try:
        ip = ipaddress.ip_address(address.split("%", 1)[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and (carried := _carried(ip)):
        return all(is_public(str(inner)) for inner in carried)
    special = ip.is_multicast or ip.is_reserved or (isinstance(ip, ipaddress.IPv6Address) and ip.is_site_local)
    return ip.is_global and not special


def _carried(ip: ipaddress.IPv6Address) -> tuple[ipaddress.IPv4Address, ...]:
    """The IPv4 addresses that an IPv6 address stands for: packets to it may end up there."""
    if ip.ipv4_mapped is not None:
        return (ip.ipv4_mapped,)
    if ip.sixtofour is not None:
        return (ip.sixtofour,)
    if ip.teredo is not None:
        return ip.teredo
    # Behind a NAT64 gateway 64:ff9b::a.b.c.d is a.b.c.d; the old "compatible" form is ::a.b.c.d.
    if ip in _NAT64 or int(ip) >> 32 == 0:
        return (ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF),)
    return ()


def checked_url(text: str, base: str | None = None, *, allow_private: bool = False) -> URL:
    """A URL that may be asked for, or :class:`Refused`. ``base`` is the page that redirected here."""
    if len(text) > _LONGEST_URL or _CONTROL.search(text.strip()):
        raise Refused("bad-url")
    try:
        joined = urljoin(base, text.strip()) if base else text.strip()
        url = URL(joined)
        host, port = url.host, url.port
    except Exception as error:  # a parser fed with hostile text may raise anything; all of it means the same
        raise Refused("bad-url") from error
    if url.scheme not in ("http", "https"):
        raise Refused("scheme")
    if not host or port is None:
        raise Refused("bad-url")
    if url.user is not None or url.password is not None:
        raise Refused("credentials-in-url")
    address = _checked_host(joined, url)
    if not allow_private:
        # Ports below 1024 other than the web's belong to mail, shells and file servers.
        if port < 1024 and port not in (80, 443):
            raise Refused("port")
        # aiohttp takes an address written out as it is, without asking the resolver.
        if address is not None and not is_public(address):
            raise Refused("private-address")
    return url


def _checked_host(link: str, url: URL) -> str | None:
    """The address that a link's host is, None where it is a name; :class:`Refused` for everything in between.

    Both are looked at: the host as it stands in the link, and the host that the HTTP library makes of it.
    """
    authority = _AUTHORITY.match(link)
    written = _PORT.sub("", authority[1]) if authority else ""
    host = url.raw_host or ""
    # No host holds a percent sign (a zone such as %eth0 names an interface of this machine) or a backslash.
    if not written or "%" in written or "\\" in written:
        raise Refused("bad-url")
    if written.startswith("["):
        try:
            return str(ipaddress.IPv6Address(host))
        except ValueError as error:
            raise Refused("bad-url") from error
    if not _NAME.fullmatch(host):
        raise Refused("bad-url")
    folded = unicodedata.normalize("NFKC", written.translate(_FULL_STOPS)).translate(_FULL_STOPS)
    if not ends_in_number(host) and not ends_in_number(folded):
        return None
    if not written == host == folded or not _is_ipv4(host):
        raise Refused("bad-url")
    return host


def ends_in_number(host: str) -> bool:
    """Whether the last part of a host is a number: no name ends so, and resolvers read such a host as an address."""
    return _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]) is not None


def _is_ipv4(host: str) -> bool:
    """Whether a host is an IPv4 address as it is printed: four decimal numbers without leading zeros."""
    try:
        return str(ipaddress.IPv4Address(host)) == host
    except ValueError:
        return False


def host_of(link: str) -> str:
    """The host that a link names; all malformed links share one."""
    try:
        return (URL(link).host or "").lower()
    except Exception:  # a parser fed with hostile text may raise anything
        return ""


def system_lookup(host: str, port: int, family: int) -> list[tuple[int, str]]:
    """Ask the system's resolver."""
    answers = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    return [
        (found, str(address[0])) for found, _, _, _, address in answers if found in (socket.AF_INET, socket.AF_INET6)
    ]


class PublicResolver(AbstractResolver):
    """Resolves names and hands only public addresses to the connector, which connects to those and no others.

    One private address among public ones refuses the name: nobody who means well publishes such a mixture.
    """

    def __init__(self, *, allow_private: bool = False, lookup: Lookup = system_lookup, threads: int = 32) -> None:
        self._allow_private, self._lookup = allow_private, lookup
        # The loop's default pool has a handful of threads; dead names would fill it for seconds each.
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="resolve")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The public addresses of a host; :class:`Refused` where there is a private one."""
        if ends_in_number(host):
            raise Refused("bad-url")  # an address in disguise: the system's resolver would read it as a number
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._pool, self._lookup, host, port, int(family))
        if not found:
            raise OSError(f"{host} has no address")
        if not self._allow_private and not all(is_public(address) for _, address in found):
            raise Refused("private-address")
        results: list[Any] = [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST)
            for kind, address in dict.fromkeys(found)
        ]
        return results

    async def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown(wait=False, cancel_futures=True)


# What a server may say to opt out of machine learning, in X-Robots-Tag or in the TDM reservation protocol.
_OPT_OUT = frozenset({"noai", "noimageai", "noindex", "noimageindex", "none", "noml"})
_AGENT = "holdfast"


def opts_out(headers: Any) -> bool:
    """Whether response headers ask not to be used: ``X-Robots-Tag`` for everyone or for us, ``TDM-Reservation: 1``."""
    if any(value.strip() == "1" for value in headers.getall("TDM-Reservation", [])):
        return True
    for line in headers.getall("X-Robots-Tag", []):
        agent: str | None = None
        for part in line.lower().split(","):
            name, colon, rest = part.partition(":")
            directive = part.strip()
            if colon and name.strip() not in ("unavailable_after", "max-snippet", "max-image-preview"):
                agent, directive = name.strip(), rest.strip()  # "otherbot: noindex, noai" speaks to otherbot alone
            if directive in _OPT_OUT and agent in (None, "*", _AGENT):
                return True
    return False
