"""Clean: no picture twice, and none that is nearly a protected, dev, sealed or test picture.

What is left is written as tables of pairs (``filepath,title``) beside the pictures, and as shards; what is not is
listed with the reason.
"""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.data.dedup.leaks import CORRELATION, DISTANCE, Match, Pictures, find_leaks
from holdfast.data.dedup.signatures import SMALL, make_signatures, thumbnail
from holdfast.data.images import BadImage, open_image, to_rgb
from holdfast.data.retrieve.download import FetchLimits
from holdfast.data.retrieve.fetch import listing_hash, open_store_to_read, read_fetched, records_of
from holdfast.data.retrieve.manifest import RetrievalFolder, fingerprint_step
from holdfast.data.retrieve.shards import Record, ShardStore, write_tar
from holdfast.errors import UserError
from holdfast.files import fingerprint_ids, fingerprint_json, not_writable, write_atomic, write_text

LeakCheck = Callable[[Pictures, Pictures | None], list[Match]]

_SHARD_PICTURES = 1000


def fetched_pictures(store: ShardStore) -> tuple[list[Record], Pictures]:
    """Records and signatures of what was fetched. The id is the hash of the bytes that came, as a catalogue's is."""
    records: list[Record] = []
    thumbs: list[np.ndarray] = []
    small: list[bool] = []
    for record, jpeg in read_fetched(store):
        try:
            image = to_rgb(open_image(jpeg))
        except BadImage as error:  # we encoded it ourselves
            raise ValueError(f"picture {record.key} in the shards is damaged: {error}") from error
        records.append(record)
        thumbs.append(thumbnail(image))
        small.append(min(image.size) < SMALL)
    stacked = np.stack(thumbs) if thumbs else np.zeros((0, 32, 32), np.uint8)
    pictures = Pictures(
        tuple(str(record.body_sha256) for record in records),
        tuple(record.key for record in records),
        make_signatures(stacked, small=np.array(small, dtype=bool)),
    )
    return records, pictures


def clean(
    out: Path,
    against: Sequence[tuple[str, Pictures]],
    *,
    check: LeakCheck = find_leaks,
    pictures: bool = True,
) -> dict[str, Any]:
    """Remove near copies, keep ``ratio`` negatives for each target pair, and write what is left.

    ``against`` are the named sets that nothing may be taken from. With ``pictures`` the pictures are also written as
    files with tables of pairs; the shards are written in any case.
    """
    with RetrievalFolder(out).writing("fetch") as folder:
        return _clean(folder, against, check, pictures=pictures)


def _clean(
    folder: RetrievalFolder, against: Sequence[tuple[str, Pictures]], check: LeakCheck, *, pictures: bool
) -> dict[str, Any]:
    source = fingerprint_step(folder.need("fetch"))
    ratio = int(folder.need("search")["query"]["ratio"])
    store = _fetched(folder)
    records, fetched = fetched_pictures(store)
    removed = _near_protected(fetched, against, check)
    removed |= _near_each_other(fetched, removed, check)
    left = [row for row in range(len(records)) if row not in removed]
    targets = [row for row in left if records[row].role == "target"]
    negatives = [row for row in left if records[row].role == "negative"]
    for row in negatives[ratio * len(targets) :]:
        removed[row] = ("more negatives than needed", "")
    chosen = {"target": targets, "negatives": negatives[: ratio * len(targets)]}
    folder.reopen("clean")
    _write_removed(folder, records, removed)
    try:
        _write_left(folder, store, records, chosen, pictures=pictures)
    except OSError as error:
        raise not_writable(folder.cleaned, error) from error
    reasons = [reason for reason, _ in removed.values()]
    section: dict[str, Any] = {
        "input": source,
        "against": {name: fingerprint_ids(item.ids) for name, item in against},
        "near": {"distance": DISTANCE, "correlation": CORRELATION},
        "counts": {
            "images": len(records),
            **{name: len(rows) for name, rows in chosen.items()},
            "removed": len(removed),
            "removed_because": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
            "compared_with": sum(len(item) for _, item in against),
        },
        "hashes": {
            name: fingerprint_json([[records[row].key, records[row].sha256, records[row].text] for row in rows])
            for name, rows in chosen.items()
        },
    }
    folder.finish("clean", section)
    return section


def _fetched(folder: RetrievalFolder) -> ShardStore:
    """The shards of the fetch step, if they are as the manifest says."""
    store = open_store_to_read(folder, FetchLimits())
    if folder.need("fetch")["hashes"].get("records") != listing_hash(records_of(store)):
        raise UserError(
            f"the downloads in {folder.fetched} are not those of the last whole run",
            found="a fetch that was stopped halfway, or files that were changed",
            do="run `holdfast retrieve fetch` again",
        )
    return store


def _near_protected(
    fetched: Pictures, against: Sequence[tuple[str, Pictures]], check: LeakCheck
) -> dict[int, tuple[str, str]]:
    removed: dict[int, tuple[str, str]] = {}
    for name, others in against:
        for match in check(fetched, others):
            removed.setdefault(match.a, (f"near {name}", others.names[match.b]))
    return removed


def _near_each_other(
    fetched: Pictures, removed: dict[int, tuple[str, str]], check: LeakCheck
) -> dict[int, tuple[str, str]]:
    """Of pictures that are nearly one, the first stays: targets come before negatives."""
    earlier: dict[int, list[int]] = {}
    for match in check(fetched, None):
        earlier.setdefault(max(match.a, match.b), []).append(min(match.a, match.b))
    first: dict[str, int] = {}
    for row, identity in enumerate(fetched.ids):
        if first.setdefault(identity, row) != row:
            earlier.setdefault(row, []).append(first[identity])
    again: dict[int, tuple[str, str]] = {}
    for row in sorted(earlier):
        if row in removed:
            continue
        same = [item for item in sorted(earlier[row]) if item not in removed and item not in again]
        if same:
            again[row] = ("near another fetched", fetched.names[same[0]])
    return again


def _write_removed(folder: RetrievalFolder, records: list[Record], removed: dict[int, tuple[str, str]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["key", "role", "url", "reason", "match"])
    for row in sorted(removed):
        writer.writerow([records[row].key, records[row].role, records[row].url, *removed[row]])
    write_text(folder.cleaned / "removed.csv", text.getvalue())


def _write_left(
    folder: RetrievalFolder, store: ShardStore, records: list[Record], chosen: dict[str, list[int]], *, pictures: bool
) -> None:
    """Shards of each kind, and beside them pictures and tables. Done anew each time: an old file must not stay."""
    root = folder.cleaned
    for old in (*root.glob("target-*.tar"), *root.glob("negatives-*.tar"), *root.glob("*.csv")):
        if old.name != "removed.csv":
            old.unlink()
    shutil.rmtree(root / "images", ignore_errors=True)
    part_of = {records[row].key: name for name, rows in chosen.items() for row in rows}
    waiting: dict[str, list[tuple[Record, bytes]]] = {name: [] for name in chosen}
    written = dict.fromkeys(chosen, 0)

    def flush(name: str) -> None:
        members = waiting[name]
        write_atomic(root / f"{name}-{written[name]:05d}.tar", lambda path: write_tar(path, members))
        written[name] += 1
        waiting[name] = []

    if pictures:
        (root / "images").mkdir(parents=True, exist_ok=True)
    for record, jpeg in read_fetched(store):
        name = part_of.get(record.key)
        if name is None:
            continue
        waiting[name].append((record, jpeg))
        if pictures:
            (root / "images" / f"{record.key}.jpg").write_bytes(jpeg)
        if len(waiting[name]) == _SHARD_PICTURES:
            flush(name)
    for name, rows in chosen.items():
        if waiting[name]:
            flush(name)
        if pictures:
            _write_pairs(root / f"{name}.csv", [records[row] for row in rows])


def _write_pairs(path: Path, records: list[Record]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["filepath", "title"])
    for record in records:
        # One line a pair: a caption is text for a model, and line breaks in it mean nothing.
        writer.writerow([f"images/{record.key}.jpg", " ".join(record.text.split())])
    write_text(path, text.getvalue())
