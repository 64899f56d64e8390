"""Fetch: download what the judge kept, and as many negatives, into shards.

Links rot: what was lost, and why, is part of the result. Failures that may pass are
tried again when the command is run again.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.data.retrieve.download import FetchLimits, download, open_session
from holdfast.data.retrieve.manifest import Note, RetrievalFolder, fingerprint_step
from holdfast.data.retrieve.net import Lookup, system_lookup
from holdfast.data.retrieve.scheduler import ByHost
from holdfast.data.retrieve.shards import Record, ShardStore, Wanted
from holdfast.errors import UserError
from holdfast.files import fingerprint_json, is_temporary, not_writable, read_json, write_json

Progress = Callable[[int, int, int], None]  # settled, in all, pictures among them

SHARD_ROWS = 1000
PLAN = "plan.json"  # what the downloads were made for; written before the first of them


def wanted_rows(folder: RetrievalFolder) -> tuple[list[Wanted], str]:
    """What to fetch, and the fingerprint of the step that says so: kept rows first, then their negatives."""
    judged = folder.step("judge")
    searched = folder.need("search")
    if judged is None:
        raise UserError(
            f"the captions in {folder.root} were not judged yet",
            do="run `holdfast retrieve judge`; with --judge none every caption found is kept",
        )
    kept = folder.rows("judge", "judged", ["url", "text", "license", "kept"]).to_pylist()
    rows: list[Wanted] = []
    seen: set[str] = set()
    for row in kept:
        if row["kept"] and row["url"] not in seen:
            seen.add(row["url"])
            rows.append(Wanted(len(rows), "target", row["url"], row["text"], row["license"]))
    ratio = int(searched["query"]["ratio"])
    for row in folder.rows("search", "negatives").slice(0, ratio * len(rows)).to_pylist():
        rows.append(Wanted(len(rows), "negative", row["url"], row["text"], row["license"]))
    return rows, fingerprint_step(judged)


def open_store(folder: RetrievalFolder, limits: FetchLimits, *, restart: bool = False) -> tuple[ShardStore, str]:
    """The folder's shards, after a check that they belong to this selection of rows."""
    rows, source = wanted_rows(folder)
    if not rows:
        raise UserError(
            "there is nothing to fetch", found="no caption was kept by the judge", do="loosen the search or the judge"
        )
    plan = {"input": source, "shard_rows": SHARD_ROWS, "image": asdict(limits.image)}
    if _read_plan(folder) != plan:
        if _holds_downloads(folder.fetched):
            if not restart:
                raise UserError(
                    f"{folder.fetched} holds downloads of another selection or other image settings",
                    do="take another folder, or throw them away with --restart",
                )
            _throw_away(folder.fetched)
        write_json(_plan_path(folder), plan)
    return ShardStore(folder.fetched, rows, SHARD_ROWS, limits.attempts), source


def _plan_path(folder: RetrievalFolder) -> Path:
    return folder.fetched / PLAN


def _read_plan(folder: RetrievalFolder) -> dict[str, Any] | None:
    """What the downloads were made for; None where that is not to be known."""
    try:
        plan = read_json(_plan_path(folder))
    except UserError:
        return None
    return plan if isinstance(plan, dict) else None


def _holds_downloads(path: Path) -> bool:
    if not path.is_dir():
        return path.exists()
    return any(entry.name != PLAN and not is_temporary(entry) for entry in path.iterdir())


def _throw_away(path: Path) -> None:
    """Remove a folder; one that a kill left half removed could be taken for the beginning of another."""
    try:
        rubbish = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.replace(path, Path(rubbish) / path.name)
        shutil.rmtree(rubbish)
    except OSError as error:
        raise not_writable(path, error) from error


def open_store_to_read(folder: RetrievalFolder, limits: FetchLimits) -> ShardStore:
    """The shards of a finished fetch step."""
    plan = _read_plan(folder)
    rows, source = wanted_rows(folder)
    if plan is None or plan.get("input") != source or type(plan.get("shard_rows")) is not int:
        raise UserError(
            f"{folder.fetched} holds downloads of another selection", do="run `holdfast retrieve fetch` first"
        )
    return ShardStore(folder.fetched, rows, max(1, plan["shard_rows"]), limits.attempts)


def fetch(
    out: Path,
    limits: FetchLimits,
    *,
    restart: bool = False,
    progress: Progress | None = None,
    lookup: Lookup = system_lookup,
    note: Note | None = None,
) -> dict[str, Any]:
    """Download what is wanted and not there yet, and write the manifest's section."""
    with RetrievalFolder(out).writing("search") as folder:
        store, source = open_store(folder, limits, restart=restart)
        asyncio.run(_fetch_all(store, open_rows(store, note), limits, progress, lookup))
        return finish(folder, store, limits, source, "holdfast")


def open_rows(store: ShardStore, note: Note | None = None) -> list[Wanted]:
    """The rows that are still to be fetched, of all shards; says so where earlier downloads could not be read."""
    rows = [row for shard in range(store.count) for row in store.open_rows(shard)]
    if store.unreadable and note is not None:
        note(f"{store.unreadable:,} lines in {store.root} cannot be read; what they told of is fetched again")
    return rows


def records_of(store: ShardStore) -> Iterator[Record]:
    """What became of every row, in order of keys."""
    for shard in range(store.count):
        yield from store.finished(shard).values()


def listing_hash(records: Iterable[Record]) -> str:
    """What the manifest knows the result by."""
    return fingerprint_json([[record.key, record.url, record.status, record.sha256] for record in records])


def finish(folder: RetrievalFolder, store: ShardStore, limits: FetchLimits, source: str, origin: str) -> dict[str, Any]:
    """Count what came and what was lost, and write the section."""
    counts = {"target": Counter[str](), "negative": Counter[str]()}
    records = list(records_of(store))
    for record in records:
        counts[record.role][record.status] += 1
    lost = sum((count for count in counts.values()), Counter[str]())
    images = lost.pop("ok", 0)
    section: dict[str, Any] = {
        "input": source,
        "origin": origin,
        "image": asdict(limits.image),
        "counts": {
            "wanted": len(records),
            "target": counts["target"]["ok"],
            "negatives": counts["negative"]["ok"],
            "images": images,
            "lost": sum(lost.values()),
            "lost_because": dict(sorted(lost.items())),
            "may_be_retried": sum(record.again(limits.attempts) for record in records),
        },
        "hashes": {"records": listing_hash(records)},
    }
    folder.finish("fetch", section)
    return section


async def _fetch_all(
    store: ShardStore, todo: list[Wanted], limits: FetchLimits, progress: Progress | None, lookup: Lookup
) -> None:
    _raise_file_limit(limits.concurrency + 256)
    waiting = Counter(row.index // store.size for row in todo)
    total = sum(len(store.rows(shard)) for shard in range(store.count))
    state = {"settled": total - len(todo), "images": 0}
    # Decoding leaves the interpreter lock, so threads are enough.
    with ThreadPoolExecutor(max(2, os.cpu_count() or 1), thread_name_prefix="decode") as pool:
        async with open_session(limits, lookup) as session:

            async def fetch_row(row: Wanted) -> None:
                outcome = await download(session, row.url, limits, pool)
                store.record(row, outcome)
                shard = row.index // store.size
                waiting[shard] -= 1
                if waiting[shard] == 0:
                    # Writing a shard takes a while; the other downloads go on meanwhile.
                    await asyncio.get_running_loop().run_in_executor(pool, store.close, shard)
                state["settled"] += 1
                state["images"] += outcome.status == "ok"
                if progress is not None:
                    progress(state["settled"], total, state["images"])

            await ByHost(iter(todo), fetch_row, limits.concurrency, limits.per_host).run()


def _raise_file_limit(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def read_fetched(store: ShardStore) -> Iterator[tuple[Record, bytes]]:
    """Every picture that came, with its record, in order of keys."""
    for shard in range(store.count):
        records = store.finished(shard)
        for key, jpeg in store.pictures(shard, records):
            yield records[key], jpeg
