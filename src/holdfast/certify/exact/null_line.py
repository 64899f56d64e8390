"""Proven upper bounds on sup P(T >= t) along the line Δ = -ε, where the worst case of the null hypothesis lies.

The line is p01 = max(-ε, 0) + s, p10 = max(ε, 0) + s with s in [0, (1-|ε|)/2]. It is cut into cells, and a cell is
settled by the cheaper of two bounds:

1. *Corner.* P(T >= t) rises in p01 and falls in p10, so on a cell [lo, hi] it is at most its value at the corner
   (p01(hi), p10(lo)). Cells that it leaves open are halved.
2. *Interpolation.* f(s) = P(T >= t) is a polynomial in s. Off the real line |f(z)| <= (|p01| + |p10| + |p00|)^n = M, so
   the interpolant at m+1 Chebyshev points of the cell is within 4 M ρ^-m / (ρ - 1) of f, for every Bernstein ellipse ρ
   (Trefethen, Approximation Theory and Approximation Practice, theorem 8.2). |p01| + |p10| + |p00| is convex in z: its
   maximum over a polygon around the ellipse is at a vertex. Between N angles π/N apart, the interpolant sum a_k cos kφ
   exceeds its largest sample by at most (π/N)²/8 * sum k² |a_k|.

Cells are four standard deviations of the flips wide, which keeps M small at every n: about 0.8 sqrt(n) of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from holdfast.certify.exact.region import LEFT_OUT, IntArray, Region
from holdfast.certify.exact.special import FloatArray, normal_quantile, normal_tail

CELL_DEVIATIONS = 4.0
# Degrees of interpolation and the error that each has on a cell of four deviations, rounded up. The figures only choose
# the degree; the error that enters a bound is computed for the cell.
DEGREE = 24
DEGREES = ((8, 2e-2), (12, 2e-4), (16, 1e-6), (DEGREE, 0.0))
# Below this distance of T from the level's normal quantile a failure is likely, and looked for first.
EXPECTED_FAILURE = 0.1
# Closer than this to that quantile the corner bound settles next to nothing, and all cells are interpolated at once;
# further away where the cells are so few that interpolating them costs no more than looking at their corners.
CLOSE, CLOSE_OF_FEW, FEW_CELLS = 0.25, 1.0, 8
# How often an unsettled cell is halved for the corner bound before it is interpolated.
HALVINGS = 2
# Rounding of sums of up to 10^5 terms in double precision, with room to spare: below 1e-12 where it was compared with
# sums of 40 digits (n up to 10^4).
ROUNDING = 1e-10
SLACK = LEFT_OUT + ROUNDING
COARSE_ANGLES, FINE_ANGLES = 128, 4096
POLYGON = 32
ELLIPSES = np.array([2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 40.0])


def _polygons() -> NDArray[np.complex128]:
    """Corners of a polygon around each Bernstein ellipse of [-1, 1], upper half: the lower follows by symmetry."""
    angle = np.arange(POLYGON // 2 + 1) * 2.0 * math.pi / POLYGON
    wide, high = (ELLIPSES + 1.0 / ELLIPSES) / 2.0, (ELLIPSES - 1.0 / ELLIPSES) / 2.0
    return (wide[:, None] * np.cos(angle) + 1j * high[:, None] * np.sin(angle)) / math.cos(math.pi / POLYGON)


_POLYGONS = _polygons()


@lru_cache(maxsize=8)
def _nodes(degree: int) -> tuple[FloatArray, FloatArray]:
    """Chebyshev points of the first kind [m+1], and the matrix from values there to coefficients a_k [m+1, m+1]."""
    angles = (np.arange(degree + 1) + 0.5) * math.pi / (degree + 1)
    to_coefficients = 2.0 / (degree + 1) * np.cos(np.outer(np.arange(degree + 1), angles))
    to_coefficients[0] /= 2.0
    return np.cos(angles), to_coefficients


@lru_cache(maxsize=8)
def _samples(degree: int, angles: int) -> FloatArray:
    """Coefficients -> values of the interpolant at ``angles + 1`` equally spaced angles, [angles+1, m+1]."""
    if degree < DEGREE:  # the first columns of the largest, whose cosines take milliseconds
        return np.ascontiguousarray(_samples(DEGREE, angles)[:, : degree + 1])
    return np.cos(np.outer(np.arange(angles + 1) * math.pi / angles, np.arange(degree + 1)))


@dataclass(frozen=True)
class Line:
    """The null line of one (n, ε), cut into cells.

    With s = (1-|ε|)/2 sin²θ a step dθ is at most 2 sqrt(n) dθ standard deviations, whatever ε.
    """

    n: int
    margin: float
    edges: FloatArray  # [cells+1], from 0 to (1-|ε|)/2

    @classmethod
    def cut(cls, n: int, margin: float) -> Line:
        """Cells of ``CELL_DEVIATIONS`` standard deviations."""
        cells = max(1, math.ceil(math.pi * math.sqrt(n) / CELL_DEVIATIONS))
        return cls(n, margin, (1.0 - abs(margin)) / 2.0 * np.sin(np.linspace(0.0, math.pi / 2.0, cells + 1)) ** 2)

    def rates(self, s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(p01, p10) at positions on the line."""
        return s + max(-self.margin, 0.0), s + max(self.margin, 0.0)

    def corner_rates(self, low: FloatArray, high: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The corner (p01(hi), p10(lo)) of each cell."""
        return self.rates(high)[0], self.rates(low)[1]

    def interpolation_errors(self, low: FloatArray, high: FloatArray, degree: int) -> FloatArray:
        """4 M ρ^-m / (ρ - 1) for each cell, with the best ρ of a fixed list: about 1e-12 at degree 24 and every n."""
        middle, half = (high + low) / 2.0, (high - low) / 2.0
        z = middle[:, None, None] + half[:, None, None] * _POLYGONS  # [cells, ellipses, vertices]
        loss, gain = max(self.margin, 0.0), max(-self.margin, 0.0)
        total = np.abs(z + gain) + np.abs(z + loss) + np.abs(1.0 - abs(self.margin) - 2.0 * z)
        log_bound = self.n * np.log(total.max(axis=2))  # log M, [cells, ellipses]
        log_error = math.log(4.0) + log_bound - degree * np.log(ELLIPSES) - np.log(ELLIPSES - 1.0)
        return np.exp(np.minimum(log_error.min(axis=1), 0.0))


def supremum(region: Region, margin: float) -> float:
    """A proven upper bound on sup P(T >= t) over the null line, at most about 1e-8 above it."""
    line = Line.cut(region.n, margin)
    ends = line.rates(line.edges)
    corners = line.corner_rates(line.edges[:-1], line.edges[1:])
    both = region.probability(np.concatenate([ends[0], corners[0]]), np.concatenate([ends[1], corners[1]]))
    attained, corner = float(both[: len(line.edges)].max()), both[len(line.edges) :]
    # A cell whose corner lies below a value attained elsewhere cannot hold the supremum.
    open_cells = np.flatnonzero(corner >= attained)
    bound = _Interpolated.on(region, line, open_cells, DEGREE, SLACK).bound() if len(open_cells) else 0.0
    return min(1.0, max(attained + SLACK, bound))


def at_most(region: Region, margin: float, level: float, observed: float) -> bool:
    """Whether sup P(T >= t) <= level is proven; quicker than :func:`supremum` when it is not close to the level.

    ``observed`` is the t of the region. It only decides how to search: how coarsely to begin, and at which degree.
    """
    line = Line.cut(region.n, margin)
    # Windows that leave out more are narrower; close to the level the exact supremum decides.
    slack = max(1e-4 * level, ROUNDING)
    excess = observed + normal_quantile(level)
    if excess < EXPECTED_FAILURE:
        some = line.edges[:: max(1, len(line.edges) // 8)]
        if float(_probability(region, line.rates(some), slack).max()) - ROUNDING > level:
            return False
    cells = len(line.edges) - 1
    if excess < (CLOSE_OF_FEW if cells <= FEW_CELLS else CLOSE):
        open_cells = np.arange(cells)
    else:
        open_cells = _unsettled_groups(region, line, level, slack, excess)
        open_cells = _unsettled_halves(region, line, open_cells, level, slack)
    if len(open_cells) == 0:
        return True
    gap = level - normal_tail(observed)
    for degree in (degree for degree, error in DEGREES if gap > 3.0 * error or degree == DEGREE):
        found = _Interpolated.on(region, line, open_cells, degree, slack)
        if found.attained() > level:
            return False
        if found.bound(enough=level) <= level:
            return True
    return supremum(region, margin) <= level


def _probability(region: Region, rates: tuple[FloatArray, FloatArray], slack: float) -> FloatArray:
    return region.probability(*rates, left_out=slack / 2.0)


def _unsettled_groups(region: Region, line: Line, level: float, slack: float, excess: float) -> IntArray:
    """The cells that the corner bound leaves open, found from groups of cells downwards."""
    # A cell of four deviations costs the corner bound about two deviations of T.
    size = 1 << max(0, int(math.log2(max(excess / 2.0, 1.0))))
    cells = len(line.edges) - 1
    begin = np.arange(0, cells, size)
    while True:
        corners = line.corner_rates(line.edges[begin], line.edges[np.minimum(begin + size, cells)])
        begin = begin[_probability(region, corners, slack) + slack > level]
        if size == 1 or len(begin) == 0:
            return begin
        size //= 2
        begin = np.sort(np.append(begin, begin + size))
        begin = begin[begin < cells]


def _unsettled_halves(region: Region, line: Line, cells: IntArray, level: float, slack: float) -> IntArray:
    """The cells of which some part stays open when they are halved again and again."""
    low, high = line.edges[cells], line.edges[cells + 1]
    for _ in range(HALVINGS):
        if len(cells) == 0:
            break
        middle = (low + high) / 2.0
        low, high, cells = np.append(low, middle), np.append(middle, high), np.append(cells, cells)
        still = _probability(region, line.corner_rates(low, high), slack) + slack > level
        low, high, cells = low[still], high[still], cells[still]
    cells = np.sort(cells)  # np.unique imports numpy.ma
    return cells[np.flatnonzero(np.diff(cells, prepend=-1))]


@dataclass(frozen=True)
class _Interpolated:
    """f on some cells by its interpolant there, with all that it can be off by."""

    values: FloatArray  # [cells, m+1] at the nodes
    coefficients: FloatArray  # [cells, m+1]
    addition: FloatArray  # [cells]

    @classmethod
    def on(cls, region: Region, line: Line, cells: IntArray, degree: int, slack: float) -> _Interpolated:
        low, high = line.edges[cells], line.edges[cells + 1]
        nodes, to_coefficients = _nodes(degree)
        positions = (high + low)[:, None] / 2.0 + (high - low)[:, None] / 2.0 * nodes
        values = _probability(region, line.rates(positions.ravel()), slack).reshape(positions.shape)
        # An error of the values grows by at most the Lebesgue constant of the nodes, below 3.1 up to degree 24.
        addition = line.interpolation_errors(low, high, degree) + 4.0 * slack
        return cls(values, values @ to_coefficients.T, addition)

    def attained(self) -> float:
        return float(self.values.max()) - ROUNDING

    def bound(self, enough: float = 0.0) -> float:
        """An upper bound on f over the cells: a coarse look at all of them, a fine one where the largest may be.

        The coarse one alone, where it is at most ``enough``, or where no fine one could be: f at the nodes, with all
        that it can be off by, is above.
        """
        coarse = self._maximum(self.coefficients, COARSE_ANGLES) + self.addition
        largest = float(coarse.max(initial=0.0))
        if largest <= enough or 0.0 < enough < float((self.values.max(axis=1) + self.addition).max()):
            return largest
        best = coarse >= float(self.values.max())
        fine = self._maximum(self.coefficients[best], FINE_ANGLES) + self.addition[best]
        return max(float(coarse[~best].max(initial=0.0)), float(fine.max(initial=0.0)))

    @staticmethod
    def _maximum(coefficients: FloatArray, angles: int) -> FloatArray:
        """The largest sample of each interpolant, and what can lie between two samples."""
        degree = coefficients.shape[1] - 1
        between = (math.pi / angles) ** 2 / 8.0 * (np.abs(coefficients) @ np.arange(degree + 1.0) ** 2)
        return (coefficients @ _samples(degree, angles).T).max(axis=1, initial=-1.0) + between
