"""Predictions that a person hands in: read, checked, joined, counted.

One file with ``task,label,old,new`` (and, optionally, ``example_id``), or two files with
``example_id,task,label,prediction`` that are joined by example id. CSV or Parquet. Every fault is a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pyarrow_compute
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from holdfast.certify.claims import Counts
from holdfast.errors import UserError, nearest

pc: Any = pyarrow_compute  # its functions are made when it is imported: no type checker sees them
PAIRED_COLUMNS = ("task", "label", "old", "new")
SINGLE_COLUMNS = ("example_id", "task", "label", "prediction")
MISSING = ["", "nan", "null", "na", "n/a", "<na>"]


@dataclass(frozen=True)
class Paired:
    """Rows of two models on the same images. ``order`` is the order in which they came."""

    task: list[str]
    correct_old: np.ndarray[tuple[int], np.dtype[np.bool_]]
    correct_new: np.ndarray[tuple[int], np.dtype[np.bool_]]
    disjoint: bool  # known that no image serves two tasks

    def tasks(self) -> list[str]:
        """Names in alphabetical order."""
        return sorted(set(self.task))

    def changes(self, task: str) -> list[int]:
        """X_i in {-1, 0, 1} of one task, in the order of the rows."""
        chosen = np.array([one == task for one in self.task])
        return (self.correct_new[chosen].astype(int) - self.correct_old[chosen].astype(int)).tolist()

    def counts(self) -> dict[str, Counts]:
        """b, c and n of every task."""
        codes = {name: code for code, name in enumerate(self.tasks())}
        index = np.array([codes[one] for one in self.task])
        n = np.bincount(index, minlength=len(codes))
        gained = np.bincount(index, weights=~self.correct_old & self.correct_new, minlength=len(codes))
        lost = np.bincount(index, weights=self.correct_old & ~self.correct_new, minlength=len(codes))
        return {name: Counts(name, int(n[k]), int(gained[k]), int(lost[k])) for name, k in codes.items()}


def read_table(path: Path) -> pa.Table:
    """A CSV or Parquet file as it stands."""
    if not path.exists():
        raise UserError(f"{path} does not exist", do="check the path")
    try:
        if path.suffix.lower() in (".parquet", ".pq"):
            return pq.read_table(path)
        with path.open("rb") as file:
            names = file.readline().decode("utf-8-sig").strip()
        separator = "\t" if "\t" in names else ";" if ";" in names and "," not in names else ","
        columns = [name.strip().strip('"') for name in names.split(separator)]
        types = pa_csv.ConvertOptions(column_types={name: pa.string() for name in columns}, strings_can_be_null=False)
        return pa_csv.read_csv(path, parse_options=pa_csv.ParseOptions(delimiter=separator), convert_options=types)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError, OSError) as error:
        raise UserError(
            f"{path} cannot be read", expected="CSV with a line of column names, or Parquet", found=str(error)
        ) from error


def _column(table: pa.Table, name: str, path: Path) -> pa.ChunkedArray:
    """A column as text; NaN, empty and null cells are refused."""
    column = table[name]
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_floating(kind):
        whole = pc.all(pc.equal(pc.floor(column), column), min_count=0).as_py()
        missing = pc.or_kleene(pc.is_null(column), pc.is_nan(column))
        column = column if pc.any(missing).as_py() or not whole else column.cast(pa.int64())
    elif pa.types.is_nested(kind) or pa.types.is_binary(kind):
        raise UserError(f"column {name} of {path} holds {kind}", expected="names or numbers")
    else:
        missing = pc.is_null(column)
    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
    missing = pc.or_kleene(missing, pc.is_in(pc.utf8_lower(text), pa.array(MISSING)))
    holes = pc.sum(missing).as_py() or 0
    if holes:
        first = pc.index(missing, True).as_py()
        raise UserError(
            f"{path} has {holes} empty or NaN {'cell' if holes == 1 else 'cells'} in column {name}",
            expected="a value in every row",
            found=f"the first in data row {first + 1}",
            do="remove those rows, or repair what wrote them",
        )
    return text


def _columns(table: pa.Table, wanted: Sequence[str], path: Path) -> dict[str, pa.ChunkedArray]:
    names = {name.strip(): name for name in table.column_names}
    missing = [name for name in wanted if name not in names]
    if missing:
        raise UserError(
            f"{path} lacks {'column' if len(missing) == 1 else 'columns'} {', '.join(missing)}",
            expected=f"columns {','.join(wanted)}",
            found=",".join(table.column_names) or "no columns",
            do=f"rename or add them; {nearest(missing[0], names)}",
        )
    if len(table) == 0:
        raise UserError(f"{path} has no rows", expected="one row an image")
    return {name: _column(table, names[name], path) for name in wanted}


def read_paired(path: Path, labels: Iterable[str] = ()) -> Paired:
    """One file with both models' predictions: columns ``task,label,old,new`` and optionally ``example_id``."""
    table = read_table(path)
    with_ids = "example_id" in [name.strip() for name in table.column_names]
    columns = _columns(table, [*PAIRED_COLUMNS, *(["example_id"] if with_ids else [])], path)
    disjoint = False
    if with_ids:
        _check_unique(columns["task"], columns["example_id"], path)
        disjoint = len(pc.unique(columns["example_id"])) == len(table)
    _check_labels(columns, {"old": columns["old"], "new": columns["new"]}, labels, str(path))
    return _paired(columns, columns["old"], columns["new"], disjoint)


def read_joined(old_path: Path, new_path: Path, labels: Iterable[str] = ()) -> Paired:
    """Two files, one a model, joined by example id (and task, for an image that serves several)."""
    old = _columns(read_table(old_path), SINGLE_COLUMNS, old_path)
    new = _columns(read_table(new_path), SINGLE_COLUMNS, new_path)
    return join(old, new, labels, (old_path, new_path))


def paired_tables(old: pa.Table, new: pa.Table, labels: Iterable[str] = ()) -> Paired:
    """Two tables in memory, as :func:`read_joined` does with files."""
    names = (Path("the old model's predictions"), Path("the new model's predictions"))
    return join(_columns(old, SINGLE_COLUMNS, names[0]), _columns(new, SINGLE_COLUMNS, names[1]), labels, names)


def join(
    old: dict[str, pa.ChunkedArray], new: dict[str, pa.ChunkedArray], labels: Iterable[str], paths: tuple[Path, Path]
) -> Paired:
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
    rows = pa.array(order)
    aligned = {name: column.take(rows) for name, column in new.items()}
    different = pc.sum(pc.not_equal(old["label"], aligned["label"])).as_py()
    if different:
        raise UserError(
            f"{paths[0]} and {paths[1]} give {different} images different labels",
            expected="the same label for an image in both files",
            do="write both files from the same labels",
        )
    predictions = {"old": old["prediction"], "new": aligned["prediction"]}
    _check_labels(old, predictions, labels, f"{paths[0]} and {paths[1]}")
    disjoint = len(pc.unique(old["example_id"])) == len(order)
    return _paired(old, predictions["old"], predictions["new"], disjoint)


def _keys(columns: dict[str, pa.ChunkedArray]) -> Iterable[tuple[str, str]]:
    return zip(columns["task"].to_pylist(), columns["example_id"].to_pylist(), strict=True)


def _check_unique(task: pa.ChunkedArray, identity: pa.ChunkedArray, path: Path) -> None:
    grouped = pa.table({"task": task, "id": identity}).group_by(["task", "id"]).aggregate([([], "count_all")])
    twice = grouped.filter(pc.greater(grouped["count_all"], 1))
    if len(twice):
        first = twice.slice(0, 1).to_pylist()[0]
        raise UserError(
            f"{path} names {len(twice)} example {'id' if len(twice) == 1 else 'ids'} more than once",
            expected="each example once: the images of a task must be independent",
            found=f"{first['id']!r} {first['count_all']} times in task {first['task']!r}",
            do="keep one row an example",
        )


def _spelling(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _check_labels(
    columns: dict[str, pa.ChunkedArray], predictions: dict[str, pa.ChunkedArray], declared: Iterable[str], where: str
) -> None:
    """Refuse a label that nothing else knows, and predictions written in another vocabulary than the labels.

    With declared ``labels`` every label and prediction must be one of them. Without, a model may name classes that have
    no images here; but a label that is neither a task nor ever predicted, a prediction that differs from a label in
    spelling only, and predictions none of which is a label, are mistakes that would count as errors of a model.
    """
    labels = set(pc.unique(columns["label"]).to_pylist())
    tasks = set(pc.unique(columns["task"]).to_pylist())
    predicted = {name: set(pc.unique(column).to_pylist()) for name, column in predictions.items()}
    said = set[str]().union(*predicted.values())
    allowed = set(declared)
    unknown = sorted((labels | said) - allowed) if allowed else sorted(labels - tasks - said)
    if unknown:
        known = allowed or tasks | said
        raise UserError(
            f"{where} holds unknown {'label' if len(unknown) == 1 else 'labels'} {', '.join(unknown[:5])}",
            expected="labels that --labels names" if allowed else "labels that are a task or that a model predicts",
            found=f"{unknown[0]!r}; {nearest(unknown[0], known)}",
            do="correct the spelling, or name all labels with --labels a,b,c",
        )
    spellings = {_spelling(label): label for label in sorted(labels | tasks)}
    for name, values in predicted.items():
        for value in sorted(values - labels - tasks - allowed):
            if _spelling(value) in spellings:
                raise UserError(
                    f"{where}: column {name} holds the unknown label {value!r}",
                    expected=f"the spelling of the labels, {spellings[_spelling(value)]!r}",
                    do="write predictions and labels alike: a different spelling counts as a wrong answer",
                )
    if not said & (labels | tasks) and not allowed:
        raise UserError(
            f"{where}: no prediction of either model is one of the labels",
            expected=f"predictions such as {', '.join(sorted(labels)[:3])}",
            found=", ".join(sorted(said)[:3]),
            do="write predictions as the names that the labels use",
        )


def _paired(columns: dict[str, pa.ChunkedArray], old: pa.ChunkedArray, new: pa.ChunkedArray, disjoint: bool) -> Paired:
    label = columns["label"]
    return Paired(
        columns["task"].to_pylist(),
        pc.equal(old, label).combine_chunks().to_numpy(zero_copy_only=False),
        pc.equal(new, label).combine_chunks().to_numpy(zero_copy_only=False),
        disjoint,
    )
