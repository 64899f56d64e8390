"""Files: folders of pictures and tables that name them; paths, globs and splits as every source reads them."""

from __future__ import annotations

import csv
import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.config import SourceConfig
from holdfast.data.catalogue import BytesReader, Entry, Listing, Problem, readable_name
from holdfast.data.images import SUFFIXES
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


def split_role(split: str | None) -> Role | None:
    """The role that a split of a source stands for; None where the example is to be shared out."""
    return None if split is None else SPLITS.get(split.lower())


def walk_pictures(root: Path) -> Iterator[Path]:
    """Picture files under ``root`` in sorted order. Links are followed, each folder once, so that a loop ends."""
    visited: set[tuple[int, int]] = set()

    def walk(folder: Path) -> Iterator[Path]:
        status = folder.stat()
        if (status.st_dev, status.st_ino) in visited:
            return
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as found:
            items = sorted((one for one in found if not one.name.startswith(".")), key=lambda one: one.name)
        for item in items:
            path = Path(item.path)
            if _is_folder(item):
                yield from walk(path)
            elif path.suffix.lower() in SUFFIXES:
                yield path

    yield from walk(root)


def _is_folder(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link to itself
        return False


def expand(path: Path) -> list[Path]:
    """The files or folders a path or glob stands for, sorted; ``{000..127}`` counts up. None is an error."""
    if path.exists():
        return [path]
    counted = re.search(r"\{(\d+)\.\.(\d+)\}", str(path))
    if counted:
        first, last = counted.groups()
        names = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
        return [one for name in names for one in expand(Path(str(path).replace(counted.group(), name)))]
    found = sorted(Path(one) for one in glob.glob(str(path), recursive=True))
    if found:
        return found
    if glob.has_magic(str(path)):
        raise UserError(f"nothing matches {path}", do="check the pattern; it is relative to the TOML file")
    known = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(f"{path} does not exist", do=nearest(path.name, known) if known else "check the path")


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
    return Listing(readable_name(path), entries, BytesReader(lambda index: files[index].read_bytes()), problems)


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
    return Listing(readable_name(path), entries, BytesReader(lambda index: files[index].read_bytes()), problems)


def _cell(row: dict[str, str | None], column: str) -> str | None:
    return (row.get(column) or "").strip() or None


def _table_rows(path: Path) -> Iterator[tuple[int, dict[str, str | None]]]:
    columns = "filepath,title[,label][,split]"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            tabs = path.suffix.lower() == ".tsv" or ("\t" in header and "," not in header)
            rows = csv.DictReader(file, delimiter="\t" if tabs else ",", skipinitialspace=True)
            found = [name.strip() for name in rows.fieldnames or ()]
            rows.fieldnames = found
            if "filepath" not in found or not {"title", "label"} & set(found):
                missing = "filepath" if "filepath" not in found else "title or label"
                raise UserError(
                    f"{path} has no column {missing}", expected=columns, found=", ".join(found) or "an empty file"
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
