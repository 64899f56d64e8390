"""Proven upper bounds on sup P(T >= t) along the line Δ = -ε, where the worst case of the null hypothesis lies.

The line is p01 = max(-ε, 0) + s, p10 = max(ε, 0) + s with s in [0, (1-|ε|)/2]. It is cut into cells, and a cell is
settled by the cheaper of two bounds:

1. *Corner.* P(T >= t) rises in p01 and falls in p10, so on a cell [lo, hi] it is at most its value at the corner
   (p01(hi), p10(lo)).
2. *Interpolation.* f(s) = P(T >= t) is a polynomial in s. Off the real line |f(z)| <= (|p01| + |p10| + |p00|)^n = M, so
   the interpolant at m+1 Chebyshev points of the cell is within 4 M ρ^-m / (ρ - 1) of f, for every Bernstein ellipse ρ
   (Trefethen, Approximation Theory and Approximation Practice, theorem 8.2). |p01| + |p10| + |p00| is convex in z: its
   maximum over a polygon around the ellipse is at a vertex. Between N angles π/N apart, the interpolant sum a_k cos kφ
   exceeds its largest sample by at most (π/N)²/8 * sum k² |a_k|.

Cells are four standard deviations of the flips wide, which keeps M small at every n: there are about 0.8 sqrt(n) of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from holdfast.certify.region import LEFT_OUT, FloatArray, IntArray, Region

DEGREE = 24
CELL_DEVIATIONS = 4.0
# How often an unsettled cell is halved for the corner bound before it is interpolated.
HALVINGS = 2
# What the interpolation may add to a bound; cells are made narrower until the proven error is below it.
INTERPOLATION_ERROR = 1e-10
# Rounding of sums of up to 10^5 terms in double precision, with room to spare.
ROUNDING = 1e-10
SLACK = LEFT_OUT + ROUNDING
COARSE_ANGLES, FINE_ANGLES = 128, 4096
POLYGON = 32
ELLIPSES = np.array([2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 9.0, 12.0, 20.0, 50.0])

_NODE_ANGLES = (np.arange(DEGREE + 1) + 0.5) * math.pi / (DEGREE + 1)
NODES = np.cos(_NODE_ANGLES)  # Chebyshev points of the first kind, [m+1]
# values at the nodes -> coefficients a_k, [m+1, m+1]
_TO_COEFFICIENTS = 2.0 / (DEGREE + 1) * np.cos(np.outer(np.arange(DEGREE + 1), _NODE_ANGLES))
_TO_COEFFICIENTS[0] /= 2.0
_SQUARES = np.arange(DEGREE + 1, dtype=np.float64) ** 2


@lru_cache(maxsize=2)
def _samples(angles: int) -> FloatArray:
    """Coefficients -> values of the interpolant at ``angles + 1`` equally spaced angles, [angles+1, m+1]."""
    return np.cos(np.outer(np.arange(angles + 1) * math.pi / angles, np.arange(DEGREE + 1)))


@dataclass(frozen=True)
class Line:
    """The null line of one (n, ε), cut into cells with a proven interpolation error each."""

    n: int
    margin: float
    edges: FloatArray  # [cells+1], from 0 to (1-|ε|)/2
    errors: FloatArray  # [cells]

    def rates(self, s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(p01, p10) at positions on the line."""
        return s + max(-self.margin, 0.0), s + max(self.margin, 0.0)

    def corner_rates(self, low: FloatArray, high: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The corner (p01(hi), p10(lo)) of each cell."""
        return self.rates(high)[0], self.rates(low)[1]


@lru_cache(maxsize=256)
def null_line(n: int, margin: float) -> Line:
    """Cut the null line into cells whose interpolation error is at most ``INTERPOLATION_ERROR``.

    With s = (1-|ε|)/2 sin²θ a step dθ is at most 2 sqrt(n) dθ standard deviations, whatever ε.
    """
    length = (1.0 - abs(margin)) / 2.0
    cells = max(1, math.ceil(math.pi * math.sqrt(n) / CELL_DEVIATIONS))
    while True:
        edges = length * np.sin(np.linspace(0.0, math.pi / 2.0, cells + 1)) ** 2
        errors = _interpolation_errors(n, margin, edges)
        if float(errors.max()) <= INTERPOLATION_ERROR:
            return Line(n, margin, edges, errors)
        cells = math.ceil(1.25 * cells)


def _interpolation_errors(n: int, margin: float, edges: FloatArray) -> FloatArray:
    """4 M ρ^-m / (ρ - 1) for each cell, with the best ρ of a fixed list."""
    middle, half = (edges[1:] + edges[:-1]) / 2.0, (edges[1:] - edges[:-1]) / 2.0
    angle = np.arange(POLYGON // 2 + 1) * 2.0 * math.pi / POLYGON  # the rest follows by symmetry
    wide, high = (ELLIPSES + 1.0 / ELLIPSES) / 2.0, (ELLIPSES - 1.0 / ELLIPSES) / 2.0
    shape = wide[:, None] * np.cos(angle) + 1j * high[:, None] * np.sin(angle)  # [ellipses, vertices]
    z = middle[:, None, None] + half[:, None, None] * shape / math.cos(math.pi / POLYGON)  # a polygon around each
    total = np.abs(z + max(-margin, 0.0)) + np.abs(z + max(margin, 0.0)) + np.abs(1.0 - abs(margin) - 2.0 * z)
    log_bound = n * np.log(total.max(axis=2))  # [cells, ellipses]
    log_error = math.log(4.0) + log_bound - DEGREE * np.log(ELLIPSES) - np.log(ELLIPSES - 1.0)
    return np.exp(np.minimum(log_error.min(axis=1), 0.0))


def supremum(region: Region, margin: float) -> float:
    """A proven upper bound on sup P(T >= t) over the null line, at most about 1e-8 above it."""
    line = null_line(region.n, margin)
    low, high = line.edges[:-1], line.edges[1:]
    ends = line.rates(line.edges)
    corners = line.corner_rates(low, high)
    both = region.probability(np.concatenate([ends[0], corners[0]]), np.concatenate([ends[1], corners[1]]))
    attained, corner = float(both[: len(line.edges)].max()), both[len(line.edges) :]
    # A cell whose corner lies below a value attained elsewhere cannot hold the supremum.
    open_cells = np.flatnonzero(corner >= attained)
    upper = attained + SLACK
    if len(open_cells):
        upper = max(upper, _interpolated_bound(region, line, open_cells, None))
    return min(1.0, upper)


def at_most(region: Region, margin: float, level: float) -> bool:
    """Whether sup P(T >= t) <= level is proven; quicker than :func:`supremum` when it is not close to the level."""
    line = null_line(region.n, margin)
    low, high = line.edges[:-1], line.edges[1:]
    parent = np.arange(len(low))
    inner = line.edges
    for halving in range(HALVINGS + 1):
        points, corners = line.rates(inner), line.corner_rates(low, high)
        both = region.probability(np.concatenate([points[0], corners[0]]), np.concatenate([points[1], corners[1]]))
        if float(both[: len(inner)].max()) - SLACK > level:
            return False
        unsettled = both[len(inner) :] + SLACK > level
        low, high, parent = low[unsettled], high[unsettled], parent[unsettled]
        if len(parent) == 0:
            return True
        if halving < HALVINGS:
            inner = (low + high) / 2.0
            low, high, parent = np.append(low, inner), np.append(inner, high), np.append(parent, parent)
    return _interpolated_bound(region, line, np.unique(parent), level) <= level


def _interpolated_bound(region: Region, line: Line, cells: IntArray, level: float | None) -> float:
    """The largest value f can take on the chosen cells, by interpolation; 1 when it exceeds the level for certain."""
    low, high = line.edges[cells], line.edges[cells + 1]
    positions = (high + low)[:, None] / 2.0 + (high - low)[:, None] / 2.0 * NODES
    values = region.probability(*line.rates(positions.ravel())).reshape(positions.shape)
    attained = float(values.max())
    if level is not None and attained - SLACK > level:
        return 1.0
    # Rounding in the values grows by at most the Lebesgue constant of the nodes, 3 at this degree.
    addition = line.errors[cells] + 4.0 * SLACK
    coefficients = values @ _TO_COEFFICIENTS.T  # [cells, m+1]
    bound = _interpolant_maximum(coefficients, COARSE_ANGLES) + addition
    if level is not None and float(bound.max()) <= level:
        return float(bound.max())
    best = bound >= attained
    fine = _interpolant_maximum(coefficients[best], FINE_ANGLES) + addition[best]
    return max(float(bound[~best].max(initial=0.0)), float(fine.max(initial=0.0)))


def _interpolant_maximum(coefficients: FloatArray, angles: int) -> FloatArray:
    """An upper bound on each interpolant over its cell: its largest sample and what can lie between two samples."""
    between = (math.pi / angles) ** 2 / 8.0 * (np.abs(coefficients) @ _SQUARES)
    return (coefficients @ _samples(angles).T).max(axis=1) + between
