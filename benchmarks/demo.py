"""The demo over ten seeds: in how many of them did each method keep every class?

python benchmarks/demo.py --seeds 10 --jobs 2 --out benchmarks/results/demo.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from holdfast.evaluate.metrics import Comparison
from holdfast.rounds.demo import demo


def _told(compared: Comparison) -> dict[str, Any]:
    return {
        "worst_change": compared.dev_safety,
        "target_gain": compared.target_gain,
        "kept_every_class": compared.safe,
        "change": {name: one.accuracy_change for name, one in compared.tasks.items()},
    }


def one_seed(seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = demo(Path(folder), seed, device="cpu", quiet=True)
        handed = result.round.test
        return {
            "seed": seed,
            "plain": _told(result.plain),
            "holdfast": _told(result.holdfast),
            "handed_back": {"chosen": result.round.chosen, **(_told(handed) if handed else {})},
            "seconds": round(time.perf_counter() - began, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        runs = pool.map(one_seed, range(arguments.seeds), chunksize=1)
    summary: dict[str, Any] = {}
    for name in ("plain", "holdfast"):
        summary[name] = {
            "median_worst_change": statistics.median(run[name]["worst_change"] for run in runs),
            "median_target_gain": statistics.median(run[name]["target_gain"] for run in runs),
            "kept_every_class": sum(run[name]["kept_every_class"] for run in runs),
        }
    shipped = [run for run in runs if run["handed_back"]["chosen"]]
    summary["handed_back"] = {
        "new_model": len(shipped),
        "kept_every_class": sum(run["handed_back"]["kept_every_class"] for run in shipped),
        "median_target_gain": statistics.median(run["handed_back"]["target_gain"] for run in shipped)
        if shipped
        else 0.0,
    }
    summary["drop_ratio"] = summary["holdfast"]["median_worst_change"] / summary["plain"]["median_worst_change"]
    summary["gain_ratio"] = summary["holdfast"]["median_target_gain"] / summary["plain"]["median_target_gain"]
    print(json.dumps(summary, indent=2))
    if arguments.out:
        commit = (
            os.environ.get("HOLDFAST_COMMIT")
            or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
        )
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        arguments.out.write_text(
            json.dumps({"machine": machine, "commit": commit, "summary": summary, "runs": runs}, indent=1)
        )


if __name__ == "__main__":
    main()
