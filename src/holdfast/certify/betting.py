"""A finite-sample test of a mean by betting: valid for any distribution within known limits, at any number of units.

Units (images, or groups of images) are drawn independently from one population. Each has a payoff Z >= -1, scaled so
that the null hypothesis reads E Z <= 0. Somebody starts with a capital of 1 and bets a share λ_t in [0, 1) of it on
each unit, λ_t chosen from the units before it:

    W_t = W_{t-1} (1 + λ_t Z_t),        E[W_t | the past] = W_{t-1} (1 + λ_t E Z_t) <= W_{t-1} under H0.

So E W <= 1 wherever the bets stop, the mean over several orders of the units has E <= 1 as well, and Markov's
inequality makes 1/W a p-value: P(W >= 1/α) <= α. Nothing is assumed of the shape of the distribution, and no
approximation enters. The rule for λ decides on power alone (it follows Voráček and Orabona's target-recalculating
bets): reach the target within the units that are left,

    λ_t = 0.7 sqrt(2 ln(target / W_{t-1}) / (v_t (G - t + 1))),        v_t = second moment of Z so far.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import numpy as np

from holdfast.certify.exact.region import FloatArray, IntArray

# All of these shape power, none validity. They were chosen by simulation, before any data; benchmarks/groups.py shows
# what they give.
AGGRESSION = 0.7
LARGEST_BET = 0.99
PRIOR_MOMENT, PRIOR_UNITS = 0.02, 10.0
OVERSHOOT = 2.0  # in each order the bets stop at 2/α: their mean reaches 1/α though some orders fail
_ABOVE = 1e-3  # aim that much above the target in logarithms, so that rounding does not leave it just below
# A verdict must not hang on one order. With many units one order says nearly what another says.
ORDERS, FEWER_ORDERS, MANY_UNITS = 24, 8, 3_000
_KEYS = 8  # 64-bit keys in one digest


def orders(names: Sequence[str]) -> IntArray:
    """[K, G]: K orders of the units, by hashes of their names: the same on every machine, blind to outcomes."""
    wanted = ORDERS if len(names) <= MANY_UNITS else FEWER_ORDERS
    keys = [_digests(names, block) for block in range(math.ceil(wanted / _KEYS))]
    return np.argsort(np.concatenate(keys, axis=0)[:wanted], axis=1, kind="stable")


def _digests(names: Sequence[str], block: int) -> IntArray:
    salt = f"holdfast-{block}".encode()
    joined = b"".join(hashlib.blake2b(name.encode(), salt=salt[:16]).digest() for name in names)
    return np.frombuffer(joined, dtype="<u8").reshape(len(names), _KEYS).T


def log_capital(payoffs: FloatArray, level: float) -> FloatArray:
    """ln W after all bets, [...], on ``payoffs`` [G, ...] >= -1, whose first axis is the order of the units.

    The bets stop once W reaches 2 / ``level``.
    """
    return _bet(payoffs, len(payoffs), payoffs.shape[1:], level)


def _bet(payoffs: Iterable[FloatArray], units: int, shape: tuple[int, ...], level: float) -> FloatArray:
    stop = math.log(OVERSHOOT / level)
    capital = np.zeros(shape)
    moment = np.full(shape, PRIOR_UNITS * PRIOR_MOMENT)
    for place, payoff in enumerate(payoffs):
        missing = np.maximum(stop + _ABOVE - capital, 0.0)
        remaining = moment * ((units - place) / (PRIOR_UNITS + place))
        bet = np.minimum(AGGRESSION * np.sqrt(2.0 * missing / remaining), LARGEST_BET)
        bet[capital >= stop] = 0.0
        capital += np.log1p(bet * payoff)
        moment += payoff * payoff
    return capital


def e_values(
    totals: FloatArray, weights: FloatArray, limit: float, margins: FloatArray, level: float, order: IntArray
) -> FloatArray:
    """The mean of W over the orders, [H], against H0: E[total + margin * weight] <= 0 for each of H margins.

    A total is the sum of weight times change over a unit, each change in [-1, 1], and no unit weighs more than
    ``limit``: total + ε weight >= -(1 - ε) limit, so that Z = (total + ε weight) / ((1 - ε) limit) >= -1.
    """
    scale = 1.0 / ((1.0 - margins) * limit)
    slope = margins * scale
    payoffs = (
        # Rounding must not turn a payoff of -1 into less.
        np.maximum(totals[chosen][:, None] * scale + weights[chosen][:, None] * slope, -1.0)
        for chosen in order.T
    )
    return np.exp(_bet(payoffs, order.shape[1], (len(order), len(margins)), level)).mean(axis=0)


def batched_e_values(payoffs: FloatArray, level: float) -> FloatArray:
    """The same for many data sets at once: ``payoffs`` [G, K, sets], with K orders of each; [sets]."""
    return np.exp(log_capital(payoffs, level)).mean(axis=0)
