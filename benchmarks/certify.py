"""How long a certificate takes, beside statsmodels' exact McNemar test on the same tables.

    python benchmarks/certify.py [--workers 2] [--out benchmarks/results/certify.json]

Two loads: 364 tasks with 100 to 5000 images each, and 5 tasks with up to 1000; p-values, verdicts, simultaneous and
single lower bounds and the planner's advice included, nothing cached. Wall time says little on a busy machine: the
processor time of one process and the load average stand beside it. The exact McNemar test answers another question
(H0: Δ = 0, given the number of flips; no margin, no bound); it is here as the price of an ordinary p-value.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from holdfast.certify import report as advice
from holdfast.certify.claims import Counts, evaluate
from holdfast.certify.report import report
from holdfast.files import write_json

MARGIN, DELTA = 0.02, 0.05


def load(tasks: int, smallest: int, largest: int, seed: int = 0) -> list[Counts]:
    """Tasks of random size and discordance, unchanged in the population."""
    generator = np.random.default_rng(seed)
    made: list[Counts] = []
    for index in range(tasks):
        n = int(generator.integers(smallest, largest + 1))
        flip = float(generator.choice([0.005, 0.02, 0.05, 0.1]))
        gained, lost, _ = generator.multinomial(n, [flip / 2, flip / 2, 1 - flip])
        made.append(Counts(f"task-{index:03d}", n, int(gained), int(lost)))
    return made


def certificate_seconds(counts: list[Counts], workers: int) -> tuple[float, float, str]:
    """Wall and processor time (of this process) of a verdict with all that is told about it."""
    advice._sufficient.cache_clear()
    started, used = time.perf_counter(), time.process_time()
    result = evaluate(counts, {count.task: MARGIN for count in counts}, DELTA, disjoint=True, workers=workers)
    reported = report(result, confidence=1 - DELTA)
    return time.perf_counter() - started, time.process_time() - used, reported["verdict"]


def mcnemar_seconds(counts: list[Counts]) -> float:
    """Wall time of statsmodels' exact McNemar p-values of the same tables."""
    from statsmodels.stats.contingency_tables import mcnemar  # here: worker processes import this file too

    started = time.perf_counter()
    for count in counts:
        mcnemar([[count.n - count.gained - count.lost, count.lost], [count.gained, 0]], exact=True)
    return time.perf_counter() - started


def command_seconds(counts: list[Counts]) -> float:
    """Wall time of the whole command on a CSV, Python's start included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predictions.csv"
        with path.open("w") as file:
            file.write("task,label,old,new\n")
            for count in counts:
                same = count.n - count.gained - count.lost
                name = count.task
                file.write(
                    f"{name},{name},other,{name}\n" * count.gained + f"{name},{name},{name},other\n" * count.lost
                )
                file.write(f"{name},{name},{name},{name}\n" * same)
        command = [sys.executable, "-m", "holdfast", "certify", "--predictions", str(path), "--margin", str(MARGIN)]
        started = time.perf_counter()
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
    assert json.loads(done.stdout)["verdict"], done.stderr
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/certify.json"))
    arguments = parser.parse_args()
    results: dict[str, dict[str, float | str]] = {}
    for name, counts in (
        ("5 tasks, n 100..1000", load(5, 100, 1000)),
        ("364 tasks, n 100..5000", load(364, 100, 5000)),
    ):
        seconds, _, verdict = certificate_seconds(counts, arguments.workers)
        alone, processor, _ = certificate_seconds(counts, 1)
        results[name] = {
            "images": sum(count.n for count in counts),
            "verdict": verdict,
            "certificate_seconds": seconds,
            "certificate_seconds_one_process": alone,
            "processor_seconds_one_process": processor,
            "command_seconds": command_seconds(counts),
            "exact_mcnemar_seconds": mcnemar_seconds(counts),
        }
        print(name, json.dumps(results[name]))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    machine = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }
    write_json(
        arguments.out,
        {"results": results, "workers": arguments.workers, "machine": machine, "commit": commit.stdout.strip()},
    )


if __name__ == "__main__":
    main()
