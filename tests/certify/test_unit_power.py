"""Plans for groups and scores: stated populations are what they say, and a plan's number does what it promises."""

import numpy as np
import pytest

from holdfast.certify.exact.power import Truth, images_needed
from holdfast.certify.grouped import units_of
from holdfast.certify.unit_power import (
    Flips,
    Population,
    Resampled,
    Scores,
    best_unit_margin,
    unit_power,
    units_needed,
)


@pytest.mark.parametrize(
    "population",
    [Flips(8, 0.1, -0.02, 0.3), Flips(5, 0.06, 0.01, 0.0), Flips(4, 0.2, 0.0, 1.0), Scores(6, 0.1, 0.01, 0.4)],
)
def test_a_population_has_its_mean_and_variance(population: Population) -> None:
    totals, weights = population.draw(np.random.default_rng(0), 4000, 50)
    mean = population.difference * population.weight
    assert totals.mean() == pytest.approx(mean, abs=5 * np.sqrt(population.variance / totals.size))
    assert totals.var() == pytest.approx(population.variance, rel=0.05)
    assert weights.mean() == population.weight
    assert (np.abs(totals) <= population.limit).all()


def test_dev_units_are_drawn_again_at_the_planned_change() -> None:
    units = units_of(np.array([0.1, -0.2, 0.3, 0.0]), np.array([0, 0, 1, 2]), limit=2)
    population = Resampled(units, 0.01)
    totals, weights = population.draw(np.random.default_rng(1), 2000, 50)
    assert totals.sum() / weights.sum() == pytest.approx(0.01, abs=0.003)
    assert population.weight == pytest.approx(4 / 3)


def test_the_number_of_groups_reaches_the_power() -> None:
    population = Flips(10, 0.1, 0.0, 0.5)
    needed = units_needed(population, 0.05, 0.05, 0.8)
    assert unit_power(population, needed, 0.05, 0.05) >= 0.8
    assert unit_power(population, int(needed * 0.8), 0.05, 0.05) < 0.8
    assert best_unit_margin(population, needed, 0.05, 0.8) == pytest.approx(0.05, abs=0.005)


def test_correlation_costs_images_and_single_images_little() -> None:
    alone = images_needed(0.05, Truth(0.1), 0.05, 0.8)
    by_icc = [units_needed(Flips(5, 0.1, 0.0, icc), 0.05, 0.05, 0.8) * 5 for icc in (0.0, 0.5, 1.0)]
    assert alone < by_icc[0] < by_icc[1] < by_icc[2]


def test_a_plan_nobody_can_carry_out_is_refused() -> None:
    with pytest.raises(OverflowError):
        units_needed(Flips(2, 0.5, -0.019, 1.0), 0.02, 0.05, 0.8)
