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


def _figures(compared: Comparison) -> dict[str, Any]:
    return {
        "worst_change": compared.dev_safety,
        "target_gain": compared.target_gain,
        "kept_every_class": compared.safe,
        "change": {name: item.accuracy_change for name, item in compared.tasks.items()},
    }


def one_seed(seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = demo(Path(folder), seed, device="cpu", quiet=True)
        handed = result.round.test
        return {
            "seed": seed,
            "plain": _figures(result.plain),
            "holdfast": _figures(result.holdfast),
            "handed_back": {"chosen": result.round.chosen, **(_figures(handed) if handed else {})},
            "seconds": round(time.perf_counter() - began, 1),
        }


def draw(results: Path, figure: Path) -> None:
    """Change of every class, a dot a seed, plain fine-tuning beside holdfast."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    runs = json.loads(results.read_text())["runs"]
    names = list(runs[0]["plain"]["change"])
    canvas, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for offset, name, label, colour in (
        (-0.17, "plain", "plain fine-tuning", "#c0392b"),
        (0.17, "holdfast", "holdfast", "#1f6f8b"),
    ):
        for place, task in enumerate(names):
            values = [100 * run[name]["change"][task] for run in runs]
            axes.scatter([place + offset] * len(values), values, s=14, color=colour, alpha=0.45, linewidths=0)
            axes.hlines(statistics.median(values), place + offset - 0.13, place + offset + 0.13, color=colour, lw=2.5)
        axes.scatter([], [], color=colour, label=label)
    axes.axhline(0, color="#555555", lw=0.8)
    axes.set_xticks(range(len(names)), [f"{task}\n(target)" if task == names[-1] else task for task in names])
    axes.set_ylabel("change of accuracy (points)")
    axes.set_title(f"Teaching a digit classifier the eight: {len(runs)} seeds, test images", fontsize=10, loc="left")
    axes.legend(frameon=False, loc="upper left", ncols=2, bbox_to_anchor=(0, 0.97))
    axes.spines[["top", "right"]].set_visible(False)
    figure.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(figure, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path, help="draw benchmarks/results/demo.json and stop")
    arguments = parser.parse_args()
    if arguments.figure:
        draw(Path(__file__).parent / "results" / "demo.json", arguments.figure)
        return
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
        **{
            f"median_{key}": statistics.median(run["handed_back"][key] for run in shipped) if shipped else 0.0
            for key in ("target_gain", "worst_change")
        },
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
