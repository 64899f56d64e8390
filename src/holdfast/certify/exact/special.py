"""The special functions that the exact test needs, in numpy and the standard library.

``scipy.special`` has them too, and importing it takes three times as long as numpy: longer than most of what a person
asks on the command line. The tests compare every function here with scipy's and with sums of 50 digits.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_NORMAL = NormalDist()
# Stirling's series: log Γ(x) = (x - 1/2) log x - x + log sqrt(2π) + sum of c_k / x^(2k+1). From here on its terms, as
# many as there are, leave out less than 1e-16.
_FROM = 12.0
_SERIES = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360)
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
# log k! of the first k, each rounded once.
_FIRST = np.array([math.log(math.factorial(k)) for k in range(21)])
# A term this small beside the sum before it does not change the sum any more.
_NEGLIGIBLE = 1e-18


def normal_quantile(share: float) -> float:
    """Φ⁻¹; infinite at 0 and 1."""
    if not 0.0 < share < 1.0:
        return -math.inf if share <= 0.0 else math.inf
    return _NORMAL.inv_cdf(share)


def normal_tail(value: float) -> float:
    """1 - Φ(value), as exact for large values as for small ones."""
    return 0.5 * math.erfc(value / math.sqrt(2.0))


def log_gamma(x: FloatArray) -> FloatArray:
    """log Γ(x) for x > 0, to about 1e-14 of the larger of it and 10."""
    small = x < _FROM
    found = _stirling(np.where(small, x + _FROM, x))
    if np.any(small):  # Γ(x) = Γ(x + 12) / (x (x+1) ... (x+11))
        found[small] -= np.log((x[small][:, None] + np.arange(_FROM)).prod(axis=1))
    return found


def log_factorials(n: int) -> FloatArray:
    """log 0!, log 1!, ..., log n!, each to about one unit in its last place."""
    rest = np.arange(len(_FIRST), n + 1, dtype=np.float64) + 1.0
    return np.concatenate([_FIRST, _stirling(rest)])[: n + 1]


def _stirling(x: FloatArray) -> FloatArray:
    return (x - 0.5) * np.log(x) - x + _HALF_LOG_2PI + _stirling_error(x)


def _stirling_error(x: FloatArray) -> FloatArray:
    """The sum of Stirling's series, for x >= 12."""
    inverse = 1.0 / (x * x)
    total = np.zeros_like(x)
    for term in reversed(_SERIES):
        total = total * inverse + term
    return total / x


def binomial_tail(least: IntArray, n: IntArray, rate: FloatArray, other: FloatArray) -> FloatArray:
    """P(X >= least) of X ~ Bin(n, rate), row by row, to about 1e-13 of it; 1 <= least <= n, and other = 1 - rate.

    The smaller tail is summed outwards from its largest term, where the ratio of neighbours only falls:

        P(X >= m) = P(X = m) (1 + r_1 (1 + r_2 (1 + ...))),    r_i = (n - m - i + 1) / (m + i) * rate / (1 - rate).
    """
    upper = least > n * rate
    first = np.where(upper, least, n - least + 1)  # of the lower tail: what is not in X <= least - 1
    chance, rest = np.where(upper, rate, other), np.where(upper, other, rate)
    tail = binomial_mass(first, n, chance, rest) * _outwards(first, n, chance / rest)
    return np.where(upper, tail, 1.0 - tail)


def _outwards(first: IntArray, n: IntArray, odds: FloatArray) -> FloatArray:
    """1 + r_1 (1 + r_2 (1 + ...)), summed in pieces until no row has a term left that counts."""
    total, term = np.ones_like(odds), np.ones_like(odds)
    done, live = 0, np.flatnonzero(first < n)
    while len(live):
        m, beyond, factor = first[live], (n - first)[live], odds[live]
        # About five deviations: of most rows the second piece settles that nothing is left.
        width = 12 + int(5.0 * math.sqrt(float((beyond * factor / (1.0 + factor)).max())))
        step = np.arange(done, done + width, dtype=np.float64)
        ratio = np.maximum(beyond[:, None] - step, 0.0)
        ratio *= factor[:, None]
        ratio /= (m + 1.0)[:, None] + step
        np.cumprod(ratio, axis=1, out=ratio)
        total[live] += term[live] * ratio.sum(axis=1)
        term[live] *= ratio[:, -1]
        done += width
        # Ratios fall: what is left is at most a geometric series of the next one.
        following = np.minimum((beyond - done) / (m + done + 1.0) * factor, 1.0 - 1e-9)
        left = term[live] * following / (1.0 - following)
        live = live[left > _NEGLIGIBLE * total[live]]
    return total


def binomial_mass(k: IntArray, n: IntArray, rate: FloatArray, other: FloatArray) -> FloatArray:
    """P(X = k) of X ~ Bin(n, rate), to about 1e-13 of it; 1 <= k <= n, and other = 1 - rate, both above 0.

    By the saddle point (Loader, Fast and accurate computation of binomial probabilities, 2000): nothing large cancels,
    as it does between logarithms of factorials.
    """
    rest, error = n - k, _errors(max(int(n.max()).bit_length(), 5))
    exponent = error[n] - error[k] - error[rest] - _deviance(k, n * rate) - _deviance(rest, n * other)
    return np.exp(exponent) * np.sqrt(n / (2.0 * math.pi * k * np.maximum(rest, 1.0 / (2.0 * math.pi))))


def _deviance(x: IntArray, mean: FloatArray) -> FloatArray:
    """x log(x / mean) - x + mean, to about 1e-16 of |x - mean|; the mean where x is 0."""
    distance = x - mean
    return x * np.log1p(np.maximum(distance / mean, 1e-15 - 1.0)) - distance


@lru_cache(maxsize=24)  # one for each power of two
def _errors(bits: int) -> FloatArray:
    """log k! less (k + 1/2) log k - k + log sqrt(2π), for k below 2^bits.

    Of 0 it is taken as 0, with a factor of 1 for its root: the mass of n of n is then rate^n, by the deviances.
    """
    found = _stirling_error(np.maximum(np.arange(1 << bits, dtype=np.float64), _FROM))
    for k in range(min(len(_FIRST), len(found))):
        found[k] = _FIRST[k] - (k + 0.5) * math.log(k) + k - _HALF_LOG_2PI if k else 0.0
    return found
