"""WebDataset shards that are the same whatever order the downloads came in, and survive a kill at any moment.

Row i belongs to shard i // size from the start. While a shard is under way, each outcome is appended to its journal
and each picture to its blob; when all its rows are settled the tar is written in order of keys and put in place in one
step.
"""

from __future__ import annotations

import hashlib
import json
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.artifacts import canonical_json, read_jsonl, write_atomic, write_text
from holdfast.data.retrieve.download import TRANSIENT, Outcome


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
    """The shards of one folder, and the journals of those that are not whole yet."""

    def __init__(self, root: Path, wanted: list[Wanted], size: int, attempts: int) -> None:
        self.root, self.size, self._wanted, self._attempts = root, size, wanted, attempts
        self._tried: dict[str, int] = {}  # attempts of earlier runs, of the rows that are tried again
        root.mkdir(parents=True, exist_ok=True)

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
        path = self.table(shard)
        return {line["key"]: Record(**line) for line in read_jsonl(path)} if path.exists() else {}

    def _journalled(self, shard: int) -> dict[str, tuple[Record, int, int]]:
        """Outcomes of the shard under way: key -> record and where its picture lies in the blob."""
        journal, blob = self._journal(shard), self._blob(shard)
        if not journal.exists():
            return {}
        size = blob.stat().st_size if blob.exists() else 0
        known: dict[str, tuple[Record, int, int]] = {}
        whole = 0
        with journal.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break  # cut short by a kill
                entry: dict[str, Any] = json.loads(line)
                if entry["offset"] + entry["length"] > size:
                    break
                known[entry["record"]["key"]] = (Record(**entry["record"]), entry["offset"], entry["length"])
                whole += len(line)
        if whole != journal.stat().st_size:
            with journal.open("r+b") as file:
                file.truncate(whole)
        return known

    def open_rows(self, shard: int) -> list[Wanted]:
        """The rows that this run has still to try; a shard that became whole before a kill is closed on the way."""
        done, under_way = self.finished(shard), self._journalled(shard)
        rows = [
            row
            for row in self.rows(shard)
            if row.key not in under_way and (row.key not in done or done[row.key].again(self._attempts))
        ]
        self._tried.update((row.key, done[row.key].attempts) for row in rows if row.key in done)
        if not rows and under_way:
            self.close(shard)
        return rows

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
            with self._blob(shard).open("ab") as file:
                offset, length = file.tell(), len(picture.jpeg)
                file.write(picture.jpeg)
        line = {"record": record.as_dict(), "offset": offset, "length": length}
        with self._journal(shard).open("ab") as file:
            file.write(canonical_json(line).encode() + b"\n")

    def close(self, shard: int) -> None:
        """Write a shard whose rows are all settled, and forget its journal."""
        done, under_way = self.finished(shard), self._journalled(shard)
        records = done | {key: one[0] for key, one in under_way.items()}
        pictures = dict(self.pictures(shard)) if done else {}
        blob = self._blob(shard)
        if blob.exists():
            with blob.open("rb") as file:
                for key, (record, offset, length) in under_way.items():
                    if record.status == "ok":
                        file.seek(offset)
                        pictures[key] = file.read(length)
        ordered = [records[row.key] for row in self.rows(shard)]
        for record in ordered:
            if record.status == "ok" and hashlib.sha256(pictures[record.key]).hexdigest() != record.sha256:
                raise ValueError(f"the journal of shard {shard} does not match its pictures")
        members = [(record, pictures[record.key]) for record in ordered if record.status == "ok"]
        write_atomic(self.tar(shard), lambda path: write_tar(path, members))
        write_text(self.table(shard), "".join(canonical_json(record.as_dict()) + "\n" for record in ordered))
        self._journal(shard).unlink(missing_ok=True)
        blob.unlink(missing_ok=True)

    def pictures(self, shard: int) -> Iterator[tuple[str, bytes]]:
        """Key and JPEG of every picture of a whole shard."""
        if not self.tar(shard).exists():
            return
        with tarfile.open(self.tar(shard), "r:") as tar:
            for member in tar:
                if member.name.endswith(".jpg") and (file := tar.extractfile(member)) is not None:
                    yield member.name.removesuffix(".jpg"), file.read()


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
