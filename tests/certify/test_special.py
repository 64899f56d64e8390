"""The special functions of the exact test, against scipy's and against whole-number arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import special as scipy_special

from holdfast.certify.exact.score_test import LARGEST_LEVEL, SMALLEST_LEVEL
from holdfast.certify.exact.special import (
    binomial_mass,
    binomial_tail,
    log_factorials,
    log_gamma,
    normal_quantile,
    normal_tail,
)


def exact_tail(least: int, n: int, rate: float) -> float:
    """P(Bin(n, rate) >= least), without rounding until the end."""
    p = Fraction(rate)
    return float(sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(least, n + 1)))


def test_log_factorials_are_those_of_whole_numbers() -> None:
    found = log_factorials(3000)
    exact = [math.log(math.factorial(k)) for k in range(3001)]
    np.testing.assert_allclose(found, exact, rtol=5e-16, atol=0.0)
    assert [len(log_factorials(n)) for n in (0, 1, 20, 21, 22)] == [1, 2, 21, 22, 23]


def test_log_gamma_and_log_factorials_are_scipys() -> None:
    x = np.concatenate([np.geomspace(1e-6, 1e6, 4001), np.arange(1.0, 40.0)])
    expected = scipy_special.gammaln(x)
    assert np.all(np.abs(log_gamma(x) - expected) <= 1e-14 * np.maximum(10.0, np.abs(expected)))
    np.testing.assert_allclose(
        log_factorials(200_000), scipy_special.gammaln(np.arange(200_001) + 1.0), rtol=4e-16, atol=0.0
    )


@pytest.mark.parametrize("n", [1, 2, 7, 25, 60])
@pytest.mark.parametrize("rate", [1e-9, 0.003, 0.2, 0.5, 0.75, 0.999])
def test_every_binomial_tail_is_the_sum_of_its_terms(n: int, rate: float) -> None:
    least = np.arange(1, n + 1)
    rates = np.full(n, rate)
    found = binomial_tail(least, np.full(n, n), rates, 1.0 - rates)
    np.testing.assert_allclose(found, [exact_tail(k, n, rate) for k in least.tolist()], rtol=1e-12, atol=1e-300)
    mass = binomial_mass(least, np.full(n, n), rates, 1.0 - rates)
    terms = [exact_tail(k, n, rate) - exact_tail(k + 1, n, rate) for k in least.tolist()]
    np.testing.assert_allclose(mass, terms, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("most", [30, 1000, 30_000, 1_000_000])
def test_binomial_tails_are_scipys(most: int) -> None:
    draw = np.random.default_rng(most)
    n = draw.integers(1, most + 1, 2000)
    rate = np.maximum(draw.random(2000) ** 3, 1e-12)
    deviations = draw.normal(0.0, 3.0, 2000) * np.sqrt(n * rate * (1.0 - rate))
    least = np.clip(np.round(n * rate + deviations), 1, n).astype(np.int64)
    found = binomial_tail(least, n, rate, 1.0 - rate)
    expected = scipy_special.betainc(least, n - least + 1.0, rate)
    # A rounding of the rate alone moves the tail by n times as much.
    np.testing.assert_allclose(found, expected, rtol=1e-12 + 4e-16 * most, atol=1e-290)


def test_tails_without_any_chance_and_with_all_of_it() -> None:
    least, n = np.array([1, 5, 1000, 500]), np.array([5, 5, 1000, 1000])
    rate, other = np.array([1e-300, 1e-300, 1e-300, 0.5]), np.array([1.0, 1.0, 1.0, 0.5])
    found = binomial_tail(least, n, rate, other)
    np.testing.assert_allclose(found[:3], [5e-300, 0.0, 0.0], rtol=1e-12)
    assert found[3] == pytest.approx(scipy_special.betainc(500.0, 501.0, 0.5), rel=1e-13)
    assert binomial_tail(least, n, other, rate)[:3].tolist() == [1.0, 1.0, 1.0]


def test_the_normal_distribution_over_every_level_in_use() -> None:
    levels = [*np.geomspace(SMALLEST_LEVEL, LARGEST_LEVEL, 200), 1.0 - 1e-6, 0.8, 0.9999]
    found = [normal_quantile(level) for level in levels]
    np.testing.assert_allclose(found, scipy_special.ndtri(levels), rtol=1e-13, atol=1e-15)
    values = np.linspace(-8.0, 30.0, 400)
    np.testing.assert_allclose([normal_tail(value) for value in values], scipy_special.ndtr(-values), rtol=1e-12)
    assert (normal_quantile(0.0), normal_quantile(1.0)) == (-math.inf, math.inf)
