"""Reading out of files that somebody else wrote: tar archives and Parquet tables of pictures.

Both are read within bounds, whatever their headers say: nothing outside the source's folder is opened, and nothing
is asked of the memory that pictures would not need. No torch here: the report reads pictures, too.
"""

from __future__ import annotations

import json
import os
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from holdfast.data.images import MAX_BYTES, BadImage, UnsafeName, read_picture
from holdfast.data.names import printable
from holdfast.errors import UserError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

# Columns of a table that describe a picture, by the names people give them.
CAPTIONS = ("caption", "captions", "text", "title", "TEXT", "sentence")
LABELS = ("label", "labels", "class", "category")

_MAX_HEADER = 32 << 10  # bytes of a tar header with its extensions: long names and attributes
_MAX_GROUP = 4 << 30  # bytes of the pictures of a row group: writers make groups of some hundred megabytes
_BATCH = 8  # pictures of a row group that are unpacked at once
_CACHED_GROUPS = 4  # row groups whose pictures are kept while their neighbours are asked for


def parse_json(text: str | bytes) -> Any:
    """A JSON value. A ValueError says what is wrong, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_outside(name: PurePath) -> bool:
    """Whether a name within a source points outside it."""
    return name.is_absolute() or ".." in name.parts


def member_key(name: str) -> str:
    """What the members of one example have in common: their name up to its first dot."""
    path = PurePosixPath(name)
    return printable(str(path.parent / path.name.partition(".")[0]))


def tar_members(shard: Path) -> Iterator[tarfile.TarInfo]:
    """The members of a plain tar file, in order; a TarError or an OSError where it is broken, or means harm."""
    with shard.open("rb") as file:
        headers = _Headers(file)
        try:
            with tarfile.open(fileobj=cast(IO[bytes], headers), mode="r:") as archive:
                last = -1
                for member in archive:
                    if member.size < 0 or member.offset <= last:  # it leads back, and would do so for ever
                        raise tarfile.ReadError("a header with an impossible size")
                    last = member.offset
                    yield member
        except (ValueError, LookupError, ArithmeticError, EOFError, RecursionError) as error:
            raise tarfile.ReadError(f"a header that cannot be read ({error})") from error
        if headers.last.strip(b"\0"):
            raise tarfile.ReadError("it goes on with something that is no header")


class _Headers:
    """A tar file as tarfile sees it. tarfile trusts the sizes in headers: here nothing longer than one is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.last = b""

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_HEADER:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        self.last = self._file.read(size)
        return self.last

    def seek(self, position: int) -> int:
        return self._file.seek(position)

    def tell(self) -> int:
        return self._file.tell()


@dataclass(frozen=True)
class _Table:
    """An open Parquet file."""

    file: pq.ParquetFile
    schema: pa.Schema
    starts: np.ndarray  # [groups + 1] first row of each row group, and the number of rows


class RowGroups:
    """Random access to the pictures of Parquet files; a few row groups are kept.

    A row without bytes may name a file with its ``path``: one in the table's folder, and within the source's, which
    is ``roots[i]`` for file i (where it is left out: the table's own).
    """

    def __init__(self, files: Sequence[Path], roots: Sequence[Path] | None = None) -> None:
        self._files = files
        self._roots = [file.parent for file in files] if roots is None else roots
        self._tables: dict[int, _Table] = {}
        self._cache: OrderedDict[tuple[int, int], pa.ChunkedArray | str] = OrderedDict()
        self._lock = threading.Lock()

    def _table(self, number: int) -> _Table:
        if number not in self._tables:
            import pyarrow.parquet as pq

            path = self._files[number]
            try:
                file = pq.ParquetFile(path, memory_map=True)
                schema = file.schema_arrow
                sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
                if min(sizes, default=0) < 0 or sum(sizes) > 8 * path.stat().st_size:
                    raise ValueError(f"{sum(sizes):,} rows, more than the file has bits")
            except (pa.ArrowException, OSError, ValueError) as error:
                raise UserError(f"{path} is not a Parquet file", found=_first_line(error)) from error
            self._tables[number] = _Table(file, schema, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))
        return self._tables[number]

    def schema(self, number: int) -> pa.Schema:
        """Columns of a file, with their metadata."""
        return self._table(number).schema

    def rows(self, number: int) -> int:
        """Rows of a file."""
        return int(self._table(number).starts[-1])

    def describe(self, number: int, further: Sequence[str] = ()) -> dict[str, list[Any]]:
        """The columns that describe the pictures, by name, and ``further`` ones."""
        self._picture_column(number)  # a table without pictures is refused before it is read
        table = self._table(number)
        wanted = [name for name in table.schema.names if name in {*LABELS, *CAPTIONS, "split", *further}]
        try:
            found = table.file.read(columns=wanted) if wanted else pa.table({})
            columns = {name: found.column(found.column_names.index(name)).to_pylist() for name in wanted}
            if any(len(values) != self.rows(number) for values in columns.values()):
                raise ValueError("columns that are not equally long")
        except (pa.ArrowException, OSError, ValueError, ArithmeticError, MemoryError) as error:
            raise UserError(f"{self._files[number]} cannot be read", found=_first_line(error)) from error
        return columns

    def _picture_column(self, number: int) -> str:
        schema = self.schema(number)
        for field in sorted(schema, key=lambda field: field.name != "image"):
            if field.name not in (*LABELS, *CAPTIONS, "split") and _holds_pictures(field.type):
                return field.name
        raise UserError(
            f"{self._files[number]} holds no pictures",
            expected="a column of bytes, or of {bytes, path} as Hugging Face writes it",
            found=", ".join(f"{field.name}: {field.type}" for field in schema)[:1000],
        )

    def picture(self, number: int, row: int) -> bytes:
        """The encoded picture of one row."""
        with self._lock:
            starts = self._table(number).starts
            if not 0 <= row < starts[-1]:
                raise IndexError(f"{self._files[number]} has no row {row}")
            group = int(np.searchsorted(starts, row, "right")) - 1
            pictures = self._group(number, group)
            value: Any = pictures if isinstance(pictures, str) else pictures[row - int(starts[group])].as_py()
        if isinstance(value, str):
            raise BadImage(value)
        content = value.get("bytes") if isinstance(value, dict) else value
        if isinstance(content, bytes):
            if len(content) > MAX_BYTES:
                raise BadImage(f"larger than {MAX_BYTES:,} bytes")
            return content
        if isinstance(value, dict) and isinstance(value.get("path"), str) and value["path"]:
            return self._named(number, value["path"])
        raise BadImage("the row has no picture")

    def _group(self, number: int, group: int) -> pa.ChunkedArray | str:
        """The pictures of a row group, or why they cannot be read."""
        if (number, group) not in self._cache:
            self._cache[number, group] = self._read_group(number, group)
            if len(self._cache) > _CACHED_GROUPS:
                self._cache.popitem(last=False)
        self._cache.move_to_end((number, group))
        return self._cache[number, group]

    def _read_group(self, number: int, group: int) -> pa.ChunkedArray | str:
        table = self._table(number)
        parts: list[pa.Array] = []
        size = 0  # a few bytes on disk can be any number in memory: unpacked bit by bit, it is known in time
        try:
            column = self._picture_column(number)
            for batch in table.file.iter_batches(batch_size=_BATCH, row_groups=[group], columns=[column]):
                size += batch.nbytes
                if size > _MAX_GROUP:
                    return f"in a row group of more than {_MAX_GROUP:,} bytes"
                parts.append(batch.column(0))
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            return f"in a row group that cannot be read: {_first_line(error)}"
        if sum(len(part) for part in parts) != table.starts[group + 1] - table.starts[group]:
            return "in a row group that is cut short"
        return pa.chunked_array(parts)

    def _named(self, number: int, name: str) -> bytes:
        folder, root = self._files[number].parent, self._roots[number]
        try:
            file = os.path.realpath(folder / name)
            inside = not is_outside(PurePath(name)) and PurePath(file).is_relative_to(os.path.realpath(root))
        except ValueError as error:  # a NUL
            raise BadImage(f"no name of a file: {name[:200]!r}") from error
        if not inside:
            raise UnsafeName(f"{name[:200]!r} points outside the source's folder: not read")
        return read_picture(Path(file))


def _holds_pictures(kind: pa.DataType) -> bool:
    if not pa.types.is_struct(kind):
        return _is_bytes(kind)
    place = kind.get_field_index("bytes")
    return place >= 0 and (_is_bytes(kind.field(place).type) or pa.types.is_null(kind.field(place).type))


def _is_bytes(kind: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(test(kind) for test in tests)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
