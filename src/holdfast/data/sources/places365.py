"""Places365: the standard layout and the official category list, train and validation merged and split 60/20/20."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.config import SourceConfig
from holdfast.data.catalogue import Entry, Listing, Problem, number_of
from holdfast.data.names import readable_name
from holdfast.data.sources.files import find_files, pictures_in, read_lines, walk_pictures
from holdfast.errors import UserError

CATEGORIES = "categories_places365.txt"
VALIDATION = "places365_val.txt"


def read_categories(path: Path) -> list[str]:
    """``/a/airfield 0`` … as ``airfield`` …, in the order of their numbers."""
    lines = [line.split() for line in read_lines(path)]
    try:
        numbered = {int(number): name for name, number in lines}
    except ValueError as error:
        raise UserError(f"{path} is not the category list", expected="lines such as `/a/airfield 0`") from error
    if sorted(numbered) != list(range(len(numbered))) or len(numbered) != len(lines):
        raise UserError(f"{path}: the numbers of the categories do not count up from 0, each once")
    names = [numbered[number] for number in range(len(numbered))]
    return [name.removeprefix(f"/{name[1:2]}/") for name in names]


def split_of(example_id: str) -> str:
    """60/20/20 by content."""
    number = number_of(example_id, "places365")
    return "train" if number < 0.6 else "dev" if number < 0.8 else "test"


def list_places365(config: SourceConfig, path: Path) -> Listing:
    """``train/airfield/*.jpg``, ``data_256/a/airfield/*.jpg``; validation images by folder or by the official list."""
    found = find_files(path, CATEGORIES) if os.path.isdir(path) else []
    if not found:
        raise UserError(f"{CATEGORIES} is not under {path}", do="put the official category list beside the images")
    categories = read_categories(found[0])
    folders = _folder_names(categories)
    numbers = _validation_numbers(path)
    files: list[Path] = []
    entries: list[Entry] = []
    problems: list[Problem] = []
    for file in walk_pictures(path):
        inner = file.relative_to(path).parts
        label = _category(inner[:-1], folders)
        if label is None and inner[-1] in numbers:
            label = _by_number(numbers[inner[-1]], categories, inner[-1])
        if label is None:
            problems.append(Problem("picture outside the categories", readable_name(file)))
            continue
        files.append(file)
        entries.append(Entry(readable_name(file), label))
    if not files:
        raise UserError(f"no pictures of Places365 under {path}", expected="train/airfield/*.jpg and the like")
    empty = sorted(set(categories) - {str(entry.label) for entry in entries})
    problems += [Problem("category without pictures", name) for name in empty]
    return Listing(readable_name(path), entries, pictures_in(files), problems, decide_split=split_of)


def _folder_names(categories: list[str]) -> dict[str, str]:
    """Spellings of a category's folder: ``hotel/outdoor``, ``hotel-outdoor``, ``hotel_outdoor``."""
    names = {spelling: name for name in categories for spelling in (name.replace("/", "_"), name.replace("/", "-"))}
    return names | {name: name for name in categories}


def _category(folders: tuple[str, ...], names: dict[str, str]) -> str | None:
    """The longest run of folders, from the innermost outwards, that is a category."""
    for start in range(len(folders)):
        for end in range(len(folders), start, -1):
            name = names.get("/".join(folders[start:end]))
            if name is not None:
                return name
    return None


def _validation_numbers(path: Path) -> dict[str, int]:
    found = find_files(path, VALIDATION)
    if not found:
        return {}
    try:
        return {name: int(number) for name, number in map(str.split, read_lines(found[0]))}
    except ValueError as error:
        raise UserError(
            f"{found[0]} is not the list of validation images", expected="lines such as `a.jpg 165`"
        ) from error


def _by_number(number: int, categories: list[str], name: str) -> str:
    if not 0 <= number < len(categories):
        raise UserError(f"{VALIDATION}: {name} has the category {number}", expected=f"0 to {len(categories) - 1}")
    return categories[number]
