"""Columns beside right and wrong: scores, weights, and the group that a row was drawn with.

Scores (a judge's grade, IoU, pass@k, 1 - loss) lie in a range that is declared, [0, 1] by default, and are read as
shares of it: so is the margin. Scores that are all 0 or 1, without groups and weights and without a declared range, are
rights and wrongs, and take the exact test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from holdfast.certify.claims import Counts
from holdfast.certify.columns import Column, column_names, read_column, refuse_missing, whole_numbers
from holdfast.certify.exact.region import FloatArray, IntArray
from holdfast.certify.grouped import UnitCounts, units_of
from holdfast.certify.settings import Layout
from holdfast.errors import UserError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

PAIRED_SCORES = ("old_score", "new_score")
SINGLE_SCORE = "score"


@dataclass(frozen=True, eq=False)
class Measured:
    """Changes, weights and groups of all rows."""

    layout: Layout
    changes: FloatArray  # [n], in [-1, 1]
    names: Sequence[str]  # of the units, by code
    units: IntArray  # [n], code of each row's unit
    weights: FloatArray | None
    scored: bool

    def summary(self, task: str, rows: IntArray) -> Counts:
        """The rows of one task as units that are only described: their limit is not checked."""
        return self._counted(task, rows, (), float("inf"))

    def counts(self, task: str, rows: IntArray, members: tuple[str, ...] = ()) -> Counts:
        """The rows of one task as units to test."""
        return self._counted(task, rows, members, self.layout.largest_unit)

    def _counted(self, task: str, rows: IntArray, members: tuple[str, ...], limit: float | None) -> Counts:
        changes = self.changes[rows]
        weights = None if self.weights is None else self.weights[rows]
        kept = np.ones(len(rows), dtype=np.bool_)
        if task in self.layout.largest_units and not self.layout.equal_groups:
            limit = self.layout.largest_units[task]
            sizes = np.bincount(self.units[rows], weights, minlength=len(self.names))
            kept = sizes[self.units[rows]] <= limit
            if not kept.any():
                raise UserError(f"every group of {task} is larger than the limit {limit:g}")
        units = units_of(
            changes[kept],
            self.units[rows][kept],
            names=self.names,
            weights=None if weights is None else weights[kept],
            limit=limit,
            equal=self.layout.equal_groups,
        )
        up, down = int((changes[kept] > 0).sum()), int((changes[kept] < 0).sum())
        kind = "row" if self.layout.group is None else "group"
        number = int(kept.sum())
        plain = weights is None and not self.scored and not units.equal
        if plain and (units.limit == 1.0 or (limit == np.inf and len(units.names) == number)):
            return Counts(task, number, up, down, members)  # groups of one image: the exact test
        return UnitCounts(task, number, up, down, members, units=units, kind=kind, scored=self.scored)

    def disjoint(self, task: IntArray) -> bool:
        """Whether no unit serves two tasks."""
        pairs = np.unique(np.stack([self.units, task]), axis=1)
        return pairs.shape[1] == len(np.unique(self.units))


def read_measured(
    tables: Sequence[tuple[pa.Table, Path, IntArray | None]],
    layout: Layout,
    changes: FloatArray,
    identity: Column | None,
    *,
    scored: bool,
) -> Measured | None:
    """Groups and weights from the first of the ``tables`` (each with its order of rows) that has them.

    None where rows are independent, of one weight, and right or wrong: those take the exact test.
    """
    weights = None if layout.weight is None else _weights(tables, layout.weight)
    group = None if layout.group is None else _groups(tables, layout.group)
    if group is None and weights is None and not scored:
        return None
    unit = group or identity
    names = [str(row) for row in range(len(changes))] if unit is None else unit.names
    codes = np.arange(len(changes), dtype=np.int64) if unit is None else unit.codes
    return Measured(layout, changes, names, codes, weights, scored)


def _holding(
    tables: Sequence[tuple[pa.Table, Path, IntArray | None]], name: str
) -> tuple[pa.Table, Path, IntArray | None]:
    """The first table that has a column."""
    known = [column for table, _, _ in tables for column in column_names(table)]
    for table, path, rows in tables:
        if name in column_names(table):
            return table, path, rows
    raise UserError(
        f"{tables[0][1]} lacks the column {name}", expected="the column that an option names", do=nearest(name, known)
    )


def _groups(tables: Sequence[tuple[pa.Table, Path, IntArray | None]], name: str) -> Column:
    table, path, rows = _holding(tables, name)
    column = whole_numbers(read_column(table, name, path))
    refuse_missing(column, name, path)
    return column if rows is None else column.take(rows)


def _weights(tables: Sequence[tuple[pa.Table, Path, IntArray | None]], name: str) -> FloatArray:
    table, path, rows = _holding(tables, name)
    values = read_numbers(table, name, path)
    if (values < 0).any():
        raise UserError(f"column {name} of {path} holds a weight below 0", expected="weights from 0 on")
    return values if rows is None else values[rows]


def are_rights_and_wrongs(old: FloatArray, new: FloatArray, layout: Layout) -> bool:
    """Whether scores are all 0 or 1 of a range that nobody declared: a metric that knows right and wrong only."""
    if layout.score_range is not None or layout.weight is not None or layout.group is not None:
        return False
    return bool(np.isin(old, (0.0, 1.0)).all() and np.isin(new, (0.0, 1.0)).all())


def read_scores(table: pa.Table, name: str, path: Path, layout: Layout) -> FloatArray:
    """A column of scores as shares of their range."""
    low, high = layout.score_range or (0.0, 1.0)
    values = read_numbers(table, name, path)
    outside = np.flatnonzero((values < low) | (values > high))
    if len(outside):
        raise UserError(
            f"column {name} of {path} leaves the range of scores",
            expected=f"scores from {low:g} to {high:g}",
            found=f"{values[outside[0]]:g} in data row {int(outside[0]) + 1}",
            do="declare the range that the score can have, before looking: --score-range LOW,HIGH",
        )
    return (values - low) / (high - low)


def read_numbers(table: pa.Table, name: str, path: Path) -> FloatArray:
    """A column of finite numbers."""
    column = read_column(table, name, path)
    refuse_missing(column, name, path)
    try:
        values = np.array([float(value) for value in column.names])
    except ValueError as error:
        raise UserError(f"column {name} of {path} holds no number", found=str(error)[:200]) from error
    if not np.isfinite(values).all():
        raise UserError(f"column {name} of {path} holds a number that is not finite", expected="finite numbers")
    return values[column.codes]
