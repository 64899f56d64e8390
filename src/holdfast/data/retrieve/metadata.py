"""Where captions live: Parquet files in LAION's layout, on disk or in an S3-compatible store."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from holdfast.errors import UserError, nearest

if TYPE_CHECKING:
    import duckdb

# What a column may be called, ours first. LAION-400M writes capitals, LAION-2B and img2dataset small letters.
ALIASES = {
    "url": ("url", "image_url"),
    "text": ("text", "caption", "alt_text", "title"),
    "width": ("width", "original_width"),
    "height": ("height", "original_height"),
    "similarity": ("similarity", "clip_similarity_vitb32", "clip_b32_similarity_score"),
    "nsfw": ("nsfw",),
    "license": ("license",),
}


@dataclass(frozen=True)
class S3Options:
    """How to reach an S3-compatible store. Keys come from the environment and are written nowhere."""

    endpoint: str | None = None  # host:port, or a URL
    region: str | None = None
    anonymous: bool = False

    @property
    def host(self) -> str | None:
        """The endpoint without its scheme."""
        return self.endpoint.split("://", 1)[-1].rstrip("/") if self.endpoint else None

    @property
    def scheme(self) -> str:
        """http only where the endpoint says so."""
        return "http" if self.endpoint and self.endpoint.startswith("http://") else "https"

    def filesystem(self) -> pafs.FileSystem:
        """The store as Arrow sees it."""
        return pafs.S3FileSystem(
            anonymous=self.anonymous,
            region=self.region or os.environ.get("AWS_REGION", "us-east-1"),
            scheme=self.scheme,
            endpoint_override=self.host,
            connect_timeout=10,
            request_timeout=60,
        )


@dataclass(frozen=True)
class MetadataFile:
    """One Parquet file of captions. ``footer`` is the hash of its Parquet footer: offsets, sizes, statistics."""

    name: str  # relative to what was asked for: the same data elsewhere has the same name
    location: str
    size: int
    rows: int
    footer: str
    columns: tuple[str, ...]
    row_groups: tuple[int, ...]  # rows of each

    def described(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {"name": self.name, "bytes": self.size, "rows": self.rows, "footer": self.footer}


def find_files(source: str, s3: S3Options | None = None) -> list[MetadataFile]:
    """The Parquet files that a path, a folder, a glob or an ``s3://`` address stands for, in a fixed order."""
    if source.startswith("s3://"):
        return _on_s3(source, s3 or S3Options())
    if "://" in source:
        raise UserError(f"cannot search {source}", expected="a path, a glob or an s3:// address")
    local: pafs.FileSystem = pafs.LocalFileSystem()
    path = Path(source)
    if path.is_file():
        return [_described(local, str(path), path.name)]
    if path.is_dir():
        names = sorted(str(item) for item in path.rglob("*.parquet") if item.is_file())
        root = path
    else:
        names = sorted(item for item in glob.glob(source, recursive=True) if Path(item).is_file())
        root = Path(os.path.commonpath([str(Path(name).parent) for name in names])) if names else path
    if not names:
        raise UserError(
            f"no Parquet file at {source}",
            expected="a .parquet file, a folder that holds some, or a glob in quotes",
            do="check the path",
        )
    return [_described(local, name, str(Path(name).relative_to(root))) for name in names]


def _on_s3(source: str, options: S3Options) -> list[MetadataFile]:
    address = source.removeprefix("s3://")
    fixed = address.split("*", 1)[0].split("?", 1)[0]
    try:
        store = options.filesystem()
        if fixed == address and store.get_file_info(address).type == pafs.FileType.File:
            return [_described(store, address, address.rsplit("/", 1)[-1], prefix="s3://")]
        base = fixed.rstrip("/") if fixed == address else fixed.rsplit("/", 1)[0]
        listed = store.get_file_info(pafs.FileSelector(base, recursive=True))
        paths = sorted(item.path for item in listed if item.type == pafs.FileType.File)
    except OSError as error:
        raise UserError(
            f"cannot read {source}",
            found=str(error).splitlines()[0][:300],
            do="check --s3-endpoint and the keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or --s3-anonymous)",
        ) from error
    wanted = [
        path for path in paths if path.endswith(".parquet") and (fixed == address or fnmatch.fnmatch(path, address))
    ]
    if not wanted:
        raise UserError(f"no Parquet file at {source}", do="check the address")
    return [_described(store, item, item[len(base) :].lstrip("/"), prefix="s3://") for item in wanted]


def _described(store: pafs.FileSystem, path: str, name: str, prefix: str = "") -> MetadataFile:
    try:
        with store.open_input_file(path) as file:
            size = file.size()
            parquet = pq.ParquetFile(file)
            length = int.from_bytes(file.read_at(4, size - 8), "little")
            footer = hashlib.sha256(file.read_at(length + 8, size - length - 8)).hexdigest()
            columns = tuple(parquet.schema_arrow.names)
            groups = tuple(parquet.metadata.row_group(i).num_rows for i in range(parquet.metadata.num_row_groups))
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{prefix}{path} is not readable as Parquet", found=str(error).splitlines()[0][:200], do="check the file"
        ) from error
    return MetadataFile(name, prefix + path, size, sum(groups), f"sha256:{footer}", columns, groups)


def column_names(file: MetadataFile, chosen: dict[str, str]) -> dict[str, str]:
    """Our name -> the file's name, for the columns that are there. ``url`` and ``text`` must be."""
    present = {name.lower(): name for name in file.columns}
    names: dict[str, str] = {}
    for ours, aliases in ALIASES.items():
        if ours in chosen:
            if chosen[ours].lower() not in present:
                raise UserError(f"{file.name} has no column {chosen[ours]!r}", do=nearest(chosen[ours], file.columns))
            names[ours] = present[chosen[ours].lower()]
            continue
        match = next((present[alias] for alias in aliases if alias in present), None)
        if match is not None:
            names[ours] = match
    for needed in ("url", "text"):
        if needed not in names:
            raise UserError(
                f"{file.name} has no {needed.upper()} column",
                expected="LAION's layout: URL, TEXT, and optionally similarity, NSFW, WIDTH, HEIGHT, LICENSE",
                found=", ".join(file.columns),
                do=f"name it with --{needed}-column",
            )
    return names


def connect(
    memory: str, threads: int | None, spill: Path, s3: S3Options | None, files: Iterable[MetadataFile]
) -> duckdb.DuckDBPyConnection:
    """A DuckDB that stays within its memory, spills beside its output, and can read where the files are."""
    engine = import_duckdb()
    connection = engine.connect()
    try:
        connection.execute(f"SET memory_limit = {quoted(memory)}")
    except engine.Error as error:
        raise UserError(f"--memory got {memory!r}", expected="a size such as 1GB") from error
    connection.execute(f"SET temp_directory = {quoted(str(spill))}")
    connection.execute("SET enable_progress_bar = false")
    if threads is not None:
        connection.execute(f"SET threads = {int(threads)}")
    if any(file.location.startswith("s3://") for file in files):
        _reach_s3(connection, s3 or S3Options())
    return connection


def import_duckdb() -> Any:
    """The engine, or a sentence that names the extra."""
    try:
        import duckdb
    except ImportError as error:
        raise UserError("searching needs DuckDB", do="install holdfast[retrieve]") from error
    return duckdb


def _reach_s3(connection: duckdb.DuckDBPyConnection, options: S3Options) -> None:
    engine = import_duckdb()
    try:
        connection.execute("LOAD httpfs")
    except engine.Error:
        # The extension is fetched over the network at first use; where it is not installed, Arrow's own S3 client,
        # which comes with pyarrow, reads the same bytes.
        from fsspec.implementations.arrow import ArrowFSWrapper

        connection.register_filesystem(ArrowFSWrapper(options.filesystem()))
        return
    given = {
        "KEY_ID": os.environ.get("AWS_ACCESS_KEY_ID"),
        "SECRET": os.environ.get("AWS_SECRET_ACCESS_KEY"),
        "SESSION_TOKEN": os.environ.get("AWS_SESSION_TOKEN"),
        "REGION": options.region or os.environ.get("AWS_REGION", "us-east-1"),
        "ENDPOINT": options.host,
        "URL_STYLE": "path" if options.endpoint else None,
    }
    if options.anonymous:
        given["KEY_ID"] = given["SECRET"] = given["SESSION_TOKEN"] = None
    settings = [f"{name} {quoted(value)}" for name, value in given.items() if value]
    settings.append(f"USE_SSL {'true' if options.scheme == 'https' else 'false'}")
    connection.execute(f"CREATE SECRET (TYPE s3, {', '.join(settings)})")


def quoted(text: str) -> str:
    """A string literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    """A column name of SQL."""
    return '"' + name.replace('"', '""') + '"'
