"""The planner against exact enumeration that shares nothing with it but the p-value."""

import random

import numpy as np
import pytest
from scipy.stats import multinomial

from benchmarks.validity import accepted
from holdfast.certify.exact.power import (
    Truth,
    best_margin,
    exact_power,
    formula_images,
    images_needed,
    per_task_power,
    reaches,
    sufficient_images,
)
from holdfast.certify.plans import plan_report


def enumerated_power(n: int, margin: float, truth: Truth, level: float) -> float:
    limit = min(n, int(n * truth.discordance + 8 * np.sqrt(n * truth.discordance) + 12))
    b, c = (one.ravel() for one in np.meshgrid(np.arange(limit + 1), np.arange(limit + 1), indexing="ij"))
    kept = b + c <= limit
    b, c = b[kept], c[kept]
    chosen = accepted(b, c, n, margin, level)
    outcomes = np.stack([b, c, n - b - c], axis=1)[chosen]
    return float(multinomial.pmf(outcomes, n, [truth.gained, truth.lost, 1 - truth.discordance]).sum())


@pytest.mark.parametrize(
    ("n", "margin", "discordance", "expected"),
    [(100, 0.05, 0.02, 0.789), (500, 0.02, 0.02, 0.880), (1000, 0.02, 0.05, 0.866), (5000, 0.01, 0.05, 0.932)],
)
def test_exact_power_at_no_change(n: int, margin: float, discordance: float, expected: float) -> None:
    assert exact_power(n, margin, Truth(discordance), 0.05) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("n", "margin", "truth"), [(100, 0.05, Truth(0.02)), (240, 0.02, Truth(0.03, 0.01))])
def test_power_is_the_enumerated_one(n: int, margin: float, truth: Truth) -> None:
    assert exact_power(n, margin, truth, 0.05) == pytest.approx(enumerated_power(n, margin, truth, 0.05), abs=1e-6)


@pytest.mark.parametrize(
    ("margin", "discordance", "tasks"),
    [(0.05, 0.005, 1), (0.05, 0.1, 1), (0.02, 0.02, 1), (0.02, 0.02, 5), (0.05, 0.005, 364), (0.02, 0.05, 364)],
)
def test_the_answer_reaches_its_power_and_a_little_less_does_not(margin: float, discordance: float, tasks: int) -> None:
    truth, power = Truth(discordance), per_task_power(0.8, tasks)
    n = images_needed(margin, truth, 0.05, power)
    assert enumerated_power(n, margin, truth, 0.05) >= power - 1e-8
    fewer = n - 1 if n <= 2000 else int(0.98 * n)
    assert enumerated_power(fewer, margin, truth, 0.05) < power


def test_simultaneous_bounds_need_more() -> None:
    power = per_task_power(0.8, 5)
    assert images_needed(0.02, Truth(0.02), 0.01, power) > images_needed(0.02, Truth(0.02), 0.05, power)


@pytest.mark.parametrize(
    ("margin", "tasks", "expected"),
    [
        (0.01, 1, (611, 1420, 3214, 6316)),
        (0.02, 5, (341, 726, 1511, 2891)),
        (0.05, 364, (145, 295, 563, 1012)),
        (0.01, 364, (1732, 5112, 12135, 24052)),
    ],
)
def test_the_formula_is_the_specification(margin: float, tasks: int, expected: tuple[int, ...]) -> None:
    power = per_task_power(0.8, tasks)
    assert tuple(formula_images(margin, Truth(d), 0.05, power) for d in (0.005, 0.02, 0.05, 0.1)) == expected


def test_sufficient_is_sufficient_and_near() -> None:
    n = sufficient_images(0.01, Truth(0.05), 0.05, 0.8)
    assert reaches(n, 0.01, Truth(0.05), 0.05, 0.8)
    assert n <= 1.04 * images_needed(0.01, Truth(0.05), 0.05, 0.8)


def test_best_margin() -> None:
    margin = best_margin(300, Truth(0.02), 0.05, 0.8)
    assert margin is not None
    assert reaches(300, margin, Truth(0.02), 0.05, 0.8)
    assert not reaches(300, margin - 0.0005, Truth(0.02), 0.05, 0.8)
    assert best_margin(1, Truth(0.02), 0.05, 0.8) is None
    assert best_margin(2000, Truth(0.05, 0.03), 0.05, 0.8) == 0.0  # a real gain needs no margin


def test_what_cannot_be_planned() -> None:
    with pytest.raises(ValueError, match="no number of images"):
        images_needed(0.0, Truth(0.02), 0.05, 0.8)
    with pytest.raises(ValueError, match="does not hold"):
        Truth(0.01, 0.02)


def test_many_tasks_share_searches_and_the_numbers_hold() -> None:
    """Each number of images has the exact power it promises, and is within 5 % of the smallest."""
    draw = random.Random(2)
    flips = {f"t{k:03}": draw.uniform(0.004, 0.05) for k in range(364)}
    options = {"default": 0.05, "single": {}, "confidence": 0.95, "power": 0.8, "difference": 0.0}
    found = plan_report(flips, 364, **options, images=None, simultaneous=False)
    assert found["precision"] == 0.05
    power = per_task_power(0.8, 364)
    for row in found["by_task"][::60]:
        truth = Truth(row["discordance"])
        smallest = images_needed(0.05, truth, 0.05, power)
        assert reaches(row["per_task"], 0.05, Truth(row["discordance"]), 0.05, power) or row["per_task"] > smallest
        assert smallest <= row["per_task"] <= max(smallest + 2, 1.06 * smallest)
    assert found["per_task"] == max(row["per_task"] for row in found["by_task"])
    few = plan_report({"a": 0.02, "b": 0.02}, 2, **options, images=None, simultaneous=False)
    assert few["precision"] == 0.0


def test_the_number_of_searches_does_not_grow_with_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[float] = []

    def counted(margin: float, truth: Truth, level: float, power: float) -> int:
        searched.append(truth.discordance)
        return 100

    monkeypatch.setattr("holdfast.certify.plans.about_images", counted)
    options = {"default": 0.05, "single": {}, "confidence": 0.95, "power": 0.8, "difference": 0.0}
    for number in (364, 20_000):
        searched.clear()
        flips = {f"t{k}": 0.005 + 0.055 * k / number for k in range(number)}
        plan_report(flips, number, **options, images=None, simultaneous=False)
        assert len(searched) == len(set(searched)) <= 128  # ln(0.06 / 0.005) / ln 1.02
