"""Flip rates against a naive count."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.evaluate.flips import FlipRates, overall
from holdfast.evaluate.metrics import Comparison, TaskChange


def test_rates_are_those_of_a_naive_count_and_of_the_published_formula() -> None:
    random = np.random.default_rng(0)
    old, new = random.random(500) < 0.8, random.random(500) < 0.7
    lost = sum(1 for before, now in zip(old, new, strict=True) if before and not now)
    gained = sum(1 for before, now in zip(old, new, strict=True) if now and not before)
    rates = FlipRates(500, int(old.sum()), gained, lost)
    error_old, error_new = 1 - old.mean(), 1 - new.mean()
    assert rates.negative == lost / 500
    assert rates.positive == gained / 500
    assert rates.relative == pytest.approx((lost / 500) / ((1 - error_old) * error_new))
    assert rates.relative == pytest.approx(1.0, abs=0.15)  # errors that are independent


@pytest.mark.parametrize(("old_correct", "gained", "lost"), [(0, 3, 0), (10, 0, 0), (7, 3, 0)])
def test_the_relative_rate_is_undefined_where_nothing_could_be_lost(old_correct: int, gained: int, lost: int) -> None:
    assert FlipRates(10, old_correct, gained, lost).relative is None


def test_no_negative_flip_and_an_error_left_is_zero() -> None:
    assert FlipRates(10, 8, 1, 0).relative == 0.0


def test_overall_counts_examples_and_does_not_average_tasks() -> None:
    tasks = {"a": TaskChange(100, 90, 80, 0, 10, 0.0, 0.0), "b": TaskChange(10, 5, 9, 4, 0, 0.0, 0.0)}
    compared = Comparison("b", tasks)
    assert compared.flips == overall(change.flips for change in tasks.values()) == FlipRates(110, 95, 4, 10)
    assert compared.flips.negative == 10 / 110
    assert compared.flips.relative == pytest.approx((10 / 110) / (95 / 110 * 21 / 110))
