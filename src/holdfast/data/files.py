"""Files: folders of pictures and tables that name them; paths, globs and splits as every source reads them."""

from __future__ import annotations

import csv
import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from holdfast.artifacts import read_regular
from holdfast.config import SourceConfig
from holdfast.data.catalogue import BytesReader, Entry, Listing, Problem, readable_name
from holdfast.data.images import SUFFIXES, read_picture
from holdfast.data.tasks import Role
from holdfast.errors import UserError, nearest

# How the splits that sources bring along are read; None is shared out by content hash.
SPLITS: dict[str, Role | None] = {
    "train": None,
    "training": None,
    "trainval": None,
    "all": None,
    "val": Role.DEV,
    "valid": Role.DEV,
    "validation": Role.DEV,
    "dev": Role.DEV,
    "test": Role.TEST,
    "testing": Role.TEST,
    "base": Role.BASE,
    "constraint": Role.CONSTRAINT,
    "sealed": Role.SEALED,
}

_MAX_LIST = 64 << 20  # bytes of a list of classes or images; that of the validation images of Places365 has a megabyte
_MAX_LINE = 1 << 20  # characters of a line of a table
_MAX_COUNTED = 1_000_000  # files that {000..127} may stand for


def split_role(split: str | None) -> Role | None:
    """The role that a split of a source stands for; None where the example is to be shared out."""
    return None if split is None else SPLITS.get(split.lower())


def split_in_name(file: Path) -> str | None:
    """``train-00000-of-00001.parquet`` and ``train/0000.tar`` say their split."""
    for word in (file.stem.split("-")[0].split("_")[0].lower(), file.parent.name.lower()):
        if word in SPLITS:
            return word
    return None


def pictures_in(files: Sequence[Path]) -> BytesReader:
    """A reader of picture files, each by its position."""
    return BytesReader(lambda index: read_picture(files[index]))


def read_lines(path: Path) -> list[str]:
    """The lines of a small text file (a list of classes, of images) that are not empty."""
    try:
        text = read_regular(path, _MAX_LIST).decode("utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read", found=error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text", found=str(error), do="save it as UTF-8") from error
    return [line for line in text.splitlines() if line.strip()]


def walk_pictures(root: Path) -> Iterator[Path]:
    """Picture files under ``root`` in sorted order. Links are followed, each folder once, so that a loop ends."""
    visited: set[tuple[int, int]] = set()
    waiting: list[tuple[Path, bool]] = [(root, True)]  # (path, whether it is a folder), the next one last
    while waiting:
        path, is_folder = waiting.pop()
        if not is_folder:
            yield path
            continue
        for item in reversed(_folder_items(path, visited)):
            if _is_folder(item) or os.path.splitext(item.name)[1].lower() in SUFFIXES:
                waiting.append((Path(item.path), _is_folder(item)))


def _folder_items(folder: Path, visited: set[tuple[int, int]]) -> list[os.DirEntry[str]]:
    """What lies in a folder, sorted by name; nothing if it was visited before."""
    try:
        status = folder.stat()
        if (status.st_dev, status.st_ino) in visited:
            return []
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as found:
            return sorted((item for item in found if not item.name.startswith(".")), key=lambda item: item.name)
    except NotADirectoryError as error:
        raise UserError(
            f"{folder} is neither a file nor a folder", found="a named pipe, a device or a socket"
        ) from error
    except OSError as error:
        raise UserError(f"{folder} cannot be read", found=error.strerror or str(error)) from error


def _is_folder(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link to itself
        return False


def expand(path: Path) -> list[Path]:
    """The files or folders a path or glob stands for, sorted; ``{000..127}`` counts up. None is an error."""
    try:
        return _expanded(path)
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise UserError(f"{path} cannot be read", found=error.strerror or str(error)) from error
    except RecursionError as error:
        raise _too_deep(path) from error


def _expanded(path: Path) -> list[Path]:
    if path.exists():
        return [path]
    counted = re.search(r"\{(\d+)\.\.(\d+)\}", str(path))
    if counted:
        first, last = counted.groups()
        if len(last) > 9 or not int(first) <= int(last) < int(first) + _MAX_COUNTED:
            raise UserError(f"{counted.group()} does not count up", expected="{000..127}, at most a million")
        numbers = range(int(first), int(last) + 1)
        names = (str(path).replace(counted.group(), f"{number:0{len(first)}d}") for number in numbers)
        return [found for name in names for found in _expanded(Path(name))]
    found = sorted(Path(one) for one in glob.glob(str(path), recursive=True))
    if found:
        return found
    if glob.has_magic(str(path)):
        raise UserError(f"nothing matches {path}", do="check the pattern; it is relative to the TOML file")
    known = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(f"{path} does not exist", do=nearest(path.name, known) if known else "check the path")


def container_files(path: Path, suffix: str, problems: list[Problem]) -> list[tuple[Path, Path]]:
    """The files with that suffix a source is made of, each with the source's folder."""
    found: list[tuple[Path, Path]] = []
    for place in expand(path):
        try:
            files = sorted(place.rglob(f"*{suffix}")) if place.is_dir() else [place]
        except RecursionError as error:
            raise _too_deep(place) from error
        for file in files:
            if file.is_file():
                found.append((file, place if place.is_dir() else place.parent))
            elif not file.is_dir():
                problems.append(Problem("not a regular file", readable_name(file), "not read"))
    if not found:
        raise UserError(f"no {suffix} files under {path}")
    return found


def _too_deep(path: Path) -> UserError:
    return UserError(f"the folders under {path} are nested too deeply", do="give the folder that holds the files")


def find_files(root: Path, name: str) -> list[Path]:
    """Files of that name in a folder and up to two levels below."""
    return [file for depth in ("", "*/", "*/*/") for file in sorted(root.glob(depth + name))]


def list_folder(config: SourceConfig, path: Path) -> Listing:
    """``split/class/picture``, ``class/picture``, or pictures without a class; deeper folders belong to their class."""
    files: list[Path] = []
    entries: list[Entry] = []
    problems: list[Problem] = []
    for root in expand(path):
        if not root.is_dir():
            raise UserError(f"{root} is a file", expected="a folder of pictures", do="give the source its `kind`")
        pictures = [(one, one.relative_to(root).parts) for one in walk_pictures(root)]
        splits = _split_folders([parts for _, parts in pictures])
        for name in sorted(splits - SPLITS.keys()):
            problems.append(Problem("unknown split", name, "shared out like train"))
        for file, parts in pictures:
            split = readable_name(Path(parts[0])) if parts[0] in splits else None
            inner = parts[1:] if split is not None else parts
            label = readable_name(Path(inner[0])) if len(inner) > 1 else None
            files.append(file)
            entries.append(Entry(readable_name(file), label, None, split))
    if not files:
        raise UserError(f"no pictures under {path}", expected=f"files ending in {', '.join(sorted(SUFFIXES))}")
    return Listing(readable_name(path), entries, pictures_in(files), problems)


def _split_folders(paths: Sequence[tuple[str, ...]]) -> set[str]:
    """Top folders that are splits: one bears a split's name and holds folders only (a class may be called `train`)."""
    direct = {parts[0] for parts in paths if len(parts) == 2}
    deep = {parts[0] for parts in paths if len(parts) > 2}
    if any(name.lower() in SPLITS for name in deep - direct):
        return deep - direct
    if direct and not deep and all(name.lower() in SPLITS for name in direct) and direct & {"train", "test", "val"}:
        # train/picture, test/picture: pictures without a class. A class called `train` has others beside it.
        return direct
    return set()


def list_csv(config: SourceConfig, path: Path) -> Listing:
    """Tables with ``filepath,title[,label][,split]``; paths are relative to the table's folder."""
    files: list[Path] = []
    entries: list[Entry] = []
    problems: list[Problem] = []
    for table in expand(path):
        for number, row in _table_rows(table):
            name = (row["filepath"] or "").strip()
            if not name:
                problems.append(Problem("row without a path", f"{table.name} line {number}"))
                continue
            files.append(table.parent / name)
            entries.append(
                Entry(readable_name(files[-1]), _cell(row, "label"), _cell(row, "title"), _cell(row, "split"))
            )
    if not files:
        raise UserError(f"{path} has no rows", expected="a line for every picture below the header")
    return Listing(readable_name(path), entries, pictures_in(files), problems)


def _cell(row: dict[str, str | None], column: str) -> str | None:
    return (row.get(column) or "").strip() or None


def _table_rows(path: Path) -> Iterator[tuple[int, dict[str, str | None]]]:
    columns = "filepath,title[,label][,split]"
    if not path.is_file():
        raise UserError(f"{path} is not a regular file", expected=f"a table with the columns {columns}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline(_MAX_LINE)
            file.seek(0)
            tabs = path.suffix.lower() == ".tsv" or ("\t" in header and "," not in header)
            rows = csv.DictReader(_lines(file, path), delimiter="\t" if tabs else ",", skipinitialspace=True)
            found = [name.strip() for name in rows.fieldnames or ()]
            rows.fieldnames = found
            if "filepath" not in found or not {"title", "label"} & set(found):
                missing = "filepath" if "filepath" not in found else "title or label"
                raise UserError(
                    f"{path} has no column {missing}",
                    expected=columns,
                    found=", ".join(found)[:1000] or "an empty file",
                )
            for row in rows:
                if None in row:
                    raise UserError(
                        f"{path} line {rows.line_num} has more fields than the header",
                        do='put a title that contains the separator in double quotes ("…")',
                    )
                yield rows.line_num, row
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text", found=str(error), do="save the table as UTF-8") from error
    except (csv.Error, OSError) as error:
        raise UserError(f"{path} cannot be read as a table", found=str(error)) from error


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    """The lines of a table. One that holds a NUL, or never ends, is of no table and is not read on."""
    number = 0
    while line := file.readline(_MAX_LINE):
        number += 1
        if "\0" in line:
            raise UserError(
                f"{path} line {number} holds a NUL character", do="save the table as UTF-8 text, one line a picture"
            )
        if len(line) == _MAX_LINE:
            raise UserError(f"{path} line {number} is longer than {_MAX_LINE:,} characters")
        yield line
