"""Random negatives: captions with none of the words, drawn after the scan, when it is known how many are needed.

Reading a link costs a scan of its whole column, so a uniform draw over billions of rows would cost a second pass. The
draw is made in two stages instead: blocks of neighbouring rows in an order given by a hash, one for every 2.5 million
rows and at least 16 where there are as many, and within a block the captions whose hash is small. Every row is as
likely as any other; the same files and seed give the same rows, whoever scans them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.data.retrieve.manifest import RetrievalFolder
from holdfast.data.retrieve.metadata import MetadataFile, identifier, quoted

if TYPE_CHECKING:
    import duckdb

    from holdfast.data.retrieve.search import SearchQuery

FEWEST_BLOCKS, MOST_BLOCKS, ROWS_A_BLOCK = 16, 256, 2_500_000  # so a draw costs a few per cent of the scan
BLOCK_ROWS = 32_768
_MARGIN = 1.25  # some of what is drawn falls away as filtered, repeated or found
_HASH_END = 2**64


@dataclass(frozen=True)
class Block:
    """Neighbouring rows of one file, within one row group: what can be read without reading the rest."""

    file: int
    start: int
    rows: int


def ordered_blocks(files: list[MetadataFile], seed: int) -> list[Block]:
    """All blocks in the order in which they are drawn from."""
    found: list[tuple[bytes, Block]] = []
    for index, file in enumerate(files):
        start = 0
        for rows in file.row_groups:
            for offset in range(0, rows, BLOCK_ROWS):
                block = Block(index, start + offset, min(BLOCK_ROWS, rows - offset))
                found.append((hashlib.sha256(f"{seed} {file.footer} {block.start}".encode()).digest(), block))
            start += rows
    return [block for _, block in sorted(found, key=lambda item: (item[0], item[1].file, item[1].start))]


def draw_negatives(
    connection: duckdb.DuckDBPyConnection,
    files: list[MetadataFile],
    query: SearchQuery,
    found: int,
    folder: RetrievalFolder,
) -> int:
    """Write ``ratio * found`` negatives, or as many as there are; how many were written."""
    from holdfast.data.retrieve.search import write_rows

    wanted, blocks = query.ratio * found, ordered_blocks(files, query.seed)
    together = max(FEWEST_BLOCKS, min(MOST_BLOCKS, sum(file.rows for file in files) // ROWS_A_BLOCK))
    share = _MARGIN * wanted / max(1, sum(block.rows for block in blocks[:together]))
    columns = "file INT, row BIGINT, url VARCHAR, text VARCHAR, license VARCHAR, hash UBIGINT, good BOOLEAN"
    connection.execute(f"CREATE TABLE found AS SELECT url FROM read_parquet({quoted(str(folder.found))})")
    while True:
        limit = _HASH_END if share >= 1 else int(share * _HASH_END)
        connection.execute(f"CREATE OR REPLACE TABLE drawn ({columns})")
        for start in range(0, len(blocks) if wanted else 0, together):
            for block in blocks[start : start + together]:
                connection.execute(_draw(block, files[block.file], query, limit))
            if _count(connection) >= wanted:
                break
        if _count(connection) >= wanted or limit == _HASH_END:
            return write_rows(connection, f"{_distinct()} ORDER BY hash, file, row LIMIT {wanted}", folder.negatives)
        share = 8 * share


def _draw(block: Block, file: MetadataFile, query: SearchQuery, limit: int) -> str:
    """Rows of a block with a small hash; ``good`` are those that pass the filters and contain no term anywhere.

    The filter names the hash alone: one condition on one column is what DuckDB evaluates before it decodes the others.
    """
    from holdfast.data.retrieve.search import check_columns, license_column, passes

    names = check_columns(file, query)
    url, text = identifier(names["url"]), identifier(names["text"])
    row_hash = f"hash({text}, {int(query.seed)})"
    small = f" AND {row_hash} < {limit}::UBIGINT" if limit < _HASH_END else ""
    good = f"{passes(names, query)} AND NOT regexp_matches({text}, {quoted(query.words.loose)})"
    return (
        f"INSERT INTO drawn SELECT {block.file}, file_row_number, {url}::VARCHAR, {text}::VARCHAR,"
        f" {license_column(names)}, {row_hash}, {text} IS NOT NULL AND {url} IS NOT NULL AND {good}"
        f" FROM read_parquet({quoted(file.location)}, file_row_number = true)"
        f" WHERE file_row_number BETWEEN {block.start} AND {block.start + block.rows - 1}{small}"
    )


def _distinct() -> str:
    """One row a caption and one a URL, the first of each, and no URL that was found under another caption."""
    first = "QUALIFY row_number() OVER (PARTITION BY {} ORDER BY hash, file, row) = 1"
    rows = f"SELECT * FROM drawn WHERE good AND url NOT IN (SELECT url FROM found) {first.format('text')}"
    return f"SELECT * FROM ({rows}) {first.format('url')}"


def _count(connection: duckdb.DuckDBPyConnection) -> int:
    return int(connection.execute(f"SELECT count(*) FROM ({_distinct()})").fetchall()[0][0])
