"""Writing a packed store: in parallel, block by block, so that a kill at any moment loses one block at most.

A block's pictures are written and flushed to disk before a line in the journal says so. Starting again lists the
source, finds it unchanged, and writes the blocks that no whole line speaks of, or in which pictures could not be
read. The header is written last and makes the store valid. One process writes at a time
(:mod:`holdfast.locks`); another that comes meanwhile is told of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.config import SourceConfig
from holdfast.data.catalogue import Listing, Problem, check_limit, content_and_image, in_order
from holdfast.data.dedup.signatures import SIDE, SMALL, thumbnail
from holdfast.data.images import BadImage, evaluation_view, interpolation_filter, picture_id
from holdfast.data.sources import list_source
from holdfast.data.sources.store import BLOCK, FORMAT, INDEX, JOURNAL, PLAN, VERSION, Store, open_store
from holdfast.errors import UserError
from holdfast.files import (
    clear_temporaries,
    fingerprint_bytes,
    fingerprint_file,
    fingerprint_json,
    is_temporary,
    read_json,
    read_jsonl,
    write_atomic,
    write_json,
)
from holdfast.locks import LOCK, one_writer

Progress = Callable[[int, int], None]  # pictures done, pictures in all


@dataclass(frozen=True)
class _Packed:
    """One picture as it goes into the store."""

    id: str
    picture: str
    view: np.ndarray
    thumb: np.ndarray
    small: bool


def pack(
    config: SourceConfig,
    out: Path,
    *,
    size: int = 224,
    interpolation: str = "bicubic",
    root: Path | None = None,
    workers: int | None = None,
    limit: float = 0.01,
    progress: Progress | None = None,
) -> Store:
    """Write the source's pictures to a store at ``out``, or go on with one that was begun there."""
    if size < 1:
        raise UserError("the size of pictures must be positive", found=str(size))
    interpolation_filter(interpolation)
    listing = list_source(config, root or Path())
    if config.kind == "pack":
        raise UserError("a packed store is not packed again", do="give the source it was made of")
    try:
        return _pack(listing, out, size, interpolation, workers or min(8, os.cpu_count() or 1), limit, progress)
    except OSError as error:
        raise UserError(
            f"cannot write {out}",
            found=error.strerror or str(error),
            do="free some space and run the same command again: it goes on where it stopped",
        ) from error


def _pack(
    listing: Listing,
    out: Path,
    size: int,
    interpolation: str,
    workers: int,
    limit: float,
    progress: Progress | None,
) -> Store:
    rows = _rows(listing)
    plan = _plan(listing, rows, size, interpolation)
    if _is_finished(out, plan) and not _leftovers(out):
        return open_store(out)  # nothing to write: it may lie where nothing can be written
    _refuse_other_files(out)
    with one_writer(out):
        if _is_finished(out, plan):
            _clean_up(out)
            return open_store(out)
        done = _begin(out, plan)
        _write_blocks(listing, rows, out, plan, done, workers, progress)
        return _finish(listing, rows, out, plan, limit)


def _rows(listing: Listing) -> list[list[int]]:
    """Positions of the listing by picture: a picture named several times, with several captions, is stored once."""
    places: dict[str, list[int]] = {}
    for position, entry in enumerate(listing.entries):
        places.setdefault(entry.locator, []).append(position)
    return list(places.values())


def _plan(listing: Listing, rows: list[list[int]], size: int, interpolation: str) -> dict[str, Any]:
    digest = hashlib.sha256()
    for entry in listing.entries:
        digest.update(json.dumps([entry.locator, entry.label, entry.caption, entry.split]).encode())
    return {
        "format": FORMAT,
        "version": VERSION,
        "size": size,
        "interpolation": interpolation,
        "rows": len(rows),
        "source": listing.name,
        "listing": f"sha256:{digest.hexdigest()}",
    }


def _is_finished(out: Path, plan: dict[str, Any]) -> bool:
    """Whether the store is there; one of another plan is refused."""
    if not (out / "store.json").exists():
        return False
    header = open_store(out).header
    if any(header.get(key) != value for key, value in plan.items()):
        raise _other_plan(out)
    return True


def _leftovers(out: Path) -> list[Path]:
    """What a kill after the header was written leaves behind."""
    return [path for path in out.iterdir() if path.name in (PLAN, JOURNAL) or is_temporary(path)]


def _clean_up(out: Path) -> None:
    clear_temporaries(out)
    for name in (JOURNAL, PLAN):
        (out / name).unlink(missing_ok=True)


def _refuse_other_files(out: Path) -> None:
    """A folder with anything in it but a store, or what a kill in a store's first write left, is somebody else's."""
    if not out.exists():
        return
    names = {path.name for path in out.iterdir() if not is_temporary(path)} - {LOCK} if out.is_dir() else {out.name}
    if names and not names & {PLAN, "store.json"}:
        raise UserError(f"{out} is not empty", expected="a folder that does not exist yet, or an unfinished store")


def _begin(out: Path, plan: dict[str, Any]) -> set[int]:
    """Blocks that are there already, every picture of them."""
    _refuse_other_files(out)
    clear_temporaries(out)
    if not (out / PLAN).exists():
        write_json(out / PLAN, plan)
    if read_json(out / PLAN) != plan:
        raise _other_plan(out)
    return {number for number, line in _journal(out, plan["rows"]).items() if not line["bad"]}


def _other_plan(out: Path) -> UserError:
    return UserError(
        f"{out} holds a store of something else",
        expected="the same source, unchanged, with the same size and interpolation",
        do="choose another folder, or remove that one first",
    )


def _journal(out: Path, rows: int) -> dict[int, dict[str, Any]]:
    """The last whole line of the journal about each block; half a line, as a kill leaves it, is passed over."""
    path = out / JOURNAL
    if not path.exists():
        return {}
    try:
        if not path.is_file():
            raise ValueError("it is not a regular file")
        lines = {line["block"]: line for line in read_jsonl(path)}
        if not all(_is_line(line, rows) for line in lines.values()):
            raise ValueError("a line that speaks of no block of this store")
        return lines
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is broken", found=str(error), do=f"remove {out} and pack again") from error


def _is_line(line: dict[str, Any], rows: int) -> bool:
    number, ids, small, bad = (line[key] for key in ("block", "ids", "small", "bad"))
    count = min(rows - number * BLOCK, BLOCK)
    return (
        number >= 0
        and len(ids) == count > 0
        and all(0 <= position < count for position in (*small, *map(int, bad)))
        and all(isinstance(text, str) for text in (line["digest"], *bad.values()))
        and all((identity is None) == (str(position) in bad) for position, identity in enumerate(ids))
        and len(line.get("pictures", ids)) == count
    )


def _write_blocks(
    listing: Listing,
    rows: list[list[int]],
    out: Path,
    plan: dict[str, Any],
    done: set[int],
    workers: int,
    progress: Progress | None,
) -> None:
    lengths = {"pixels.bin": 3 * plan["size"] ** 2, "thumbs.bin": SIDE**2}
    todo = [number for number in range(-(-len(rows) // BLOCK)) if number not in done]
    with ExitStack() as opened:
        handles: dict[str, int] = {}
        for name, length in lengths.items():
            handles[name] = os.open(out / name, os.O_RDWR | os.O_CREAT, 0o644)
            opened.callback(os.close, handles[name])
            os.ftruncate(handles[name], length * len(rows))
        journal = opened.enter_context((out / JOURNAL).open("ab"))
        os.ftruncate(journal.fileno(), _whole_lines(out / JOURNAL))
        for count, (number, block) in enumerate(_blocks(listing, rows, plan, todo, workers), len(done) + 1):
            arrays = _stack(block, plan["size"])
            for (name, length), array in zip(lengths.items(), arrays, strict=True):
                _write_all(handles[name], array, number * BLOCK * length)
                os.fdatasync(handles[name])
            journal.write((json.dumps(_line(number, block, arrays[0])) + "\n").encode())
            journal.flush()
            os.fdatasync(journal.fileno())
            if progress is not None:
                progress(min(count * BLOCK, len(rows)), len(rows))


def _whole_lines(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1


def _blocks(
    listing: Listing, rows: list[list[int]], plan: dict[str, Any], todo: list[int], workers: int
) -> Iterator[tuple[int, list[_Packed | str]]]:
    """The blocks that are to be written; pictures are decoded by several threads and come in order."""

    def make(row: int) -> _Packed | str:
        index = listing.indices[rows[row][0]]
        try:
            content, image = content_and_image(listing.reader, index)
            view = evaluation_view(image, plan["size"], plan["interpolation"])
        except (OSError, BadImage) as error:
            return getattr(error, "strerror", None) or str(error)
        identity = hashlib.sha256(content).hexdigest()
        return _Packed(identity, picture_id(image), view, thumbnail(image), min(image.size) < SMALL)

    members = {number: range(number * BLOCK, min((number + 1) * BLOCK, len(rows))) for number in todo}
    pictures = in_order(make, (row for number in todo for row in members[number]), workers)
    for number in todo:
        yield number, list(islice(pictures, len(members[number])))


def _stack(block: list[_Packed | str], size: int) -> tuple[np.ndarray, np.ndarray]:
    views = np.zeros((len(block), 3, size, size), dtype=np.uint8)
    thumbs = np.zeros((len(block), SIDE, SIDE), dtype=np.uint8)
    for position, packed in enumerate(block):
        if isinstance(packed, _Packed):
            views[position], thumbs[position] = packed.view, packed.thumb
    return views, thumbs


def _write_all(handle: int, array: np.ndarray, offset: int) -> None:
    content = array.data.cast("B")
    while content:
        written = os.pwrite(handle, content, offset)
        content, offset = content[written:], offset + written


def _line(number: int, block: list[_Packed | str], views: np.ndarray) -> dict[str, Any]:
    return {
        "block": number,
        "ids": [packed.id if isinstance(packed, _Packed) else None for packed in block],
        "pictures": [packed.picture if isinstance(packed, _Packed) else None for packed in block],
        "small": [position for position, packed in enumerate(block) if isinstance(packed, _Packed) and packed.small],
        "bad": {str(position): packed for position, packed in enumerate(block) if isinstance(packed, str)},
        "digest": fingerprint_bytes(views.tobytes()),
    }


def _finish(listing: Listing, rows: list[list[int]], out: Path, plan: dict[str, Any], limit: float) -> Store:
    journal = [line for _, line in sorted(_journal(out, len(rows)).items())]
    ids: list[str | None] = [identity for line in journal for identity in line["ids"]]
    # Blocks that an earlier version wrote do not say which picture a row shows.
    pictures: list[str | None] = [
        picture for line in journal for picture in line.get("pictures", [None] * len(line["ids"]))
    ]
    small = {BLOCK * line["block"] + position for line in journal for position in line["small"]}
    bad = [
        Problem("unreadable", listing.entries[rows[BLOCK * line["block"] + int(position)][0]].locator, why)
        for line in journal
        for position, why in line["bad"].items()
    ]
    check_limit(bad, len(rows), limit)
    lines: list[dict[str, Any]] = []
    for row, positions in enumerate(rows):
        identity = ids[row]
        if identity is None:
            continue
        for position in positions:
            entry = listing.entries[position]
            if listing.decide_split is not None:
                entry = replace(entry, split=listing.decide_split(identity))
            shown = (entry.label, entry.caption, entry.split, entry.locator)
            values = (row, identity, *shown, row in small, pictures[row])
            lines.append(dict(zip(INDEX.names, values, strict=True)))
    table = pa.Table.from_pylist(lines, schema=INDEX)
    write_atomic(out / "index.arrow", lambda temporary: _write_index(temporary, table))
    header = plan | {
        "examples": len({line["example_id"] for line in lines}),
        "index": fingerprint_file(out / "index.arrow"),
        "blocks": [line["digest"] for line in journal],
        "problems": [[item.kind, item.where, item.detail] for item in (*listing.problems, *bad)],
    }
    header["fingerprint"] = fingerprint_json({key: header[key] for key in ("size", "interpolation", "index", "blocks")})
    write_json(out / "store.json", header)
    _clean_up(out)
    return open_store(out)


def _write_index(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
