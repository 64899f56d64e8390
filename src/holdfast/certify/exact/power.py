"""How many images a certificate needs, and how small a margin given images allow; by exact power.

The normal formula is where the search starts:

    n >= [ (z_{1-α} + 0.02) sqrt(V0) + z_{1-β'} sqrt(V1) ]² / (ε + Δ)²,    n >= ln α / ln(1 - ε),
    V1 = D - Δ²,   V0 = 2q* - ε - ε² with q* as q̂ at the true rates,   β' = 1 - (1-β)^{1/m}.

What is returned is the smallest n whose exact power reaches the target: the chance, at the true rates, of an outcome
whose p-value is at most α, both computed by enumeration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from holdfast.certify.exact.region import SMALLEST, log_factorials_of, statistics
from holdfast.certify.exact.score_test import rejects
from holdfast.certify.exact.special import FloatArray, IntArray, normal_quantile

# Probability of the outcomes that the enumeration leaves out; power comes out too small by that much at most.
LEFT_OUT = 1e-9
# How far above that of the normal distribution the T of a level mostly lies: the places that are tried first, the
# last one first.
NEARBY = (0.0, 0.06, 0.12)
# Up to here every n is tried; above it, every thousandth part.
EVERY = 2000
MOST_IMAGES = 1_000_000
# The margins that are tried for given images.
MARGIN_STEP = 0.0005


@dataclass(frozen=True)
class Truth:
    """What a plan assumes: how often the models differ in correctness, and the true change in accuracy."""

    discordance: float
    difference: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.discordance <= 1.0 or abs(self.difference) > self.discordance + 1e-12:
            raise ValueError(f"|Δ| = {abs(self.difference)} <= D = {self.discordance} <= 1 does not hold")

    @property
    def gained(self) -> float:
        """p01."""
        return max(0.0, (self.discordance + self.difference) / 2.0)

    @property
    def lost(self) -> float:
        """p10."""
        return max(0.0, (self.discordance - self.difference) / 2.0)


@dataclass(frozen=True)
class _Outcomes:
    """The likely outcomes at a truth, by falling T: what T is, and the chance of this T or a larger one."""

    statistic: FloatArray
    reached: FloatArray

    @classmethod
    def at(cls, n: int, margin: float, truth: Truth) -> _Outcomes:
        b, c, log_mass = _likely(n, truth)
        t = statistics(b, c, n, margin)
        order = np.argsort(-t, kind="stable")
        return cls(t[order], np.cumsum(np.exp(log_mass[order])))


@lru_cache(maxsize=4)
def _likely(n: int, truth: Truth) -> tuple[IntArray, IntArray, FloatArray]:
    """The likely outcomes at a truth: gained, lost, and the logarithm of their probability. Margins share them."""
    p01, p10 = max(truth.gained, SMALLEST), max(truth.lost, SMALLEST)
    flip = p01 + p10
    log_left = math.log(4.0 / LEFT_OUT)

    def reach(variance: float) -> float:  # Bernstein, as in region.py; |X| <= 1 (and |X - Δ| <= 2 for b - c)
        return 2.0 * log_left / 3.0 + math.sqrt(4.0 * log_left**2 / 9.0 + 2.0 * log_left * variance)

    flips = reach(n * flip * max(1.0 - flip, 0.0))
    net = reach(n * max(flip - truth.difference**2, 0.0))
    fewest, most = max(0, math.floor(n * flip - flips)), min(n, math.ceil(n * flip + flips))
    least, largest = math.floor(n * truth.difference - net), math.ceil(n * truth.difference + net)
    d = np.arange(fewest, most + 1)[:, None]
    # b - c = d - 2c rises along a row
    c = np.arange(min(most, (most - least) // 2), max(0, (fewest - largest) // 2) - 1, -1)[None, :]
    kept = (c <= d) & (d - 2 * c >= least) & (d - 2 * c <= largest)
    b, c = (d - c)[kept], np.broadcast_to(c, kept.shape)[kept]
    same = n - b - c
    logs = log_factorials_of(n)
    log_mass = logs[n] - logs[b] - logs[c] - logs[same]
    log_mass += b * math.log(p01) + c * math.log(p10) + same * math.log(max(1.0 - flip, SMALLEST))
    return b, c, log_mass


def exact_power(n: int, margin: float, truth: Truth, level: float) -> float:
    """The chance at the true rates that n images certify the margin, by enumeration; too small by at most 1e-9."""
    outcomes = _Outcomes.at(n, margin, truth)
    passing, failing = -1, len(outcomes.statistic)  # p falls as T rises: bisection over the outcomes
    # T is about normal: the last outcome that passes mostly lies between two of these.
    around = np.searchsorted(-outcomes.statistic, normal_quantile(level) - np.array(NEARBY)).tolist()
    while failing - passing > 1:
        middle = (passing + failing) // 2
        if around:
            middle = min(max(around.pop(), passing + 1), failing - 1)
        if rejects(float(outcomes.statistic[middle]), n, margin, level):
            passing = middle
        else:
            failing = middle
    return float(outcomes.reached[passing]) if passing >= 0 else 0.0


def reaches(n: int, margin: float, truth: Truth, level: float, power: float) -> bool:
    """Whether the exact power reaches ``power``: whether the T that is exceeded that often has a p-value <= level."""
    outcomes = _Outcomes.at(n, margin, truth)
    place = int(np.searchsorted(outcomes.reached, power))
    return place < len(outcomes.statistic) and rejects(float(outcomes.statistic[place]), n, margin, level)


def formula_images(margin: float, truth: Truth, level: float, power: float) -> int:
    """The normal formula of the module's head, rounded up."""
    _check_reachable(margin, truth)
    d, delta = truth.discordance, truth.difference
    linear = -d - (2.0 - delta) * margin
    constant = truth.lost * margin * (1.0 + margin)
    q = (math.sqrt(max(linear * linear - 8.0 * constant, 0.0)) - linear) / 4.0
    null = max(2.0 * q - margin - margin * margin, margin * (1.0 - margin))
    alternative = max(d - delta * delta, 0.0)
    spread = (-normal_quantile(level) + 0.02) * math.sqrt(null) + normal_quantile(power) * math.sqrt(alternative)
    square = (margin + delta) ** 2
    n = spread * abs(spread) / square if square > 0.0 else math.inf
    if delta == 0.0:
        n = max(n, math.log(level) / math.log1p(-margin))
    return max(1, math.ceil(min(n, 1e18)))  # beyond what anybody has, and a whole number still


def _check_reachable(margin: float, truth: Truth) -> None:
    if margin + truth.difference <= 0.0:
        raise ValueError(f"no number of images shows a change above {-margin} when the change is {truth.difference}")


def images_needed(margin: float, truth: Truth, level: float, power: float) -> int:
    """The smallest n whose exact power reaches ``power``; above 2000, to within a thousandth."""
    enough = sufficient_images(margin, truth, level, power)
    few = enough * truth.discordance < 30.0  # few flips: power is a coarse staircase in n
    start = 1 if enough <= 400 else int(enough * (0.7 if few else 0.85))
    n = start
    while n < enough:
        if reaches(n, margin, truth, level, power):
            return n
        n += max(1, n // 1000) if n > EVERY else 1
    return enough


def sufficient_images(margin: float, truth: Truth, level: float, power: float) -> int:
    """An n whose exact power reaches ``power``, found in steps of 2 %: quicker than the smallest one."""
    n = max(1, int(0.8 * formula_images(margin, truth, level, power)))
    while n <= MOST_IMAGES:
        if reaches(n, margin, truth, level, power):
            return n
        n += max(1, n // 50)
    raise OverflowError(f"more than {MOST_IMAGES} images")


def about_images(margin: float, truth: Truth, level: float, power: float) -> int:
    """An n whose exact power reaches ``power``, and that of an n 2 % smaller does not: a quick search."""
    n = formula_images(margin, truth, level, power)
    if n > MOST_IMAGES:
        raise OverflowError(f"more than {MOST_IMAGES} images")
    if reaches(n, margin, truth, level, power):
        while n > 1 and reaches(fewer := n - max(1, n // 50), margin, truth, level, power):
            n = fewer
        return n
    while n <= MOST_IMAGES:
        n += max(1, n // 50)
        if reaches(n, margin, truth, level, power):
            return n
    raise OverflowError(f"more than {MOST_IMAGES} images")


def two_digits_up(value: float) -> float:
    """A positive number rounded up to two digits: away from luck, so that similar tasks share one search."""
    scale = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / scale - 1e-9) * scale


def best_margin(images: int, truth: Truth, level: float, power: float) -> float | None:
    """The smallest margin, in steps of 0.0005, that ``images`` certify with the wanted power; None where none does."""
    largest = round(0.95 / MARGIN_STEP)
    smallest = max(0, math.floor(-truth.difference / MARGIN_STEP) + 1) if truth.difference <= 0 else 0

    def possible(step: int) -> bool:
        return reaches(images, step * MARGIN_STEP, truth, level, power)

    if smallest > largest or not possible(largest):
        return None
    failing, passing = smallest - 1, largest
    while passing - failing > 1:
        middle = (passing + failing) // 2
        passing, failing = (middle, failing) if possible(middle) else (passing, middle)
    # Power is a staircase in ε: a smaller margin nearby may do as well.
    nearby = range(max(smallest, passing - max(2, passing // 20)), passing)
    return next((step for step in nearby if possible(step)), passing) * MARGIN_STEP


def per_task_power(power: float, tasks: int) -> float:
    """1 - β' = (1-β)^{1/m}: what each of m independent tasks must reach for all of them to pass with ``power``."""
    return power ** (1.0 / tasks)


def estimated_discordance(gained: int, lost: int, n: int) -> float:
    """D from the flips of other images of the task; half a flip where there was none."""
    return max(gained + lost, 0.5) / n


def zero_flip_images(margin: float, level: float) -> int:
    """The smallest n with (1-ε)^n <= level: below it not even a task without any flip passes without gains."""
    return math.ceil(math.log(level) / math.log1p(-margin)) if margin > 0 else 0


__all__ = [
    "Truth",
    "about_images",
    "best_margin",
    "estimated_discordance",
    "exact_power",
    "formula_images",
    "images_needed",
    "per_task_power",
    "reaches",
    "sufficient_images",
    "two_digits_up",
    "zero_flip_images",
]
