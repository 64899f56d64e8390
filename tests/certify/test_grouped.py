"""The betting test against truth: exact expectations by enumeration, a plain loop, and the claims of its docstrings."""

import itertools
import math

import numpy as np
import pytest

from holdfast.certify import betting
from holdfast.certify.betting import e_values, log_capital, orders
from holdfast.certify.exact.score_test import GRID
from holdfast.certify.grouped import Units, grouped_pvalue, units_of
from holdfast.errors import UserError


def enumerated(points: list[tuple[float, float]], chances: list[float], units: int, margin: float, level: float):
    """Every data set of ``units`` independent (total, weight): its chance, and its e-value."""
    limit = max(weight for _, weight in points)
    order = orders([str(unit) for unit in range(units)])
    for chosen in itertools.product(range(len(points)), repeat=units):
        totals = np.array([points[index][0] for index in chosen])
        weights = np.array([points[index][1] for index in chosen])
        value = e_values(totals, weights, limit, np.array([margin]), level, order)[0]
        yield math.prod(chances[index] for index in chosen), float(value)


# Points (total, weight) and chances with E[total + ε weight] = 0: a fair bet at every unit.
FAIR = {
    "flips": ([(1.0, 1.0), (0.0, 1.0), (-1.0, 1.0)], [0.2, 0.5, 0.3], 0.1),
    "one in ten loses all": ([(0.0, 4.0), (-4.0, 4.0)], [0.9, 0.1], 0.1),
    "sizes that tell the outcome": ([(1.0, 1.0), (-2.0, 5.0)], [0.6, 0.4], 0.2 / 2.6),
    "a gain is asked for": ([(1.0, 1.0), (-1.0, 1.0)], [0.6, 0.4], -0.2),
}


@pytest.mark.parametrize("name", FAIR)
@pytest.mark.parametrize("level", [0.05, 0.4])
def test_the_mean_capital_is_one_at_the_boundary(name: str, level: float) -> None:
    points, chances, margin = FAIR[name]
    mean_payoff = sum(c * (t + margin * w) for (t, w), c in zip(points, chances, strict=True))
    assert abs(mean_payoff) < 1e-12
    found = list(enumerated(points, chances, 6, margin, level))
    assert sum(chance for chance, _ in found) == pytest.approx(1.0)
    assert sum(chance * value for chance, value in found) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("name", FAIR)
def test_false_certificates_by_enumeration(name: str) -> None:
    points, chances, margin = FAIR[name]
    for level in (0.05, 0.2, 0.5):
        wrong = sum(chance for chance, value in enumerated(points, chances, 6, margin, level) if value >= 1 / level)
        assert wrong <= level + 1e-12


def test_it_does_certify() -> None:
    units = units_of(np.zeros(700), np.repeat(np.arange(70), 10))
    assert units.p_value(0.05, 0.05) <= 0.05 < units.p_value(0.02, 0.05)  # 0.98^70 = 0.24: no test could


def test_no_test_certifies_fewer_groups_than_unchanged_images_would_need() -> None:
    # One group in 1/ε that loses everything stays unseen with probability (1-ε)^G.
    for groups in (20, 40, 58):
        assert units_of(np.zeros(5 * groups), np.repeat(np.arange(groups), 5)).p_value(0.05, 0.05) > 0.05


def plain_capital(payoffs: list[float], level: float) -> float:
    capital, squares = 1.0, betting.PRIOR_UNITS * betting.PRIOR_MOMENT
    for place, payoff in enumerate(payoffs):
        if capital >= betting.OVERSHOOT / level:
            break
        variance = squares / (betting.PRIOR_UNITS + place)
        missing = math.log(betting.OVERSHOOT / level) + 1e-3 - math.log(capital)
        bet = betting.AGGRESSION * math.sqrt(2 * missing / (variance * (len(payoffs) - place)))
        capital *= 1 + min(bet, betting.LARGEST_BET) * payoff
        squares += payoff**2
    return capital


def test_the_capital_against_a_plain_loop() -> None:
    generator = np.random.default_rng(3)
    payoffs = np.clip(generator.normal(0.1, 0.4, (200, 5)), -1, None)
    found = np.exp(log_capital(payoffs, 0.05))
    assert found == pytest.approx([plain_capital(payoffs[:, set_].tolist(), 0.05) for set_ in range(5)], rel=1e-9)


def test_rows_in_another_order_change_nothing() -> None:
    generator = np.random.default_rng(4)
    changes, groups = generator.choice([-1.0, 0.0, 1.0], 400, p=[0.02, 0.93, 0.05]), np.repeat(np.arange(100), 4)
    names = [f"video {code}" for code in range(100)]
    shuffled = generator.permutation(400)
    first = units_of(changes, groups, names=names)
    other = units_of(changes[shuffled], groups[shuffled], names=names)
    assert first.p_value(0.05, 0.05) == pytest.approx(other.p_value(0.05, 0.05), rel=1e-9)
    # Codes are arbitrary, names are not.
    renumbered = units_of(changes, 99 - groups, names=names[::-1])
    assert first.p_value(0.05, 0.05) == pytest.approx(renumbered.p_value(0.05, 0.05), rel=1e-9)


def test_weights_in_another_unit_change_nothing() -> None:
    generator = np.random.default_rng(5)
    changes, weights = generator.uniform(-0.2, 0.3, 150), generator.uniform(0.1, 1.0, 150)
    first = units_of(changes, weights=weights, limit=1.0)
    other = units_of(changes, weights=weights * 8, limit=8.0)
    assert first.p_value(0.05, 0.05) == pytest.approx(other.p_value(0.05, 0.05), rel=1e-9)
    assert first.change == pytest.approx(np.average(changes, weights=weights))


def test_equal_groups_count_the_same() -> None:
    changes, groups = np.array([1.0, 1.0, 1.0, 0.0, -1.0, 0.0]), np.array([0, 0, 0, 1, 1, 2])
    units = units_of(changes, groups, equal=True)
    assert units.totals.tolist() == [1.0, -0.5, 0.0]
    assert units.limit == 1.0
    assert units.change == pytest.approx(0.5 / 3)


def test_the_other_direction() -> None:
    generator = np.random.default_rng(6)
    changes = generator.choice([-1.0, 0.0, 1.0], 900, p=[0.2, 0.78, 0.02])
    units = units_of(changes, np.repeat(np.arange(300), 3))
    assert units.p_value_regressed(0.05, 0.05) <= 0.05
    assert units.p_value(0.05, 0.05) == 1.0
    assert units.p_value_regressed(0.05, 0.05) == pytest.approx(
        units_of(-changes, np.repeat(np.arange(300), 3)).p_value(-0.05, 0.05)
    )


def test_a_lower_bound_is_the_walk_down_the_grid() -> None:
    generator = np.random.default_rng(7)
    units = units_of(generator.normal(0.02, 0.1, 400).clip(-1, 1))
    walked = -1.0
    for margin in sorted({*GRID, 0.013}, reverse=True):
        if units.p_value(margin, 0.05) > 0.05:
            break
        walked = -margin
    assert units.lower_bound(0.05, extra=(0.013,)) == pytest.approx(walked)
    assert walked < units.change
    assert units_of(np.array([-1.0, 0.0])).lower_bound(0.05) == -1.0


def test_what_no_outcome_can_show() -> None:
    few, enough = units_of(np.zeros(3)), units_of(np.zeros(60))
    assert few.impossible(0.02, 0.05)
    assert not enough.impossible(0.02, 0.05)


def test_units_that_contradict_their_limit(tried) -> None:
    tried("bad inputs")
    changes, groups = np.zeros(6), np.array([0, 0, 0, 1, 1, 2])
    with pytest.raises(UserError, match="different sizes need a declared limit"):
        units_of(changes, groups)
    with pytest.raises(UserError, match="larger than the declared limit"):
        units_of(changes, groups, limit=2)
    with pytest.raises(UserError, match="not usable"):
        units_of(changes, groups, limit=math.nan)
    with pytest.raises(UserError, match="no row has a weight"):
        units_of(changes, groups, weights=np.zeros(6))
    with pytest.raises(ValueError, match="between -1 and 1"):
        Units(np.array([2.0]), np.array([1.0]), ("a",), 1.0)


def test_the_function_of_the_library() -> None:
    found = grouped_pvalue(np.zeros(1000), np.repeat(np.arange(100), 10), 0.05)
    assert found.p_value <= 0.05
    assert (found.change, found.units) == (0.0, 100)
