"""Which picture a file shows: hashes of decoded pixels, remembered by the hash of the file's bytes.

Decoding costs more than reading, and a round reads its sources several times, so what was found is kept in a small
database in the user's cache folder. It is a cache: whatever is wrong with it, pictures are decoded again.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import PIL
from PIL import Image, features

from holdfast.data.images import BadImage, picture_id

_FLUSH = 4096  # new entries that are written together
_MOST_READ = 1024  # bytes of the database for each file that is asked for; an entry takes about 250


class PictureCache:
    """Hash of a file's bytes -> id of the picture in it; "" where no picture could be decoded."""

    def __init__(self, path: Path | None = None, *, expected: int = 0) -> None:
        """``expected`` is how many files will be asked for: where it is most of what is known, all is read at once."""
        self._lock = threading.Lock()
        self._new: dict[str, str] = {}
        self._all: dict[str, str] | None = None
        self._database: sqlite3.Connection | None = None
        try:
            path = path or default_cache()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
            self._database.execute("create table if not exists pictures (file text primary key, picture text not null)")
            if path.stat().st_size < _MOST_READ * expected:
                found = self._database.execute("select file, picture from pictures")
                self._all = {file: str(picture) for file, picture in found}
        except (OSError, sqlite3.Error):
            self._database = None

    def picture(self, file: str, decode: Callable[[], Image.Image]) -> str:
        """The id of the picture in the file with this hash; it is decoded where that is not known yet."""
        with self._lock:
            found = self._new.get(file) or self._look_up(file)
        if found is not None:
            return found
        try:
            found = picture_id(decode())
        except (BadImage, OSError):
            return ""  # reported when it is opened for use
        with self._lock:
            self._new[file] = found
            if len(self._new) >= _FLUSH:
                self._flush()
        return found

    def close(self) -> None:
        """Write what was found."""
        with self._lock:
            self._flush()
            if self._database is not None:
                self._database.close()
                self._database = None

    def _look_up(self, file: str) -> str | None:
        if self._all is not None:
            return self._all.get(file)
        if self._database is None:
            return None
        try:
            row = self._database.execute("select picture from pictures where file = ?", (file,)).fetchone()
        except sqlite3.Error:
            self._database = None
            return None
        return str(row[0]) if row else None

    def _flush(self) -> None:
        if self._database is None or not self._new:
            return
        if self._all is not None:
            self._all.update(self._new)
        try:
            with self._database:
                self._database.executemany("insert or ignore into pictures values (?, ?)", self._new.items())
            self._new.clear()
        except sqlite3.Error:  # a full disk, a folder that is read-only, a file that is no database
            self._database = None


def cache_folder() -> Path:
    """$HOLDFAST_CACHE, or ``holdfast`` in the user's cache folder."""
    chosen = os.environ.get("HOLDFAST_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(chosen) if chosen else Path(base) / "holdfast"


def default_cache() -> Path:
    """In the cache folder; another decoder has another file."""
    return cache_folder() / f"pictures-{_decoder()}.sqlite3"


def _decoder() -> str:
    """The libraries that decode: another version of them may round a pixel otherwise."""
    names = ("libjpeg_turbo", "jpg", "zlib", "libtiff", "webp", "jpg_2000", "avif")
    versions = [PIL.__version__, *(f"{name} {features.version(name)}" for name in names if features.check(name))]
    return hashlib.sha256("\n".join(versions).encode()).hexdigest()[:12]
