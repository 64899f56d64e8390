"""The choice of settings: retention ratio first, target gain second, on dev images alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.compare.choose import Spread, best_seed, cells, choose, read_records, scores_by_place
from holdfast.compare.grid import Job
from holdfast.compare.records import JobFolder, JobRecord, read_comparison
from tests.compare.fabricated import comparison, finish, jobs_of, make_study


def choose_from(root: Path, results: dict[float, list[tuple[int, int] | None]]) -> tuple[list[Job], float, int]:
    """(worst, gain) of each seed by alpha -> jobs, chosen alpha, missing jobs."""
    study = make_study(root, methods=[{"name": "rm", "grid": {"alpha": list(results)}}])
    jobs = jobs_of(study, root)
    for job in jobs:
        result = results[dict(job.setting)["method.alpha"]][job.seed]
        if result is None:
            JobFolder(job.folder).write(JobRecord("failed", error="no"))
        else:
            finish(job, *result)
    (choice,) = choose(jobs, read_records(jobs))
    return jobs, dict(choice.setting)["method.alpha"], choice.missing


def test_retention_comes_before_gain(tmp_path: Path) -> None:
    _, chosen, _ = choose_from(tmp_path, {0.1: [(-1, 30), (-1, 30)], 1.0: [(0, 1), (-9, 1)]})
    assert chosen == 1.0


def test_gain_decides_among_equals(tmp_path: Path) -> None:
    _, chosen, _ = choose_from(tmp_path, {0.1: [(0, 3), (-1, 5)], 1.0: [(-9, 6), (1, 3)], 10.0: [(0, 4), (-1, 4)]})
    assert chosen == 1.0


def test_settings_of_which_every_seed_finished_are_preferred(tmp_path: Path) -> None:
    _, chosen, missing = choose_from(tmp_path, {0.1: [(0, 30), None], 1.0: [(-1, 1), (-1, 1)]})
    assert (chosen, missing) == (1.0, 1)


def test_a_row_without_a_finished_job_has_no_choice(tmp_path: Path) -> None:
    jobs = jobs_of(make_study(tmp_path), tmp_path)
    assert choose(jobs, read_records(jobs)) == []


def test_test_figures_make_the_cells_and_dev_figures_do_not(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    jobs = jobs_of(study, tmp_path)
    for job in jobs:
        good = dict(job.setting)["method.alpha"] == 1.0
        finish(job, 0 if good else -5, 20, test=comparison(-2 if job.seed else 1, 10 + job.seed) if good else None)
    (choice,) = choose(jobs, read_records(jobs))
    cell = cells([choice], scores_by_place([choice]))["rm", "all"]
    assert (cell.seeds, cell.retention_ratio) == (2, 0.5)
    assert cell.dev_safety.mean == pytest.approx((1 - 2) / 2 / 50)
    assert cell.target_accuracy.mean == pytest.approx((20 + 21) / 2 / 50)
    assert (cell.base_accuracy, cell.setting) == (0.2, "alpha=1")


def test_the_deviation_is_the_papers() -> None:
    """WCCL on tunnel, 100 images: four of five seeds right on all 47 images, one on 46: 0.9957(0.0085)."""
    spread = Spread.of([1, 1, 1, 1, 46 / 47])
    assert f"{spread.mean:.4f}({spread.std:.4f})" == "0.9957(0.0085)"


def test_the_next_round_starts_from_a_safe_seed_with_the_largest_gain(tmp_path: Path) -> None:
    study = make_study(tmp_path, seeds=[0, 1, 2], methods=[{"name": "rm"}])
    jobs = jobs_of(study, tmp_path)
    for job, (worst, gain) in zip(jobs, [(-1, 30), (0, 8), (2, 5)], strict=True):
        finish(job, worst, gain)
    (choice,) = choose(jobs, read_records(jobs))
    assert best_seed(choice).seed == 1


def test_comparisons_come_back_as_they_were(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    job = jobs_of(study, tmp_path)[0]
    finish(job, -3, 4)
    assert read_comparison(JobFolder(job.folder).dev) == comparison(-3, 4)
