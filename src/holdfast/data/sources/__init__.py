"""Sources: where examples come from. A literal dict says who reads which kind.

A lister looks at names, tables and labels only and returns a :class:`~holdfast.data.catalogue.Listing`;
:func:`catalogue` then reads each example once for its content hash.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from holdfast.config import SourceConfig
from holdfast.data.catalogue import Catalogue, Listing, build, join
from holdfast.data.names import readable_name
from holdfast.data.sources.files import expand, find_files, group_in_path, walk_pictures
from holdfast.errors import UserError, nearest

Lister = Callable[[SourceConfig, Path], Listing]

# Who reads which kind of source: a module of this package, and its function. Only the one that is needed is imported.
KINDS = {
    "folder": ("folder", "list_folder"),
    "csv": ("csv", "list_csv"),
    "digits": ("digits", "list_digits"),
    "bdd100k": ("bdd100k", "list_bdd100k"),
    "places365": ("places365", "list_places365"),
    "parquet": ("parquet", "list_parquet"),
    "webdataset": ("webdataset", "list_webdataset"),
    "pack": ("store", "list_store"),
}


def lister(kind: str) -> Lister:
    """Who lists sources of this kind."""
    module, function = KINDS[kind]
    return getattr(importlib.import_module(f"holdfast.data.sources.{module}"), function)


GROUP_COLUMNS = ("csv", "parquet")  # where `group` of a source is a column; elsewhere it is a rule for paths


def list_source(config: SourceConfig, root: Path) -> Listing:
    """What one source names, with its classes renamed and its splits chosen as the configuration says.

    Locators are relative to ``root`` where the source's path is: what is written down of them stays true in a folder
    that is moved.
    """
    listing = lister(config.kind)(config, root / (config.path or ""))
    if config.path is not None and not config.path.is_absolute():
        listing = _relative_to(root, listing)
    labels = {entry.label for entry in listing.entries if entry.label is not None}
    for name in config.classes:
        if name not in labels:
            raise UserError(f"{listing.name} has no class {name!r} to rename", do=nearest(name, labels))
    splits = {entry.split for entry in listing.entries if entry.split is not None}
    for name in config.splits or ():
        if name not in splits:
            raise UserError(f"{listing.name} has no split {name!r}", do=nearest(name, splits))
    chosen = [
        position
        for position, entry in enumerate(listing.entries)
        if config.splits is None or entry.split in config.splits
    ]
    entries = [listing.entries[position] for position in chosen]
    if config.classes:
        entries = [replace(item, label=config.classes.get(item.label or "", item.label)) for item in entries]
    if config.group is not None and config.kind not in GROUP_COLUMNS:
        entries = [replace(item, group=group_in_path(config.group, item.locator)) for item in entries]
    indices = [listing.indices[position] for position in chosen]
    return replace(listing, entries=entries, indices=indices)


def _relative_to(root: Path, listing: Listing) -> Listing:
    begin = readable_name(root).rstrip("/") + "/"
    if begin == "./":
        return listing
    entries = [replace(entry, locator=entry.locator.removeprefix(begin)) for entry in listing.entries]
    problems = [replace(problem, where=problem.where.removeprefix(begin)) for problem in listing.problems]
    return replace(listing, name=listing.name.removeprefix(begin), entries=entries, problems=problems)


def catalogue(sources: Iterable[SourceConfig], root: Path, *, limit: float = 1.0, workers: int = 4) -> Catalogue:
    """The examples of all sources with their content hashes. ``limit`` is the share that may be unreadable."""
    return join([build(list_source(source, root), limit=limit, workers=workers) for source in sources])


def guess_source(text: str) -> SourceConfig:
    """The source that a word on the command line means, by what lies there."""
    if text == "digits":
        return SourceConfig(kind="digits")
    path = Path(text)
    first = expand(path)[0]
    kind = _KIND_OF_FILE.get(first.suffix.lower()) if first.is_file() else _kind_of_folder(first)
    if kind is None:
        raise UserError(
            f"{text} is no source that holdfast knows",
            expected=f"a folder, a file ending in {', '.join(_KIND_OF_FILE)}, or `digits`",
        )
    return SourceConfig.model_validate({"kind": kind, "path": path})


_KIND_OF_FILE = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".tar": "webdataset"}


def _kind_of_folder(folder: Path) -> str:
    if (folder / "store.json").exists():
        return "pack"
    from holdfast.data.sources.bdd100k import LABEL_FILES
    from holdfast.data.sources.places365 import CATEGORIES

    if find_files(folder, CATEGORIES):
        return "places365"
    if any(find_files(folder, name) for names in LABEL_FILES.values() for name in names):
        return "bdd100k"
    if next(walk_pictures(folder), None) is None:
        for suffix, kind in ((".parquet", "parquet"), (".tar", "webdataset")):
            if next(folder.rglob(f"*{suffix}"), None) is not None:
                return kind
    return "folder"
