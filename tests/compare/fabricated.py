"""Job folders with results that nobody had to train for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast.compare.grid import Job, Study, StudyConfig, plan
from holdfast.compare.records import JobFolder, JobRecord, Score, write_comparison
from holdfast.config import parse
from holdfast.evaluate.metrics import Comparison, TaskChange

ROUND: dict[str, Any] = {
    "task": {"target": "wanted"},
    "data": {"source": {"kind": "digits"}},
    "model": {"architecture": "tiny"},
}


def make_study(root: Path, **values: Any) -> Study:
    given = {"round": ROUND, "methods": [{"name": "rm", "grid": {"alpha": [0.1, 1.0]}}], "seeds": [0, 1], **values}
    return Study("small", parse(StudyConfig, given, "STUDY.toml"), root, root / "STUDY.toml")


def change(examples: int, before: int, now: int) -> TaskChange:
    gained, lost = max(0, now - before), max(0, before - now)
    return TaskChange(examples, before, now, gained, lost, 0.5, 0.4)


def comparison(worst: int, gain: int, tasks: int = 3) -> Comparison:
    """Of 50 images a task: the first task changes by ``worst``, the others by 1, the target by ``gain``."""
    protected = {f"task{k}": change(50, 40, 40 + (worst if k == 0 else 1)) for k in range(tasks)}
    return Comparison("wanted", {**protected, "wanted": change(50, 10, 10 + gain)})


def finish(job: Job, worst: int, gain: int, *, test: Comparison | None = None, tasks: int = 3) -> None:
    """Write what a finished job writes."""
    folder = JobFolder(job.folder)
    compared = comparison(worst, gain, tasks)
    folder.write(JobRecord("done", 20, Score.of(compared), seconds=1.0))
    write_comparison(folder.dev, compared)
    if test is not None:
        write_comparison(folder.test, test)
    lines: list[dict[str, Any]] = []
    for step in (10, 20):
        weight = {f"task{k}": (None if k else 3.0 / step) for k in range(tasks)}
        lines.append({"step": step, "weight": weight})
        share = step / 20
        figures = {"dev_safety": worst / 50 * share, "target_gain": gain / 50 * share}
        lines.append({"step": step, "evaluation": {**figures, "train_safety": 0.0, "train_gain": gain / 50}})
    folder.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def jobs_of(study: Study, root: Path) -> list[Job]:
    return plan(study, root)
