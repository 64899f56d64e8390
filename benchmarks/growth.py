"""How a round grows: step time and memory against protected tasks, classes and target pairs; evaluation against images.

    OMP_NUM_THREADS=1 python benchmarks/growth.py      # writes results/growth.json and docs/figures/growth.png

Tiny towers on a CPU: everything that grows is outside them, and small towers show it sooner. Times are processor time
of the product's loop, which other processes on the machine do not change.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
mpl.use("Agg")

from matplotlib import pyplot

from benchmarks.machine import commit, machine
from holdfast.data.round import LabelledSet, RoundData
from holdfast.data.sources.store import PackedPixels
from holdfast.data.task import TaskSpec
from holdfast.evaluate.predict import predict
from holdfast.runtime import Runtime
from holdfast.train.loop import train
from holdfast.train.shapes import SHAPES, Shape, made_up_round, made_up_run, train_config, write_pictures

CPU = Runtime(torch.device("cpu"))
BASE = replace(SHAPES["tiny"], protected=5, batch=32, tasks_per_step=5, images_per_task=2, constraint_per_task=4)
PROMPTS = 1000  # in all, where the number of tasks varies and the number of prompts must not


class _Clock:
    """Processor time at each logged step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def step(self, done: int, values: object) -> None:
        self.times.append(time.process_time())

    def evaluated(self, done: int, record: object) -> None:
        pass


def step_time(shape: Shape, data: RoundData) -> tuple[float, int]:
    """Milliseconds of a step (median of stretches of five), and bytes of the method's moving averages."""
    config = train_config(shape, steps=25, log_every=5, device="cpu")
    method, plan = made_up_run(shape, data, config, CPU, paired=False)
    clock = _Clock()
    # Gradient shares are measured at the first logged step only, which is not counted.
    train(method, data, replace(plan, share_every=1000), CPU, progress=clock)
    averages = [value for name, value in method.named_buffers() if "log_u" in name or ".u." in name]
    return float(1000 * np.median(np.diff(clock.times)) / 5), sum(
        average.numel() * average.element_size() for average in averages
    )


def with_prompts(data: RoundData, count: int) -> RoundData:
    """The same round with ``count`` prompts in all, spread over its classes."""
    classes = data.tasks.classes
    each = [count // len(classes) + (k < count % len(classes)) for k in range(len(classes))]
    prompts = tuple(tuple(f"{j} a photo of a {name}" for j in range(n)) for name, n in zip(classes, each, strict=True))
    return replace(data, tasks=TaskSpec(data.tasks.target, data.tasks.protected, prompts))


def tasks(count: int, pixels: PackedPixels) -> dict[str, Any]:
    shape = replace(BASE, protected=count)
    milliseconds, size = step_time(shape, with_prompts(made_up_round(shape, pixels), PROMPTS + 1))
    return {"milliseconds": milliseconds, "bytes_of_averages": size}


def classes(count: int, pixels: PackedPixels) -> dict[str, Any]:
    shape = replace(BASE, protected=count - 1)
    milliseconds, size = step_time(shape, made_up_round(shape, pixels))
    return {"milliseconds": milliseconds, "bytes_of_averages": size}


def pairs(count: int, pixels: PackedPixels) -> dict[str, Any]:
    shape = replace(BASE, target_pairs=count)
    milliseconds, size = step_time(shape, made_up_round(shape, pixels))
    return {"milliseconds": milliseconds, "bytes_of_averages": size, "bytes_an_index_and_direction": size / count / 2}


def evaluation(count: int, pixels: PackedPixels) -> dict[str, Any]:
    data = made_up_round(BASE, pixels)
    method, _ = made_up_run(BASE, data, train_config(BASE, steps=1, device="cpu"), CPU, paired=False)
    rows = np.arange(count) % len(pixels)
    examples = LabelledSet(pixels, rows, rows % 5, tuple(str(i) for i in range(count)))
    predict(method.model, data.constraint, data.tasks.classes)  # what only the first call pays for
    began = time.process_time()
    predict(method.model, examples, data.tasks.classes)
    return {"milliseconds": 1000 * (time.process_time() - began)}


SWEEPS: dict[str, tuple[str, Callable[[int, PackedPixels], dict[str, Any]], list[int]]] = {
    "tasks": (f"protected tasks (5 visited a step, {PROMPTS} prompts in all)", tasks, [5, 20, 100, 300, 999]),
    "classes": ("classes, one prompt each (5 tasks visited a step)", classes, [10, 30, 100, 300, 1000]),
    "pairs": ("target pairs", pairs, [10**3, 10**4, 10**5, 10**6, 10**7]),
    "evaluation": ("images evaluated", evaluation, [1000, 2000, 4000, 8000]),
}


def draw(result: dict[str, Any], path: Path) -> None:
    figure, axes = pyplot.subplots(1, len(SWEEPS), figsize=(16, 3.4), constrained_layout=True)
    for axis, (name, (label, _, _)) in zip(axes, SWEEPS.items(), strict=True):
        points = result["sweeps"][name]
        axis.plot(
            [point["count"] for point in points], [point["milliseconds"] for point in points], "o-", color="#20639b"
        )
        axis.set(xscale="log", xlabel=label, ylabel="ms" if name == "evaluation" else "ms a step")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SWEEPS), choices=list(SWEEPS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--figure", type=Path, default=Path(__file__).parents[1] / "docs" / "figures" / "growth.png")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "machine": machine(),
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "sweeps": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        pixels = write_pictures(Path(folder) / "pixels.bin", BASE.images, 32)
        for name in arguments.only:
            _, measure, counts = SWEEPS[name]
            points = result["sweeps"][name] = []
            for count in counts:
                points.append({"count": count, **measure(count, pixels)})
                print(name, points[-1], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "growth.json").write_text(json.dumps(result, indent=2) + "\n")
    if set(result["sweeps"]) == set(SWEEPS):
        draw(result, arguments.figure)


if __name__ == "__main__":
    main()
