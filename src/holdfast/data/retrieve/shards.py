"""WebDataset shards that are the same whatever order the downloads came in, and survive a kill at any moment.

Row i belongs to shard i // size from the start. While a shard is under way, each outcome is appended to its journal
and each picture to its blob; when all its rows are settled the tar is written in order of keys and put in place in one
step. A line of a journal or a table that cannot be read, or whose picture is not where it says, counts as if it had
never been written: its row is fetched again.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from holdfast.data.retrieve.download import TRANSIENT, Outcome
from holdfast.errors import HoldfastError, UserError
from holdfast.files import canonical_json, not_writable, read_or_empty, write_atomic, write_text

_LARGEST_LOG = 1 << 30  # bytes of a journal or a table: a shard has a thousand rows


@dataclass(frozen=True)
class Wanted:
    """A row that is to be fetched."""

    index: int
    role: str  # "target" or "negative"
    url: str
    text: str
    license: str | None = None

    @property
    def key(self) -> str:
        """Its name in the shards."""
        return f"{self.index:09d}"


@dataclass(frozen=True)
class Record:
    """What became of a row. ``attempts`` counts the runs in which it was tried."""

    key: str
    role: str
    url: str
    text: str
    license: str | None
    status: str
    attempts: int
    body_sha256: str | None = None
    sha256: str | None = None
    width: int | None = None
    height: int | None = None
    source_format: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Its fields; ``dataclasses.asdict`` copies each of them, which costs as much as the download."""
        return dict(vars(self))

    def again(self, attempts: int) -> bool:
        """Whether another run should try it."""
        return self.status in TRANSIENT and self.attempts < attempts


class ShardStore:
    """The shards of one folder, and the journals of those that are not whole yet.

    ``unreadable`` counts the lines that were passed over when the shards were opened for a run.
    """

    def __init__(self, root: Path, wanted: list[Wanted], size: int, attempts: int) -> None:
        self.root, self.size, self._wanted, self._attempts = root, size, wanted, attempts
        self.unreadable = 0
        self._tried: dict[str, int] = {}  # attempts of earlier runs, of the rows that are tried again

    @property
    def count(self) -> int:
        """How many shards there are to be."""
        return -(-len(self._wanted) // self.size)

    def rows(self, shard: int) -> list[Wanted]:
        """The rows of a shard."""
        return self._wanted[shard * self.size : (shard + 1) * self.size]

    def tar(self, shard: int) -> Path:
        """Pictures, captions and records."""
        return self.root / f"shard-{shard:05d}.tar"

    def table(self, shard: int) -> Path:
        """One line a row of the shard, fetched or not."""
        return self.root / f"shard-{shard:05d}.jsonl"

    def _journal(self, shard: int) -> Path:
        return self.root / f"shard-{shard:05d}.journal"

    def _blob(self, shard: int) -> Path:
        return self.root / f"shard-{shard:05d}.blob"

    def finished(self, shard: int) -> dict[str, Record]:
        """The records of a whole shard by key; empty where it is not whole."""
        return self._finished(shard)[0]

    def _finished(self, shard: int) -> tuple[dict[str, Record], int]:
        """The records of a whole shard, and the number of lines that hold none."""
        rows = {row.key: row for row in self.rows(shard)}
        lines = [_parse(line) for line in io.BytesIO(_read_log(self.table(shard)))]
        records = [record for line in lines if (record := _record_of(line, rows)) is not None]
        return {record.key: record for record in records}, len(lines) - len(records)

    def _journalled(self, shard: int) -> tuple[dict[str, tuple[Record, bytes]], int]:
        """Outcomes of the shard under way, with their pictures, and the number of whole lines that hold none."""
        rows = {row.key: row for row in self.rows(shard)}
        content = _read_log(self._journal(shard))
        whole = content[: content.rfind(b"\n") + 1]  # the rest was cut short by a kill
        known: dict[str, tuple[Record, bytes]] = {}
        unreadable = 0
        with self._open_blob(shard) as blob:
            for line in io.BytesIO(whole):
                entry = _parse(line)
                record = _record_of(entry.get("record"), rows)
                picture = _picture(blob, entry)
                if record is None or picture is None or not _belongs(picture, record):
                    unreadable += 1
                else:
                    known[record.key] = record, picture
        return known, unreadable

    def _open_blob(self, shard: int) -> io.BufferedIOBase:
        blob = self._blob(shard)
        return blob.open("rb") if blob.is_file() else io.BytesIO()

    def open_rows(self, shard: int) -> list[Wanted]:
        """The rows that this run has still to try; a shard that became whole before a kill is closed on the way."""
        (done, spoilt), (under_way, ruined) = self._finished(shard), self._journalled(shard)
        self.unreadable += spoilt + ruined
        if not self.tar(shard).is_file():
            done = {key: record for key, record in done.items() if record.status != "ok"}
        rows = [
            row
            for row in self.rows(shard)
            if row.key not in under_way and (row.key not in done or done[row.key].again(self._attempts))
        ]
        self._tried.update((row.key, done[row.key].attempts) for row in rows if row.key in done)
        self._tidy(shard)
        if not rows and under_way:
            self.close(shard)
        return rows

    def _tidy(self, shard: int) -> None:
        """Take away what a kill left: the end of a line, pictures that no journal tells of."""
        journal = self._journal(shard)
        try:
            if not journal.exists():
                self._blob(shard).unlink(missing_ok=True)
                return
            content = _read_log(journal)
            whole = content.rfind(b"\n") + 1
            if whole != len(content):
                with journal.open("r+b") as file:
                    file.truncate(whole)
        except OSError as error:
            raise not_writable(journal, error) from error

    def record(self, row: Wanted, outcome: Outcome) -> None:
        """Write down one outcome. The picture goes first: a journal line is a promise that its bytes are there."""
        shard = row.index // self.size
        before = self._tried.get(row.key, 0)
        picture = outcome.image
        record = Record(
            row.key, row.role, row.url, row.text, row.license, outcome.status, before + 1, outcome.body_sha256
        )
        offset = length = 0
        if picture is not None:
            record = replace(
                record,
                sha256=picture.sha256,
                width=picture.width,
                height=picture.height,
                source_format=picture.source_format,
            )
        try:
            if picture is not None:
                with self._blob(shard).open("ab") as file:
                    offset, length = file.tell(), len(picture.jpeg)
                    file.write(picture.jpeg)
            line = {"record": record.as_dict(), "offset": offset, "length": length}
            with self._journal(shard).open("ab") as file:
                file.write(canonical_json(line).encode() + b"\n")
        except OSError as error:
            raise not_writable(self._journal(shard), error) from error

    def close(self, shard: int) -> None:
        """Write a shard whose rows are all settled, and forget its journal."""
        done, (under_way, _) = self.finished(shard), self._journalled(shard)
        records = done | {key: record for key, (record, _) in under_way.items()}
        missing = [row.key for row in self.rows(shard) if row.key not in records]
        if missing:
            raise HoldfastError(
                f"{len(missing)} downloads of shard {shard} are not where they were written",
                do="check the disk and run `holdfast retrieve fetch` again: they are fetched again",
            )
        pictures = dict(self.pictures(shard, {key: done[key] for key in done.keys() - under_way.keys()}))
        pictures |= {key: picture for key, (_, picture) in under_way.items()}
        ordered = [records[row.key] for row in self.rows(shard)]
        members = [(record, pictures[record.key]) for record in ordered if record.status == "ok"]
        write_atomic(self.tar(shard), lambda path: write_tar(path, members))
        write_text(self.table(shard), "".join(canonical_json(record.as_dict()) + "\n" for record in ordered))
        self._journal(shard).unlink(missing_ok=True)
        self._blob(shard).unlink(missing_ok=True)

    def pictures(self, shard: int, records: dict[str, Record]) -> Iterator[tuple[str, bytes]]:
        """Key and JPEG of every picture that the records of a whole shard tell of, each checked against its hash."""
        waiting = {key for key, record in records.items() if record.status == "ok"}
        if not waiting:
            return
        try:
            with self._open_tar(shard) as tar:
                for member in tar:
                    key = member.name.removesuffix(".jpg")
                    if key not in waiting or key == member.name or (file := tar.extractfile(member)) is None:
                        continue
                    jpeg = file.read()
                    if _belongs(jpeg, records[key]):
                        waiting.discard(key)
                        yield key, jpeg
        except (tarfile.TarError, OSError, ValueError, EOFError) as error:
            raise self._damaged(shard, str(error)) from error
        if waiting:
            raise self._damaged(shard, f"{len(waiting)} pictures that are missing or changed")

    def _open_tar(self, shard: int) -> tarfile.TarFile:
        path = self.tar(shard)
        if not path.is_file():
            raise FileNotFoundError("no such file")
        return tarfile.open(path, "r:")

    def _damaged(self, shard: int, found: str) -> UserError:
        return UserError(
            f"{self.tar(shard)} is not as it was written",
            found=found,
            do="remove it and run `holdfast retrieve fetch` again: its pictures are fetched again",
        )


def _read_log(path: Path) -> bytes:
    again = "remove it and run `holdfast retrieve fetch` again: what it recorded is fetched again"
    return read_or_empty(path, _LARGEST_LOG, do=again)


def _parse(line: bytes) -> dict[str, Any]:
    """A line as JSON; an empty object where it is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


_FIELDS = {field.name for field in fields(Record)}


def _record_of(value: Any, rows: dict[str, Wanted]) -> Record | None:
    """The record that a line holds, if it is one of these rows; None for anything else."""
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        return None
    key, status, attempts = value["key"], value["status"], value["attempts"]
    row = rows.get(key) if isinstance(key, str) else None
    if row is None or (row.role, row.url, row.text, row.license) != tuple(
        value[name] for name in ("role", "url", "text", "license")
    ):
        return None
    if not isinstance(status, str) or type(attempts) is not int:
        return None
    if status == "ok" and not all(isinstance(value[name], str) for name in ("sha256", "body_sha256")):
        return None
    return Record(**value)


def _picture(blob: io.BufferedIOBase, entry: dict[str, Any]) -> bytes | None:
    """The bytes that a line of the journal points at, none for an outcome without a picture; None beyond the end."""
    offset, length = entry.get("offset"), entry.get("length")
    if type(offset) is not int or type(length) is not int:
        return None
    if offset < 0 or length < 0 or offset + length > blob.seek(0, io.SEEK_END):
        return None
    blob.seek(offset)
    return blob.read(length)


def _belongs(picture: bytes, record: Record) -> bool:
    return record.status != "ok" or hashlib.sha256(picture).hexdigest() == record.sha256


def write_tar(path: Path, members: list[tuple[Record, bytes]]) -> None:
    """A WebDataset shard: ``key.jpg``, ``key.txt``, ``key.json``; the same members give the same bytes."""
    with path.open("wb") as file:
        for record, jpeg in members:
            about = {name: value for name, value in record.as_dict().items() if name not in ("text", "attempts")}
            for ending, content in (
                ("jpg", jpeg),
                ("txt", record.text.encode()),
                ("json", canonical_json(about).encode()),
            ):
                file.write(_tar_header(f"{record.key}.{ending}", len(content)))
                file.write(content)
                file.write(bytes(-len(content) % 512))
        file.write(bytes(1024))


def _tar_header(name: str, size: int) -> bytes:
    """The 512 bytes before a plain file: POSIX ustar, no owner, no time.

    The standard library takes longer to write them than Pillow takes to decode a small picture.
    """
    header = struct.pack(
        "100s8s8s8s12s12s8sc100s6s2s",
        name.encode(),
        b"0000644\0",
        b"0000000\0",
        b"0000000\0",
        b"%011o\0" % size,
        b"00000000000\0",
        b"        ",
        b"0",
        b"",
        b"ustar\0",
        b"00",
    )
    return header[:148] + b"%06o\0 " % sum(header) + header[156:] + bytes(512 - len(header))
