"""What a study's bookkeeping costs: beside training, with 1000 jobs, and in memory.

    python benchmarks/compare.py            # writes benchmarks/results/compare.json

1. 100 small studies on the embedded digits, each a real training run: time outside training, evaluation and data, as a
   share of the training time.
2. A study of 1000 jobs with finished results: time to list every job, and to choose and write all tables.
3. Memory of the process after 200 and after 2000 finished jobs of the same study.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, machine
from holdfast.compare.choose import choose, read_records
from holdfast.compare.grid import Job, Study, StudyConfig, plan
from holdfast.compare.output import write_outputs
from holdfast.compare.records import JobFolder, JobRecord, Score, write_comparison
from holdfast.config import parse
from holdfast.evaluate.metrics import Comparison, TaskChange
from holdfast.files import write_json

ROUND: dict[str, Any] = {
    "task": {"target": "eight"},
    "data": {"source": {"kind": "digits"}, "roles": {"dev": 0.2, "sealed": 0.0, "test": 0.2}, "constraint_images": 20},
    "model": {"architecture": "tiny", "head_rank": 4},
    "train": {"steps": 20, "batch": 16, "images_per_task": 2, "device": "cpu", "checkpoint_every": 1000},
    "evaluate": {"every": 10},
}


def study(folder: Path, **values: Any) -> Study:
    given = {"round": ROUND, "methods": [{"name": "rm"}], "seeds": [0], **values}
    return Study("benchmark", parse(StudyConfig, given, "benchmark"), folder, folder / "STUDY.toml")


def small_studies(folder: Path, count: int) -> dict[str, Any]:
    """Wall time of whole studies, and of what is not bookkeeping in them."""
    from holdfast.compare import run
    from holdfast.compare.pool import run_here
    from holdfast.compare.study import run_study

    working, own_test = 0.0, run.score_test

    def timed_test(job: Job) -> Comparison:
        nonlocal working
        began = time.perf_counter()
        try:
            return own_test(job)
        finally:
            working += time.perf_counter() - began

    run.score_test = timed_test
    training, began = 0.0, time.perf_counter()
    for number in range(count):
        found = study(folder, seeds=[number])
        out = folder / f"study-{number}"
        run_study(found, out, run_here, lambda text: None, figures=False)
        record = JobFolder(plan(found, out)[0].folder).read()
        working += record.seconds
        training += record.training_seconds
    wall = time.perf_counter() - began
    run.score_test = own_test
    return {
        "studies": count,
        "wall_seconds": round(wall, 2),
        "training_seconds": round(training, 2),
        "jobs_and_test_seconds": round(working, 2),
        "bookkeeping_seconds": round(wall - working, 2),
        "bookkeeping_share_of_training": round((wall - working) / training, 4),
    }


def fabricate(jobs: list[Job], tasks: int) -> None:
    """Finished results for every job, as large as those of a study with this many tasks."""
    names = [f"task{k}" for k in range(tasks)]
    change = TaskChange(50, 40, 41, 2, 1, 0.5, 0.4)
    compared = Comparison("eight", {**dict.fromkeys(names, change), "eight": change})
    record = JobRecord("done", 20, Score.of(compared), 1.0, 0.9)
    for job in jobs:
        folder = JobFolder(job.folder)
        folder.write(record)
        write_comparison(folder.dev, compared)
        write_comparison(folder.test, compared)


def thousand_jobs(folder: Path, tasks: int) -> dict[str, Any]:
    """Time to list and to tabulate a study of 1000 jobs: 10 rows, 5 columns, 4 settings, 5 seeds."""
    methods = [{"name": "rm", "label": f"RM {n}", "grid": {"alpha": [0.1, 1.0, 10.0, 100.0]}} for n in range(10)]
    found = study(folder, methods=methods, sizes=[10, 20, 30, 40, 50], seeds=[0, 1, 2, 3, 4])
    out = folder / f"thousand-{tasks}"
    fabricate(plan(found, out), tasks)
    began = time.perf_counter()
    jobs = plan(found, out)
    lines = [f"{job.name} · {job.folder}" for job in jobs]
    listed = time.perf_counter() - began
    records = read_records(jobs)
    choices = choose(jobs, records)
    files = write_outputs(found, jobs, records, choices, out, figures=False)
    return {
        "jobs": len(lines),
        "tasks": tasks,
        "list_seconds": round(listed, 3),
        "tabulate_seconds": round(time.perf_counter() - began - listed, 3),
        "list_and_tabulate_seconds": round(time.perf_counter() - began, 3),
        "files": len(files),
    }


def memory(folder: Path) -> dict[str, Any]:
    """Resident memory after this many finished jobs have been reported and tabulated."""
    found = study(folder, methods=[{"name": "rm", "grid": {"alpha": [0.1 * n for n in range(1, 41)]}}], seeds=range(50))
    out = folder / "memory"
    jobs = plan(found, out)
    fabricate(jobs, 10)
    after: dict[str, float] = {}
    for count in (200, 2000):
        records = read_records(jobs[:count])
        choose(jobs[:count], records)
        after[str(count)] = round(resident() / 2**20, 1)
    return {"mib_after_jobs": after}


def resident() -> int:
    """Bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "compare.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {
            "thousand_jobs": [thousand_jobs(folder, tasks) for tasks in (9, 364)],
            "memory": memory(folder),
            "small_studies": small_studies(folder, given.studies),
        }
    write_json(given.out, {"machine": machine(), "commit": commit(), **results})
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
