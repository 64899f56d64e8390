"""How long `certify` takes on 10,000 tasks with 19 different outcomes, and `plan` on the predictions of 364 tasks.

    python benchmarks/certify_speed.py

The tables are written as CSV first; reading and checking them is part of the time. Both are made from a fixed seed.
"""

from __future__ import annotations

import csv
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from holdfast import certify, plan

TASKS, IMAGES, OUTCOMES = 10_000, 60, [(gained, lost) for gained in range(5) for lost in range(4)][:19]
PLANNED, MARGIN = 364, 0.02


def write_outcomes(path: Path) -> Path:
    """``TASKS`` tasks of ``IMAGES`` images each, which repeat the outcomes in turn."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["example_id", "task", "old_correct", "new_correct"])
        for task in range(TASKS):
            gained, lost = OUTCOMES[task % len(OUTCOMES)]
            for image in range(IMAGES):
                old, new = int(image >= gained), int(not gained <= image < gained + lost)
                writer.writerow([f"{task}-{image}", f"task-{task:05}", old, new])
    return path


def write_dev(path: Path) -> Path:
    """Dev predictions of ``PLANNED`` tasks: 60 to 900 images each, which flip in 0.5 to 6 of 100."""
    draw = np.random.default_rng(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["example_id", "task", "old_correct", "new_correct"])
        for task in range(PLANNED):
            images, flips = int(draw.integers(60, 900)), draw.uniform(0.005, 0.06)
            old = draw.random(images) < 0.9
            new = old ^ (draw.random(images) < flips)
            for image in range(images):
                writer.writerow([f"{task}-{image}", f"task-{task:03}", int(old[image]), int(new[image])])
    return path


def main() -> None:
    """Print a row for each."""
    print(f"{os.cpu_count()} processors")
    print("| what | seconds | of the processor | result |")
    print("| --- | ---: | ---: | --- |")
    with tempfile.TemporaryDirectory() as folder:
        table, dev = write_outcomes(Path(folder) / "outcomes.csv"), write_dev(Path(folder) / "dev.csv")
        for claim in ("all", "each", "bounds"):
            row(f"certify, {TASKS:,} tasks, claim `{claim}`", partial(verdict_of, table, claim))
        row(f"plan, {PLANNED} tasks", lambda: f"{plan(dev, margin=MARGIN).images_needed:,} images a task")
        row(f"plan, {PLANNED} tasks, 500 images", lambda: f"margin {plan(dev, images=500).best_margin}")


def verdict_of(table: Path, claim: str) -> str:
    """What `certify` says about a table."""
    return str(certify(table, margin=MARGIN, claim=claim).verdict)


def row(what: str, work: Callable[[], object]) -> None:
    """Time it and print a row."""
    begin, busy = time.perf_counter(), time.process_time()
    result = work()
    print(f"| {what} | {time.perf_counter() - begin:.1f} | {time.process_time() - busy:.1f} | {result} |", flush=True)


if __name__ == "__main__":
    main()
