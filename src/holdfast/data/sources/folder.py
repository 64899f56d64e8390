"""Folders of pictures: ``split/class/picture`` or ``class/picture``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.config import SourceConfig
from holdfast.data.catalogue import Entry, Listing, Problem
from holdfast.data.images import CONVERT, OTHER_SUFFIXES, SUFFIXES
from holdfast.data.names import readable_name
from holdfast.data.sources.files import SPLITS, expand, pictures_in, subfolders, walk_pictures
from holdfast.errors import UserError

# Kinds of problems.
NO_PICTURES = "folder without pictures"
NOT_READ = "picture in a format that is not read"
OTHER_FILES = "folder with files that are no pictures"


def list_folder(config: SourceConfig, path: Path) -> Listing:
    """``split/class/picture``, ``class/picture``, or pictures without a class; deeper folders belong to their class."""
    files: list[Path] = []
    entries: list[Entry] = []
    problems: list[Problem] = []
    for root in expand(path):
        if not root.is_dir():
            raise UserError(f"{root} is a file", expected="a folder of pictures", do="give the source its `kind`")
        above = len(root.parts)
        others: list[Path] = []
        pictures = [(picture, picture.parts[above:]) for picture in walk_pictures(root, others)]
        splits = _split_folders([parts for _, parts in pictures])
        for name in sorted(splits - SPLITS.keys()):
            problems.append(Problem("unknown split", name, "shared out like train"))
        for file, parts in pictures:
            split = readable_name(parts[0]) if parts[0] in splits else None
            inner = parts[1:] if split is not None else parts
            label = readable_name(inner[0]) if len(inner) > 1 else None
            files.append(file)
            entries.append(Entry(readable_name(file), label, None, split))
        if any(entry.label is not None for entry in entries):
            problems.extend(_without_pictures(root, {parts[:-1] for _, parts in pictures}, splits))
        problems.extend(_passed_over(others, {folder for file, _ in pictures for folder in file.parents}))
    if not files:
        expected = f"files ending in {', '.join(sorted(SUFFIXES))}"
        unread = [problem.where for problem in problems if problem.kind == NOT_READ]
        do = f"convert {_some(unread)} to JPEG or PNG" if unread else "check the path; classes are folders inside it"
        raise UserError(f"no pictures under {path}", expected=expected, found=_other_items(path), do=do)
    return Listing(readable_name(path), entries, pictures_in(files), problems)


def _without_pictures(root: Path, filled: set[tuple[str, ...]], splits: set[str]) -> Iterator[Problem]:
    """Folders where classes are expected that hold no picture; ``filled`` are the folders of the pictures.

    A link to a folder whose pictures were read under another name is none of them.
    """
    holding = {parts[:length] for parts in filled for length in (1, 2)}
    for folder in subfolders(root):
        inside = [(folder.name, inner.name) for inner in subfolders(folder)] if folder.name in splits else []
        for parts in (item for item in inside or [(folder.name,)] if item not in holding):
            path = root.joinpath(*parts)
            if next(walk_pictures(path), None) is None:
                yield Problem(NO_PICTURES, readable_name(path), _other_items(path))


def _passed_over(others: Sequence[Path], filled: set[Path]) -> Iterator[Problem]:
    """Files that are not read: each that is a picture, and by folder those that are none, among pictures."""
    beside: dict[Path, list[str]] = defaultdict(list)
    for file in sorted(others):
        if file.suffix.lower() in OTHER_SUFFIXES:
            yield Problem(NOT_READ, readable_name(file), CONVERT)
        elif file.parent in filled:
            beside[file.parent].append(readable_name(file.name))
    for folder, names in beside.items():
        yield Problem(OTHER_FILES, readable_name(folder), _some(names))


def _other_items(path: Path) -> str:
    """What lies in the folders that hold no picture, in a few names."""
    names = sorted(readable_name(item.name) for root in expand(path) for item in root.iterdir())
    return _some(names) if names else "an empty folder"


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[:most])}, … ({len(names)} in all)"


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
