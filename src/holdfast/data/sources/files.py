"""What sources that lie in files have in common: splits by name, patterns of paths, lists of files."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.data.catalogue import BytesReader, Problem
from holdfast.data.images import SUFFIXES, read_picture
from holdfast.data.names import readable_name
from holdfast.data.task import Role
from holdfast.errors import UserError, nearest
from holdfast.files import read_regular

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
    "constraint": Role.TRAIN,
    "sealed": Role.SEALED,
}

_OF_THE_SYSTEM = ("thumbs.db", "desktop.ini")  # what Windows leaves in folders; elsewhere such names begin with a dot
_MAX_LIST = 64 << 20  # bytes of a list of classes or images; that of the validation images of Places365 has a megabyte
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


def group_cell(value: object, column: str, table: Path, row: int) -> str:
    """The group that a table names for a picture; a picture without one is refused."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value  # as pandas writes whole numbers
    name = "" if value is None else str(number).strip()
    if name.lower() in ("", "nan"):
        raise UserError(
            f"{table} row {row} names no group",
            expected=f"a value in the column {column!r}, as `group` of the source says",
            do="fill the column in every row, or leave `group` out where examples are independent",
        )
    return name


def group_in_path(rule: str, locator: str) -> str:
    """The group that a picture's path names: the first parenthesis of the rule, or all that it matches."""
    found = re.search(rule, locator)
    name = "" if found is None else (found.group(1) if found.re.groups else found.group()) or ""
    if not name:
        raise UserError(
            f"the path {locator} names no group",
            expected=f"a path in which the rule {rule!r} finds one",
            do=r"change `group` of the source: a regular expression such as '([^/]+)_frame\d+', or '/([^/]+)/[^/]+$' "
            "for the folder that the picture lies in",
        )
    return name


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


def walk_pictures(root: Path, others: list[Path] | None = None) -> Iterator[Path]:
    """Picture files under ``root`` in sorted order. Links are followed, each folder once, so that a loop ends.

    Files that are not read are added to ``others``.
    """
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
            elif others is not None and item.name.lower() not in _OF_THE_SYSTEM:
                others.append(Path(item.path))


def subfolders(folder: Path) -> list[Path]:
    """Folders in a folder, sorted by name; hidden ones are left out."""
    return [Path(item.path) for item in _folder_items(folder, set()) if _is_folder(item)]


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
    found = sorted(Path(item) for item in glob.glob(str(path), recursive=True))
    if found:
        return found
    if glob.has_magic(str(path)):
        raise UserError(f"nothing matches {path}", do="check the pattern; it is relative to the TOML file")
    known = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
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
