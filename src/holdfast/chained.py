"""A log that only grows: each entry names the hash of the one before it, so that a change anywhere shows.

An append writes the whole log anew beside the old one and moves it into place: a kill or a full disk at any moment
leaves the log as it was, or with the whole entry. A lock on the file keeps two processes from appending at once; as an
append replaces the file, it locks the new one before that is seen. What a kill leaves of a write is removed by the next
one. The ledger of sealed sets and the lineage of a project are such logs; both are a few kilobytes.

The chain alone cannot show that its end was cut off, or that its last entry was written anew. So the log has an
anchored head: ``LOG.head``, a line with the number of entries and the hash of the last one, written after each append.
A kill between the two leaves a head that is one entry behind, which is no fault; a head that the log does not reach is.
Whoever rewrites both is found by a copy of the head elsewhere: in a certificate, or in the history of a repository.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from holdfast.errors import UserError
from holdfast.files import (
    canonical_json,
    fingerprint_bytes,
    fingerprint_json,
    is_temporary,
    not_writable,
    read_regular,
    write_atomic,
)

_LARGEST_HEAD = 4096  # bytes; a head is one line
_TORN = fingerprint_bytes(b"{}")  # what earlier versions named in place of a line that a crash had cut short


@dataclass(frozen=True)
class Broken:
    """Where a log was changed: an entry that does not fit the one before it, itself, or the head."""

    entry: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class Head:
    """How long a log was at some time, and the hash of its last entry then."""

    entries: int
    fingerprint: str

    def missing_in(self, entries: Sequence[Mapping[str, Any]]) -> str | None:
        """Why a log with these entries is not one that grew from this head; None where it is."""
        if len(entries) < self.entries:
            return f"it has {len(entries)} entries and had {self.entries}: its end was cut off"
        if self.entries and _link(entries[self.entries - 1]) != self.fingerprint:
            return f"entry {self.entries} is not the one that was written"
        return None


class ChainedLog:
    """One log file. Reading needs no lock: the file is whole at every moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head_path = path.with_name(f"{path.name}.head")
        self._held: list[IO[bytes]] = []  # the file that is locked, and those that appends have put in its place

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
        """The first entry that was changed, or that stands behind one that was changed, taken out or cut off."""
        lines = self._lines()
        for place, entry in enumerate(lines):
            if entry and not (self._follows(lines, place, skip=True) or self._follows(lines, place, skip=False)):
                return Broken(entry, f"an entry that does not follow the one before it: {entry.get('event')}")
            if entry and "fingerprint" in entry and entry["fingerprint"] != _link(entry):
                return Broken(entry, f"an entry that does not fit its own hash: {entry.get('event')}")
        return self._cut()

    def head(self) -> Head | None:
        """The head that is written down; None in a log of an earlier version, or before its first entry."""
        try:
            found = json.loads(read_regular(self.head_path, _LARGEST_HEAD))
            return Head(int(found["entries"]), str(found["fingerprint"]))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return Head(-1, "")

    @property
    def anchored(self) -> bool:
        """Whether a cut at the end would show: not in a log that only earlier versions have written."""
        return self.head() is not None

    def now(self) -> Head:
        """The head as the entries are at this moment, for whoever keeps a copy of it elsewhere."""
        entries = self.entries()
        return Head(len(entries), _link(entries[-1]) if entries else "")

    def append(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Write one entry behind the last, then the head, and wait for the disk. The lock must be held."""
        if (cut := self._cut()) is not None:
            raise UserError(
                f"{self.path} was changed; nothing is appended to it",
                expected="a record that is only ever appended to",
                found=cut.reason,
                do="restore the file and its .head",
            )
        before = self.entries()
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        body = {**entry, "time": now, "previous": _link(before[-1]) if before else "", "place": len(before) + 1}
        whole = {**body, "fingerprint": fingerprint_json(body)}
        self._clear_temporaries()
        content = self._content()
        if content and not content.endswith(b"\n"):
            content += b"\n"  # what a crash cut short stays where it is, on a line of its own
        content += canonical_json(whole).encode() + b"\n"
        write_atomic(self.path, lambda temporary: self._write_locked(temporary, content))
        head = canonical_json({"entries": whole["place"], "fingerprint": whole["fingerprint"]}).encode() + b"\n"
        write_atomic(self.head_path, lambda temporary: _write(temporary, head))
        return whole

    @contextmanager
    def locked(self) -> Generator[None]:
        """Nobody else appends inside the block. The system releases the lock of a process that dies."""
        with _lock_file(self.path) as file:
            self._held = [file]
            self._clear_temporaries()
            try:
                yield
            finally:
                held, self._held = self._held, []
                for newer in held[1:]:
                    newer.close()

    def _clear_temporaries(self) -> None:
        """Remove what a kill in the middle of a write left beside the log. The lock must be held."""
        for path in self.path.parent.iterdir():
            if is_temporary(path) and path.name.startswith(f".{self.path.name}."):
                with suppress(OSError):  # another user's, in a folder that many write: it stays, and does no harm
                    path.unlink()

    def _write_locked(self, temporary: Path, content: bytes) -> None:
        """Write what will take the log's place; where the log is locked, the lock passes on to it before it is seen."""
        file = temporary.open("wb")
        if self._held:
            fcntl.flock(file, fcntl.LOCK_EX)  # nobody else knows this file yet
            self._held.append(file)
            file.write(content)
            file.flush()
        else:
            with file:
                file.write(content)

    def _cut(self) -> Broken | None:
        """Whether the log reaches its head. Entries that say their place were written with one."""
        head = self.head()  # before the entries: another process may append in between
        entries = self.entries()
        last = entries[-1] if entries else {}
        if head is None:
            # A kill right after the first entry of this version leaves no head yet; later on it was taken away.
            gone = sum("place" in entry for entry in entries) > 1 and self.head() is None
            return Broken(last, f"{self.head_path.name}, which says where the record ends, is gone") if gone else None
        if head.entries < 0:
            return Broken(last, f"{self.head_path.name}, which says where the record ends, cannot be read")
        reason = head.missing_in(entries)
        return None if reason is None else Broken(last, reason)

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
def _lock_file(path: Path) -> Generator[IO[bytes]]:
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
            yield file
            return
