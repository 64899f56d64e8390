"""The judge's key: sent to the endpoint, and to nobody else.

Endpoints and the proxies before them quote the request in their errors, the header with the key included. Whatever
comes back goes through :meth:`ApiKey.hide` before it reaches a message, a cache or a table.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
from urllib.parse import quote, quote_plus

from holdfast.errors import UserError

HIDDEN = "***"
_SHORTEST = 4  # "x" and its like are placeholders for endpoints without keys, and occur in every text
_SHORTEST_ENCODED = 6  # what is left of a short key in base64 occurs by chance


class ApiKey:
    """A key, or the lack of one."""

    def __init__(self, key: str = "") -> None:
        self._key = key
        forms = sorted(_forms(key), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, forms)), re.IGNORECASE) if forms else None

    @classmethod
    def from_environment(cls, variable: str) -> ApiKey:
        """The key in an environment variable; none where it is not set."""
        key = os.environ.get(variable, "").strip()  # a key that was read from a file ends in a line break
        if not (key.isascii() and key.isprintable()):
            raise UserError(
                f"the key in {variable} cannot be sent",
                expected="letters, digits and signs of ASCII, in one line",
                found="a line break, a control character or a letter beyond ASCII",
                do=f"set {variable} again",
            )
        return cls(key)

    def headers(self) -> dict[str, str]:
        """What a request carries."""
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def hide(self, text: str) -> str:
        """``text`` with ``***`` wherever the key stands, in plain or in one of its usual encodings."""
        return self._pattern.sub(HIDDEN, text) if self._pattern else text

    def __repr__(self) -> str:
        return f"ApiKey({HIDDEN if self._key else ''})"


def _forms(key: str) -> set[str]:
    """The ways in which a key is written down: plain, in JSON, HTML and URLs, as hexadecimal digits and base64."""
    if not key:
        return set()
    if len(key) < _SHORTEST:
        return {f"Bearer {key}", quote(f"Bearer {key}"), quote_plus(f"Bearer {key}")}
    plain = {key, json.dumps(key)[1:-1], html.escape(key), quote(key), quote(key, safe=""), quote_plus(key)}
    return plain | {key.encode().hex()} | _in_base64(key.encode())


def _in_base64(content: bytes) -> set[str]:
    """What base64 makes of ``content`` wherever it stands in a longer text, as in ``Bearer KEY`` or ``user:KEY``.

    Three bytes become four letters, so there are three ways to fall on them; letters that also depend on a neighbour
    are left out.
    """
    found: set[str] = set()
    for before in range(3):
        whole = base64.b64encode(bytes(before) + content).decode().rstrip("=")
        start = -(-before * 8 // 6)
        end = (before + len(content)) * 8 // 6
        found |= {whole[start:end], whole[start:end].replace("+", "-").replace("/", "_")}
    return {form for form in found if len(form) >= _SHORTEST_ENCODED}
