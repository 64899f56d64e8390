"""The rules of choice: retention first, but not for nothing."""

from __future__ import annotations

from holdfast.candidates.select import Candidate, choose_on_dev, worthwhile
from holdfast.candidates.select import rank_for_testing as order_of
from holdfast.evaluate.metrics import Comparison, TaskChange

MARGINS = {"a": 0.05, "b": 0.05}


def candidate(lam: float, gain: int, a: tuple[int, int], b: tuple[int, int] = (0, 0), loss: float = 0.0) -> Candidate:
    """Of 100 images each: the target gains ``gain``, the protected classes (gained, lost)."""

    def change(gained: int, lost: int, rise: float = 0.0) -> TaskChange:
        return TaskChange(100, 50, 50 + gained - lost, gained, lost, 1.0, 1.0 + rise)

    tasks = {"a": change(*a, loss), "b": change(*b), "t": change(max(gain, 0), max(-gain, 0))}
    return Candidate("step-00000100", lam, Comparison("t", tasks))


def test_on_dev_the_safest_of_the_worthwhile_ones_is_chosen() -> None:
    small = candidate(0.25, 5, (9, 0), (9, 0))  # the safest of all, but next to nothing is gained
    middle = candidate(0.5, 20, (3, 0), (4, 1))
    bold = candidate(1.0, 30, (2, 2), (5, 1))
    unsafe = candidate(0.75, 60, (0, 1))
    assert choose_on_dev([small, middle, bold, unsafe]) is middle
    assert choose_on_dev([unsafe]) is None
    assert choose_on_dev([candidate(0.5, 0, (1, 0))]) is None  # nothing gained: the old model stays


def test_on_dev_a_new_target_alone_comes_first() -> None:
    alone, moved = candidate(0.0, 15, (0, 0)), candidate(0.5, 20, (3, 0), (4, 0))
    assert choose_on_dev([alone, moved]) is alone
    assert choose_on_dev([candidate(0.0, 15, (0, 1)), moved]) is moved  # unless it lost something
    assert choose_on_dev([candidate(0.0, 5, (0, 0)), moved]) is moved  # or is hardly worth having


def test_of_equals_the_one_whose_losses_fell_most() -> None:
    one, other = candidate(0.5, 10, (1, 1), loss=0.1), candidate(1.0, 10, (1, 1), loss=-0.1)
    assert choose_on_dev([one, other]) is other


def test_the_sequence_starts_with_the_strongest_evidence_and_goes_on_to_what_lost_nothing() -> None:
    timid = candidate(0.1, 2, (0, 0))
    first = candidate(0.25, 14, (2, 0), (1, 0))
    bolder = candidate(0.5, 16, (1, 0), (1, 1))
    boldest = candidate(1.0, 20, (0, 3))  # more is gained, but dev images show a loss
    assert order_of([timid, first, bolder, boldest], MARGINS, test_more_candidates=True) == [
        first,
        bolder,
    ]
    assert order_of([timid, first, bolder, boldest], MARGINS, test_more_candidates=False) == [first]


def test_all_tasks_together_say_which_comes_first_not_the_weakest_alone() -> None:
    even = candidate(0.5, 12, (0, 1), (0, 1))
    better = candidate(1.0, 12, (0, 2), (9, 0))  # its weakest task shows less, both together show more
    assert order_of([even, better], MARGINS, test_more_candidates=True) == [better]


def test_where_nothing_is_gained_every_candidate_counts() -> None:
    ones = [candidate(0.5, -1, (0, 0)), candidate(1.0, -3, (0, 0))]
    assert worthwhile(ones) == ones
    gains = [candidate(0.5, 10, (0, 0)), candidate(0.75, 7, (0, 0)), candidate(1.0, 6, (0, 0))]
    assert worthwhile(gains) == gains[:2]  # two thirds of the largest gain


def test_a_new_target_alone_is_the_measure_and_gives_way_to_much_better_evidence_only() -> None:
    alone, weak = candidate(0.0, 18, (0, 0)), candidate(0.0, 10, (0, 0))
    moved = candidate(0.5, 30, (1, 0), (1, 0))
    assert worthwhile([weak, alone, moved]) == [alone, moved]
    assert order_of([weak, alone, moved], MARGINS, test_more_candidates=False) == [alone]
    surely = candidate(0.5, 30, (9, 0), (9, 0))  # on 100 images each: log p lower by more than six
    assert order_of([weak, alone, surely], MARGINS, test_more_candidates=False) == [surely]
    assert worthwhile([weak, moved]) == [moved]  # less than half of what is to be had: no measure
