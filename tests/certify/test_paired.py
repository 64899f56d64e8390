"""The exact score test against naive enumeration."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multinomial

from benchmarks.validity import accepted
from holdfast.certify.exact import score_test
from holdfast.certify.exact.null_line import Line, at_most, supremum
from holdfast.certify.exact.region import Region, statistic, statistics
from holdfast.certify.exact.score_test import (
    GRID,
    LARGEST_LEVEL,
    SMALLEST_LEVEL,
    impossible,
    lower_bounds,
    p_value,
    p_value_regressed,
    passes,
    rejects,
    usable,
)

MARGINS = [0.0, 0.005, 0.02, 0.05, 0.3, 0.9, -0.02, -0.3, -0.9]


def tango(b: int, c: int, n: int, e: float) -> float:
    """The statistic as in the specification, by the textbook root."""
    big, small = -b - c - (2 * n - b + c) * e, c * e * (1 + e)
    q = (np.sqrt(big * big - 8 * n * small) - big) / (4 * n)
    variance = n * (2 * q - e - e * e)
    return (b - c + n * e) / np.sqrt(variance) if variance > 1e-12 else 0.0


def naive_p_value(b: int, c: int, n: int, e: float, points: int = 400) -> float:
    """max over a dense line of the sum of all outcomes at least as extreme."""
    t = statistic(b, c, n, e)
    region = [(i, j, n - i - j) for i in range(n + 1) for j in range(n + 1 - i) if statistic(i, j, n, e) >= t - 1e-8]
    line = (1 - abs(e)) / 2 * np.sin(np.linspace(0, np.pi / 2, points)) ** 2
    return max(multinomial.pmf(region, n, [s + max(-e, 0), s + max(e, 0), 1 - abs(e) - 2 * s]).sum() for s in line)


@pytest.mark.parametrize("margin", [0.0, 0.005, 0.02, 0.05, 0.3])
def test_statistic_is_the_specification(margin: float) -> None:
    n = 12
    for b in range(n + 1):
        for c in range(n + 1 - b):
            assert statistic(b, c, n, margin) == pytest.approx(tango(b, c, n, margin), abs=1e-9)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_region_and_its_probability(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 16))
    margin = data.draw(st.sampled_from(MARGINS))
    b = data.draw(st.integers(0, n))
    c = data.draw(st.integers(0, n - b))
    t = statistic(b, c, n, margin)
    region = Region.above(t, n, margin)
    inside = [
        (i, d - i, n - d) for d in range(n + 1) for i in range(d + 1) if statistic(i, d - i, n, margin) >= t - 1e-8
    ]
    assert [int(first) for first in region.first] == [
        min((i for i, j, _ in inside if i + j == d), default=d + 1) for d in range(n + 1)
    ]
    weights = data.draw(st.tuples(*[st.floats(0.0, 1.0)] * 3).filter(lambda w: sum(w) > 0.1))
    rates = np.array(weights) / sum(weights)
    expected = multinomial.pmf(inside, n, rates).sum()
    assert region.probability(rates[:1], rates[1:2])[0] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("n", [1, 7, 25])
@pytest.mark.parametrize("margin", [0.0, 0.02, 0.3, -0.1])
def test_p_value_bounds_the_naive_one_closely(n: int, margin: float) -> None:
    generator = np.random.default_rng(n)
    for _ in range(6):
        b = int(generator.integers(0, n + 1))
        c = int(generator.integers(0, n + 1 - b))
        naive, ours = naive_p_value(b, c, n, margin), p_value(b, c, n, margin)
        assert naive - 1e-9 <= ours <= naive + 2e-4 + 0.01 * naive


def test_p_value_at_n_5000_bounds_every_point_of_a_fine_line() -> None:
    # Against the probability itself, at points that the method never used.
    n, margin = 5000, 0.01
    region = Region.above(statistic(60, 78, n, margin), n, margin)
    s = 0.495 * np.sin(np.random.default_rng(0).random(3000) * np.pi / 2) ** 2  # as dense as the flips vary
    values = region.probability(s, s + margin)
    bound = supremum(region, margin)
    assert values.max() <= bound <= values.max() * 1.01


def test_reference_points() -> None:
    assert p_value(3, 0, 43, 0.02) == pytest.approx(0.024, abs=5e-4)
    assert p_value(5, 0, 43, 0.0) == pytest.approx(0.016, abs=5e-4)
    assert p_value(0, 0, 43, 0.0) == 1.0
    # zero flips certify ε only if (1-ε)^n <= δ: 43 unchanged images certify nothing better than 6.7 %
    assert p_value(0, 0, 43, 0.066) > 0.05
    assert p_value(0, 0, 43, 0.068) <= 0.05


@pytest.mark.parametrize(
    ("n", "low", "high"), [(43, 1.68, 1.75), (100, 1.67, 1.70), (500, 1.66, 1.67), (1000, 1.65, 1.68)]
)
def test_critical_values(n: int, low: float, high: float) -> None:
    b, c = (item.ravel() for item in np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij"))
    b, c = b[b + c <= n], c[b + c <= n]
    for margin in (0.02, 0.05):
        chosen = accepted(b, c, n, margin)
        assert low - 0.005 <= statistics(b[chosen], c[chosen], n, margin).min() <= high + 0.005


@given(n=st.integers(1, 60), data=st.data(), margin=st.sampled_from([0.0, 0.005, 0.02, 0.05, 0.2, -0.05]))
@settings(max_examples=120, deadline=None)
def test_more_gained_never_lowers_and_more_lost_never_raises_the_evidence(n, data, margin) -> None:
    b = data.draw(st.integers(0, n))
    c = data.draw(st.integers(0, n - b))
    here = p_value(b, c, n, margin)
    if b + c < n:
        assert p_value(b + 1, c, n, margin) <= here + 1e-7
        assert p_value(b, c + 1, n, margin) >= here - 1e-7
        assert statistic(b + 1, c, n, margin) >= statistic(b, c, n, margin) >= statistic(b, c + 1, n, margin)
    if c:
        assert p_value(b + 1, c - 1, n, margin) <= here + 1e-7


@given(n=st.integers(1, 300), data=st.data(), margin=st.sampled_from([0.0, 0.01, 0.05, -0.02]))
@settings(max_examples=120, deadline=None)
def test_the_quick_decision_is_the_p_value(n, data, margin) -> None:
    level = data.draw(st.sampled_from([0.05, 0.001]))
    b = data.draw(st.integers(0, min(n, 40)))
    c = data.draw(st.integers(0, min(n - b, 40)))
    assert passes(b, c, n, margin, level) == (p_value(b, c, n, margin) <= level)


def test_quick_decision_close_to_the_level() -> None:
    # A level a hair above and below the p-value: nothing is decided by luck.
    for b, c, n, margin in ((10, 12, 1000, 0.01), (40, 30, 3000, 0.005), (0, 0, 200, 0.02), (3, 1, 60, 0.05)):
        region = Region.above(statistic(b, c, n, margin), n, margin)
        p = supremum(region, margin)
        assert at_most(region, margin, p * 1.0001, statistic(b, c, n, margin))
        assert not at_most(region, margin, p * 0.9999, statistic(b, c, n, margin))


def test_other_direction_is_the_mirror() -> None:
    assert p_value_regressed(2, 20, 300, 0.02) == p_value(20, 2, 300, -0.02)
    assert p_value_regressed(2, 30, 300, 0.02) < 0.01
    assert p_value_regressed(5, 5, 300, 0.02) > 0.5


def test_no_outcome_can_pass() -> None:
    for n, margin in itertools.product((1, 2, 3, 4, 5, 6), (0.0, 0.02, 0.2)):
        assert impossible(n, margin, 0.05) == (p_value(n, 0, n, margin) > 0.05)
        assert p_value(n, 0, n, margin) == pytest.approx(((1 - margin) / 2) ** n, rel=1e-6)


def test_lower_bound_walks_the_declared_grid_and_stops_at_the_first_failure() -> None:
    assert list(GRID) == sorted(GRID, reverse=True)
    assert GRID[0] == 0.95
    assert 0.0 in GRID
    for b, c, n in ((3, 0, 43), (0, 0, 43), (10, 12, 1000), (30, 2, 100), (0, 30, 30)):
        expected = -1.0
        for margin in GRID:
            if p_value(b, c, n, margin) > 0.05:
                break
            expected = -margin
        assert lower_bounds(b, c, n, [0.05]) == [pytest.approx(expected)]


def test_lower_bounds_of_two_levels_are_those_of_each() -> None:
    both = lower_bounds(12, 9, 800, [0.05, 0.0005], extra=[0.0123])
    assert both == [*lower_bounds(12, 9, 800, [0.05], [0.0123]), *lower_bounds(12, 9, 800, [0.0005], [0.0123])]
    assert both[1] < both[0]
    assert lower_bounds(40, 2, 200, [0.05])[0] > 0.1  # on into gains


def test_lower_bound_covers() -> None:
    # Exact: the chance that the bound exceeds the truth, at a truth on the grid.
    n, difference = 30, -0.05
    rates = [0.05, 0.1, 0.85]
    wrong = sum(
        multinomial.pmf([b, c, n - b - c], n, rates)
        for b in range(12)
        for c in range(n + 1 - b)
        if c <= 12 and lower_bounds(b, c, n, [0.05])[0] > difference + 1e-12
    )
    assert wrong <= 0.05


@pytest.mark.parametrize("n", [1, 3, 43, 1000, 100_000])
@pytest.mark.parametrize("margin", [0.0, 0.001, 0.02, -0.3, 0.95])
def test_interpolation_error_is_negligible_at_every_n(n: int, margin: float) -> None:
    line = Line.cut(n, margin)
    assert line.interpolation_errors(line.edges[:-1], line.edges[1:], 24).max() < 1e-11


def test_counts_that_are_none() -> None:
    with pytest.raises(ValueError, match="not counts"):
        p_value(3, 3, 5, 0.02)
    with pytest.raises(ValueError, match="margin"):
        p_value(1, 1, 5, 1.0)


@pytest.mark.parametrize("margin", [0.0, 0.02, 0.3, 0.9])
def test_the_finest_levels_against_a_closed_form(margin: float) -> None:
    """No outcome has a larger T than "all of them gained", which has probability ((1-ε)/2)^n at most."""
    for n in range(2, 60):
        truth, found = ((1 - margin) / 2) ** n, p_value(n, 0, n, margin)
        assert truth <= found <= (1 + 1e-7) * truth + 6e-10  # a bound, and a close one
        assert found > 1e-10  # hence no level near that is of use
        for level in (SMALLEST_LEVEL, 1e-7, 1e-6, 1e-4, 0.05, LARGEST_LEVEL):
            if found <= level:
                assert passes(n, 0, n, margin, level)
            if truth > level:
                assert not passes(n, 0, n, margin, level)


@pytest.mark.parametrize(("gained", "lost", "margin"), [(40, 3, 0.0), (33, 1, 0.02), (25, 2, 0.3), (4, 0, 0.4)])
def test_the_finest_levels_against_sums_of_positive_terms(gained: int, lost: int, margin: float) -> None:
    n = 60
    naive, found = naive_p_value(gained, lost, n, margin), p_value(gained, lost, n, margin)
    assert 1e-13 < naive < 1e-6  # sums of positive terms lose no digits
    assert naive <= found <= 1.01 * naive + 6e-10
    for level in (naive / 2, 0.99 * naive):
        assert not passes(gained, lost, n, margin, level)
    assert passes(gained, lost, n, margin, max(2 * found, SMALLEST_LEVEL))


@pytest.mark.parametrize("level", [5e-9, 1e-9, 2e-10, 1e-10, 1e-12, 1e-30])
def test_below_the_finest_level_nothing_is_claimed_that_does_not_hold(level: float) -> None:
    # Bounds side by side test at δ/m, which may be finer: they may then say less, and never too much.
    for margin in (0.0, 0.02, 0.3):
        too_few = int(np.log(level) / np.log((1 - margin) / 2))
        assert ((1 - margin) / 2) ** too_few > level
        assert not passes(too_few, 0, too_few, margin, level)


def test_usable_levels() -> None:
    assert [level for level in (0.0, 1e-9, 1e-8, 0.05, 0.5, 0.51, 1.0, float("nan")) if usable(level)] == [
        1e-8,
        0.05,
        0.5,
    ]


@pytest.mark.parametrize(
    ("n", "margin", "level"), [(25, 0.1, 0.05), (60, 0.05, 0.0125), (41, 0.0, 0.05), (80, -0.02, 0.3)]
)
def test_what_was_decided_before_changes_no_decision(n: int, margin: float, level: float) -> None:
    observed = sorted({statistic(b, c, n, margin) for b in range(0, n // 2, 3) for c in range(0, n // 3, 2)})
    alone = [at_most(Region.above(t, n, margin), margin, level, t) for t in observed]
    assert {False, True} == set(alone)
    order = np.random.default_rng(0).permutation(len(observed))
    for walk in (order, order[::-1], range(len(observed)), range(len(observed))[::-1]):
        score_test._decided.cache_clear()  # pyright: ignore[reportPrivateUsage]
        found = {index: rejects(observed[index], n, margin, level) for index in walk}
        assert [found[index] for index in range(len(observed))] == alone


def test_tasks_of_as_many_images_share_what_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[float] = []

    def counted(region: Region, margin: float, level: float, observed: float) -> bool:
        tested.append(observed)
        return at_most(region, margin, level, observed)

    score_test._decided.cache_clear()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(score_test, "at_most", counted)
    first = lower_bounds(9, 5, 97, [0.01, 0.05])
    walked = len(tested)
    assert lower_bounds(9, 5, 97, [0.01, 0.05]) == first
    assert len(tested) == walked
    assert lower_bounds(11, 5, 97, [0.01, 0.05]) >= first
    assert len(tested) - walked < walked
