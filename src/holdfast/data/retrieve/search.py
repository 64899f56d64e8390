"""Search: one streaming pass of DuckDB over the captions for those with the words, then random ones without.

The scan is asked one cheap question about one column, which DuckDB evaluates inside its Parquet reader, before it
decodes the other columns; the exact whole-word test runs on the few rows that come out. The negatives are drawn when
the number found is known (:mod:`holdfast.data.retrieve.negatives`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.data.retrieve.manifest import ROWS, RetrievalFolder
from holdfast.data.retrieve.metadata import (
    MetadataFile,
    S3Options,
    column_names,
    connect,
    find_files,
    identifier,
    import_duckdb,
    quoted,
)
from holdfast.data.retrieve.negatives import draw_negatives
from holdfast.data.retrieve.words import Words
from holdfast.errors import UserError
from holdfast.files import clear_temporaries, fingerprint_file, fingerprint_json, not_writable, write_atomic

if TYPE_CHECKING:
    import duckdb

_PART_ROWS = 65_536
_GROUP_ROWS = 8_000_000  # rows of one query: enough that its fixed costs vanish, few enough to lose little when stopped
_PART = pa.schema(
    [
        pa.field("file", pa.int32(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("url", pa.string()),
        pa.field("text", pa.string()),
        pa.field("license", pa.string()),
        pa.field("kind", pa.int8(), nullable=False),
    ]
)
# What became of a row that the scan handed out.
NOTHING, FOUND, EXCLUDED, FILTERED = -1, 0, 1, 2

Progress = Callable[[int, int], None]  # rows done, rows in all


@dataclass(frozen=True)
class SearchQuery:
    """What is looked for, and which rows may be taken at all."""

    words: Words
    ratio: int = 10  # negatives for each row found; the paper's ten
    seed: int = 0
    min_side: int | None = None  # pixels, both WIDTH and HEIGHT
    min_similarity: float | None = None
    nsfw: Literal["unlikely", "unsure", "any"] = "unsure"  # the least safe tag that is still taken
    columns: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.ratio < 0:
            raise UserError(f"--ratio got {self.ratio}", expected="0 or more")
        if self.nsfw not in ("unlikely", "unsure", "any"):
            raise UserError(f"--nsfw got {self.nsfw!r}", expected="unlikely, unsure or any")

    def described(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {**asdict(self.words), **{name: value for name, value in asdict(self).items() if name != "words"}}


def search(
    source: str,
    query: SearchQuery,
    out: Path,
    *,
    s3: S3Options | None = None,
    memory: str = "1GB",
    threads: int | None = None,
    progress: Progress | None = None,
    cluster: str | None = None,
) -> dict[str, Any]:
    """Search the captions at ``source`` and write what was found, the negatives and the manifest's section to ``out``.

    A search that was stopped goes on with the file at which it stopped. With ``cluster`` (``local`` or the address of
    a Ray cluster) the files are scanned by Ray workers; the result is the same.
    """
    files = find_files(source, s3)
    for file in files:
        check_columns(file, query)
    engine = f"duckdb {import_duckdb().__version__}"
    request = {"query": query.described(), "files": [file.described() for file in files], "engine": engine}
    with RetrievalFolder(out).writing() as folder:
        done = folder.step("search")
        if done is None or done["request"] != fingerprint_json(request) or not _untouched(folder, done):
            done = _search(files, query, folder, request, s3, memory, threads, progress, cluster)
        for old in folder.found.parent.glob("parts-*"):
            shutil.rmtree(old)
        return done


def _search(
    files: list[MetadataFile],
    query: SearchQuery,
    folder: RetrievalFolder,
    request: dict[str, Any],
    s3: S3Options | None,
    memory: str,
    threads: int | None,
    progress: Progress | None,
    cluster: str | None,
) -> dict[str, Any]:
    parts = folder.found.parent / f"parts-{fingerprint_json(request)[7:19]}"
    try:
        parts.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_writable(parts, error) from error
    clear_temporaries(parts)
    if cluster is None:
        _scan_here(files, query, parts, s3, memory, threads, progress)
    else:
        from holdfast.data.retrieve.cluster import scan_on_cluster

        scan_on_cluster(cluster, files, query, parts, s3, memory, progress)
    try:
        with connect(memory, threads, parts, s3, files) as connection:
            counts = _merge(connection, parts, folder)
            counts["negatives"] = draw_negatives(connection, files, query, counts["found"], folder)
    except import_duckdb().Error as error:
        raise UserError(
            "DuckDB could not put the rows together",
            found=str(error).splitlines()[0][:300],
            do="give it more --memory or room on the disk; the scan is kept, and the same command goes on from there",
        ) from error
    section = {
        "request": fingerprint_json(request),
        **request,
        "counts": {"rows": sum(file.rows for file in files), **counts},
        "hashes": {"found": fingerprint_file(folder.found), "negatives": fingerprint_file(folder.negatives)},
    }
    folder.finish("search", section)
    return section


def _untouched(folder: RetrievalFolder, section: dict[str, Any]) -> bool:
    pairs = (("found", folder.found), ("negatives", folder.negatives))
    return all(path.is_file() and fingerprint_file(path) == section["hashes"].get(name) for name, path in pairs)


def check_columns(file: MetadataFile, query: SearchQuery) -> dict[str, str]:
    """The file's columns by our names; a filter on a column that is not there is the user's mistake."""
    names = column_names(file, query.columns)
    needs: dict[str, tuple[str, ...]] = {"--min-side": ("width", "height")} if query.min_side is not None else {}
    if query.min_similarity is not None:
        needs["--min-similarity"] = ("similarity",)
    for option, columns in needs.items():
        for column in columns:
            if column not in names:
                raise UserError(
                    f"{option} needs a {column.upper()} column, which {file.name} has not",
                    found=", ".join(file.columns),
                    do=f"leave {option} out",
                )
    return names


def _scan_here(
    files: list[MetadataFile],
    query: SearchQuery,
    parts: Path,
    s3: S3Options | None,
    memory: str,
    threads: int | None,
    progress: Progress | None,
) -> None:
    total, before = sum(file.rows for file in files), 0
    connection = connect(memory, threads, parts, s3, files)
    with connection:
        for group in _groups(files, _knows_file_index(connection, files[0])):
            start = before
            before += sum(file.rows for _, file in group)
            if not (path := part_path(parts, group[0][0])).exists():
                starts = dict(zip((index for index, _ in group), _starts(group, start), strict=True))
                report = (
                    None if progress is None else lambda file, row, starts=starts: progress(starts[file] + row, total)
                )
                write_part(path, scan_files(connection, group, query), report)
            if progress is not None:
                progress(before, total)


Group = list[tuple[int, MetadataFile]]  # files with their place in the list of all


def _knows_file_index(connection: duckdb.DuckDBPyConnection, file: MetadataFile) -> bool:
    """Whether this DuckDB can say which of several files a row is from without carrying the name (1.3 and later)."""
    try:
        connection.execute(f"SELECT file_index FROM read_parquet({quoted(file.location)}) LIMIT 0").fetchall()
    except import_duckdb().Error:
        return False
    return True


def _groups(files: list[MetadataFile], together: bool) -> list[Group]:
    """Files that are scanned by one query: neighbours whose columns have the same names, or each alone."""
    groups: list[Group] = []
    for index, file in enumerate(files):
        last = groups[-1] if groups else []
        rows = sum(item.rows for _, item in last)
        if together and last and rows + file.rows <= _GROUP_ROWS and last[0][1].columns == file.columns:
            last.append((index, file))
        else:
            groups.append([(index, file)])
    return groups


def _starts(group: Group, first: int) -> list[int]:
    return [first + sum(file.rows for _, file in group[:place]) for place in range(len(group))]


def part_path(parts: Path, index: int) -> Path:
    """Where the rows of the files from ``index`` on wait for the others."""
    return parts / f"{index:06d}.parquet"


def scan_files(connection: duckdb.DuckDBPyConnection, group: Group, query: SearchQuery) -> Iterator[pa.RecordBatch]:
    """The rows of some files that contain the words, in order: found, excluded or filtered."""
    names = check_columns(group[0][1], query)
    first = group[0][0]
    place = f"file_index + {first}" if len(group) > 1 else f"{first}"
    locations = ", ".join(quoted(file.location) for _, file in group)
    url, text = identifier(names["url"]), identifier(names["text"])
    words = query.words
    quick = " OR ".join(f"regexp_matches({text}, {quoted(item)})" for item in words.quick)
    excluded = f"regexp_matches({text}, {quoted(words.excluded)})" if words.excluded else "false"
    statement = (
        "SELECT *, kind >= 0 AS wanted FROM ("
        f"SELECT ({place})::INT AS file, file_row_number AS row, {url}::VARCHAR AS url, {text}::VARCHAR AS text,"
        f" {license_column(names)} AS license,"
        f" CASE WHEN {url} IS NULL OR NOT regexp_matches({text}, {quoted(words.whole)}) THEN {NOTHING}"
        f" WHEN {excluded} THEN {EXCLUDED}"
        f" WHEN {passes(names, query)} THEN {FOUND} ELSE {FILTERED} END::TINYINT AS kind"
        f" FROM read_parquet([{locations}], file_row_number = true) WHERE {quick})"
    )
    engine = import_duckdb()
    try:
        for batch in stream(connection, statement):
            kept = batch.filter(batch.column("wanted"))
            yield pa.RecordBatch.from_arrays([kept.column(item.name).cast(item.type) for item in _PART], schema=_PART)
    except (engine.Error, pa.ArrowException, OSError) as error:
        raise UserError(
            f"DuckDB could not read {group[0][1].name}"
            + (f" or one of the {len(group) - 1} after it" * (len(group) > 1)),
            found=str(error).splitlines()[0][:300],
            do="check it; what was scanned before is kept, and the same command goes on from there",
        ) from error


def license_column(names: dict[str, str]) -> str:
    """The licence as SQL, NULL where there is no such column."""
    return f"{identifier(names['license']) if 'license' in names else 'NULL'}::VARCHAR"


def passes(names: dict[str, str], query: SearchQuery) -> str:
    """The filters on size, similarity and NSFW tag; a row that has no value does not pass a filter on it."""
    tests: list[str] = []
    if query.min_side is not None:
        tests += [
            f"coalesce({identifier(names[item])} >= {int(query.min_side)}, false)" for item in ("width", "height")
        ]
    if query.min_similarity is not None:
        tests.append(f"coalesce({identifier(names['similarity'])} >= {float(query.min_similarity)!r}, false)")
    if query.nsfw != "any" and "nsfw" in names:
        tag = f"upper(coalesce({identifier(names['nsfw'])}::VARCHAR, 'UNSURE'))"
        tests.append(f"{tag} NOT IN ('NSFW', 'TRUE'{', ' + quoted('UNSURE') if query.nsfw == 'unlikely' else ''})")
    return " AND ".join(tests) or "true"


def write_part(path: Path, batches: Iterator[pa.RecordBatch], report: Callable[[int, int], None] | None = None) -> None:
    """Stream batches into a part; it gets its name only when it is whole."""

    def write(temporary: Path) -> None:
        with pq.ParquetWriter(temporary, _PART, compression="lz4", use_dictionary=False) as writer:
            for batch in batches:
                if len(batch):
                    writer.write_batch(batch)
                    if report is not None:
                        report(batch.column("file")[-1].as_py(), batch.column("row")[-1].as_py())

    write_atomic(path, write)


def _merge(connection: duckdb.DuckDBPyConnection, parts: Path, folder: RetrievalFolder) -> dict[str, int]:
    """Put the parts together: everything found, in the order of the files."""
    connection.execute(f"CREATE VIEW part AS SELECT * FROM read_parquet({quoted(str(parts / '*.parquet'))})")
    kinds = dict(connection.execute("SELECT kind, count(*) FROM part GROUP BY kind").fetchall())
    urls = connection.execute(f"SELECT count(DISTINCT url) FROM part WHERE kind = {FOUND}").fetchall()
    found = write_rows(connection, f"SELECT * FROM part WHERE kind = {FOUND} ORDER BY file, row", folder.found)
    return {
        "matched": found + kinds.get(EXCLUDED, 0) + kinds.get(FILTERED, 0),
        "excluded": kinds.get(EXCLUDED, 0),
        "filtered": kinds.get(FILTERED, 0),
        "found": found,
        "found_urls": int(urls[0][0]),
    }


def stream(connection: duckdb.DuckDBPyConnection, statement: str) -> Iterator[pa.RecordBatch]:
    """The rows of a query in batches of bounded size."""
    result: Any = connection.sql(statement)
    if result is not None:
        # DuckDB 2 renamed fetch_arrow_reader.
        yield from (getattr(result, "to_arrow_reader", None) or result.fetch_arrow_reader)(_PART_ROWS)


def write_rows(connection: duckdb.DuckDBPyConnection, statement: str, path: Path) -> int:
    """Write a query's rows as Parquet with Arrow, whose files are the same bytes for the same rows."""
    rows = 0

    def write(temporary: Path) -> None:
        nonlocal rows
        with pq.ParquetWriter(temporary, ROWS, compression="zstd") as writer:
            for batch in stream(connection, statement):
                arrays = [batch.column(field.name).cast(field.type) for field in ROWS]
                writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=ROWS))
                rows += len(batch)

    write_atomic(path, write)
    return rows
