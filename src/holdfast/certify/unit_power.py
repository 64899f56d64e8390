"""How many groups (or scored rows) a certificate by betting needs: power by seeded simulation of a stated population.

Power depends on how images of one group go together. A model of that is stated (a correlation within groups), or dev
predictions are drawn from again and again. A plan is a forecast, never part of the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from holdfast.certify.betting import FEWER_ORDERS, batched_e_values
from holdfast.certify.exact.power import MARGIN_STEP, zero_flip_images
from holdfast.certify.exact.special import FloatArray, normal_quantile
from holdfast.certify.grouped import Units

MOST_UNITS = 200_000
_SETS = 400  # data sets a power is estimated from; more where it must be nearly 1
_BLOCK = 1 << 21
_PRECISION = 50  # a plan is exact to about one part in so many


class Population(Protocol):
    """Draws units of a stated population."""

    @property
    def limit(self) -> float:
        """The largest weight of a unit."""
        ...

    @property
    def weight(self) -> float:
        """Mean weight of a unit."""
        ...

    @property
    def difference(self) -> float:
        """True mean change."""
        ...

    @property
    def variance(self) -> float:
        """Variance of a unit's total."""
        ...

    def draw(self, generator: np.random.Generator, units: int, sets: int) -> tuple[FloatArray, FloatArray]:
        """Totals and weights, [units, sets] each."""
        ...


@dataclass(frozen=True)
class _EqualGroups:
    size: int  # images, or rows, of every group

    @property
    def limit(self) -> float:
        """Every group has the same size."""
        return float(self.size)

    @property
    def weight(self) -> float:
        """The same."""
        return float(self.size)


@dataclass(frozen=True)
class Flips(_EqualGroups):
    """Groups of ``size`` images that are right or wrong; two of one group correlate by ``icc``.

    An image shares its group's draw with probability sqrt(icc), else it has a draw of its own.
    """

    discordance: float
    difference: float = 0.0
    icc: float = 0.0

    @property
    def variance(self) -> float:
        """m (1 + (m-1) icc) (D - Δ²)."""
        return self.size * (1.0 + (self.size - 1) * self.icc) * (self.discordance - self.difference**2)

    def draw(self, generator: np.random.Generator, units: int, sets: int) -> tuple[FloatArray, FloatArray]:
        """Totals and weights, [units, sets] each."""
        gained = (self.discordance + self.difference) / 2.0
        lost = (self.discordance - self.difference) / 2.0
        together = generator.binomial(self.size, math.sqrt(self.icc), (units, sets))
        number = generator.random((units, sets))
        shared = (number < gained).astype(np.int64) - (number > 1.0 - lost)
        up = generator.binomial(self.size - together, gained)
        down = generator.binomial(self.size - together - up, min(1.0, lost / max(1.0 - gained, 1e-12)))
        return (together * shared + up - down).astype(np.float64), np.full((units, sets), self.limit)


@dataclass(frozen=True)
class Scores(_EqualGroups):
    """Groups of ``size`` rows whose change in score has this mean and standard deviation; both as shares of the range.

    Normal, and cut off at the range.
    """

    deviation: float
    difference: float = 0.0
    icc: float = 0.0

    @property
    def variance(self) -> float:
        """m (1 + (m-1) icc) s²."""
        return self.size * (1.0 + (self.size - 1) * self.icc) * self.deviation**2

    def draw(self, generator: np.random.Generator, units: int, sets: int) -> tuple[FloatArray, FloatArray]:
        """Totals and weights, [units, sets] each."""
        noise = generator.standard_normal((units, sets))
        totals = self.size * self.difference + math.sqrt(self.variance) * noise
        return np.clip(totals, -self.limit, self.limit), np.full((units, sets), self.limit)


@dataclass(frozen=True, eq=False)
class Resampled:
    """The units of dev predictions, drawn again, their totals moved so that the mean change is ``difference``."""

    units: Units
    difference: float = 0.0

    @property
    def limit(self) -> float:
        """The limit of the units."""
        return self.units.limit

    @property
    def weight(self) -> float:
        """Mean weight of a unit."""
        return float(self.units.weights.mean())

    @property
    def variance(self) -> float:
        """Variance of the moved totals around their share of the change."""
        return float(np.mean((self._moved() - self.difference * self.units.weights) ** 2))

    def _moved(self) -> FloatArray:
        shift = self.difference - self.units.change
        return np.clip(self.units.totals + shift * self.units.weights, -self.units.weights, self.units.weights)

    def draw(self, generator: np.random.Generator, units: int, sets: int) -> tuple[FloatArray, FloatArray]:
        """Totals and weights, [units, sets] each."""
        chosen = generator.integers(len(self.units.names), size=(units, sets))
        return self._moved()[chosen], self.units.weights[chosen]


def unit_power(population: Population, units: int, margin: float, level: float, sets: int = _SETS) -> float:
    """The share of simulated data sets that pass; seeded."""
    generator = np.random.default_rng(units)
    passed, done = 0, 0
    block = max(1, _BLOCK // (units * FEWER_ORDERS))
    while done < sets:
        now = min(block, sets - done)
        totals, weights = population.draw(generator, units, now)
        payoffs = np.maximum((totals + margin * weights) / ((1.0 - margin) * population.limit), -1.0)
        shuffled = np.stack([payoffs[generator.permutation(units)] for _ in range(FEWER_ORDERS)], axis=1)
        passed += int((batched_e_values(shuffled, level) >= 1.0 / level).sum())
        done += now
    return passed / sets


def formula_units(population: Population, margin: float, level: float, power: float) -> int:
    """Where the search starts: the normal formula with the cost of betting, and the least that no loss at all needs."""
    needed = (1.1 * normal_quantile(1.0 - level) + normal_quantile(power)) ** 2 * population.variance
    distance = (margin + population.difference) * population.weight
    return max(zero_flip_images(max(margin, 0.0), level), math.ceil(needed / distance**2), 2)


def units_needed(population: Population, margin: float, level: float, power: float) -> int:
    """The smallest number of units, to about 2 %, whose simulated power reaches ``power``; OverflowError above 200,000.

    Never below ln(level) / ln(1 - ε): with fewer groups not even one without any loss would pass.
    """
    sets = min(4000, max(_SETS, math.ceil(20.0 / (1.0 - power))))

    def reaches(units: int) -> bool:
        return unit_power(population, units, margin, level, sets) >= power

    enough = formula_units(population, margin, level, power)
    too_few = 0
    while enough <= MOST_UNITS and not reaches(enough):
        too_few, enough = enough, math.ceil(enough * 1.3)
    if enough > MOST_UNITS:
        raise OverflowError(f"more than {MOST_UNITS} units")
    if too_few == 0:
        lower = max(1, int(enough * 0.7))
        while lower > 1 and reaches(lower):
            enough, lower = lower, int(lower * 0.7)
        too_few = lower
    while enough - too_few > max(1, enough // _PRECISION):
        middle = (enough + too_few) // 2
        enough, too_few = (middle, too_few) if reaches(middle) else (enough, middle)
    return enough


def sufficient_units(population: Population, margin: float, level: float, power: float) -> int | None:
    """A number of units that does, found in steps of 15 %: quicker than the smallest one. None where none is found."""
    units = formula_units(population, margin, level, power)
    for _ in range(12):
        if unit_power(population, units, margin, level, _SETS // 2) >= power:
            return units
        units = math.ceil(units * 1.15)
    return None


def best_unit_margin(population: Population, units: int, level: float, power: float) -> float | None:
    """The smallest margin, in steps of 0.0005, that so many units show with the wanted power; None where none does."""
    sets = min(4000, max(_SETS, math.ceil(20.0 / (1.0 - power))))

    def possible(step: int) -> bool:
        return unit_power(population, units, step * MARGIN_STEP, level, sets) >= power

    failing, passing = max(-1, math.floor(-population.difference / MARGIN_STEP)), round(0.95 / MARGIN_STEP)
    if failing >= passing or not possible(passing):
        return None
    while passing - failing > 1:
        middle = (passing + failing) // 2
        passing, failing = (middle, failing) if possible(middle) else (passing, middle)
    return passing * MARGIN_STEP
