"""The scene study's tables count as they say, on runs made up by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scene_tables as tables
from benchmarks import scenes


def made_up(seed: int, certified: list[float] | None, half: tuple[int, int], full: tuple[int, int]) -> dict[str, Any]:
    """``half``, ``full``: images lost by `sea`, gained by the target, of 100; sealed: ten times the lost, of 500."""

    def counts(images: int, lost: int, gained: int) -> dict[str, list[int]]:
        return {
            "sea": [images, 0, lost, 0, 0],
            "street": [images, 2, 1, 0, 0],
            "forest": [images, gained, 0, 0, 0],
        }

    def lam(at: float, lost: int, gained: int) -> dict[str, Any]:
        return {"lambda": at, "held": 0.0, "test": counts(100, lost, gained), "sealed": counts(500, 10 * lost, gained)}

    return {
        "name": "holdfast",
        "target": "forest",
        "size": 100,
        "seed": seed,
        "certified": certified,
        "walk": [lam(0.5, *half), lam(1.0, *full)],
    }


@pytest.fixture
def runs(tmp_path: Path) -> list[dict[str, Any]]:
    worse = {"walk": made_up(2, [1.0, 0.0], (0, 10), (4, 20))["walk"]}
    for one in worse["walk"]:
        one["sealed"]["sea"][2] = 0
    given = [
        made_up(3, [0.5, 0.0], (0, 10), (5, 30)),  # certified half way, and nothing lost there
        made_up(2, [1.0, 0.0], (0, 10), (0, 20)) | worse,  # certified at the end, though sea lost four test images
        made_up(1, None, (0, 10), (0, 40)),  # undecided: the old model, whatever the new one does
        {"name": "holdfast", "target": "forest", "size": 100, "seed": 0, "error": "gradient not finite"},
    ]
    (tmp_path / "scenes-main.json").write_text(json.dumps({"runs": given}))
    return tables.load(tmp_path)["main"]


def test_a_run_that_stopped_is_left_out(runs: list[dict[str, Any]]) -> None:
    assert [run["seed"] for run in runs] == [1, 2, 3]


def test_certified_models_are_counted_and_old_ones_on_their_own(runs: list[dict[str, Any]]) -> None:
    found = tables.summarise(runs, tables.certified)
    assert (found.runs, found.new, found.old, found.kept, found.certified) == (3, 2, 1, 1, 2)
    assert found.worst == pytest.approx((0.0 - 0.04) / 2)
    assert found.target == pytest.approx((0.10 + 0.20) / 2)


def test_without_a_certificate_every_run_hands_back_its_end(runs: list[dict[str, Any]]) -> None:
    found = tables.summarise(runs, tables.end)
    assert (found.runs, found.new, found.kept, found.certified) == (3, 3, 1, 2)  # seed 3 lost 50 of 500
    assert found.worst == pytest.approx(-0.03)
    assert found.target == pytest.approx(0.30)


def test_nothing_handed_back_has_no_mean(runs: list[dict[str, Any]]) -> None:
    found = tables.summarise(runs[:1], tables.certified)
    assert (found.new, found.kept, found.worst, found.target) == (0, 0, None, None)
    assert tables.pair(found.worst, found.target) == "– / –"


def test_rows_of_the_main_table(runs: list[dict[str, Any]]) -> None:
    lines = tables.main_table(runs, "forest").splitlines()
    assert lines[2].startswith("| **holdfast** | 1/2 (+1 old) | -2.0 / +15.0 | 2/3 | – | – / – | – |")


def test_change_over_two_rounds_is_a_difference_of_counts(runs: list[dict[str, Any]]) -> None:
    second = runs[2] | {
        "old": {"test": {"sea": 0.91, "street": 0.80, "forest": 0.50}},
        "first": {"old": {"test": {"sea": 0.90, "street": 0.82, "forest": 0.20}}},
    }
    over = tables.first_to_last(second)  # half way: sea 91 + 0, street 80 + 2 - 1, forest 50 + 10
    assert over == pytest.approx({"sea": 0.01, "street": -0.01, "forest": 0.40})


def test_the_published_results_still_read() -> None:
    found = tables.load(Path(tables.__file__).parent / "results")
    # 275 runs, 45 with paired views, fifteen of fine-tuning as trained; fine-tuning stands for two more sizes.
    assert len(found["main"]) == 275 + 45 + 15 + 2 * 30
    assert "### Two rounds" in tables.page(found)


def test_recorded_choices_are_those_of_todays_rules() -> None:
    found = json.loads((Path(tables.__file__).parent / "results" / "scenes-main.json").read_text())["runs"]
    for run in found[::12]:
        again = scenes.rejudged(run)
        assert (again["chosen"], again["order"], again["certified"]) == (run["chosen"], run["order"], run["certified"])
