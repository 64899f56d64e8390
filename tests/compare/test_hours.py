"""GPU hours of a study: from the step times that the benchmark measured, against sums by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.compare.grid import Job, Study, StudyConfig, plan_all, read_study, ready_studies
from holdfast.compare.hours import MACHINE, MEASURED, architecture_of, estimate
from holdfast.config import parse
from holdfast.train.shapes import SHAPES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "step.json"


def test_the_step_times_are_those_of_the_benchmark() -> None:
    results = json.loads(RESULTS.read_text())
    assert MACHINE in results["machine"]
    for name, measured in MEASURED.items():
        shape = SHAPES[name]
        assert measured.milliseconds == results[name]["published"]["ms"]
        assert measured.architecture == shape.architecture
        assert measured.images == shape.batch + (shape.tasks_per_step or shape.protected) * shape.images_per_task


def small(root: Path, **values: Any) -> Study:
    given: dict[str, Any] = {
        "seeds": [0, 1],
        "round": {
            "task": {"target": "a", "protected": ["b", "c"]},
            "data": {"source": {"kind": "digits"}},
            "model": {"architecture": "ViT-B-16"},
            "train": {"steps": 1000, "batch": 133},
        },
        "methods": [{"name": "rm", "label": "RM", "grid": {"train.steps": [1000, 3000]}}],
        **values,
    }
    return Study("small", parse(StudyConfig, given, "STUDY.toml"), root, root / "STUDY.toml")


def test_hours_are_steps_times_the_measured_step_in_proportion_to_its_pictures(tmp_path: Path) -> None:
    found = estimate(small(tmp_path))
    assert (found.jobs, found.steps) == (4, 8000)
    # 133 + 2 x 10 pictures are half of the 306 that were measured
    assert found.hours == pytest.approx(8000 * 64.93e-3 / 2 / 3600)
    assert estimate(small(tmp_path), 9.0).hours == pytest.approx(8000 * 9e-3 / 3600)


def test_interpolated_rows_train_nothing_and_what_runs_before_counts(tmp_path: Path) -> None:
    methods = [{"name": "rm", "label": "RM"}, {"name": "wise_ft", "of": "RM", "lambdas": [0.5, 0.9]}]
    found = estimate(small(tmp_path, methods=methods))
    assert (found.jobs, found.steps) == (2 + 4, 2000)
    first, second = (estimate(read_study(name)) for name in ("two-rounds-overcast", "two-rounds-foggy"))
    assert second.jobs == 2 * first.jobs
    assert architecture_of(read_study("two-rounds-foggy")) == "ViT-B-16-quickgelu"
    base = read_study("two-rounds-overcast").config.base
    assert base is not None
    assert second.steps == 2 * (first.steps - base.train.steps) + base.train.steps


def _steps_are_taken(job: Job) -> bool:
    return job.parent is None and job.config.method.trains()


@pytest.mark.parametrize("name", ready_studies())
def test_jobs_are_those_of_the_plan(name: str, tmp_path: Path) -> None:
    study = read_study(name, tmp_path)
    jobs = plan_all(study, tmp_path / "out")
    found = estimate(study)
    assert found.jobs == len(jobs)
    base = 0 if study.config.base is None else study.config.base.train.steps
    if study.config.after is None:
        assert found.steps == base + sum(job.config.train.steps for job in jobs if _steps_are_taken(job))
    assert (found.hours is None) == (not name.startswith(("bdd100k", "places365", "ablation", "two-rounds")))
