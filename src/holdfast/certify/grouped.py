"""Groups, weights and scores: the test of a mean change where the exact test for independent rights and wrongs ends.

**Groups.** Frames of one video are not independent, videos are. What is drawn is a group g with m_g images; the claim
is about the image-weighted change in accuracy, Δ = E[sum of X over a group] / E[m]. So

    H0: Δ <= -ε    is    E[Y_g] <= 0    with    Y_g = sum over i in g of w_i (X_i + ε)    (w_i = 1 without weights),

the Y_g are independent, and Y_g >= -(1-ε) limit if no group weighs more than ``limit``. :mod:`holdfast.certify.betting`
tests that for any dependence within a group. Images that belong to no group are groups of one.

**The limit** belongs to the claim: it is about groups of at most that weight. A rare group that is larger than all seen
could hold any loss, and no test would know. It is fixed before the outcomes are seen. Where all units weigh the same it
need not be given: the claim is then about groups of that size.

**Which test** is a rule of the layout alone: the exact paired score test where every unit is a single image of equal
weight that is right or wrong, the betting test everywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from holdfast.certify.betting import e_values, orders
from holdfast.certify.claims import Counts
from holdfast.certify.exact.region import FloatArray, IntArray
from holdfast.certify.exact.score_test import GRID
from holdfast.errors import UserError

BETTING = "betting test"


@dataclass(frozen=True, eq=False)
class Units:
    """What was drawn independently, for one task: a total of weighted changes and a weight for each."""

    totals: FloatArray  # [G], sum of w x, each x in [-1, 1]
    weights: FloatArray  # [G], sum of w, above 0
    names: tuple[str, ...]  # [G]
    limit: float  # no unit of the population weighs more
    equal: bool = False  # every unit counts the same, whatever it holds

    def __post_init__(self) -> None:
        if len(self.names) == 0 or not len(self.names) == len(self.totals) == len(self.weights):
            raise ValueError("units need a name, a total and a weight each")
        if (np.abs(self.totals) > self.weights * (1 + 1e-9)).any() or (self.weights <= 0).any():
            raise ValueError("a change lies between -1 and 1, and a weight above 0")
        if (self.weights > self.limit * (1 + 1e-9)).any():
            raise ValueError(f"a unit weighs more than the limit {self.limit}")

    @property
    def change(self) -> float:
        """The weighted mean change."""
        return float(self.totals.sum() / self.weights.sum())

    @cached_property
    def order(self) -> IntArray:
        """Orders in which the units are bet on."""
        return orders(self.names)

    def p_value(self, margin: float, level: float) -> float:
        """p-value of H0: Δ <= -margin; a small one needs no more than ``level``, and none falls below half of it."""
        return _p(self.totals, self, np.array([margin]), level)[0]

    def p_value_regressed(self, margin: float, level: float) -> float:
        """p-value of H0: Δ >= -margin."""
        return _p(-self.totals, self, np.array([-margin]), level)[0]

    def impossible(self, margin: float, level: float) -> bool:
        """Whether not even a gain on every image would pass."""
        return _p(self.weights, self, np.array([margin]), level)[0] > level

    def lower_bound(self, level: float, extra: Sequence[float] = ()) -> float:
        """Minus the last margin of the preset grid that passes before the first that fails; -1 where none does."""
        grid = np.array(sorted({*GRID, *extra}, reverse=True))
        failed = np.flatnonzero(np.array(_p(self.totals, self, grid, level)) > level)
        passed = int(failed[0]) if len(failed) else len(grid)
        return -float(grid[passed - 1]) + 0.0 if passed else -1.0


def _p(totals: FloatArray, units: Units, margins: FloatArray, level: float) -> list[float]:
    values = e_values(totals, units.weights, units.limit, margins, level, units.order)
    return np.minimum(1.0, 1.0 / np.maximum(values, 1e-300)).tolist()


@dataclass(frozen=True, eq=False)
class UnitCounts(Counts):
    """The images of one task in units that are not single rights and wrongs: counted, and tested by betting."""

    units: Units | None = None
    kind: str = "group"  # what a unit is: "group" or "row"
    scored: bool = False  # changes of scores, not of right and wrong

    @property
    def difference(self) -> float:
        """Weighted mean change."""
        return self.sample.change

    @property
    def independent(self) -> int:
        """Units."""
        return len(self.sample.names)

    @property
    def measure(self) -> str:
        """What changes."""
        return "mean score" if self.scored else "accuracy"

    def p_value(self, margin: float, level: float) -> float:
        """By the betting test."""
        return self.sample.p_value(margin, level)

    def p_value_regressed(self, margin: float, level: float) -> float:
        """By the betting test."""
        return self.sample.p_value_regressed(margin, level)

    def lower_bounds(self, levels: Sequence[float], margin: float) -> list[float]:
        """By the betting test, over the same grid."""
        found = {level: self.sample.lower_bound(level, (margin,)) for level in set(levels)}
        return [found[level] for level in levels]

    @property
    def sample(self) -> Units:
        """The units, which every counted task has."""
        assert self.units is not None
        return self.units

    def outcome(self) -> tuple[Any, ...]:
        """Units of two tasks are never the same."""
        return (self.task,)

    def described(self) -> dict[str, Any]:
        """What a report tells beside the counts."""
        return {
            "unit": self.kind,
            "units": self.independent,
            "largest_unit": self.sample.limit,
            "equal_units": self.sample.equal,
        }

    def population(self) -> str:
        """The units that the claim is about, in words."""
        if self.kind == "row":
            return "rows" if self.sample.limit == 1.0 else f"rows of weight up to {self.sample.limit:g}"
        if self.sample.equal:
            return "groups, each counted the same"
        return f"groups of up to {self.sample.limit:g}"


def units_of(
    changes: FloatArray,
    groups: IntArray | None = None,
    *,
    names: Sequence[str] | None = None,
    weights: FloatArray | None = None,
    limit: float | None = None,
    equal: bool = False,
) -> Units:
    """Units from rows: ``changes`` in [-1, 1], the code of each row's group (none: each row is a unit), its weight.

    ``names[code]`` names a unit. ``limit`` is the largest weight of a unit, ``equal`` gives every unit the weight 1.
    """
    codes = np.arange(len(changes), dtype=np.int64) if groups is None else groups
    present, place = np.unique(codes, return_inverse=True)
    weight = np.ones(len(changes)) if weights is None else np.asarray(weights, dtype=np.float64)
    totals: FloatArray = np.bincount(place, weight * changes).astype(np.float64)
    sizes: FloatArray = np.bincount(place, weight).astype(np.float64)
    kept = sizes > 0.0
    if not kept.any():
        raise UserError("no row has a weight above 0", do="give rows that are to count a weight above 0")
    called = [str(code) if names is None else names[code] for code in _listed(present[kept])]
    totals, sizes = totals[kept], sizes[kept]
    if equal:
        totals, sizes = totals / sizes, np.ones(len(sizes))
        limit = 1.0
    return Units(totals, sizes, tuple(called), checked_limit(sizes, called, limit), equal)


def _listed(codes: IntArray) -> list[int]:
    return [int(code) for code in codes]


def checked_limit(sizes: FloatArray, names: Sequence[str], limit: float | None) -> float:
    """The declared limit, or the weight that all units have."""
    largest = int(np.argmax(sizes))
    if limit is None:
        if sizes.max() - sizes.min() > 1e-9 * sizes.max():
            raise UserError(
                "units of different sizes need a declared limit",
                expected="the largest number of images (or weight) that a group may have, fixed before the test; the "
                "claim is about groups up to that size",
                found=f"from {sizes.min():g} to {sizes[largest]:g} ({names[largest]})",
                do=f"give --largest-unit {sizes[largest]:g} or more, or let every group count the same: --equal-groups",
            )
        return float(sizes[largest])
    if not limit > 0.0:
        raise UserError(f"a largest unit of {limit:g} is not usable", expected="a number above 0")
    if sizes[largest] > limit * (1 + 1e-9):
        raise UserError(
            f"the unit {names[largest]!r} is larger than the declared limit",
            expected=f"at most {limit:g}",
            found=f"{sizes[largest]:g}",
            do="raise --largest-unit, or keep fewer rows of that group; choose without looking at predictions",
        )
    return float(limit)


@dataclass(frozen=True)
class GroupedTest:
    """What :func:`grouped_pvalue` found."""

    p_value: float
    change: float
    units: int
    test: str


def grouped_pvalue(
    changes: FloatArray,
    groups: IntArray,
    margin: float,
    *,
    level: float = 0.05,
    weights: FloatArray | None = None,
    limit: float | None = None,
    equal: bool = False,
) -> GroupedTest:
    """p-value of H0: the weighted mean of ``changes`` is at most -``margin``, with rows that depend within groups."""
    units = units_of(changes, groups, weights=weights, limit=limit, equal=equal)
    return GroupedTest(units.p_value(margin, level), units.change, len(units.names), BETTING)
