"""Names of files and classes as text that can be printed, compared and written down."""

from __future__ import annotations

import unicodedata
from pathlib import Path


def printable(text: str) -> str:
    """Text that any file can hold: bytes that are no UTF-8 and halves of surrogate pairs are escaped."""
    if text.isascii():
        return text
    try:
        content = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a pair, as JSON can spell it
        content = text.encode("utf-8", "surrogatepass")
    return content.decode("utf-8", "backslashreplace")


def readable_name(path: Path | str) -> str:
    """A path as text that any file can hold: bytes that are no UTF-8 are escaped, accents have one spelling."""
    name = str(path)
    return name if name.isascii() else unicodedata.normalize("NFC", printable(name))
