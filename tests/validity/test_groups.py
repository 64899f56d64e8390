"""Groups, scores and weights: false certificates at a loss of exactly the margin, by seeded simulation."""

import math

import numpy as np
import pytest

from benchmarks import groups
from holdfast.certify.grouped import units_of

SETS = 600


def allowed(sets: int, level: float = groups.DELTA) -> float:
    """level plus four binomial standard deviations."""
    return level + 4 * math.sqrt(level * (1 - level) / sets)


@pytest.mark.parametrize("name", groups.CASES)
def test_false_certificates(name: str) -> None:
    margin, draw = groups.CASES[name]
    sample = draw(np.random.default_rng(11), SETS)
    assert groups.betting(sample, margin).mean() <= allowed(SETS)


def test_frames_taken_for_independent_images_are_certified_falsely() -> None:
    found = groups.false_certificates("100 videos x 10, correlation 0.5", 400)
    assert found["images as independent"] is not None
    assert found["images as independent"] > 0.15
    assert found["betting"] is not None
    assert found["betting"] <= 0.05


def test_it_does_certify() -> None:
    generator = np.random.default_rng(12)
    sample = groups.flips(generator, 300, 200, np.full((300, 200), 10), (0.025, 0.025), 0.1, 10.0)
    assert groups.betting(sample, 0.02).mean() > 0.7


def test_the_simulation_is_the_test_that_is_used() -> None:
    margin, draw = groups.CASES["300 videos x 10, correlation 0.5"]
    sample = draw(np.random.default_rng(13), 40)
    sets = range(sample.totals.shape[1])
    rows = np.repeat(np.arange(300), 10)
    passed = [
        units_of(np.repeat(sample.totals[:, index] / 10, 10), rows).p_value(margin + 0.02, groups.DELTA) <= 0.05
        for index in sets
    ]
    simulated = groups.betting(sample, margin + 0.02)
    assert 5 < simulated.sum() < 35
    assert np.abs(np.array(passed).mean() - simulated.mean()) <= 0.1
