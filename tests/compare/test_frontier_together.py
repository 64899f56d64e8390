"""Several studies as one table: pairs of study and seed (benchmarks/frontier.py --together)."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.frontier import differences, pooled, together
from holdfast.compare.frontier import FrontierCell, Interval, bootstrap, points


def cell(row: str, *by_seed: tuple[int, float, float], kind: str = "shipped") -> FrontierCell:
    nothing = Interval(0.0, 0.0, 0.0)
    return FrontierCell(kind, row, "60", 0.01, "", len(by_seed), nothing, nothing, 0.0, 0, 0, None, by_seed)  # pyright: ignore[reportArgumentType]


def test_pairs_are_joined_by_study_and_seed() -> None:
    studies = {
        "a": [cell("ours", (0, 0.30, 0.0), (1, 0.10, -0.02)), cell("theirs", (0, 0.20, -0.01), (1, 0.10, 0.0))],
        "a-forest": [
            *(cell("ours", (0, 0.20, 0.0)), cell("theirs", (0, 0.0, 0.0))),
            cell("ours", (0, 9.0, 0.0), kind="trained"),
        ],
        "b": [cell("ours", (0, 9.0, 0.0))],  # another study, and no other target of the same
    }
    lines = [[field.strip() for field in line.split("|")[1:-1]] for line in together(studies).splitlines()[2:]]
    ours, theirs, other = lines
    assert ours[:5] == ["a", "60", "ours", "3", "at most 1 point"]
    assert ours[5].startswith("+20.0 [")
    assert (ours[6], ours[8]) == ("-", "-")
    assert ours[9] == "2 of 3"
    assert theirs[5].startswith("+10.0 [")
    assert theirs[6].startswith("+10.0 [")  # 10, 0 and 20 points
    assert theirs[7].startswith("-0.3 [")
    assert theirs[8].startswith("-0.3 [")  # 1, -2 and 0 points
    assert theirs[9] == "3 of 3"
    assert other[:4] == ["b", "60", "ours", "1"]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_pair_that_one_row_lacks_is_not_compared(missing: int) -> None:
    rows = [(0, 0.30, 0.0), (1, 0.10, 0.0)]
    studies = {"a": [cell("ours", *rows), cell("theirs", rows[1 - missing])]}
    line = together(studies).splitlines()[3]
    assert "| 1 |" in line
    assert "+0.0 [+0.0, +0.0]" in line


def test_targets_together_are_compared_on_the_pairs_that_both_rows_have() -> None:
    decided = partial(cell, kind="decided")
    studies = {
        "bed": [decided("ours", (0, 0.4, -0.01), (1, 0.2, 0.0)), decided("theirs", (1, 0.1, -0.04))],
        "bed-forest": [decided("ours", (0, 0.6, -0.02)), decided("theirs", (0, 0.2, -0.01))],
    }
    (name, cells) = next(iter(pooled(studies).items()))
    assert (name, [item.row for item in cells]) == ("bed", ["ours", "theirs"])
    ours, theirs = cells
    assert (ours.seeds, ours.gain, ours.worst) == (3, bootstrap([0.4, 0.2, 0.6]), bootstrap([-0.01, 0.0, -0.02]))
    assert (theirs.seeds, theirs.kept, theirs.against_first) == (2, 1, bootstrap([0.1 - 0.2, 0.2 - 0.6]))
    assert differences(ours, theirs) == [
        points(bootstrap([0.2 - 0.1, 0.6 - 0.2])),
        points(bootstrap([0.0 + 0.04, -0.02 + 0.01])),
    ]
    assert "| bed | 60 | theirs | 2 | develop's rule, margin 1 |" in together(studies)
