"""The frontier: chosen on dev images, judged on test images, against a naive computation."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from holdfast.compare.choose import read_records
from holdfast.compare.frontier import (
    best_within,
    bootstrap,
    cell_from_json,
    frontier_cells,
    frontier_json,
    frontier_table,
)
from holdfast.compare.grid import Job, plan
from holdfast.compare.output import write_outputs
from holdfast.compare.pool import run_here
from holdfast.compare.records import (
    FrontierPoint,
    JobFolder,
    read_comparison,
    read_frontier,
    write_comparison,
    write_frontier,
)
from holdfast.compare.study import run_study
from holdfast.errors import UserError
from holdfast.evaluate.metrics import Comparison
from holdfast.files import read_json

from .fabricated import ROUND, comparison, finish, make_study
from .test_study import silent, study

TOLERANCES = (0.0, 0.02, 0.04)  # of 50 images: none, one and two


def test_best_within_takes_the_largest_gain_that_the_tolerance_allows() -> None:
    pool = {
        "safe": comparison(0, 3),
        "bold": comparison(-1, 9),
        "boldest": comparison(-2, 12),
        "lost": comparison(-5, 30),
    }
    assert [best_within(pool, tolerance) for tolerance in (0.0, 0.01, 0.02, 0.04)] == [
        "safe",
        "safe",
        "bold",  # a loss of exactly the tolerance is within it
        "boldest",
    ]
    assert best_within({"still": comparison(0, 0), "lost": comparison(-5, 30)}, 0.04) is None
    assert best_within({"worse": comparison(-1, 5), "better": comparison(0, 5)}, 0.04) == "better"


def test_intervals_are_those_of_all_resamples() -> None:
    values = [0.1, 0.4, 0.2]
    means = sorted(fmean(draw) for draw in product(values, repeat=3))
    found = bootstrap(values)
    assert found.mean == pytest.approx(fmean(values))
    # The least value with at least 2.5 % (97.5 %) of the 27 resamples at or below it.
    assert (found.low, found.high) == (pytest.approx(means[0]), pytest.approx(means[26]))
    many = bootstrap([random.Random(seed).gauss(0.0, 1.0) for seed in range(200)])
    assert many.high - many.low == pytest.approx(2 * 1.96 / 200**0.5, rel=0.2)
    same = bootstrap([0.3])
    assert (same.mean, same.low, same.high) == (0.3, 0.3, 0.3)


def fabricated(root: Path) -> tuple[Any, list[Job]]:
    """Two rows, one of them with two settings, three seeds, two columns: points drawn at random."""
    made = make_study(
        root,
        seeds=[0, 1, 2],
        sizes=[10, 60],
        tolerances=list(TOLERANCES),
        methods=[{"name": "holdfast"}, {"name": "rm", "grid": {"alpha": [0.1, 1.0]}}],
    )
    jobs, draw = plan(made, root / "out"), random.Random(7)
    for job in jobs:
        job.folder.mkdir(parents=True)
        finish(job, 0, 1)
        points: list[FrontierPoint] = []
        for place, tolerance in enumerate(TOLERANCES):
            dev = comparison(-draw.randint(0, place), draw.randint(1, 20))
            test = comparison(draw.randint(-4, 2), draw.randint(-3, 20))
            points.append(FrontierPoint("trained", tolerance, "step-00000020", dev, test))
        write_frontier(JobFolder(job.folder).frontier, points)
    return made, jobs


def test_cells_against_a_naive_computation(tmp_path: Path) -> None:
    _, jobs = fabricated(tmp_path)
    cells = {(cell.row, cell.column, cell.tolerance): cell for cell in frontier_cells(jobs, read_records(jobs))}
    assert len(cells) == 2 * 2 * 3
    for row, column, tolerance in product(("holdfast", "rm"), ("10", "60"), TOLERANCES):
        settings: dict[str, dict[int, FrontierPoint]] = {}
        for job in jobs:
            if (job.row, job.column) == (row, column):
                point = next(p for p in read_frontier(job.folder / "frontier.json") if p.tolerance == tolerance)
                settings.setdefault(job.setting_text, {})[job.seed] = point
        # All points are within the tolerance: the larger mean gain on dev images decides.
        best = max(settings, key=lambda name: fmean(point.dev.target_gain for point in settings[name].values()))
        judged = [settings[best][seed].test for seed in (0, 1, 2)]
        cell = cells[row, column, tolerance]
        assert cell.setting == best
        assert cell.gain == bootstrap([test.target_gain for test in judged])
        assert cell.worst.mean == pytest.approx(fmean(min(0.02, test.dev_safety) for test in judged))
        assert cell.by_seed == tuple((seed, test.target_gain, test.dev_safety) for seed, test in enumerate(judged))
        assert cell.kept == sum(test.dev_safety >= -tolerance - 1e-9 for test in judged)
        assert cell.lost == pytest.approx(
            fmean(sum(task.new_correct < task.old_correct for name, task in test.tasks.items() if name != "wanted")
                  for test in judged)
        )  # fmt: skip
        if row == "holdfast":
            assert cell.against_first is None
        else:
            first = next(item for item in jobs if (item.row, item.column, item.seed) == ("holdfast", column, 0))
            assert first.folder.exists()
            other = cells["holdfast", column, tolerance].gain.mean
            assert cell.against_first is not None
            assert cell.against_first.mean == pytest.approx(cell.gain.mean - other)


def test_table_file_and_figure(tmp_path: Path) -> None:
    made, jobs = fabricated(tmp_path)
    records = read_records(jobs)
    files = write_outputs(made, jobs, records, [], tmp_path / "out", figures=True)
    assert {"frontier.json", "frontier.txt", "frontier.csv", "frontier.png"} <= {path.name for path in files}
    cells = frontier_cells(jobs, records)
    assert [cell_from_json(entry) for entry in read_json(tmp_path / "out" / "frontier.json")] == cells
    assert frontier_json(cells)[0]["row"] == "holdfast"
    text = frontier_table("t", cells).text()
    assert "no class down" in text
    assert "at most 2 points" in text


def test_what_develop_hands_back_stands_beside_what_was_chosen_within_a_tolerance(tmp_path: Path) -> None:
    made = make_study(
        tmp_path,
        seeds=[0, 1],
        result="shipped",
        tolerances=[0.0],
        methods=[{"name": "holdfast"}, {"name": "rm", "grid": {"alpha": [0.1, 1.0]}}],
        round={**ROUND, "certify": {"margin": 0.1, "test_sealed": False}},
    )
    jobs = plan(made, tmp_path / "out")
    judged: dict[tuple[str, str, int], Comparison] = {}
    for number, job in enumerate(jobs):
        job.folder.mkdir(parents=True)
        finish(job, 0, 1)
        folder = JobFolder(job.folder)
        write_frontier(folder.frontier, [FrontierPoint("shipped", 0.0, "refit", comparison(0, 1), comparison(0, 1))])
        # Of RM's settings the second gains more, and loses what the margin allows.
        write_comparison(folder.dev, comparison(-1 if job.setting_text == "alpha=1" else 0, 5 + number))
        judged[job.row, job.setting_text, job.seed] = test = comparison(-number % 4 - 1, number)
        write_comparison(folder.test, test)
    cells = {cell.row: cell for cell in frontier_cells(jobs, read_records(jobs)) if cell.kind == "decided"}
    assert list(cells) == ["holdfast", "rm"]
    for row, cell in cells.items():
        assert cell.tolerance == 0.1
        tests = [judged[row, cell.setting, seed] for seed in (0, 1)]
        assert cell.by_seed == tuple((seed, test.target_gain, test.dev_safety) for seed, test in enumerate(tests))
        assert cell.kept == sum(test.dev_safety >= -0.1 for test in tests)
        assert cell.old == 2  # no record says that anything was shipped
    assert cells["rm"].setting == "alpha=1"
    assert "develop's rule, margin 10" in frontier_table("t", list(cells.values())).text()


def test_a_job_that_has_not_finished_is_left_out(tmp_path: Path) -> None:
    _, jobs = fabricated(tmp_path)
    for job in jobs:
        if job.row == "rm" and job.seed == 2:
            (job.folder / "frontier.json").unlink()
    cells = frontier_cells(jobs, read_records(jobs))
    assert {cell.seeds for cell in cells if cell.row == "rm"} == {2}
    assert {cell.seeds for cell in cells if cell.row == "holdfast"} == {3}


def test_rows_of_a_study_that_is_not_finished_are_compared_on_the_seeds_that_all_have(tmp_path: Path) -> None:
    _, jobs = fabricated(tmp_path)
    records = [
        replace(record, status="begun") if (job.column, job.row, job.seed) == ("60", "rm", 2) else record
        for job, record in zip(jobs, read_records(jobs), strict=True)
    ]
    for cell in frontier_cells(jobs, records):
        seeds = (0, 1) if cell.column == "60" else (0, 1, 2)
        assert tuple(seed for seed, *_ in cell.by_seed) == seeds
    none = [replace(record, status="begun") if job.row == "rm" else record
            for job, record in zip(jobs, records, strict=True)]  # fmt: skip
    assert {cell.seeds for cell in frontier_cells(jobs, none)} == {3}  # no seed is complete: what there is


def test_a_study_of_checkpoints_and_one_of_what_ships(tmp_path: Path) -> None:
    rows = [{"name": "holdfast"}, {"name": "rm"}, {"name": "refit"}]
    for result, kinds in (("checkpoint", {"trained"}), ("shipped", {"trained", "shipped"})):
        given = rows if result == "shipped" else rows[:2]
        out = tmp_path / result
        ran = run_study(
            study(tmp_path, methods=given, result=result, tolerances=[0.0, 0.1, 1.0]), out, run_here, silent
        )
        assert ran.failed == []
        for job in plan(ran.study, out):
            points = read_frontier(JobFolder(job.folder).frontier)
            assert {point.kind for point in points} == kinds
            for point in points:
                assert point.dev.dev_safety >= -point.tolerance - 1e-9
                assert set(point.test.tasks) == set(point.dev.tasks)
                if point.model == "old":
                    assert (point.dev.target_gain, point.test.target_gain, point.test.dev_safety) == (0.0, 0.0, 0.0)
                else:
                    assert point.dev.target_gain > 0
        cells = [cell_from_json(entry) for entry in read_json(out / "frontier.json")]
        decided = {cell.row: cell for cell in cells if cell.kind == "decided"}
        assert set(decided) == ({"holdfast", "rm", "refit"} if result == "shipped" else set())
        for job in plan(ran.study, out) if result == "shipped" else ():
            test, cell = read_comparison(JobFolder(job.folder).test), decided[job.row]
            assert (job.seed, test.target_gain, test.dev_safety) in cell.by_seed
            assert cell.tolerance == job.config.certify.margin
        # What the tables report is on disk as before; the frontier's scoring leaves it alone.
        assert (out / "tables" / "results.txt").exists()
        assert (out / "tables" / "frontier.txt").exists()


def test_wise_ft_is_told_how_to_take_part(tmp_path: Path) -> None:
    rows = [{"name": "finetune"}, {"name": "wise_ft", "of": "finetune"}]
    with pytest.raises(UserError, match="wise_ft has no checkpoints of its own"):
        make_study(tmp_path, methods=rows, tolerances=[0.0])
