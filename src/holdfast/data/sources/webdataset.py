"""WebDataset shards: tar files in which ``key.jpg``, ``key.txt``, ``key.json`` and ``key.cls`` make up an example.

Nothing is ever unpacked: pictures are read from their place in the archive, and names that point outside are refused.
"""

from __future__ import annotations

import os
import tarfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from holdfast.config import SourceConfig
from holdfast.data.catalogue import BytesReader, Entry, Listing, Problem
from holdfast.data.containers import is_outside, member_key, parse_json, tar_members
from holdfast.data.images import MAX_BYTES, SUFFIXES, BadImage
from holdfast.data.names import printable, readable_name
from holdfast.data.sources.files import container_files, read_lines, split_in_name
from holdfast.errors import UserError

_TEXTS = (".txt", ".json", ".cls")
_MAX_TEXT = 1 << 20  # bytes; a larger caption or label file is a mistake or an attack


def list_webdataset(config: SourceConfig, path: Path) -> Listing:
    """All examples of all shards; a shard that is cut short gives what is whole in it."""
    places: list[tuple[int, int, int]] = []
    entries: list[Entry] = []
    problems: list[Problem] = []
    shards = [shard for shard, _ in container_files(path, ".tar", problems)]
    names = _class_names(shards[0].parent)
    for number, shard in enumerate(shards):
        found = list(_examples(shard, problems))
        described = sum(item.described for item in found)
        for text in found:
            where = f"{readable_name(shard)}#{text.key}"
            if text.picture is None:
                problems.append(Problem("example without a picture", where))
                continue
            if not text.described and described:
                problems.append(Problem("example without text or label", where))
            places.append((number, *text.picture))
            label = text.label if names is None else _named(text.label, names)
            entries.append(Entry(where, label, text.caption, text.split or split_in_name(shard)))
    if not entries:
        raise UserError(f"{path} holds no pictures", expected="members such as 0001.jpg, 0001.txt, 0001.cls")
    return Listing(readable_name(path), entries, BytesReader(_Shards(shards, places).picture), problems)


class _Example:
    """What the members with one key say."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.picture: tuple[int, int] | None = None  # offset and size in the archive
        self.caption: str | None = None
        self.label: str | None = None
        self.split: str | None = None
        self.described = False


def _examples(shard: Path, problems: list[Problem]) -> Iterator[_Example]:
    found: dict[str, _Example] = {}
    seen: set[str] = set()
    name = readable_name(shard)
    try:
        handle = os.open(shard, os.O_RDONLY)
        try:
            size = os.fstat(handle).st_size
            for member in tar_members(shard):
                _take(handle, size, member, name, found, seen, problems)
        finally:
            os.close(handle)
    except (tarfile.TarError, OSError) as error:
        if shard.suffix in (".gz", ".xz", ".bz2", ".tgz", ".zst"):
            raise UserError(
                f"{name} is compressed", do="unpack it to a plain .tar: pictures are compressed already"
            ) from None
        problems.append(Problem("broken shard", name, f"{error}; what comes before is used"))
    yield from found.values()


def _take(
    handle: int,
    end: int,
    member: tarfile.TarInfo,
    shard: str,
    found: dict[str, _Example],
    seen: set[str],
    problems: list[Problem],
) -> None:
    where = f"{shard}#{readable_name(Path(member.name))}"
    path = PurePosixPath(member.name)
    if member.isdir():
        return
    if is_outside(path):
        problems.append(Problem("unsafe name", where, "points outside the archive: not read"))
        return
    if not member.isreg() or member.issparse():
        what = "sparse member" if member.issparse() else "link in a shard"
        problems.append(Problem(what, where, "not read" if member.issparse() else "not followed"))
        return
    stem, dot, ending = path.name.partition(".")
    suffix = PurePosixPath(f"x.{ending}").suffix.lower() if dot else ""
    if stem == "" or suffix not in (*_TEXTS, *SUFFIXES):
        return
    if member.name in seen:
        problems.append(Problem("name used twice", where, "the first one is used"))
        return
    seen.add(member.name)
    key = member_key(member.name)
    example = found.setdefault(key, _Example(key))
    limit = MAX_BYTES if suffix in SUFFIXES else _MAX_TEXT
    if member.size > limit:
        problems.append(Problem("too large", where, f"{member.size:,} bytes, more than {limit:,}: not read"))
    elif member.offset_data + member.size > end:
        problems.append(Problem("broken shard", where, "the shard ends inside this member"))
    elif suffix in SUFFIXES:
        example.picture = (member.offset_data, member.size)
    else:
        try:
            _describe(example, suffix, os.pread(handle, member.size, member.offset_data).decode("utf-8"))
        except ValueError as error:
            problems.append(Problem("unreadable text", where, str(error)))


def _describe(example: _Example, suffix: str, text: str) -> None:
    if suffix == ".txt":
        example.caption = text.strip() or None
    elif suffix == ".cls":
        example.label = text.strip() or None
    else:
        values = parse_json(text)
        if not isinstance(values, dict):
            raise ValueError("it holds no JSON object")
        caption, label = _first(values, ("caption", "text", "title")), _first(values, ("label", "class", "cls"))
        example.split = _first(values, ("split",))
        example.caption, example.label = example.caption or caption, example.label or label
    example.described = example.described or bool(example.caption or example.label)


def _first(values: dict[str, Any], names: Sequence[str]) -> str | None:
    for name in names:
        value = values.get(name)
        if isinstance(value, (list, dict)):
            raise ValueError(f"its {name!r} is no text")
        if value is not None and value != "":
            return printable(str(value)).strip() or None
    return None


def _class_names(folder: Path) -> list[str] | None:
    """``classnames.txt`` beside the shards names the numbers in ``.cls`` members, one a line."""
    for file in (folder / "classnames.txt", folder.parent / "classnames.txt"):
        if file.exists():
            return [line.strip() for line in read_lines(file)]
    return None


def _named(label: str | None, names: list[str]) -> str | None:
    if label is None or not (label.isascii() and label.isdigit()):
        return label
    if len(label) > 100 or int(label) >= len(names):
        raise UserError(f"class {label[:40]} has no name", expected=f"0 to {len(names) - 1}, as classnames.txt has")
    return names[int(label)]


class _Shards:
    """Pictures at their places in tar files."""

    def __init__(self, shards: Sequence[Path], places: Sequence[tuple[int, int, int]]) -> None:
        self._shards, self._places = shards, places
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()

    def picture(self, index: int) -> bytes:
        """The bytes of one member."""
        number, offset, size = self._places[index]
        with self._lock:
            if number not in self._handles:
                self._handles[number] = os.open(self._shards[number], os.O_RDONLY)
        content = os.pread(self._handles[number], size, offset)
        if len(content) != size:
            raise BadImage("the shard ends inside this picture")
        return content

    def __del__(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
