"""The exact unconditional paired score test: p-values, decisions at a level, and lower bounds on a change in accuracy.

The statistic and its region are in :mod:`holdfast.certify.exact.region`, the supremum over the null hypothesis in
:mod:`holdfast.certify.exact.null_line`. Everything here takes the counts of one task: gained b, lost c, images n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdfast.certify.exact.null_line import at_most, supremum
from holdfast.certify.exact.region import Region, statistic

__all__ = [
    "GRID",
    "LARGEST_LEVEL",
    "SMALLEST_LEVEL",
    "check_counts",
    "impossible",
    "lower_bounds",
    "p_value",
    "p_value_regressed",
    "passes",
    "rejects",
    "statistic",
    "usable",
]


# A p-value is a bound with `line.SLACK` added, up to four times where it is interpolated: it is never below 1.02e-10,
# mostly not below 4.1e-10, and levels near that are out of reach whatever the images say. At this level it costs 4 %.
SMALLEST_LEVEL = 1e-8
LARGEST_LEVEL = 0.5  # a claim that is as likely false as true is none


def usable(level: float) -> bool:
    """Whether the exact test can decide anything at a level."""
    return SMALLEST_LEVEL <= level <= LARGEST_LEVEL


def _steps(*pieces: tuple[int, int, int]) -> list[int]:
    """Descending margins in units of 1/10000: from, down to (exclusive), step."""
    return [value for start, stop, step in pieces for value in range(start, stop, -step)]


# The declared grid of margins for lower bounds, from the largest down to 0 and on into gains. It is part of the
# promise: it was fixed before any data, and a bound walks it from the top and stops at the first failure.
_POSITIVE = _steps((9500, 5000, 500), (5000, 2000, 250), (2000, 500, 100), (500, 200, 50), (200, 100, 20), (100, 0, 10))
GRID: tuple[float, ...] = tuple(value / 10000 for value in [*_POSITIVE, 0, *(-value for value in reversed(_POSITIVE))])


def check_counts(gained: int, lost: int, n: int) -> None:
    """Counts that cannot be counts are a programming error."""
    if n < 1 or gained < 0 or lost < 0 or gained + lost > n:
        raise ValueError(f"gained {gained} and lost {lost} are not counts among {n} images")


def p_value(gained: int, lost: int, n: int, margin: float) -> float:
    """Upper bound, at most about 1e-8 above it, on the p-value of H0: Δ <= -margin, for margin in (-1, 1).

    p = sup over p01 in [0, (1-ε)/2], p10 = p01 + ε, of P(T >= t_observed).
    """
    check_counts(gained, lost, n)
    if not -1.0 < margin < 1.0:
        raise ValueError(f"a margin lies between -1 and 1, not at {margin}")
    observed = statistic(gained, lost, n, margin)
    return supremum(Region.above(observed, n, margin), margin)


def p_value_regressed(gained: int, lost: int, n: int, margin: float) -> float:
    """p-value of H0: Δ >= -margin: a small one shows that more than the margin was lost."""
    return p_value(lost, gained, n, -margin)


def passes(gained: int, lost: int, n: int, margin: float, level: float) -> bool:
    """Whether p_value <= level is proven; quicker than the p-value itself."""
    check_counts(gained, lost, n)
    observed = statistic(gained, lost, n, margin)
    if observed > 0 and _hoeffding(observed, margin) <= level:
        return True
    return rejects(observed, n, margin, level)


@dataclass
class _Decided:
    """Of one (n, ε, level): the smallest T that was found to pass, and the largest that was found to fail."""

    passing: float = math.inf
    failing: float = -math.inf


@lru_cache(maxsize=4096)
def _decided(n: int, margin: float, level: float) -> _Decided:
    return _Decided()


def rejects(observed: float, n: int, margin: float, level: float) -> bool:
    """Whether sup P(T >= observed) <= level is proven.

    The regions of a falling T contain each other, so that tasks of as many images share what was decided for one.
    """
    decided = _decided(n, margin, level)
    if observed >= decided.passing:
        return True
    if observed <= decided.failing:
        return False
    found = at_most(Region.above(observed, n, margin), margin, level, observed)
    if found:
        decided.passing = observed
    else:
        decided.failing = observed
    return found


def _hoeffding(observed: float, margin: float) -> float:
    """T >= t needs b - c + nε >= t sqrt(n|ε|(1-|ε|)), as V̂ >= |ε|(1-|ε|): P <= exp(-t²|ε|(1-|ε|)/2) by Hoeffding."""
    return math.exp(-observed * observed * abs(margin) * (1.0 - abs(margin)) / 2.0)


def impossible(n: int, margin: float, level: float) -> bool:
    """Whether no outcome at all of n images can pass: ((1-ε)/2)^n > level, the p-value of "all of them gained"."""
    return ((1.0 - margin) / 2.0) ** n > level


def lower_bounds(gained: int, lost: int, n: int, levels: Sequence[float], extra: Sequence[float] = ()) -> list[float]:
    """Lower bounds on Δ, one for each level: minus the last margin of the grid that passes before the first failure.

    ``extra`` margins fixed beforehand (the user's own) join the grid. -1 where not even the largest margin passes.
    The walk of a smaller level is the beginning of the walk of a larger one, so that they cost little together.
    """
    grid = sorted({*GRID, *extra}, reverse=True)
    order = sorted(range(len(levels)), key=lambda index: levels[index])
    bounds = [-1.0] * len(levels)
    passed = 0
    for index in order:
        while passed < len(grid) and passes(gained, lost, n, grid[passed], levels[index]):
            passed += 1
        bounds[index] = -grid[passed - 1] + 0.0 if passed else -1.0
    return bounds
