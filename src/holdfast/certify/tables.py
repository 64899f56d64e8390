"""Predictions that a person hands in: read, checked, joined, counted.

One table with ``task,label,old,new`` (and ``example_id``), or two with ``example_id,task,label,prediction`` that are
joined by example id and task. Answers that were graded elsewhere: ``task,old_correct,new_correct`` in one table, or
``example_id,task,correct`` in two; scores: ``task,old_score,new_score``, or ``example_id,task,score``. CSV or Parquet.
Every fault is a sentence; what looks wrong and may be right is a warning in :class:`Inspection`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.certify.claims import Counts
from holdfast.certify.columns import (
    BoolArray,
    Column,
    check_columns,
    column_names,
    read_column,
    read_table,
    refuse_missing,
    row_codes,
    truth_column,
    whole_numbers,
)
from holdfast.certify.exact.region import FloatArray, IntArray
from holdfast.certify.repeats import Unused, combined, is_row_number, repeated, unused_warning
from holdfast.certify.scores import (
    PAIRED_SCORES,
    SINGLE_SCORE,
    Measured,
    are_rights_and_wrongs,
    read_measured,
    read_scores,
)
from holdfast.certify.settings import PLAIN, Layout
from holdfast.certify.vocabulary import are_numbers, number, read_answers
from holdfast.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

PAIRED_COLUMNS = ("task", "label", "old", "new")
PAIRED_CORRECT = ("task", "old_correct", "new_correct")
SINGLE_COLUMNS = ("example_id", "task", "label", "prediction")
SINGLE_CORRECT = ("example_id", "task", "correct")


@dataclass(frozen=True)
class Inspection:
    """What was noticed about a table of predictions; all of it stands in the report and the certificate."""

    rows: int
    ids: bool  # example ids say which image a row is about
    graded: bool = False  # by columns of right and wrong, not by comparing predictions with labels
    numbers: bool = False  # labels and predictions were compared as numbers
    unused: tuple[str, ...] = ()  # columns that the test does not read
    repeats: str | None = None  # in words, how rows repeat
    warnings: tuple[str, ...] = ()
    scored: bool = False  # by columns of scores

    def as_json(self) -> dict[str, Any]:
        """``input`` of a report."""
        return {
            "rows": self.rows,
            "example_ids": self.ids,
            "answers": self._answers(),
            "unused_columns": list(self.unused),
            "repeated_rows": self.repeats,
            "warnings": list(self.warnings),
        }

    def _answers(self) -> str:
        if self.scored:
            return "scores"
        return "graded columns" if self.graded else "numbers" if self.numbers else "names"


@dataclass(frozen=True)
class Paired:
    """Two models on the same images, row by row in the order in which they came."""

    task: Column
    correct_old: BoolArray
    correct_new: BoolArray
    disjoint: bool  # known that no image serves two tasks
    identity: Column | None = None  # example ids
    inspection: Inspection = field(default_factory=lambda: Inspection(0, False))
    measured: Measured | None = None  # where rows are not single rights and wrongs of one weight

    def tasks(self) -> list[str]:
        """Names in alphabetical order."""
        return list(self.task.names)

    @cached_property
    def _rows(self) -> dict[str, IntArray]:
        """The rows of every task, in their order."""
        order = np.argsort(self.task.codes, kind="stable")
        ends = np.cumsum(np.bincount(self.task.codes, minlength=len(self.task.names)))[:-1]
        return dict(zip(self.task.names, np.split(order, ends), strict=True))

    def rows(self, task: str) -> IntArray:
        """The rows of one task, in their order."""
        return self._rows[task]

    def rows_of_pool(self, name: str, members: Sequence[str]) -> IntArray:
        """The rows of several tasks, each image once however many of the tasks it serves."""
        rows = np.concatenate([self._rows[member] for member in members])
        return rows if self.identity is None else self._one_row_an_image(rows, name)

    def changes(self, task: str) -> list[int]:
        """X_i in {-1, 0, 1} of one task, in the order of the rows."""
        rows = self._rows[task]
        return (self.correct_new[rows].astype(int) - self.correct_old[rows].astype(int)).tolist()

    def tested(self, task: str) -> Counts:
        """One task as it is tested."""
        return self._counts[task] if self.measured is None else self.measured.counts(task, self._rows[task])

    def counts(self) -> dict[str, Counts]:
        """b, c and n of every task."""
        return dict(self._counts)

    @cached_property
    def _counts(self) -> dict[str, Counts]:
        if self.measured is not None:
            return {name: self.measured.summary(name, rows) for name, rows in self._rows.items()}
        size = len(self.task.names)
        n = np.bincount(self.task.codes, minlength=size)
        gained = np.bincount(self.task.codes, weights=~self.correct_old & self.correct_new, minlength=size)
        lost = np.bincount(self.task.codes, weights=self.correct_old & ~self.correct_new, minlength=size)
        return {
            name: Counts(name, int(n[code]), int(gained[code]), int(lost[code]))
            for code, name in enumerate(self.task.names)
        }

    def pooled(self, name: str, members: Sequence[str]) -> Counts:
        """Several tasks as one: b, c and n over their images, each image once however many of the tasks it serves.

        The claim is then about the group: the change in accuracy over its images together, drawn as they were drawn
        here. An image that is right in one task of the group and wrong in another has no single outcome: refused.
        """
        rows = self.rows_of_pool(name, members)
        if self.measured is not None:
            return self.measured.counts(name, rows, tuple(members))
        old, new = self.correct_old[rows], self.correct_new[rows]
        return Counts(name, len(rows), int((~old & new).sum()), int((old & ~new).sum()), members=tuple(members))

    def _one_row_an_image(self, rows: IntArray, name: str) -> IntArray:
        assert self.identity is not None
        images = self.identity.codes[rows]
        _, first, inverse = np.unique(images, return_index=True, return_inverse=True)
        outcome = self.correct_old[rows] * 2.0 + self.correct_new[rows]
        if self.measured is not None:
            outcome = self.measured.changes[rows]
        mixed = np.flatnonzero(outcome != outcome[first][inverse.reshape(-1)])
        if len(mixed):
            example = self.identity.names[int(images[mixed[0]])]
            count = len(np.unique(images[mixed]))
            raise UserError(
                f"in the pool {name} {count} {'image has' if count == 1 else 'images have'} different outcomes",
                expected="a pool counts an image once: right or wrong, whichever task it serves",
                found=f"{example!r} does not have the same outcome in all of them",
                do="claim about the tasks themselves, or pool tasks that share no images",
            )
        return rows[np.sort(first)]


# -- one table --------------------------------------------------------------------------------------------------------


def read_paired(path: Path, labels: Iterable[str] = (), layout: Layout = PLAIN) -> Paired:
    """One file with both models' predictions: columns ``task,label,old,new`` and optionally ``example_id``."""
    return paired_table(read_table(path), labels, path, layout)


def paired_table(
    table: pa.Table, labels: Iterable[str] = (), path: Path = Path("the predictions"), layout: Layout = PLAIN
) -> Paired:
    """A table in memory, as :func:`read_paired` does with a file."""
    names, labels = column_names(table), list(labels)
    scored = layout.scored(names, PAIRED_SCORES, (*PAIRED_COLUMNS[2:], *PAIRED_CORRECT[1:]))
    graded = not scored and ("old_correct" in names or "new_correct" in names)
    answered = ("task", *PAIRED_SCORES) if scored else PAIRED_CORRECT if graded else PAIRED_COLUMNS
    used = [*answered, *(["example_id"] if "example_id" in names else []), *layout.columns]
    check_columns(table, used, path)
    task, identity = _task_and_identity(table, path)
    numbers, warnings, changes = False, list[str](), None
    if scored:
        refuse_missing(task, "task", path)
        _no_labels(labels, path)
        scores = [read_scores(table, name, path, layout) for name in PAIRED_SCORES]
        old, new, changes = _scores(scores[0], scores[1], layout)
    elif graded:
        refuse_missing(task, "task", path)
        _no_labels(labels, path)
        old, new = truth_column(table, "old_correct", path), truth_column(table, "new_correct", path)
        warnings += _says_otherwise(table, path, {"old": old, "new": new})
    else:
        read = {name: read_column(table, name, path) for name in ("label", "old", "new")}
        predictions = {"old": read["old"], "new": read["new"]}
        answers = read_answers({path: read["label"]}, task, predictions, labels, {"old": path, "new": path})
        old, new = answers.old.equals(answers.label), answers.new.equals(answers.label)
        numbers, warnings = answers.numbers, list(answers.warnings)
    unused = [Unused(name, row_codes(table, raw)) for name, raw in names.items() if _is_unused(name, used)]
    read_codes = [codes for name in used if name != "example_id" for codes in [row_codes(table, names[name])]]
    inspection = _inspected(len(table), identity, read_codes, unused, warnings, graded=graded, numbers=numbers)
    paired = Paired(task, old, new, identity is not None and len(identity.names) == len(table), identity, inspection)
    return _measured(paired, [(table, path, None)], layout, changes, scored)


def _scores(old: FloatArray, new: FloatArray, layout: Layout) -> tuple[BoolArray, BoolArray, FloatArray | None]:
    """Which model scored higher, and by how much; of scores that are rights and wrongs, which model was right."""
    if are_rights_and_wrongs(old, new, layout):
        return old == 1.0, new == 1.0, None
    return old > new, new > old, new - old


def _measured(
    paired: Paired,
    tables: Sequence[tuple[pa.Table, Path, IntArray | None]],
    layout: Layout,
    changes: FloatArray | None,
    scored: bool,
) -> Paired:
    """The same rows with the columns that the layout names."""
    differences = paired.correct_new.astype(np.float64) - paired.correct_old if changes is None else changes
    measured = read_measured(tables, layout, differences, paired.identity, scored=changes is not None)
    inspection = replace(paired.inspection, scored=scored)
    disjoint = paired.disjoint and (measured is None or measured.disjoint(paired.task.codes))
    return replace(paired, measured=measured, inspection=inspection, disjoint=disjoint)


def _task_and_identity(table: pa.Table, path: Path, trusted: bool = False) -> tuple[Column, Column | None]:
    """Tasks, not yet checked for missing cells, and ids where the table has them: each once in a task."""
    task = read_column(table, "task", path)
    if not trusted:
        task = whole_numbers(task)
    if "example_id" not in column_names(table):
        return task, None
    identity = read_column(table, "example_id", path)
    if not trusted:
        identity = whole_numbers(identity)
    refuse_missing(identity, "example_id", path)
    _check_unique(task, identity, path)
    return task, identity


def _no_labels(labels: Sequence[str], path: Path) -> None:
    if labels:
        raise UserError(
            f"--labels and columns of right and wrong at once ({path})",
            do="leave --labels out: nothing is compared with a label",
        )


def _says_otherwise(table: pa.Table, path: Path, correct: Mapping[str, BoolArray]) -> list[str]:
    """Where labels and predictions stand beside the grades: in how many rows they say otherwise."""
    if not {"label", "old", "new"} <= set(column_names(table)):
        return []
    read = {name: read_column(table, name, path) for name in ("label", "old", "new")}
    if are_numbers(read["label"].names):
        read = {name: column.renamed(lambda name: number(name) or name) for name, column in read.items()}
    rows = sum(int((read[name].equals(read["label"]) != right).sum()) for name, right in correct.items())
    if rows == 0:
        return []
    return [f"old_correct and new_correct decide; {rows} of them say otherwise than label, old and new do"]


# -- two tables -------------------------------------------------------------------------------------------------------


def read_joined(
    old_path: Path, new_path: Path, labels: Iterable[str] = (), *, trusted: bool = False, layout: Layout = PLAIN
) -> Paired:
    """Two files, one a model, joined by example id (and task, for an image that serves several).

    ``trusted`` tables were written by holdfast itself, from one list of classes: their words are not questioned.
    """
    return _joined(read_table(old_path), read_table(new_path), labels, (old_path, new_path), trusted, layout)


def paired_tables(
    old: pa.Table, new: pa.Table, labels: Iterable[str] = (), *, trusted: bool = False, layout: Layout = PLAIN
) -> Paired:
    """Two tables in memory, as :func:`read_joined` does with files."""
    names = (Path("the old model's predictions"), Path("the new model's predictions"))
    return _joined(old, new, labels, names, trusted, layout)


def _joined(
    old: pa.Table, new: pa.Table, labels: Iterable[str], paths: tuple[Path, Path], trusted: bool, layout: Layout
) -> Paired:
    """Put the rows of the new model in the order of the old one's; anything that does not match is refused."""
    tables, labels = (old, new), list(labels)
    names = {name for table in tables for name in column_names(table)}
    scored = layout.scored(names, (SINGLE_SCORE,), (SINGLE_COLUMNS[3], SINGLE_CORRECT[2]))
    graded = not scored and "correct" in names
    used = ("example_id", "task", SINGLE_SCORE) if scored else SINGLE_CORRECT if graded else SINGLE_COLUMNS
    for table, path in zip(tables, paths, strict=True):
        check_columns(table, used, path)
    (task, identity), (other_task, other_identity) = (
        _task_and_identity(table, path, trusted) for table, path in zip(tables, paths, strict=True)
    )
    assert identity is not None
    assert other_identity is not None
    rows = _order((task, identity), (other_task, other_identity), paths)
    numbers, warnings, changes = False, list[str](), None
    if scored:
        refuse_missing(task, "task", paths[0])
        _no_labels(labels, paths[0])
        scores = [read_scores(table, SINGLE_SCORE, path, layout) for table, path in zip(tables, paths, strict=True)]
        *right, changes = _scores(scores[0], scores[1][rows], layout)
    elif graded:
        refuse_missing(task, "task", paths[0])
        _no_labels(labels, paths[0])
        right = (truth_column(old, "correct", paths[0]), truth_column(new, "correct", paths[1])[rows])
    else:
        label = (read_column(old, "label", paths[0]), read_column(new, "label", paths[1]).take(rows))
        predictions = {
            "old": read_column(old, "prediction", paths[0]),
            "new": read_column(new, "prediction", paths[1]).take(rows),
        }
        if trusted:
            right = (predictions["old"].equals(label[0]), predictions["new"].equals(label[0]))
        else:
            by_path = dict(zip(paths, label, strict=False)) if paths[0] != paths[1] else {paths[0]: label[0]}
            answers = read_answers(by_path, task, predictions, labels, {"old": paths[0], "new": paths[1]})
            right = (answers.old.equals(answers.label), answers.new.equals(answers.label))
            numbers, warnings = answers.numbers, list(answers.warnings)
    disjoint, sources = len(identity.names) == len(rows), [(old, paths[0], None), (new, paths[1], rows)]
    if trusted:
        paired = Paired(task, right[0], right[1], disjoint, identity, Inspection(len(rows), ids=True))
        return _measured(paired, sources, layout, changes, scored)
    unused = _unused_of_both(old, new, rows, [*used, *layout.columns])
    read_codes = [
        codes if table is old else None if codes is None else codes[rows]
        for table in tables
        for name in used[1:]
        for codes in [row_codes(table, column_names(table)[name])]
    ]
    inspection = _inspected(len(rows), identity, read_codes, unused, warnings, graded=graded, numbers=numbers)
    paired = Paired(task, right[0], right[1], disjoint, identity, inspection)
    return _measured(paired, sources, layout, changes, scored)


def _order(old: tuple[Column, Column], new: tuple[Column, Column], paths: tuple[Path, Path]) -> IntArray:
    """For every row of the old model's table the row of the new one's that is about the same image and task."""
    size = len(old[1].names)
    task, identity = new[0].codes_in(old[0]), new[1].codes_in(old[1])
    given = np.where((task < 0) | (identity < 0), -1, task * size + identity)
    wanted = old[0].codes * size + old[1].codes
    order = np.argsort(given, kind="stable")
    place = np.minimum(np.searchsorted(given[order], wanted), len(order) - 1)
    rows = order[place]
    matched = given[rows] == wanted
    if not matched.all() or len(given) != len(wanted):
        first, second = int((~matched).sum()), len(given) - int(matched.sum())
        raise UserError(
            f"{paths[0]} and {paths[1]} do not join: they are not about the same images and tasks",
            expected="the same example_id and task in both files",
            found=f"{first} rows only in the first, {second} only in the second",
            do="predict the same images with both models",
        )
    return rows


def _unused_of_both(old: pa.Table, new: pa.Table, rows: IntArray, used: Sequence[str]) -> list[Unused]:
    found: dict[str, Unused] = {}
    for name, raw in column_names(new).items():
        codes = row_codes(new, raw)
        found[name] = Unused(name, None if codes is None else codes[rows])
    found.update({name: Unused(name, row_codes(old, raw)) for name, raw in column_names(old).items()})
    return [column for name, column in sorted(found.items()) if _is_unused(name, used)]


def _is_unused(name: str, used: Sequence[str]) -> bool:
    return name not in used and not is_row_number(name)


# -- both -------------------------------------------------------------------------------------------------------------


def _inspected(
    rows: int,
    identity: Column | None,
    read_codes: Sequence[IntArray | None],
    unused: Sequence[Unused],
    warnings: Sequence[str],
    *,
    graded: bool,
    numbers: bool,
) -> Inspection:
    other = [column.codes for column in unused if column.codes is not None]
    codes = combined([item for item in [*read_codes, *other] if item is not None])
    repeats = repeated(codes, bool(other))
    found = [*warnings, *unused_warning(unused)]
    if repeats is not None and identity is not None:
        found.append(f"apart from their ids, rows repeat: {repeats}")
    names = tuple(sorted(column.name for column in unused))
    return Inspection(rows, identity is not None, graded, numbers, names, repeats, tuple(found))


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
