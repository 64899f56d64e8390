"""Whole studies on the embedded digits: finished jobs stay, failed ones stop nobody, test is scored once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.artifacts import RunFolder
from holdfast.compare.grid import Job, Study, StudyConfig, plan
from holdfast.compare.pool import LocalRunner, Tasks, choose_runner, run_here
from holdfast.compare.records import JobFolder, JobRecord
from holdfast.compare.run import Outcome, attempt
from holdfast.compare.study import run_jobs, run_study
from holdfast.config import parse
from holdfast.errors import Interrupted, UserError
from holdfast.files import fingerprint_file, read_json
from holdfast.rounds.round import Round

VALUES: dict[str, Any] = {
    "seeds": [0],
    "sizes": [6],
    "round": {
        "task": {"target": "eight", "protected": ["zero", "one"], "ignored": ["two", "three", "four", "five", "six"]},
        "data": {
            "source": {"kind": "digits", "classes": {"seven": "six", "nine": "six"}},
            "roles": {"dev": 0.1, "sealed": 0.0, "test": 0.1},
            "target_images": 12,
        },
        "model": {"architecture": "tiny", "head_rank": 2},
        "train": {"steps": 6, "batch": 8, "images_per_task": 2, "learning_rate": 1e-3, "device": "cpu"},
        "evaluate": {"every": 2},
    },
    "methods": [
        {"name": "rm", "label": "RM", "grid": {"alpha": [0.1, 10.0]}},
        {"name": "wise_ft", "label": "WiSE-FT", "of": "RM", "lambdas": [0.5]},
    ],
}


def study(root: Path, **values: Any) -> Study:
    return Study("small", parse(StudyConfig, {**VALUES, **values}, "STUDY.toml"), root, root / "STUDY.toml")


def silent(text: str) -> None:
    del text


def weights(job: Job) -> dict[str, str]:
    return {path.parent.name: fingerprint_file(path) for path in job.folder.glob("candidates/*/model.safetensors")}


def test_a_study_from_its_file_to_its_tables(tmp_path: Path) -> None:
    found = study(tmp_path)
    lines: list[str] = []
    result = run_study(found, tmp_path / "out", run_here, lines.append)
    jobs = plan(found, tmp_path / "out")
    assert (result.jobs, result.failed) == (len(jobs), []) == (4, [])
    assert sum(line.startswith("[") for line in lines) == 4
    assert {path.name for path in result.files} >= {
        "results.txt",
        "results.tex",
        "tasks.html",
        "curves.png",
        "jobs.csv",
    }

    # Test is scored for the chosen settings alone, and weights that only resuming needs are gone.
    chosen = {job.folder for choice in result.choices for job in choice.jobs}
    assert {job.folder for job in jobs if JobFolder(job.folder).test.exists()} == chosen
    assert len(chosen) == 2
    assert not any((job.folder / "checkpoints").exists() for job in jobs)
    assert (tmp_path / "out" / "chosen" / "RM-6" / "model.safetensors").exists()

    # Interpolation stands on the last weights of the job that it belongs to.
    wise = next(job for job in jobs if job.parent is not None)
    assert wise.parent is not None
    assert f"step-{6:08d}" in {path.name for path in (wise.parent / "candidates").iterdir()}

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "jobs").rglob("*.json")}
    again: list[str] = []
    run_study(found, tmp_path / "out", run_here, again.append)
    assert again == ["4 of 4 jobs are done already"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "jobs").rglob("*.json")} == before


def test_a_failed_job_is_reported_stops_nobody_and_is_tried_again(tmp_path: Path) -> None:
    broken = {"name": "der", "label": "broken", "set": {"data.prompts": "prompts.toml"}}
    found = study(tmp_path, methods=[broken, {"name": "rm", "label": "RM"}])
    result = run_study(found, tmp_path / "out", run_here, silent, figures=False)
    ((name, error),) = result.failed
    assert name.startswith("broken")
    assert "prompts.toml" in error
    assert {choice.row for choice in result.choices} == {"RM"}
    job = plan(found, tmp_path / "out")[0]
    assert JobFolder(job.folder).read().status == "failed"
    assert "Traceback" in JobFolder(job.folder).traceback.read_text()

    (tmp_path / "prompts.toml").write_text('zero = "nought"\none = "a stroke"\neight = "two rings"\n')
    result = run_study(found, tmp_path / "out", run_here, silent, figures=False)
    assert result.failed == []
    assert {choice.row for choice in result.choices} == {"RM", "broken"}


def test_an_interrupted_job_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = study(tmp_path, methods=[{"name": "rm", "label": "RM"}, {"name": "wise_ft", "of": "RM"}])
    whole = plan(found, tmp_path / "whole")[0]
    assert attempt(whole, "run").record.status == "done"

    plain = Round.evaluate_checkpoint

    def interrupted(self: Any, done: int, method: Any) -> dict[str, Any]:
        record = plain(self, done, method)
        if done == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return record

    cut = plan(found, tmp_path / "cut")[0]
    with monkeypatch.context() as patched:
        patched.setattr(Round, "evaluate_checkpoint", interrupted)
        with pytest.raises(Interrupted, match="interrupted"):
            run_jobs([cut], run_here, silent)
    assert JobFolder(cut.folder).read().status == "begun"
    assert run_jobs([cut], run_here, silent) == []
    assert JobFolder(cut.folder).read().step == JobFolder(whole.folder).read().step
    assert weights(cut) == weights(whole)
    assert list(JobFolder(cut.folder).evaluations()) == list(JobFolder(whole.folder).evaluations())


def test_a_base_model_of_its_own_and_another_studys_choice(tmp_path: Path) -> None:
    values = {key: value for key, value in VALUES["round"].items() if key != "model"}
    base = {
        "classes": ["zero", "one"],
        "objective": "cross_entropy",
        "data": VALUES["round"]["data"],
        "model": {"architecture": "tiny"},
        "train": {"steps": 2, "images_per_task": 2, "device": "cpu"},
    }
    methods = [{"name": "rm", "label": "RM"}]
    first = study(tmp_path, round=values, base=base, methods=methods)
    result = run_study(first, tmp_path / "out", run_here, silent, figures=False)
    assert result.failed == []
    assert (tmp_path / "out" / "base" / "model" / "model.safetensors").exists()
    changed = study(tmp_path, round=values, base={**base, "seed": 1}, methods=methods)
    with pytest.raises(UserError, match="made with other settings"):
        run_study(changed, tmp_path / "out", run_here, silent, figures=False)

    import json

    (tmp_path / "first.toml").write_text("")  # read through the patched reader below
    second = study(tmp_path, round=values, after="first.toml", methods=methods)

    def read(given: Any, root: Path | None = None) -> Study:
        del given, root
        return Study("first", first.config, tmp_path, tmp_path / "first.toml")

    from holdfast.compare import grid

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(grid, "read_study", read)
        done = run_study(second, tmp_path / "second", run_here, silent, figures=False)
    assert done.failed == []
    config = json.loads(RunFolder(done.choices[0].jobs[0].folder).config.read_text())
    assert Path(config["model"]["start"]).parent.name == "candidates"
    assert read_json(Path(config["model"]["start"]) / "model.json")["heads"]


def test_impossible_places_to_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    with pytest.raises(UserError, match="at least 1"):
        choose_runner(0, None)
    real = builtins.__import__

    def without_ray(name: str, *rest: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(UserError, match="not installed"):
        choose_runner(1, "local")


def test_jobs_run_seed_by_seed_and_interpolations_last(tmp_path: Path) -> None:
    jobs = plan(study(tmp_path, seeds=[3, 0]), tmp_path / "out")
    ran: list[Job] = []

    def notes(tasks: Tasks) -> Iterator[Outcome]:
        for job, action in tasks:
            ran.append(job)
            yield Outcome(job, action, JobRecord("failed", error="not run"))

    run_jobs(jobs, notes, silent)
    assert [job.seed for job in ran] == [3, 3, 0, 0, 3, 3, 0, 0]  # RM's two settings, then what interpolates them
    assert [job.parent is None for job in ran] == [True] * 4 + [False] * 4
    assert {job.name for job in ran} == {job.name for job in jobs}


@pytest.mark.slow
def test_processes_do_what_one_process_does_and_one_that_dies_takes_its_job_only(tmp_path: Path) -> None:
    import multiprocessing
    import threading
    import time

    found = study(tmp_path, seeds=[0, 1])
    run_jobs(plan(found, tmp_path / "here"), run_here, silent)
    assert run_jobs(plan(found, tmp_path / "there"), LocalRunner(2), silent) == []
    for here, elsewhere in zip(plan(found, tmp_path / "here"), plan(found, tmp_path / "there"), strict=True):
        assert weights(here) == weights(elsewhere)
        assert JobFolder(here.folder).read().dev == JobFolder(elsewhere.folder).read().dev

    long = {**VALUES["round"], "train": {**VALUES["round"]["train"], "steps": 400}, "evaluate": {"every": 400}}
    slow = study(tmp_path, round=long, methods=[{"name": "rm", "label": "RM"}], seeds=[0, 1])
    jobs = plan(slow, tmp_path / "killed")

    def kill_one() -> None:
        while not (jobs[0].folder / "metrics.jsonl").exists():
            time.sleep(0.05)
        victim = next(child for child in multiprocessing.active_children() if child.pid is not None)
        os.kill(victim.pid or 0, signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    failed = run_jobs(jobs, LocalRunner(2), silent)
    killer.join()
    assert len(failed) == 1
    assert "code -9" in failed[0][1]
    assert sorted(JobFolder(job.folder).read().status for job in jobs) == ["done", "failed"]


@pytest.mark.slow
def test_the_same_study_on_a_local_ray(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    broken = {"name": "der", "label": "broken", "set": {"data.prompts": "prompts.toml"}}
    found = study(tmp_path, methods=[broken, *VALUES["methods"]])
    try:
        result = run_study(found, tmp_path / "ray", choose_runner(1, "local"), silent, figures=False)
    finally:
        ray.shutdown()
    assert [name.split(" ")[0] for name, _ in result.failed] == ["broken"]
    assert {choice.row for choice in result.choices} == {"RM", "WiSE-FT"}
    here = study(tmp_path)
    run_jobs(plan(here, tmp_path / "here"), run_here, silent)
    elsewhere = [job for job in plan(found, tmp_path / "ray") if job.row != "broken"]
    for item, other in zip(plan(here, tmp_path / "here"), elsewhere, strict=True):
        assert JobFolder(item.folder).read().dev == JobFolder(other.folder).read().dev


def test_singular_values_of_the_chosen_runs_are_a_table(tmp_path: Path) -> None:
    from holdfast.compare.singular import write_singular_values
    from holdfast.rounds.diagnose import diagnose_run

    methods = [
        {"name": "holdfast", "label": "With heads"},
        {"name": "holdfast", "label": "Without heads", "set": {"model.head_rank": 0}},
        {"name": "wise_ft", "of": "With heads", "lambdas": [0.5]},
    ]
    result = run_study(study(tmp_path, methods=methods), tmp_path / "out", run_here, silent, figures=False)
    lines: list[str] = []
    table = write_singular_values(result, lines.append, images=4)
    assert len(lines) == 4  # two trained rows, before and after
    ((heads, plain),) = table.groups
    job = next(choice.jobs[0] for choice in result.choices if choice.row == "With heads")
    after = diagnose_run(job.folder, at="end", images=4)
    shown = f"{after.singular_value:.4g}(0)", f"{after.singular_value_without_heads:.4g}(0)"
    assert (heads[4].text, heads[5].text) == shown
    assert plain[4].text == plain[5].text  # no heads: both are the same
    assert (tmp_path / "out" / "tables" / "singular-values.tex").exists()
    again: list[str] = []
    assert write_singular_values(result, again.append, images=4) == table
    assert again == []  # kept in the jobs' folders
