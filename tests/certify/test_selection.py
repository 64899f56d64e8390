"""The fixed sequence, the order of candidates, the e-process."""

import math

import pytest

from holdfast.certify.claims import Counts
from holdfast.certify.eprocess import SHARES, EProcess, first_passage
from holdfast.certify.selection import fixed_sequence, retained


def test_the_sequence_stops_at_the_first_failure_and_is_lazy() -> None:
    asked = []

    def test(candidate: float) -> bool:
        asked.append(candidate)
        return candidate != 0.75

    result = fixed_sequence([0.25, 0.5, 0.75, 1.0], test)
    assert (result.shipped, result.index, result.tested, result.passed) == (0.5, 1, 3, True)
    assert asked == [0.25, 0.5, 0.75]  # nothing beyond the failure saw the sealed images


def test_nothing_passes_keeps_the_old_model() -> None:
    result = fixed_sequence(["a", "b"], lambda _: False)
    assert (result.shipped, result.index, result.tested, result.passed) == (None, None, 1, False)
    assert not fixed_sequence([], lambda _: True).passed


def test_all_pass() -> None:
    assert fixed_sequence(["a", "b"], lambda _: True).shipped == "b"


def test_one_bit() -> None:
    good, bad = Counts("a", 1000, 10, 8), Counts("b", 1000, 10, 25)
    margins = {"a": 0.02, "b": 0.02}
    assert retained([good], margins, 0.05)
    assert not retained([good, bad], margins, 0.05)
    assert not retained([good], margins, 0.05, target=Counts("t", 100, 2, 2))
    assert retained([good], margins, 0.05, target=Counts("t", 100, 20, 2))


def test_e_process_is_the_mean_of_products() -> None:
    changes, margin = [1, 0, -1, 0, 1, 1], 0.05
    process = EProcess(margin).extend(changes)
    products = [math.prod(1 + share / (1 - margin) * (x + margin) for x in changes) for share in SHARES]
    assert process.value == pytest.approx(sum(products) / len(products))
    assert process.images == 6
    assert process.largest >= process.value


def test_each_factor_has_mean_at_most_one_under_the_null() -> None:
    # E[1 + λ(X + ε)] = 1 + λ(Δ + ε) <= 1, and no factor is negative: that is all that Ville's inequality needs.
    for margin in (0.0, 0.02, 0.5, -0.3):
        for bet in EProcess(margin).bets():
            assert 1 + bet * (-1 + margin) > 0


def test_e_process_passes_and_stays_passed() -> None:
    passed, process = first_passage([0] * 400, 0.02, 0.05)
    assert passed is not None
    assert passed >= math.log(20) / -math.log(1 - 0.02)  # it cannot beat the exact test for zero flips
    process.extend([-1] * 60)
    assert process.value < 20
    assert process.passes(0.05)
    assert first_passage([0, -1] * 100, 0.02, 0.05)[0] is None
    with pytest.raises(ValueError, match="-1, 0 or 1"):
        process.update(2)
    with pytest.raises(ValueError, match="margin"):
        EProcess(1.0)
