"""A log that only grows: each entry names the hash of the one before it, so that a change anywhere shows.

An append writes the whole log anew beside the old one and moves it into place: a kill or a full disk at any moment
leaves the log as it was, or with the whole entry. A lock keeps two processes from appending at once. The ledger of
sealed sets and the lineage of a project are such logs; both are a few kilobytes.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.artifacts import canonical_json, fingerprint_bytes, fingerprint_json, not_writable, write_atomic

_TORN = fingerprint_bytes(b"{}")  # what earlier versions named in place of a line that a crash had cut short


@dataclass(frozen=True)
class Broken:
    """An entry that does not follow the one before it, or does not fit its own hash."""

    entry: Mapping[str, Any]


class ChainedLog:
    """One log file. Reading needs no lock: the file is whole at every moment."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[dict[str, Any]]:
        """Entries in order; a line that a crash cut short is passed over."""
        return [entry for entry in self._lines() if entry]

    def unreadable(self) -> int:
        """Whole lines that cannot be read, and that nobody has appended behind as if they were not there.

        The end of a file without its line break is what a crash leaves of an append (of an earlier version): whoever
        wrote it died before anything came of it.
        """
        lines = self._lines()
        skipped = {place - 1 for place, entry in enumerate(lines) if entry and self._follows(lines, place, skip=True)}
        return sum(1 for place, entry in enumerate(lines) if not entry and place not in skipped)

    def broken(self) -> Broken | None:
        """The first entry that was changed, or that stands behind one that was changed or taken out."""
        lines = self._lines()
        for place, entry in enumerate(lines):
            if entry and not (self._follows(lines, place, skip=True) or self._follows(lines, place, skip=False)):
                return Broken(entry)
            if entry and "fingerprint" in entry and entry["fingerprint"] != _link(entry):
                return Broken(entry)
        return None

    def append(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Write one entry behind the last and wait for the disk. The lock must be held."""
        before = self.entries()
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        body = {**entry, "time": now, "previous": _link(before[-1]) if before else ""}
        whole = {**body, "fingerprint": fingerprint_json(body)}
        content = self._content()
        if content and not content.endswith(b"\n"):
            content += b"\n"  # what a crash cut short stays where it is, on a line of its own
        content += canonical_json(whole).encode() + b"\n"
        write_atomic(self.path, lambda temporary: _write(temporary, content))
        return whole

    @contextmanager
    def locked(self) -> Generator[None]:
        """Nobody else appends inside the block. The system releases the lock of a process that dies."""
        with _lock_file(self.path):
            yield

    def _content(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def _lines(self) -> list[dict[str, Any]]:
        """Entries; an empty one stands for a whole line that cannot be read. The torn end of the file is left out."""
        *lines, _ = self._content().split(b"\n")
        return [_parse(line) for line in lines if line.strip()]

    def _follows(self, lines: list[dict[str, Any]], place: int, *, skip: bool) -> bool:
        """Whether an entry names the one before it; with ``skip`` the last one before it that can be read."""
        previous = lines[place].get("previous")
        if not skip and place and not lines[place - 1]:
            return previous == _TORN
        before = next((entry for entry in reversed(lines[:place]) if entry), None)
        return previous == ("" if before is None else _link(before))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _link(entry: Mapping[str, Any]) -> str:
    """What the next entry names: the hash of everything but an entry's own hash."""
    return fingerprint_json({name: value for name, value in entry.items() if name != "fingerprint"})


def _parse(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


@contextmanager
def _lock_file(path: Path) -> Generator[None]:
    """A lock on the file itself. An append replaces it, so the file that was locked must still be the one there."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("ab")
        except OSError as error:
            raise not_writable(path, error) from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                current = os.stat(path)
            except FileNotFoundError:
                continue
            mine = os.fstat(file.fileno())
            if (mine.st_dev, mine.st_ino) != (current.st_dev, current.st_ino):
                continue
            yield
            return
