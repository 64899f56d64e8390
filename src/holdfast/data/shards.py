"""WebDataset shards: tar files in which ``key.jpg``, ``key.txt``, ``key.json`` and ``key.cls`` make up an example.

Nothing is ever unpacked: pictures are read from their place in the archive, and names that point outside are refused.
"""

from __future__ import annotations

import json
import os
import tarfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from holdfast.config import SourceConfig
from holdfast.data.catalogue import BytesReader, Entry, Listing, Problem, readable_name
from holdfast.data.files import SPLITS, expand
from holdfast.data.images import SUFFIXES, BadImage
from holdfast.errors import UserError

_TEXTS = (".txt", ".json", ".cls")
_MAX_TEXT = 1 << 20  # bytes; a larger caption or label file is a mistake or an attack


def list_webdataset(config: SourceConfig, path: Path) -> Listing:
    """All examples of all shards; a shard that is cut short gives what is whole in it."""
    shards = [shard for one in expand(path) for shard in ([one] if one.is_file() else sorted(one.rglob("*.tar")))]
    if not shards:
        raise UserError(f"no .tar files under {path}")
    places: list[tuple[int, int, int]] = []
    entries: list[Entry] = []
    problems: list[Problem] = []
    names = _class_names(shards[0].parent)
    for number, shard in enumerate(shards):
        found = list(_examples(shard, problems))
        described = sum(one.described for one in found)
        for one in found:
            where = f"{readable_name(shard)}#{one.key}"
            if one.picture is None:
                problems.append(Problem("example without a picture", where))
                continue
            if not one.described and described:
                problems.append(Problem("example without text or label", where))
            places.append((number, *one.picture))
            label = one.label if names is None else _named(one.label, names)
            entries.append(Entry(where, label, one.caption, one.split or _split_of(shard)))
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
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                _take(archive, member, name, found, seen, problems)
    except (tarfile.TarError, EOFError, OSError) as error:
        if shard.suffix in (".gz", ".xz", ".bz2", ".tgz", ".zst"):
            raise UserError(
                f"{name} is compressed", do="unpack it to a plain .tar: pictures are compressed already"
            ) from None
        problems.append(Problem("broken shard", name, f"{error}; what comes before is used"))
    size = shard.stat().st_size
    for one in found.values():
        if one.picture is not None and sum(one.picture) > size:
            problems.append(Problem("broken shard", f"{name}#{one.key}", "the shard ends inside this picture"))
            one.picture = None
        yield one


def _take(
    archive: tarfile.TarFile,
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
    if path.is_absolute() or ".." in path.parts:
        problems.append(Problem("unsafe name", where, "points outside the archive: not read"))
        return
    if not member.isreg():
        problems.append(Problem("link in a shard", where, "not followed"))
        return
    stem, dot, ending = path.name.partition(".")
    suffix = PurePosixPath(f"x.{ending}").suffix.lower() if dot else ""
    if stem == "" or suffix not in (*_TEXTS, *SUFFIXES):
        return
    key = str(path.parent / stem)
    if member.name in seen:
        problems.append(Problem("name used twice", where, "the first one is used"))
        return
    seen.add(member.name)
    example = found.setdefault(key, _Example(key))
    if suffix in SUFFIXES:
        example.picture = (member.offset_data, member.size)
        return
    content = b"" if member.size > _MAX_TEXT else _content(archive, member)
    try:
        _describe(example, suffix, content.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        problems.append(Problem("unreadable text", where, str(error)))


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return b"" if file is None else file.read()


def _describe(example: _Example, suffix: str, text: str) -> None:
    if suffix == ".txt":
        example.caption = text.strip() or None
    elif suffix == ".cls":
        example.label = text.strip() or None
    else:
        values: Any = json.loads(text)
        if isinstance(values, dict):
            example.caption = example.caption or _first(values, ("caption", "text", "title"))
            example.label = example.label or _first(values, ("label", "class", "cls"))
            example.split = _first(values, ("split",))
    example.described = example.described or bool(example.caption or example.label)


def _first(values: dict[str, Any], names: Sequence[str]) -> str | None:
    return next((str(values[name]).strip() for name in names if values.get(name) not in (None, "")), None)


def _class_names(folder: Path) -> list[str] | None:
    """``classnames.txt`` beside the shards names the numbers in ``.cls`` members, one a line."""
    for file in (folder / "classnames.txt", folder.parent / "classnames.txt"):
        if file.is_file():
            return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return None


def _named(label: str | None, names: list[str]) -> str | None:
    if label is None or not label.isdigit():
        return label
    if int(label) >= len(names):
        raise UserError(f"class {label} has no name", expected=f"0 to {len(names) - 1}, as classnames.txt has")
    return names[int(label)]


def _split_of(shard: Path) -> str | None:
    for word in (shard.stem.split("-")[0].split("_")[0].lower(), shard.parent.name.lower()):
        if word in SPLITS:
            return word
    return None


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
