"""A table that a person hands in, as columns of names: CSV or Parquet, every fault a sentence.

Names are trimmed. A whole number is the same name however its column is typed: 3, 3.0 and "3.0" of an id or a task are
``3``. Labels and predictions are read alike in :mod:`holdfast.certify.vocabulary`.
"""

from __future__ import annotations

import csv
import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from holdfast.certify.exact.region import IntArray
from holdfast.errors import UserError

if TYPE_CHECKING:  # a plan from numbers reads no table: pyarrow is imported where one is read
    import pyarrow as pa

BoolArray = NDArray[np.bool_]
_LONGEST_HEADER = 1 << 20  # bytes of the line of column names
_SMALL = 20_000  # rows of a column that Python encodes in a few milliseconds
_WHOLE = re.compile(r"([+-]?(?:0|[1-9][0-9]*))\.0+")
# What writers put into a cell without a value. The second kind may be the name of a class.
NEVER_A_NAME = frozenset({"", "nan", "<na>"})
MAYBE_A_NAME = frozenset({"na", "n/a", "null"})
TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@dataclass(frozen=True)
class Column:
    """A column of names: each name once, and for every row which one it is.

    Everything after reading works on these: arrow's own functions would import pandas wherever it is installed, as soon
    as they meet a plain value, and that takes a second.
    """

    names: list[str]
    codes: IntArray

    @classmethod
    def of(cls, values: Sequence[str], codes: IntArray) -> Column:
        """Names trimmed, those that are the same afterwards made one, and those without a row left out."""
        codes = codes % max(1, len(values))  # -1 is the last
        used = np.flatnonzero(np.bincount(codes, minlength=len(values)))
        trimmed = [values[code].strip() for code in used.tolist()]
        names = sorted(set(trimmed))
        place = dict(zip(names, range(len(names)), strict=True))
        translated = np.full(len(values), -1, dtype=np.int64)
        translated[used] = [place[name] for name in trimmed]
        return cls(names, translated[codes])

    def renamed(self, rename: Callable[[str], str]) -> Column:
        """The same rows under other names; names that become equal are one."""
        names = [rename(name) for name in self.names]
        return self if names == self.names else Column.of(names, self.codes)

    def values(self) -> list[str]:
        """The name of every row."""
        return [self.names[code] for code in self.codes.tolist()]

    def codes_in(self, other: Column) -> IntArray:
        """For every row its name's code in another column, -1 where that one lacks it."""
        place = {name: code for code, name in enumerate(other.names)}
        return np.array([place.get(name, -1) for name in self.names], dtype=np.int64)[self.codes]

    def equals(self, other: Column) -> BoolArray:
        """Row by row, whether both hold the same name."""
        return self.codes_in(other) == other.codes

    def among(self, names: set[str]) -> BoolArray:
        """Row by row, whether the name is one of these."""
        return np.array([name in names for name in self.names], dtype=np.bool_)[self.codes]

    def take(self, rows: IntArray) -> Column:
        """The rows in another order."""
        return Column(self.names, self.codes[rows])

    def most_frequent(self, rows: BoolArray, most: int = 3) -> list[str]:
        """The names of some rows, the most frequent first."""
        times = np.bincount(self.codes[rows], minlength=len(self.names))
        order = np.argsort(-times, kind="stable")[:most]
        return [self.names[code] for code in order.tolist() if times[code]]


def read_table(path: Path) -> pa.Table:
    """A CSV or Parquet file as it stands; every cell of a CSV is text."""
    import pyarrow as pa

    try:
        if not os.path.exists(path):
            from holdfast.files import where_instead

            raise UserError(f"{path} does not exist", do=where_instead(path))
        if not os.path.isfile(path):  # a pipe would wait for ever, and a device never end
            raise UserError(f"{path} is no file", expected="a CSV or Parquet file")
        if path.suffix.lower() in (".parquet", ".pq"):
            import pyarrow.parquet as pq

            return pq.read_table(path)
        import pyarrow.csv as pa_csv

        with path.open("rb") as file:
            header = file.readline(_LONGEST_HEADER).decode("utf-8-sig").strip("\r\n")
        separator = "\t" if "\t" in header else ";" if ";" in header and "," not in header else ","
        csv.field_size_limit(_LONGEST_HEADER)
        columns = next(csv.reader([header], delimiter=separator), [])
        types = pa_csv.ConvertOptions(column_types={name: pa.string() for name in columns}, strings_can_be_null=False)
        return pa_csv.read_csv(path, parse_options=pa_csv.ParseOptions(delimiter=separator), convert_options=types)
    except (pa.ArrowException, ValueError, OSError, csv.Error) as error:
        raise UserError(
            f"{path} cannot be read",
            expected="CSV with a line of column names, or Parquet",
            found=(str(error).splitlines() or [repr(error)])[0][:300],
            do="save the table as UTF-8" if isinstance(error, UnicodeDecodeError) else "",
        ) from error


def column_names(table: pa.Table) -> dict[str, str]:
    """The columns of a table: names trimmed -> names as they stand."""
    return {name.strip(): name for name in table.column_names}


def check_columns(table: pa.Table, wanted: Sequence[str], path: Path) -> None:
    """Refuse a table that lacks a column, has one twice, or has no rows."""
    names = column_names(table)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise UserError(
            f"{path} lacks {'column' if len(missing) == 1 else 'columns'} {', '.join(missing)}",
            expected=f"columns {','.join(wanted)}",
            found=",".join(table.column_names) or "no columns",
            do=_how_to_mend(missing, list(names)),
        )
    trimmed = [name.strip() for name in table.column_names]
    several = [name for name in wanted if trimmed.count(name) > 1]
    if several:
        raise UserError(f"{path} has several columns {several[0]}", expected="each column once")
    if len(table) == 0:
        raise UserError(f"{path} has no rows", expected="one row an image")


def _how_to_mend(missing: Sequence[str], found: Sequence[str]) -> str:
    """Which column is probably misspelt; one model's predictions; or a first line that is a row already."""
    if "prediction" in found and {"old", "new"} <= set(missing):
        return "this is what one model predicted: give the files of both, `holdfast certify OLD NEW`"
    alike = {name: difflib.get_close_matches(name, found, n=1) for name in missing}
    misspelt = [f"{close[0]!r} to {name!r}" for name, close in alike.items() if close]
    return f"rename {' and '.join(misspelt)}" if misspelt else "name the columns in the first line, or add them"


def read_column(table: pa.Table, name: str, path: Path) -> Column:
    """A column as names; a null, a float NaN and an empty cell become the empty name."""
    import pyarrow as pa

    column = table[column_names(table)[name]]
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    no_names = (pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    if any(test(kind) for test in no_names):
        raise UserError(f"column {name} of {path} holds {kind}", expected="names or numbers")
    try:
        if _short_strings(column):
            return Column.of(*_numbered(column.to_pylist()))
        encoded = column.combine_chunks()
        if not isinstance(encoded, pa.DictionaryArray):
            encoded = encoded.dictionary_encode()
        codes = _codes(encoded.indices)
        short = pa.types.is_float32(kind) or pa.types.is_float16(kind)
        values = encoded.dictionary.to_pylist()
        if not (pa.types.is_string(kind) and encoded.dictionary.null_count == 0):
            values = [_text(value, short) for value in values]
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise UserError(
            f"column {name} of {path} cannot be read", found=(str(error).splitlines() or [""])[0][:300]
        ) from error
    return Column.of([*values, ""], codes)  # -1, null, is the last


def _short_strings(column: pa.ChunkedArray) -> bool:
    """Whether Python encodes a column at once: arrow's own encoding first imports ``pyarrow.compute`` and ``pydoc``."""
    import pyarrow as pa

    return pa.types.is_string(column.type) and not column.null_count and len(column) <= _SMALL


def _numbered(cells: list[str]) -> tuple[list[str], IntArray]:
    """Each cell's text once, and for every row which one it is."""
    place: dict[str, int] = {}
    codes = np.fromiter((place.setdefault(cell, len(place)) for cell in cells), np.int64, len(cells))
    return list(place), codes


def row_codes(table: pa.Table, name: str) -> IntArray | None:
    """Equal numbers for equal cells of a column that nothing else reads; None where its cells cannot be compared."""
    import pyarrow as pa

    try:
        if _short_strings(table[name]):
            return _numbered(table[name].to_pylist())[1]
        encoded = table[name].combine_chunks()
        if not isinstance(encoded, pa.DictionaryArray):
            encoded = encoded.dictionary_encode()
        return _codes(encoded.indices)
    except (pa.ArrowException, TypeError, ValueError):
        return None


def _codes(indices: Any) -> IntArray:
    """The indices of a dictionary, -1 for null; read from memory where that is possible."""
    if indices.null_count:
        return np.array([-1 if item is None else item for item in indices.to_pylist()], dtype=np.int64)
    kind = np.dtype(str(indices.type))
    start = indices.offset * kind.itemsize
    return np.frombuffer(indices.buffers()[1], kind, len(indices), start).astype(np.int64)


def _text(value: Any, short: bool) -> str:
    """A cell as text: a float without its ``.0``, and one of 32 bits with its own digits, not those of 64."""
    if value is None:
        return ""
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return str(int(value)) if value.is_integer() else str(np.float32(value)) if short else str(value)
    return str(value)


def whole_numbers(column: Column) -> Column:
    """A column of ids or tasks in which ``3.0`` is written ``3``."""
    if not any(name.endswith((".0", "00")) for name in column.names):
        return column
    return column.renamed(lambda name: found.group(1) if (found := _WHOLE.fullmatch(name)) else name)


def refuse_missing(column: Column, name: str, path: Path, classes: Collection[str] = ()) -> None:
    """Refuse empty cells and words that stand for them; ``classes`` are such words that name a class here."""
    words = NEVER_A_NAME | MAYBE_A_NAME
    empty = np.array([value.lower() in words and value not in classes for value in column.names])
    holes = np.flatnonzero(empty[column.codes])
    if len(holes) == 0:
        return
    first = column.names[int(column.codes[holes[0]])]
    also = f"; if {first} is a class, name all labels with --labels" if first else ""
    raise UserError(
        f"{path} has {len(holes)} empty or NaN {'cell' if len(holes) == 1 else 'cells'} in column {name}",
        expected="a value in every row",
        found=f"the first in data row {int(holes[0]) + 1}" + (f": {first}" if first else ""),
        do=f"remove those rows, or repair what wrote them{also}",
    )


def truth_column(table: pa.Table, name: str, path: Path) -> BoolArray:
    """A column that says whether a model was right: true or false, 1 or 0."""
    column = read_column(table, name, path)
    refuse_missing(column, name, path)
    strange = [value for value in column.names if value.lower() not in TRUTHS]
    if strange:
        raise UserError(
            f"column {name} of {path} holds {strange[0]!r}",
            expected="true or false, or 1 or 0: whether the model was right",
            do="write 1 where the model was right and 0 where it was wrong",
        )
    return np.array([TRUTHS[value.lower()] for value in column.names])[column.codes]
