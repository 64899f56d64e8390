"""Speed and memory of `holdfast retrieve search` against DuckDB's own scan, pandas and polars.

    python benchmarks/retrieve_search.py --captions 100000000 --folder FOLDER [--compare 10000000]

Captions are real ones (../shared/data/laion-style-10k.parquet) with a distinct ending each, so that they do not
compress away, in files of one million rows with LAION's columns. Every contestant runs in a process of its own, which
is asked for its peak memory and for the processor time that it used; rounds alternate, so that what else the machine
does falls on all alike. FOLDER is deleted in the end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CAPTIONS = Path(__file__).parents[1].parent / "shared" / "data" / "laion-style-10k.parquet"
RESULT = Path(__file__).parent / "results" / "retrieve_search.json"
ROWS = 1_000_000
WORD = "foggy"


def make_file(path: Path, first: int, rows: int) -> None:
    """One file of captions: real ones in a scattered order, each with an ending of its own."""
    import duckdb

    with duckdb.connect() as connection:
        connection.execute("SET memory_limit = '1GB'")
        connection.execute(
            f"CREATE TABLE base AS SELECT URL, TEXT, row_number() OVER () - 1 AS n FROM read_parquet('{CAPTIONS}')"
        )
        temporary = path.with_suffix(".tmp")
        connection.execute(
            f"""COPY (
                SELECT b.URL || '?v=' || i AS URL, b.TEXT || ' ' || format('{{:x}}', hash(i)) AS TEXT,
                    (200 + hash(i + 1) % 1800)::INT AS WIDTH, (200 + hash(i + 2) % 1800)::INT AS HEIGHT,
                    0.28 + (hash(i + 3) % 100000) / 500000.0 AS similarity,
                    CASE hash(i + 4) % 20 WHEN 0 THEN 'NSFW' WHEN 1 THEN 'UNSURE' ELSE 'UNLIKELY' END AS NSFW
                FROM range({first}, {first + rows}) r(i) JOIN base b ON b.n = (i * 7919 + i // 10000 * 31) % 10000
            ) TO '{temporary}' (FORMAT parquet, COMPRESSION snappy, ROW_GROUP_SIZE 122880)"""
        )
        os.replace(temporary, path)


def bare_count(files: list[str], out: Path, threads: int) -> int:
    """DuckDB's own scan: the yardstick."""
    import duckdb

    with duckdb.connect() as connection:
        connection.execute(f"SET threads = {threads}; SET memory_limit = '1GB'")
        rows = connection.execute(f"SELECT count(*) FROM read_parquet({files}) WHERE TEXT ILIKE '%{WORD}%'").fetchall()
    return int(rows[0][0])


def ours(files: list[str], out: Path, threads: int) -> int:
    """The whole search: scan, whole-word test, filters, negatives, sorted tables, manifest."""
    from holdfast.data.retrieve.search import SearchQuery, search
    from holdfast.data.retrieve.words import Words

    folder = Path(files[0]).parent
    source = (
        str(folder)
        if len(files) == len(list(folder.glob("*.parquet")))
        else f"{folder}/0000[0-{len(files) - 1}].parquet"
    )
    section = search(source, SearchQuery(Words(WORD)), out, threads=threads)
    return int(section["counts"]["matched"])


def with_polars(files: list[str], out: Path, threads: int) -> int:
    """Found rows and ten times as many negatives by hash, streaming."""
    import polars as pl

    text, found = pl.col("TEXT"), pl.col("TEXT").str.contains(rf"(?i)\b{WORD}\b")
    rows = (
        pl.scan_parquet(files)
        .select("URL", "TEXT", "NSFW")
        .filter(found | (text.hash(0) < 2**64 // 200))
        .with_columns(found=found)
        .collect(engine="streaming")
    )
    count = rows["found"].sum()
    rows.filter(~pl.col("found")).sort(pl.col("TEXT").hash(0)).head(10 * count).write_parquet(out.with_suffix(".n"))
    rows.filter("found").write_parquet(out.with_suffix(".f"))
    return int(count)


def with_pandas(files: list[str], out: Path, threads: int) -> int:
    """The same file by file: all of them at once do not fit into memory."""
    import pandas as pd

    found: list[Any] = []
    others: list[Any] = []
    for file in files:
        frame = pd.read_parquet(file, columns=["URL", "TEXT", "NSFW"])
        mask = frame["TEXT"].str.contains(rf"\b{WORD}\b", case=False, regex=True)
        found.append(frame[mask])
        others.append(frame[~mask].sample(frac=0.005, random_state=0))
    rows = pd.concat(found)
    pd.concat(others).head(10 * len(rows)).to_parquet(out.with_suffix(".n"))
    rows.to_parquet(out.with_suffix(".f"))
    return len(rows)


def _child(function: Callable[..., int], files: list[str], out: Path, threads: int, pipe: Any) -> None:
    started = time.perf_counter()
    count = function(files, out, threads)
    seconds = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_SELF)
    pipe.send((seconds, count, used.ru_maxrss * 1024, used.ru_utime + used.ru_stime))


def measure(function: Callable[..., int], files: list[str], work: Path, threads: int) -> tuple[float, int, int, float]:
    """Seconds, rows found, peak memory and processor seconds of one run, start of the process included in the last."""
    work.mkdir(parents=True, exist_ok=True)
    out = work / "out"
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(False)
    process = context.Process(target=_child, args=(function, files, out, threads, sender))
    process.start()
    result = receiver.recv()
    process.join()
    shutil.rmtree(work)
    return result


def contest(
    names: dict[str, Callable[..., int]], files: list[str], work: Path, threads: int, rounds: int
) -> dict[str, Any]:
    """Alternating rounds; best and median seconds, peak memory."""
    runs: dict[str, list[tuple[float, int, int, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, function in names.items():
            runs[name].append(measure(function, files, work, threads))
            print(name, *runs[name][-1], flush=True)
    return {
        name: {
            "seconds_best": round(min(item[0] for item in done), 3),
            "seconds_median": round(statistics.median(item[0] for item in done), 3),
            "cpu_seconds_best": round(min(item[3] for item in done), 3),
            "found": done[0][1],
            "peak_memory_mib": round(max(item[2] for item in done) / 2**20),
        }
        for name, done in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=int, default=20_000_000)
    parser.add_argument(
        "--compare", type=int, default=5_000_000, help="captions for the contest with pandas and polars"
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    data = given.folder / "captions"
    data.mkdir(parents=True, exist_ok=True)
    files: list[str] = []
    for index in range(given.captions // ROWS):
        path = data / f"{index:05d}.parquet"
        if not path.exists():
            make_file(path, index * ROWS, ROWS)
        files.append(str(path))
    size = sum(Path(file).stat().st_size for file in files)
    print(f"{len(files)} files, {size / 1e9:.1f} GB", flush=True)
    work = given.folder / "work"
    some = files[: given.compare // ROWS]
    small = contest(
        {"duckdb_ilike": bare_count, "holdfast": ours, "polars": with_polars, "pandas": with_pandas},
        some,
        work,
        given.threads,
        given.rounds,
    )
    large = contest({"duckdb_ilike": bare_count, "holdfast": ours}, files, work, given.threads, given.rounds)
    ratio = large["duckdb_ilike"]["seconds_median"] / large["holdfast"]["seconds_median"]
    rate = given.captions / large["holdfast"]["seconds_median"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    result = {
        "command": f"benchmarks/retrieve_search.py --captions {given.captions} --compare {given.compare}",
        "commit": commit,
        "machine": {
            "cpus": os.cpu_count(),
            "threads": given.threads,
            "machine": platform.machine(),
            "load_before": round(load, 1),
        },
        "captions": given.captions,
        "bytes": size,
        "all": large,
        "speed_against_bare_count": round(ratio, 3),
        "speed_against_bare_count_best": round(
            large["duckdb_ilike"]["seconds_best"] / large["holdfast"]["seconds_best"], 3
        ),
        "cpu_time_against_bare_count": round(
            large["duckdb_ilike"]["cpu_seconds_best"] / large["holdfast"]["cpu_seconds_best"], 3
        ),
        "captions_per_second": round(rate),
        "compared": {"captions": given.compare, **small},
        "on_paper_hours_at_this_rate": {
            "400 M captions": round(400e6 / rate / 3600, 2),
            "5 G captions": round(5e9 / rate / 3600, 2),
        },
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    (RESULT if given.captions >= 20_000_000 else given.folder.with_suffix(".json")).write_text(
        json.dumps(result, indent=2) + "\n"
    )
    print(json.dumps(result, indent=2))
    shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
