"""Predictions that a person hands in: read, checked, joined, counted.

One file with ``task,label,old,new`` (and, optionally, ``example_id``), or two files with
``example_id,task,label,prediction`` that are joined by example id. CSV or Parquet. Every fault is a sentence.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from holdfast.certify.claims import Counts
from holdfast.certify.exact.region import IntArray
from holdfast.errors import UserError, nearest

BoolArray = NDArray[np.bool_]
PAIRED_COLUMNS = ("task", "label", "old", "new")
SINGLE_COLUMNS = ("example_id", "task", "label", "prediction")
_LONGEST_HEADER = 1 << 20  # bytes of the line of column names
_NO_NAMES = (pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
MISSING = ["", "nan", "null", "na", "n/a", "<na>"]


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
        """Names trimmed, and those that are the same afterwards made one."""
        trimmed = [value.strip() for value in values]
        names = sorted(set(trimmed))
        place = {name: code for code, name in enumerate(names)}
        return cls(names, np.array([place[name] for name in trimmed], dtype=np.int64)[codes])

    def values(self) -> list[str]:
        """The name of every row."""
        return [self.names[code] for code in self.codes.tolist()]

    def equals(self, other: Column) -> BoolArray:
        """Row by row, whether both hold the same name."""
        place = {name: code for code, name in enumerate(other.names)}
        translated = np.array([place.get(name, -1) for name in self.names], dtype=np.int64)
        return translated[self.codes] == other.codes

    def take(self, rows: IntArray) -> Column:
        """The rows in another order."""
        return Column(self.names, self.codes[rows])


@dataclass(frozen=True)
class Paired:
    """Two models on the same images, row by row in the order in which they came."""

    task: Column
    correct_old: BoolArray
    correct_new: BoolArray
    disjoint: bool  # known that no image serves two tasks

    def tasks(self) -> list[str]:
        """Names in alphabetical order."""
        return list(self.task.names)

    def changes(self, task: str) -> list[int]:
        """X_i in {-1, 0, 1} of one task, in the order of the rows."""
        chosen = self.task.codes == self.task.names.index(task)
        return (self.correct_new[chosen].astype(int) - self.correct_old[chosen].astype(int)).tolist()

    def counts(self) -> dict[str, Counts]:
        """b, c and n of every task."""
        size = len(self.task.names)
        n = np.bincount(self.task.codes, minlength=size)
        gained = np.bincount(self.task.codes, weights=~self.correct_old & self.correct_new, minlength=size)
        lost = np.bincount(self.task.codes, weights=self.correct_old & ~self.correct_new, minlength=size)
        return {
            name: Counts(name, int(n[code]), int(gained[code]), int(lost[code]))
            for code, name in enumerate(self.task.names)
        }


def read_table(path: Path) -> pa.Table:
    """A CSV or Parquet file as it stands."""
    try:
        if not os.path.exists(path):
            raise UserError(f"{path} does not exist", do="check the path")
        if not os.path.isfile(path):  # a pipe would wait for ever, and a device never end
            raise UserError(f"{path} is no file", expected="a CSV or Parquet file")
        if path.suffix.lower() in (".parquet", ".pq"):
            return pq.read_table(path)
        with path.open("rb") as file:
            names = file.readline(_LONGEST_HEADER).decode("utf-8-sig").strip()
        separator = "\t" if "\t" in names else ";" if ";" in names and "," not in names else ","
        columns = [name.strip().strip('"') for name in names.split(separator)]
        types = pa_csv.ConvertOptions(column_types={name: pa.string() for name in columns}, strings_can_be_null=False)
        return pa_csv.read_csv(path, parse_options=pa_csv.ParseOptions(delimiter=separator), convert_options=types)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise UserError(
            f"{path} cannot be read",
            expected="CSV with a line of column names, or Parquet",
            found=(str(error).splitlines() or [repr(error)])[0][:300],
        ) from error


def _column(table: pa.Table, name: str, path: Path) -> Column:
    """A column as names; NaN, empty and null cells are refused."""
    column = table[name]
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if any(test(kind) for test in _NO_NAMES):
        raise UserError(f"column {name} of {path} holds {kind}", expected="names or numbers")
    try:
        encoded = column.combine_chunks()
        if not isinstance(encoded, pa.DictionaryArray):
            encoded = encoded.dictionary_encode()
        codes = _codes(encoded.indices)
        values = ["nan" if value is None else _text(value) for value in encoded.dictionary.to_pylist()]
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise UserError(
            f"column {name} of {path} cannot be read", found=(str(error).splitlines() or [""])[0][:300]
        ) from error
    empty = np.array([value.strip().lower() in MISSING for value in values] + [True])  # -1, null, is the last
    holes = np.flatnonzero(empty[codes])
    if len(holes):
        raise UserError(
            f"{path} has {len(holes)} empty or NaN {'cell' if len(holes) == 1 else 'cells'} in column {name}",
            expected="a value in every row",
            found=f"the first in data row {int(holes[0]) + 1}",
            do="remove those rows, or repair what wrote them",
        )
    return Column.of(values, codes)


def _codes(indices: Any) -> IntArray:
    """The indices of a dictionary, -1 for null; read from memory where that is possible."""
    if indices.null_count:
        return np.array([-1 if item is None else item for item in indices.to_pylist()], dtype=np.int64)
    kind = np.dtype(str(indices.type))
    start = indices.offset * kind.itemsize
    return np.frombuffer(indices.buffers()[1], kind, len(indices), start).astype(np.int64)


def _text(value: Any) -> str:
    """A label as text; 3.0 and 3 are the same class."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _columns(table: pa.Table, wanted: Sequence[str], path: Path) -> dict[str, Column]:
    names = {name.strip(): name for name in table.column_names}
    missing = [name for name in wanted if name not in names]
    if missing:
        raise UserError(
            f"{path} lacks {'column' if len(missing) == 1 else 'columns'} {', '.join(missing)}",
            expected=f"columns {','.join(wanted)}",
            found=",".join(table.column_names) or "no columns",
            do=f"rename or add them; {nearest(missing[0], names)}",
        )
    several = [name for name in wanted if [column_name.strip() for column_name in table.column_names].count(name) > 1]
    if several:
        raise UserError(f"{path} has several columns {several[0]}", expected="each column once")
    if len(table) == 0:
        raise UserError(f"{path} has no rows", expected="one row an image")
    return {name: _column(table, names[name], path) for name in wanted}


def read_paired(path: Path, labels: Iterable[str] = ()) -> Paired:
    """One file with both models' predictions: columns ``task,label,old,new`` and optionally ``example_id``."""
    return paired_table(read_table(path), labels, path)


def paired_table(table: pa.Table, labels: Iterable[str] = (), path: Path = Path("the predictions")) -> Paired:
    """A table in memory, as :func:`read_paired` does with a file."""
    with_ids = "example_id" in [name.strip() for name in table.column_names]
    columns = _columns(table, [*PAIRED_COLUMNS, *(["example_id"] if with_ids else [])], path)
    disjoint = False
    if with_ids:
        _check_unique(columns["task"], columns["example_id"], path)
        disjoint = len(columns["example_id"].names) == len(table)
    predictions = {"old": columns["old"], "new": columns["new"]}
    _check_labels(columns["label"], columns["task"], predictions, labels, str(path))
    return _paired(columns["task"], columns["label"], columns["old"], columns["new"], disjoint)


def read_joined(old_path: Path, new_path: Path, labels: Iterable[str] = ()) -> Paired:
    """Two files, one a model, joined by example id (and task, for an image that serves several)."""
    old = _columns(read_table(old_path), SINGLE_COLUMNS, old_path)
    new = _columns(read_table(new_path), SINGLE_COLUMNS, new_path)
    return _join(old, new, labels, (old_path, new_path))


def paired_tables(old: pa.Table, new: pa.Table, labels: Iterable[str] = ()) -> Paired:
    """Two tables in memory, as :func:`read_joined` does with files."""
    names = (Path("the old model's predictions"), Path("the new model's predictions"))
    return _join(_columns(old, SINGLE_COLUMNS, names[0]), _columns(new, SINGLE_COLUMNS, names[1]), labels, names)


def _join(old: dict[str, Column], new: dict[str, Column], labels: Iterable[str], paths: tuple[Path, Path]) -> Paired:
    """Put the rows of the new model in the order of the old one's; anything that does not match is refused."""
    _check_unique(old["task"], old["example_id"], paths[0])
    _check_unique(new["task"], new["example_id"], paths[1])
    places = {key: row for row, key in enumerate(_keys(new))}
    order = [places.get(key, -1) for key in _keys(old)]
    unmatched = order.count(-1)
    if unmatched or len(order) != len(places):
        raise UserError(
            f"{paths[0]} and {paths[1]} do not join: they are not about the same images and tasks",
            expected="the same example_id and task in both files",
            found=f"{unmatched} rows only in the first, {len(places) - len(order) + unmatched} only in the second",
            do="predict the same images with both models",
        )
    rows = np.array(order, dtype=np.int64)
    different = int((~old["label"].equals(new["label"].take(rows))).sum())
    if different:
        raise UserError(
            f"{paths[0]} and {paths[1]} give {different} images different labels",
            expected="the same label for an image in both files",
            do="write both files from the same labels",
        )
    predictions = {"old": old["prediction"], "new": new["prediction"].take(rows)}
    _check_labels(old["label"], old["task"], predictions, labels, f"{paths[0]} and {paths[1]}")
    disjoint = len(old["example_id"].names) == len(order)
    return _paired(old["task"], old["label"], predictions["old"], predictions["new"], disjoint)


def _keys(columns: dict[str, Column]) -> Iterable[tuple[str, str]]:
    return zip(columns["task"].values(), columns["example_id"].values(), strict=True)


def _check_unique(task: Column, identity: Column, path: Path) -> None:
    key = task.codes * len(identity.names) + identity.codes
    found, times = np.unique(key, return_counts=True)
    twice = np.flatnonzero(times > 1)
    if len(twice):
        first, count = divmod(int(found[twice[0]]), len(identity.names)), int(times[twice[0]])
        raise UserError(
            f"{path} names {len(twice)} example {'id' if len(twice) == 1 else 'ids'} more than once",
            expected="each example once: the images of a task must be independent",
            found=f"{identity.names[first[1]]!r} {count} times in task {task.names[first[0]]!r}",
            do="keep one row an example",
        )


def _spelling(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _check_labels(
    label: Column, task: Column, predictions: dict[str, Column], declared: Iterable[str], where: str
) -> None:
    """Refuse a label that nothing else knows, and predictions written in another vocabulary than the labels.

    With declared ``labels`` every label and prediction must be one of them. Without, a model may name classes that have
    no images here; but a label that is neither a task nor ever predicted, a prediction that differs from a label in
    spelling only, and predictions none of which is a label, are mistakes that would count as errors of a model.
    """
    labels, tasks = set(label.names), set(task.names)
    predicted = set[str]().union(*(column.names for column in predictions.values()))
    allowed = set(declared)
    unknown = sorted((labels | predicted) - allowed) if allowed else sorted(labels - tasks - predicted)
    if unknown:
        raise UserError(
            f"{where} holds unknown {'label' if len(unknown) == 1 else 'labels'} {', '.join(unknown[:5])}",
            expected="labels that --labels names" if allowed else "labels that are a task or that a model predicts",
            found=f"{unknown[0]!r}; {nearest(unknown[0], allowed or tasks | predicted)}",
            do="correct the spelling, or name all labels with --labels a,b,c",
        )
    spellings = {_spelling(name): name for name in sorted(labels | tasks)}
    for name, column in predictions.items():
        for value in sorted(set(column.names) - labels - tasks - allowed):
            if _spelling(value) in spellings:
                raise UserError(
                    f"{where}: column {name} holds the unknown label {value!r}",
                    expected=f"the spelling of the labels, {spellings[_spelling(value)]!r}",
                    do="write predictions and labels alike: a different spelling counts as a wrong answer",
                )
    if not predicted & (labels | tasks) and not allowed:
        raise UserError(
            f"{where}: no prediction of either model is one of the labels",
            expected=f"predictions such as {', '.join(sorted(labels)[:3])}",
            found=", ".join(sorted(predicted)[:3]),
            do="write predictions as the names that the labels use",
        )


def _paired(task: Column, label: Column, old: Column, new: Column, disjoint: bool) -> Paired:
    return Paired(task, old.equals(label), new.equals(label), disjoint)
