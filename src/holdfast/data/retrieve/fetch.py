"""Fetch: download what the judge kept, and as many negatives, into shards.

Links rot: what was lost, and why, is part of the result. Failures that may pass are
tried again when the command is run again.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from holdfast.artifacts import fingerprint_json, read_json, write_json
from holdfast.data.retrieve.download import FetchLimits, download, open_session
from holdfast.data.retrieve.manifest import RetrievalFolder, fingerprint_step
from holdfast.data.retrieve.net import Lookup, system_lookup
from holdfast.data.retrieve.scheduler import ByHost
from holdfast.data.retrieve.shards import Record, ShardStore, Wanted
from holdfast.errors import UserError

Progress = Callable[[int, int, int], None]  # settled, in all, pictures among them

SHARD_ROWS = 1000


def wanted_rows(folder: RetrievalFolder) -> tuple[list[Wanted], str]:
    """What to fetch, and the fingerprint of the step that says so: kept rows first, then their negatives."""
    judged = folder.step("judge")
    searched = folder.need("search")
    if judged is None:
        raise UserError(
            f"the captions in {folder.root} were not judged yet",
            do="run `holdfast retrieve judge`; with --judge none every caption found is kept",
        )
    kept = pq.read_table(folder.judged, columns=["url", "text", "license", "kept"]).to_pylist()
    rows: list[Wanted] = []
    seen: set[str] = set()
    for row in kept:
        if row["kept"] and row["url"] not in seen:
            seen.add(row["url"])
            rows.append(Wanted(len(rows), "target", row["url"], row["text"], row["license"]))
    ratio = int(searched["query"]["ratio"])
    for row in pq.read_table(folder.negatives).slice(0, ratio * len(rows)).to_pylist():
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
    path = folder.fetched / "plan.json"
    if path.exists() and read_json(path) != plan:
        if not restart:
            raise UserError(
                f"{folder.fetched} holds downloads of another selection or other image settings",
                do="take another folder, or throw them away with --restart",
            )
        shutil.rmtree(folder.fetched)
    if not path.exists():
        write_json(path, plan)
    return ShardStore(folder.fetched, rows, SHARD_ROWS, limits.attempts), source


def open_store_to_read(folder: RetrievalFolder, limits: FetchLimits) -> ShardStore:
    """The shards of a finished fetch step."""
    plan = read_json(folder.fetched / "plan.json")
    rows, source = wanted_rows(folder)
    if plan["input"] != source:
        raise UserError(
            f"{folder.fetched} holds downloads of another selection", do="run `holdfast retrieve fetch` first"
        )
    return ShardStore(folder.fetched, rows, int(plan["shard_rows"]), limits.attempts)


def fetch(
    out: Path,
    limits: FetchLimits,
    *,
    restart: bool = False,
    progress: Progress | None = None,
    lookup: Lookup = system_lookup,
) -> dict[str, Any]:
    """Download what is wanted and not there yet, and write the manifest's section."""
    folder = RetrievalFolder(out)
    store, source = open_store(folder, limits, restart=restart)
    asyncio.run(_fetch_all(store, limits, progress, lookup))
    return finish(folder, store, limits, source, "holdfast")


def finish(folder: RetrievalFolder, store: ShardStore, limits: FetchLimits, source: str, origin: str) -> dict[str, Any]:
    """Count what came and what was lost, and write the section."""
    counts = {"target": Counter[str](), "negative": Counter[str]()}
    listing: list[list[str | None]] = []
    retry = 0
    for shard in range(store.count):
        for record in store.finished(shard).values():
            counts[record.role][record.status] += 1
            retry += record.again(limits.attempts)
            listing.append([record.key, record.url, record.status, record.sha256])
    lost = sum((count for count in counts.values()), Counter[str]())
    images = lost.pop("ok", 0)
    section: dict[str, Any] = {
        "input": source,
        "origin": origin,
        "image": asdict(limits.image),
        "counts": {
            "wanted": len(listing),
            "target": counts["target"]["ok"],
            "negatives": counts["negative"]["ok"],
            "images": images,
            "lost": sum(lost.values()),
            "lost_because": dict(sorted(lost.items())),
            "may_be_retried": retry,
        },
        "hashes": {"records": fingerprint_json(listing)},
    }
    folder.finish("fetch", section)
    return section


async def _fetch_all(store: ShardStore, limits: FetchLimits, progress: Progress | None, lookup: Lookup) -> None:
    _raise_file_limit(limits.concurrency + 256)
    waiting = Counter[int]()
    todo: deque[Wanted] = deque()
    for shard in range(store.count):
        rows = store.open_rows(shard)
        waiting[shard] = len(rows)
        todo.extend(rows)
    total = sum(len(store.rows(shard)) for shard in range(store.count))
    state = {"settled": total - len(todo), "images": 0}
    # Decoding leaves the interpreter lock, so threads are enough.
    with ThreadPoolExecutor(max(2, os.cpu_count() or 1), thread_name_prefix="decode") as pool:
        async with open_session(limits, lookup) as session:

            async def one(row: Wanted) -> None:
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

            await ByHost(iter(todo), one, limits.concurrency, limits.per_host).run()


def _raise_file_limit(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def read_fetched(store: ShardStore) -> Iterator[tuple[Record, bytes]]:
    """Every picture that came, with its record, in order of keys."""
    for shard in range(store.count):
        records = store.finished(shard)
        for key, jpeg in store.pictures(shard):
            yield records[key], jpeg
