"""The exact unconditional paired score test, its p-values, and lower bounds on a change in accuracy.

Of n images b were gained (old wrong, new right) and c lost (old right, new wrong). The population rates are p01 and
p10, the change in accuracy is Δ = p01 - p10. The null hypothesis is a loss of at least the margin:

    H0: Δ <= -ε,        T(b, c) = (b - c + nε) / sqrt(n (2q̂ - ε - ε²))

with q̂ the maximum-likelihood estimate of p10 under Δ = -ε. T rises in b and falls in c, so that the p-value
sup over H0 of P(T >= t) is attained on the line p10 = p01 + ε. `holdfast.certify.exact.null_line` bounds that
supremum from above.

A negative ε asks for a gain of at least -ε. By symmetry T(b, c; ε) = -T(c, b; -ε): the test in the other direction
(``regressed``) is this test with b and c exchanged and the sign of ε reversed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from holdfast.certify.exact.special import FloatArray, IntArray, binomial_tail, log_factorials

# Two outcomes whose T differ by less than this are ties, and both count: that can only raise a p-value.
TIE = 1e-8
# Probability of the d = b + c that are left out of the sum; whoever bounds a probability adds it back.
LEFT_OUT = 2e-12
# Elements of one block of the vectorised sum: small enough for the processor's cache.
BLOCK = 1 << 15
SMALL_BLOCK = 1 << 15
# Whoever leaves out more than COARSE decides whether a probability lies above a level, and reports none. Up to WHOLE
# elements he is served with the sum over every d: to find the d that matter, and what lies below them, takes longer.
COARSE, WHOLE = 1e-9, 1 << 13
SMALLEST = 1e-300


def statistics(gained: IntArray, lost: IntArray, n: int, margin: float) -> FloatArray:
    """The score statistic T(b, c); 0 where nothing flipped and the margin is 0 (p = 1 there).

    q̂ = (sqrt(B² - 8nC) - B) / (4n),  B = -b - c - (2n - b + c) ε,  C = c ε (1 + ε).
    """
    linear = -(gained + lost) - (2 * n - gained + lost) * margin
    constant = lost * (margin * (1.0 + margin))
    root = np.sqrt(np.maximum(linear * linear - 8.0 * n * constant, 0.0))
    # For B > 0 the two terms nearly cancel; the other form of the same root does not.
    positive = np.maximum(root + linear, SMALLEST)
    estimate = np.where(linear <= 0, (root - linear) / (4.0 * n), -2.0 * constant / positive)
    # V̂ is at least |ε|(1 - |ε|): equality where no image flipped against the sign of the margin.
    variance = np.maximum(2.0 * estimate - margin - margin * margin, abs(margin) * (1.0 - abs(margin)))
    return (gained - lost + n * margin) / np.sqrt(n * np.maximum(variance, SMALLEST))


def statistic(gained: int, lost: int, n: int, margin: float) -> float:
    """T(b, c) of one outcome."""
    return float(statistics(np.array([gained]), np.array([lost]), n, margin)[0])


log_factorials_of = lru_cache(maxsize=64)(log_factorials)  # a test asks for those of one n again and again


@lru_cache(maxsize=64)
def _log_binomials(n: int) -> FloatArray:
    logs = log_factorials_of(n)
    return logs[n] - logs - logs[::-1]


def _windows(values: FloatArray, low: IntArray, width: int) -> FloatArray:
    """Rows ``values[low[i] : low[i] + width]``, copied from a view: quicker than an index for every element."""
    view = np.ndarray((len(values) - width + 1, width), values.dtype, values, strides=(values.itemsize,) * 2)
    return view[low]


@dataclass(frozen=True)
class Region:
    """The outcomes with T >= t: for d = b + c flips, those with b >= ``first[d]``.

    ``first`` rises by 0 or 1 a step, so that S_d = P(Bin(d, θ) >= first[d]) changes by a single binomial term:
    S_{d+1} - S_d = +θ^k (1-θ)^{d+1-k} C(d, k-1) where first stays at k, and -θ^k (1-θ)^{d+1-k} C(d, k) where it rises.
    """

    n: int
    first: FloatArray  # [n+1]
    sign: FloatArray  # [n] of the step from d to d+1
    log_coefficient: FloatArray  # [n]

    @classmethod
    def above(cls, threshold: float, n: int, margin: float) -> Region:
        """All outcomes whose statistic reaches ``threshold``, ties included."""
        if threshold > 2 * TIE:
            first = _first_gained(threshold - TIE, n, margin, TIE)
        else:
            # T < t in the swapped problem is T' > -t; what is not in that region is in ours.
            first = np.arange(n + 1) - _first_gained(-threshold + TIE, n, -margin, -TIE) + 1
        first = np.maximum(first, 0)
        flips = np.arange(n)
        start = first[:-1]
        rises = first[1:] > start
        chosen = start - 1 + rises
        logs = log_factorials_of(n)
        possible = (chosen >= 0) & (chosen <= flips)
        kept = np.where(possible, chosen, 0)
        coefficient = np.where(possible, logs[flips] - logs[kept] - logs[flips - kept], -np.inf)
        return cls(n, first.astype(np.float64), np.where(rises, -1.0, 1.0), coefficient)

    def probability(self, p01: FloatArray, p10: FloatArray, left_out: float = LEFT_OUT) -> FloatArray:
        """P(T >= t) at pairs of rates, at most ``left_out`` too small, and rounding.

        Sum over d of Bin(n, D)(d) * P(Bin(d, p01/D) >= first[d]), D = p01 + p10, over the d that matter.
        """
        if left_out > COARSE and len(p01) * (self.n + 1) <= WHOLE:
            all_flips = np.zeros(len(p01), dtype=np.int64)
            return self._block(np.maximum(p01, SMALLEST), np.maximum(p10, SMALLEST), all_flips, self.n + 1)
        order = np.argsort(p01 + p10)
        p01, p10 = np.maximum(p01[order], SMALLEST), np.maximum(p10[order], SMALLEST)
        flip = p01 + p10
        # Bernstein: P(|d - nD| >= x) <= 2 exp(-x² / (2 (nD(1-D) + x/3))) = left_out.
        log_left = math.log(2.0 / left_out)
        variance = self.n * flip * np.maximum(1.0 - flip, 0.0)
        reach = log_left / 3.0 + np.sqrt(log_left**2 / 9.0 + 2.0 * log_left * variance)
        low = np.clip(np.floor(self.n * flip - reach), 0, self.n).astype(np.int64)
        width = np.clip(np.ceil(self.n * flip + reach), 0, self.n).astype(np.int64) - low + 1
        sorted_result = np.empty_like(flip)
        begin, few = 0, len(flip) * int(width.max()) <= SMALL_BLOCK
        while begin < len(flip):
            # Rows of a block share the width of their widest window: take neighbours that differ little, unless
            # the whole is so small that the number of blocks is what costs.
            widest = int(width.max()) if few else int(1.5 * width[begin]) + 8
            end = min(len(flip), begin + max(1, BLOCK // widest))
            too_wide = np.flatnonzero(width[begin:end] > widest)
            if len(too_wide):
                end = begin + int(too_wide[0])
            rows = slice(begin, end)
            sorted_result[rows] = self._block(p01[rows], p10[rows], low[rows], int(width[rows].max()))
            begin = end
        result = np.empty_like(flip)
        result[order] = sorted_result
        return result

    def _block(self, p01: FloatArray, p10: FloatArray, low: IntArray, width: int) -> FloatArray:
        n = self.n
        width = min(width, n + 1)
        low = np.minimum(low, n + 1 - width)
        flip = p01 + p10
        up = p01 / flip
        log_up, log_down = np.log(up), np.log(p10 / flip)
        log_flip, log_same = np.log(flip), np.log(np.maximum(1.0 - flip, SMALLEST))
        start = self.first[low]
        initial = np.where(start <= 0, 1.0, 0.0)
        open_rows = np.flatnonzero((start > 0) & (start <= low))
        if len(open_rows):
            of = start[open_rows].astype(np.int64), low[open_rows], up[open_rows], (p10 / flip)[open_rows]
            initial[open_rows] = binomial_tail(*of)
        steps = np.arange(width, dtype=np.float64)
        # log Bin(n, D)(d) = log C(n, d) + d (log D - log(1-D)) + n log(1-D), d = low + steps
        weight = _windows(_log_binomials(n), low, width)  # [rows, width]
        odds = log_flip - log_same
        weight += np.multiply.outer(odds, steps)
        weight += (low * odds + n * log_same)[:, None]
        np.exp(weight, out=weight)
        tail = np.cumsum(weight[:, ::-1], axis=1)[:, ::-1]  # P(d >= ...) within the window
        if width == 1:
            return np.clip(initial * tail[:, 0], 0.0, 1.0)
        # log of the step: log C + k (log θ - log(1-θ)) + (d+1) log(1-θ)
        step = _windows(self.first[:-1], low, width - 1)
        step *= (log_up - log_down)[:, None]
        step += _windows(self.log_coefficient, low, width - 1)
        step += np.multiply.outer(log_down, steps[1:])
        step += (low * log_down)[:, None]
        np.exp(step, out=step)
        step *= _windows(self.sign, low, width - 1)
        return np.clip(initial * tail[:, 0] + np.einsum("ij,ij->i", step, tail[:, 1:]), 0.0, 1.0)


def _first_gained(threshold: float, n: int, margin: float, slack: float) -> IntArray:
    """For each d = b + c the smallest b with T(b, d-b) >= threshold > 0 (d + 1 where there is none).

    With j = b - c fixed, T >= t is V̂ <= V = (j + nε)² / (n t²), and since q̂ is the larger root of a quadratic that is
    linear in d, this is d <= [n ((V + ε²)² - ε²) + εj (V + ε² - 1)] / V, provided V >= |ε|(1 - |ε|), its least value.
    """
    # V is large enough from here on: (j + nε) >= t sqrt(n |ε|(1-|ε|)); below, no d reaches t.
    least = threshold * math.sqrt(n * abs(margin) * (1.0 - abs(margin)) * (1.0 - slack))
    begin = max(-n, math.ceil(least - n * margin)) if least > 0 else max(-n, math.floor(-n * margin) + 1)
    j = np.arange(begin, n + 1)
    variance = (j + n * margin) ** 2 / (n * threshold * threshold)
    square = variance + margin * margin
    flips = (n * (square * square - margin * margin) + margin * j * (square - 1.0)) / variance
    # Clipped from below by -1: none at all.
    most = np.clip(np.floor(np.minimum(flips, n + 0.5) + slack), -1, n).astype(np.int64)
    most = np.maximum.accumulate(most) if len(most) else most
    d = np.arange(n + 1)
    # smallest[d] is the first j whose `most` reaches d: as many j lie below it as have most < d.
    smallest = begin + np.cumsum(np.bincount(most + 1, minlength=n + 2))[: n + 1]
    smallest = np.maximum(smallest, -d)
    smallest = smallest + (smallest + d) % 2  # b - c and b + c are both even or both odd
    return np.minimum((smallest + d) // 2, d + 1)


def reverse(gained: int, lost: int, margin: float) -> tuple[int, int, float]:
    """The arguments that turn the test of H0: Δ <= -ε into the test of H0: Δ >= -ε."""
    return lost, gained, -margin
