"""The chance that a candidate passes the test on the sealed images, from what dev images say of it.

Of each class the dev images show n, gained b and lost c. The rates (p01, p10, no flip) that lie behind them get a
Dirichlet prior, so that the counts of sealed images follow a Dirichlet-multinomial distribution, and the chance of a
class is its mass on the outcomes that pass the exact test. The prior is what shrinks: of many candidates the one that
looks best on a few dozen images looks better than it is, and a class without a flip among 20 dev images may well have
one among 100 sealed ones. It has two levels:

    candidate   rates over all protected classes together: their dev counts and ``CANDIDATE_WEIGHT`` images at the rates
                that rounds have shown before, which grow with lambda and fall with the target bias
                (:class:`~holdfast.certify.forecast.ExpectedFlips`), and differ between trained weights and fits of the
                last layer
    class       its own dev counts and ``CLASS_WEIGHT`` images at the candidate's rates

What the target can gain depends on what the old model misses. Its prior is ``TARGET_WEIGHT`` images of which
``TARGET_GAINED`` of those that are missed are gained and ``TARGET_LOST`` of the others lost. Nothing here enters the
certificate: it only decides which candidate is tested, and whether a query of the sealed set is worth it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from holdfast.certify.exact.null_line import at_most
from holdfast.certify.exact.region import Region
from holdfast.certify.exact.score_test import impossible
from holdfast.certify.exact.special import FloatArray, log_factorials, log_gamma
from holdfast.certify.forecast import ExpectedFlips, Flips
from holdfast.evaluate.metrics import Comparison, TaskChange

CANDIDATE_WEIGHT, CLASS_WEIGHT, TARGET_WEIGHT = 100.0, 40.0, 7.0
TARGET_GAINED, TARGET_LOST = 0.45, 0.1  # of the target's images that the old model misses, and of those it gets right
# The critical value of T is found to this precision; far finer than what the rates are known to.
_CRITICAL = 1e-4
# Mass of the flips that are left out of a sum.
_LEFT_OUT = 1e-7


@dataclass(frozen=True)
class Rates:
    """Parameters of a Dirichlet distribution over (p01, p10, no flip)."""

    gained: float
    lost: float
    same: float

    @property
    def mean_change(self) -> float:
        """The expected change in accuracy, p01 - p10."""
        return (self.gained - self.lost) / (self.gained + self.lost + self.same)

    @classmethod
    def after(cls, seen: tuple[int, int, int], prior: Flips, weight: float) -> Rates:
        """``seen`` are images, gained and lost; the prior counts for ``weight`` images."""
        n, gained, lost = seen
        same = n - gained - lost + weight * (1.0 - prior.gained - prior.lost)
        return cls(gained + weight * prior.gained, lost + weight * prior.lost, same)


@dataclass(frozen=True)
class SealedTest:
    """What a candidate is to pass: sealed images and margin of each protected class, and the level.

    ``target`` is the number of the target's sealed images where its gain is claimed. Without sealed images (``images``
    empty) the chance is that every class keeps its accuracy to within its margin.
    """

    images: Mapping[str, int]
    margins: Mapping[str, float]
    level: float
    target: int | None = None


def predicted_chance(
    dev: Comparison,
    test: SealedTest,
    expected: ExpectedFlips | None = None,
    *,
    lam: float = 0.0,
    bias: float = 0.0,
    fitted: bool = False,
) -> float:
    """The chance that a candidate at lambda, with a target bias and these dev results, passes every claim.

    ``fitted`` says that lambda leads to a fit of the last layer, and not to trained weights.
    """
    expected = expected or ExpectedFlips()
    chance = 1.0
    prior = candidate_rates(dev, expected.at(lam, bias, fitted=fitted))
    for name, margin in test.margins.items():
        rates = Rates.after(_seen(dev.tasks[name]), prior, CLASS_WEIGHT)
        if test.images:
            chance *= passing_mass(test.images[name], margin, test.level, rates)
        else:
            chance *= keeping_mass(margin, rates)
    if test.target is not None:
        chance *= passing_mass(test.target, 0.0, test.level, target_rates(dev))
    return chance


def predicted_gain(dev: Comparison) -> float:
    """The change of the target that is to be expected of a candidate with these dev results."""
    return target_rates(dev).mean_change


def candidate_rates(dev: Comparison, prior: Flips) -> Flips:
    """Rates of a candidate over all protected classes together.

    What one class gains does not make a gain of another more likely: of gains no more is expected than usual.
    """
    protected = [_seen(change) for name, change in dev.tasks.items() if name != dev.target]
    n, gained, lost = (sum(counts) for counts in zip(*protected, strict=True)) if protected else (0, 0, 0)
    total = n + CANDIDATE_WEIGHT
    usual = min(prior.gained, (gained + CANDIDATE_WEIGHT * prior.gained) / total)
    return Flips(usual, (lost + CANDIDATE_WEIGHT * prior.lost) / total)


def target_rates(dev: Comparison) -> Rates:
    """What is known of the target's flips.

    A target that the old model mostly gets right has little to gain and more to lose. Its accuracy is taken from the
    dev images, with one image more of either kind.
    """
    change = dev.tasks[dev.target]
    right = (change.old_correct + 1) / (change.examples + 2)
    prior = Flips(TARGET_GAINED * (1 - right), TARGET_LOST * right)
    return Rates.after(_seen(change), prior, TARGET_WEIGHT)


def _seen(change: TaskChange) -> tuple[int, int, int]:
    return change.examples, change.gained, change.lost


@lru_cache(maxsize=4096)
def passing_mass(images: int, margin: float, level: float, rates: Rates) -> float:
    """The chance that ``images`` sealed images pass the exact test, over the rates that dev images leave open.

    The flips d = b + c are beta-binomial, and so are the gained among them; outcomes with b >= first(d) pass.
    """
    first = critical_region(images, margin, level)
    if first is None:
        return 0.0
    mass = _BetaBinomial(images, rates.gained + rates.lost, rates.same).of(images)
    likely = np.flatnonzero(np.cumsum(mass[::-1])[::-1] > _LEFT_OUT)
    most = int(likely[-1]) if len(likely) else 0
    gained = _BetaBinomial(most, rates.gained, rates.lost)
    total = 0.0
    for d in range(most + 1):
        needed = int(first[d])
        if needed <= d and mass[d] != 0.0:
            total += float(mass[d] * gained.of(d, needed).sum())
    return min(1.0, total)


@lru_cache(maxsize=1024)
def critical_region(images: int, margin: float, level: float) -> FloatArray | None:
    """For each number of flips the least that must be gained to pass; None where no outcome passes."""
    if images < 1 or impossible(images, margin, level):
        return None

    def passes(threshold: float) -> bool:
        return at_most(Region.above(threshold, images, margin), margin, level, threshold)

    low, high = 0.0, 2.0
    while not passes(high):
        low, high = high, 2.0 * high
        if high > 64.0:
            return None
    while high - low > _CRITICAL:
        middle = (low + high) / 2.0
        low, high = (low, middle) if passes(middle) else (middle, high)
    return Region.above(high, images, margin).first


@lru_cache(maxsize=4096)
def keeping_mass(margin: float, rates: Rates) -> float:
    """P(p01 - p10 > -margin), by the midpoint rule over the share of flips and its gained part."""
    points = (np.arange(200) + 0.5) / 200
    flips = _beta_quantiles(points, rates.gained + rates.lost, rates.same)
    gained = _beta_quantiles(points, rates.gained, rates.lost)
    change = flips[:, None] * (2.0 * gained[None, :] - 1.0)
    return float((change > -margin).mean())


class _BetaBinomial:
    """P(k of n) for n <= most where the rate is Beta(a, b); a rate that is certainly 0 or 1 is allowed."""

    def __init__(self, most: int, a: float, b: float) -> None:
        self._a, self._b, self._certain = a, b, a <= 0.0 or b <= 0.0
        if not self._certain:  # what all n share
            count = np.arange(most + 1, dtype=np.float64)
            self._factorials = log_factorials(most)
            self._taken, self._left = log_gamma(count + a), log_gamma(count + b)
            self._log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    def of(self, n: int, first: int = 0) -> FloatArray:
        """For k from ``first`` to n."""
        if self._certain:
            return np.asarray(np.arange(first, n + 1) == (0 if self._a <= 0.0 else n), dtype=np.float64)
        logs, k, rest = self._factorials, slice(first, n + 1), slice(n - first, None, -1)  # rest: n - k
        log = self._taken[k] + self._left[rest] - math.lgamma(n + self._a + self._b) - self._log_beta
        return np.exp(logs[n] - logs[k] - logs[rest] + log)


def _beta_quantiles(points: FloatArray, a: float, b: float) -> FloatArray:
    if a <= 0.0 or b <= 0.0:
        return np.full_like(points, 0.0 if a <= 0.0 else 1.0)
    from scipy.special import betaincinv  # for rounds without sealed images alone

    return np.clip(betaincinv(a, b, points), 0.0, 1.0)
