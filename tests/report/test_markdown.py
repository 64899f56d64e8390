"""The Markdown of `certify --summary` says what its JSON says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.certify.predictions import certify_sequentially
from holdfast.report.markdown import certify_markdown
from tests.certify.helpers import rows, write_csv

SPEC = {"clear": (500, 5, 3), "snowy": (20, 0, 0), "foggy": (60, 20, 1), "a|b <i>x</i>": (400, 1, 2)}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "both.csv", rows(SPEC))


def cells(markdown: str) -> dict[str, list[str]]:
    """The rows of the table by their first cell; a bar that is part of a name is escaped."""
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    parts = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0]: row for row in parts}


def number(text: str) -> float:
    return float(text.split(maxsplit=1)[0].replace("−", "-").replace(",", ""))


def test_every_number_is_the_reports(table: Path) -> None:
    reported = holdfast.certify(table, margin=0.02, target="foggy").to_json()
    markdown = certify_markdown(reported)
    assert markdown.splitlines()[0].endswith("holdfast undecided: the evidence does not suffice")
    found = cells(markdown)
    head = found["task"]
    names = {row["task"]: row["task"] for row in reported["tasks"]}
    names |= {"a|b <i>x</i>": r"a\|b &lt;i\>x&lt;/i\>", "foggy": "foggy (target)"}
    assert len(found) == 2 + len(SPEC)  # the head and the line below it
    for row in [*reported["tasks"], reported["target"]]:
        result = dict(zip(head, found[names[row["task"]]], strict=True))
        assert number(result["images"]) == row["n"]
        assert number(result["positive flips"]) == row["gained"]
        assert result["negative flips"] == f"{row['lost']} ({row['lost'] / row['n'] * 100:.2f} %)"
        assert number(result["change"]) == pytest.approx(row["difference"] * 100, abs=0.005)
        assert ("▼" in result["change"]) == (row["difference"] < 0)
        assert number(result["margin"]) == row["margin"] * 100
        assert number(result["change at least"]) == pytest.approx(row["simultaneous_lower_bound"] * 100, abs=0.005)
        p = result["p"].removeprefix("&lt;")
        assert float(p) == pytest.approx(row["p_adjusted"], abs=0.0005) or result["p"].startswith("&lt;")
        assert result["verdict"].split()[1] == row["verdict"]
    needed = next(row["needed"] for row in reported["tasks"] if row["task"] == "snowy")
    assert f"about {needed} would" in markdown
    assert "It is not P\\(bad" in markdown


def test_images_that_arrive_one_by_one(table: Path) -> None:
    reported = certify_sequentially(table, margin=0.02, tasks=["clear"])
    found = cells(certify_markdown(reported))
    assert "e-value" in found["task"]
    assert float(found["clear"][6]) == pytest.approx(reported["tasks"][0]["e_value"], rel=0.01)


@pytest.mark.parametrize("retired", [False, True])
def test_of_sealed_images_nothing_is_told_before_their_set_is_retired(table: Path, retired: bool) -> None:
    reported: dict[str, Any] = holdfast.certify(table, margin=0.02).to_json()
    sealed = {"set": "sha256:0123456789abcdef", "queries": 1, "queries_left": 4, "passed": retired, "retired": retired}
    markdown = certify_markdown({**reported, "sealed": sealed})
    assert ("| clear |" in markdown) == retired
    assert "Sealed set `0123456789ab`: query 1" in markdown
    assert ("4 left" in markdown) != retired
