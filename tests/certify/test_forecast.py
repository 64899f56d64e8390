"""The forecast of a round against plain enumeration and brute-force search."""

from __future__ import annotations

import math

import pytest
from scipy.stats import multinomial

from holdfast.certify.exact.score_test import passes
from holdfast.certify.forecast import (
    ExpectedFlips,
    Flips,
    Stock,
    chance_of,
    forecast,
    forecast_claim,
    images_for,
    margin_for,
    smallest_margin,
)
from holdfast.certify.sealed_claim import sealed_claim
from holdfast.errors import UserError

FEW = Flips(gained=0.005, lost=0.005)


def enumerated(n: int, margin: float, flips: Flips, level: float) -> float:
    """Every outcome of n images, its multinomial probability, and the test itself."""
    rates = [flips.gained, flips.lost, 1 - flips.gained - flips.lost]
    outcomes = [(b, c, n - b - c) for b in range(n + 1) for c in range(n + 1 - b)]
    return sum(
        float(multinomial.pmf(outcome, n, rates))
        for outcome in outcomes
        if passes(outcome[0], outcome[1], n, margin, level)
    )


@pytest.mark.parametrize(
    ("n", "margin", "flips", "level"),
    [
        (12, 0.25, Flips(0.05, 0.05), 0.05),
        (20, 0.15, Flips(0.02, 0.08), 0.05),
        (20, 0.0, Flips(0.3, 0.02), 0.05),
        (25, 0.1, FEW, 0.05),
        (25, 0.2, FEW, 0.01),
    ],
)
def test_the_chance_of_a_class_is_the_enumerated_one(n: int, margin: float, flips: Flips, level: float) -> None:
    assert chance_of(n, margin, flips, level) == pytest.approx(enumerated(n, margin, flips, level), abs=1e-8)


@pytest.mark.parametrize("n", [1, 2, 5, 17, 41, 100, 300])
@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("level", [0.05, 0.01])
def test_the_smallest_margin_is_the_first_that_passes(n: int, lost: int, level: float) -> None:
    found = smallest_margin(n, lost, level)
    steps = [step for step in range(1000) if lost <= n and passes(0, lost, n, round(step / 1000, 6), level)]
    assert found == (steps[0] / 1000 if steps else None)


def test_41_unchanged_images_prove_nothing_below_7_points() -> None:
    found = smallest_margin(41, 0, 0.05)
    assert found is not None
    assert (1 - found) ** 41 <= 0.05 < (1 - found + 0.001) ** 41
    assert found == 0.071


def test_a_round_passes_if_all_its_claims_do() -> None:
    images = {"a": 41, "b": 150, "c": 300, "t": 60}
    margins = {"a": 0.1, "b": 0.05, "c": 0.02}
    found = forecast(images, margins, 0.05, target="t")
    flips = ExpectedFlips()
    single = [chance_of(images[name], margins[name], flips.protected, 0.05) for name in margins]
    assert found.chance == pytest.approx(math.prod(single) * chance_of(60, 0.0, flips.target, 0.05))
    assert [task.task for task in found.tasks] == ["a", "b", "c", "t"]
    assert found.tasks[-1].is_target
    without = forecast(images, margins, 0.05)
    assert without.chance == pytest.approx(math.prod(single))


def test_more_flips_a_smaller_level_and_a_smaller_margin_lower_the_chance() -> None:
    for n in (41, 100, 300):
        by_margin = [chance_of(n, margin, FEW, 0.05) for margin in (0.02, 0.05, 0.1, 0.2, 0.3)]
        by_level = [chance_of(n, 0.05, FEW, level) for level in (0.001, 0.01, 0.05, 0.1)]
        by_loss = [chance_of(n, 0.05, Flips(0.005, lost), 0.05) for lost in (0.05, 0.02, 0.01, 0.005, 0.0)]
        for chances in (by_margin, by_level, by_loss):
            assert chances == sorted(chances)
    by_lost = [smallest_margin(100, lost, 0.05) or 1.0 for lost in range(6)]
    assert by_lost == sorted(by_lost)
    by_images = [smallest_margin(n, 1, 0.05) or 1.0 for n in (10, 20, 40, 80, 160, 320)]
    assert by_images == sorted(by_images, reverse=True)


def test_the_round_of_the_newcomer() -> None:
    """One class with 41 sealed images at 5 points: hopeless, and 35 % sealed would have done."""
    images = {"small": 41, **{f"c{number}": 160 for number in range(9)}, "t": 100}
    margins = dict.fromkeys([name for name in images if name != "t"], 0.05)
    found = forecast(images, margins, 0.05, target="t", stock=Stock({name: 5 * n for name, n in images.items()}))
    assert found.chance < 0.5
    assert found.weakest.task == "small"
    assert found.weakest.provable[0] == 0.071
    kinds = {item.kind: item for item in found.advice}
    assert {"images", "share", "margin"} <= set(kinds)
    chances = [item.chance for item in found.advice if item.kind != "pool"]  # it claims less, and comes last
    assert chances == sorted(chances, reverse=True)
    assert kinds["images"].chance >= 0.9
    assert kinds["share"].values["sealed"] > 0.2


def test_advice_gives_the_chance_that_it_says() -> None:
    images, margins = {"a": 41, "b": 80, "c": 700, "t": 60}, {"a": 0.05, "b": 0.05, "c": 0.05}
    found = forecast(images, margins, 0.05, target="t")
    assert found.chance < 0.9
    kinds = {item.kind: item for item in found.advice}
    more = {name: n + int(kinds["images"].values.get(name, 0)) for name, n in images.items()}
    assert forecast(more, margins, 0.05, target="t").chance == pytest.approx(kinds["images"].chance)
    own = {**margins, **kinds["margin"].values}
    assert forecast(images, own, 0.05, target="t").chance == pytest.approx(kinds["margin"].chance)
    pooled = forecast({"a+b": 121, "c": 700, "t": 60}, {"a+b": 0.05, "c": 0.05}, 0.05, target="t")
    assert pooled.chance == pytest.approx(kinds["pool"].chance)
    assert kinds["images"].chance >= 0.9
    assert not forecast(more, margins, 0.05, target="t").advice


def test_a_margin_or_a_number_of_images_that_is_offered_is_enough_and_hardly_more() -> None:
    for n in (41, 80, 200):
        margin = margin_for(n, FEW, 0.05, 0.95)
        assert margin is not None
        assert chance_of(n, margin, FEW, 0.05) >= 0.95 - 1e-8
        smaller = [step / 1000 for step in range(round(margin * 1000))]
        assert all(chance_of(n, less, FEW, 0.05) < 0.95 for less in smaller[-15:])
    enough = images_for(0.05, FEW, 0.05, 0.95)
    assert enough is not None
    assert chance_of(enough, 0.05, FEW, 0.05) >= 0.95 - 1e-8


def test_what_no_images_can_show_has_no_chance_and_no_number_of_images() -> None:
    assert chance_of(1, 0.05, FEW, 0.05) == 0.0
    assert smallest_margin(1, 1, 0.05) is None
    assert images_for(0.0, FEW, 0.05, 0.9) is None
    found = forecast({"a": 300}, {"a": 0.0}, 0.05, expected=ExpectedFlips(protected=FEW))
    assert [item.kind for item in found.advice] == ["margin"]


def test_a_claim_of_a_round_is_tested_at_the_level_of_its_query() -> None:
    examples = [(f"{name}{number}", name) for name, n in (("a", 80), ("t", 60)) for number in range(n)]
    claim = sealed_claim(examples, target="t", margin=0.05, queries=4)
    found = forecast_claim(claim)
    assert found.level == pytest.approx(0.0125)
    assert found.chance == pytest.approx(forecast({"a": 80, "t": 60}, {"a": 0.05}, 0.0125, target="t").chance)
    no_gain = forecast_claim(sealed_claim(examples, target="t", margin=0.05, target_gain=False))
    assert [task.task for task in no_gain.tasks] == ["a"]


@pytest.mark.parametrize("flips", [(-0.1, 0.1), (0.6, 0.6), (0.1, -0.1)])
def test_flips_that_are_no_shares_are_refused(flips: tuple[float, float]) -> None:
    with pytest.raises(UserError, match="not usable"):
        Flips(*flips)
