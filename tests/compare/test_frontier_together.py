"""Several studies as one table: pairs of study and seed (benchmarks/frontier.py --together)."""

from __future__ import annotations

import pytest

from benchmarks.frontier import together
from holdfast.compare.frontier import FrontierCell, Interval


def cell(row: str, *by_seed: tuple[int, float, float], kind: str = "shipped") -> FrontierCell:
    nothing = Interval(0.0, 0.0, 0.0)
    return FrontierCell(kind, row, "60", 0.01, "", len(by_seed), nothing, nothing, 0.0, 0, 0, None, by_seed)  # pyright: ignore[reportArgumentType]


def test_pairs_are_joined_by_study_and_seed() -> None:
    studies = {
        "a": [cell("ours", (0, 0.30, 0.0), (1, 0.10, -0.02)), cell("theirs", (0, 0.20, -0.01), (1, 0.10, 0.0))],
        "b": [cell("ours", (0, 0.20, 0.0)), cell("theirs", (0, 0.0, 0.0)), cell("ours", (0, 9.0, 0.0), kind="trained")],
    }
    lines = [[field.strip() for field in line.split("|")[1:-1]] for line in together(studies).splitlines()[2:]]
    ours, theirs = lines
    assert ours[:4] == ["60", "ours", "3", "at most 1 point"]
    assert ours[4].startswith("+20.0 [")
    assert ours[5] == "-"
    assert ours[7] == "2 of 3"
    assert theirs[4].startswith("+10.0 [")
    assert theirs[5].startswith("+10.0 [")  # 10, 0 and 20 points
    assert theirs[6].startswith("-0.3 [")
    assert theirs[7] == "3 of 3"


@pytest.mark.parametrize("missing", [0, 1])
def test_a_pair_that_one_row_lacks_is_not_compared(missing: int) -> None:
    rows = [(0, 0.30, 0.0), (1, 0.10, 0.0)]
    studies = {"a": [cell("ours", *rows), cell("theirs", rows[1 - missing])]}
    line = together(studies).splitlines()[3]
    assert "| 1 |" in line
    assert "+0.0 [+0.0, +0.0]" in line
