"""The gates of benchmarks/gates.py against their own definitions, and the case that they differ most in."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_1samp

from benchmarks.gates import PAIRED, chance, outcomes, unpaired_z
from holdfast.certify.exact.score_test import p_value


def test_without_flips_a_t_interval_passes_any_margin_and_the_exact_test_does_not() -> None:
    zero = np.array([0])
    for margin in (0.0, 0.001, 0.25):
        assert PAIRED["t interval"](zero, zero, 10, margin)[0]
        assert not PAIRED["exact test"](zero, zero, 10, margin)[0]
    # A loss of 25.9 points leaves ten images without a flip in 5 % of all draws: 0.741^10 = 0.05.
    assert p_value(0, 0, 10, 0.2585) > 0.05 >= p_value(0, 0, 10, 0.2595)
    assert p_value(0, 0, 10, 0.259) == pytest.approx((1 - 0.259) ** 10, rel=1e-3)


@pytest.mark.parametrize("gate", list(PAIRED))
def test_each_gate_is_what_it_is_called(gate: str) -> None:
    n, margin = 12, 0.2
    for gained, lost in itertools.product(range(n + 1), repeat=2):
        if gained + lost > n:
            continue
        values = np.array([1.0] * gained + [-1.0] * lost + [0.0] * (n - gained - lost))
        if gate == "exact test":
            expected = p_value(gained, lost, n, margin) <= 0.05
        elif gate == "t interval":
            low = values.mean() if np.ptp(values) == 0 else ttest_1samp(values, 0.0).confidence_interval(0.95).low
            expected = round(float(low), 6) >= -margin
        elif gate == "threshold":
            expected = float(values.mean()) >= -margin - 1e-12
        else:
            flips = gained + lost
            expected = flips == 0 or binomtest(lost, flips, 0.5, alternative="greater").pvalue > 0.05
        assert bool(PAIRED[gate](np.array([gained]), np.array([lost]), n, margin)[0]) == expected, (gained, lost)


def test_outcomes_are_all_that_matter() -> None:
    for n, rates in ((10, (0.0, 0.02)), (300, (0.01, 0.03)), (5000, (0.05, 0.07))):
        assert outcomes(n, rates)[2].sum() == pytest.approx(1.0, abs=1e-9)


def test_unpaired_z_by_simulation() -> None:
    n, accuracy, rates = 200, 0.8, (0.02, 0.1)
    draws = np.random.default_rng(0).multinomial(n, [*rates, accuracy - rates[1], 1 - accuracy - rates[0]], 20_000)
    old, new = (draws[:, 2] + draws[:, 1]) / n, (draws[:, 2] + draws[:, 0]) / n
    z = (new - old) / np.sqrt((old * (1 - old) + new * (1 - new)) / (n - 1))
    assert unpaired_z(n, rates, accuracy) == pytest.approx(float((z > -1.96).mean()), abs=0.015)


def test_only_the_exact_test_keeps_its_level() -> None:
    for n in (10, 100, 300):
        for discordance in (0.02, 0.07, 0.17):
            assert chance("exact test", n, 0.02, discordance, -0.02, 0.8) <= 0.05
    assert chance("t interval", 10, 0.02, 0.02, -0.02, 0.8) == pytest.approx(0.98**10, abs=1e-3)
    assert chance("t interval", 100, 0.02, 0.02, -0.02, 0.8) > 0.13
