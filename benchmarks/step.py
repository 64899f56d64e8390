"""Time and memory of a step, from the product's own loop: the two shapes of the paper, in the default form (which asks
the old model about every picture) and in the published one, with clean and paired views.

    python benchmarks/step.py                       # writes benchmarks/results/step.json and step-full.json
    python benchmarks/step.py --shapes tiny --out /tmp/results
    python benchmarks/step.py --kernels             # only step-kernels.txt: which kernels ten steps are made of

Pictures are read from a packed file and augmented on the device; losses are logged every ten steps and gradient shares
measured as in any round.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, machine
from holdfast.methods import base
from holdfast.methods.forms import Form
from holdfast.runtime import Runtime, started
from holdfast.train.bench import Figures, measure
from holdfast.train.loop import train
from holdfast.train.shapes import SHAPES, made_up_round, made_up_run, train_config, write_pictures


def measure_shape(
    shape_name: str, folder: Path, runtime: Runtime, views: str, form: Form, steps: int, **changes: Any
) -> Figures:
    shape = SHAPES[shape_name]
    config = train_config(shape, **changes)
    path = folder / f"{shape_name}.bin"
    pixels = write_pictures(path, shape.images, shape.size)
    method, plan = made_up_run(
        shape, made_up_round(shape, pixels), config, runtime, paired=views == "paired", form=form
    )
    return measure(method, made_up_round(shape, pixels), plan, runtime, steps=steps)


class Kernels:
    """Notes the kernels of steps 21 to 30, with texts and pictures on one stream, so that none runs beside another."""

    def __init__(self) -> None:
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def step(self, done: int, values: Mapping[str, float]) -> None:
        if done == 20:
            self.profile.__enter__()
        elif done == 30:
            torch.cuda.synchronize()
            self.profile.__exit__(None, None, None)

    def evaluated(self, done: int, record: Mapping[str, Any]) -> None:
        pass

    def table(self) -> str:
        rows: dict[str, list[float]] = {}
        for event in self.profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                row = rows.setdefault(event.name, [0.0, 0.0])
                row[0] += 0.1
                row[1] += event.device_time_total / 1e4
        lines = [f"all {sum(row[1] for row in rows.values()):.2f} ms a step"]
        for name, (count, milliseconds) in sorted(rows.items(), key=lambda item: -item[1][1])[:80]:
            lines.append(f"{milliseconds:8.3f} ms {count:7.1f} times  {name[:120]}")
        return "\n".join(lines)


def at_once(device: torch.device, function: Callable[[], Any], *, on_its_own: bool) -> Callable[[], Any]:
    """In place of ``fast.beside``: everything on one stream."""
    value = function()
    return lambda: value


def kernels(shape_name: str, folder: Path, runtime: Runtime) -> str:
    shape = SHAPES[shape_name]
    data = made_up_round(shape, write_pictures(folder / f"{shape_name}.bin", shape.images, 224))
    method, plan = made_up_run(shape, data, train_config(shape, steps=30), runtime, paired=False)
    beside, base.beside = base.beside, at_once
    noted = Kernels()
    try:
        train(method, data, plan, runtime, progress=noted)
    finally:
        base.beside = beside
    return f"{shape_name}: {noted.table()}"


def line(name: str, figures: Figures) -> str:
    parts = "  ".join(f"{part} {value:.1f}" for part, value in figures.parts.items())
    return (
        f"{name:32s} {figures.milliseconds:7.1f} ms ({figures.fastest:.1f}-{figures.slowest:.1f})  "
        f"{figures.memory_gib:5.1f} GiB  {figures.images_per_second:6.0f} images/s  "
        f"{100 * figures.share:4.1f} % of {figures.matrix_rate:.0f} TFLOP/s  first {figures.first_step_seconds:.0f} s"
        f"\n{'':32s} {parts}"
    )


def write(out: Path, short: dict[str, Any], full: dict[str, Any]) -> None:
    """After every run: a run that is cut short keeps what it has."""
    described = machine()
    name = described.get("gpu", f"{described['cores']} CPU cores")
    out.mkdir(parents=True, exist_ok=True)
    brief = {**short, "machine": f"{name}, torch {torch.__version__}", "commit": commit()}
    (out / "step.json").write_text(json.dumps(brief, indent=2) + "\n")
    (out / "step-full.json").write_text(json.dumps(full, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["bdd100k", "places365"], choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--views", nargs="+", default=["clean", "paired"], choices=["clean", "paired"])
    parser.add_argument(
        "--forms", nargs="+", default=["default", "published"], choices=["default", "published", "authors"]
    )
    parser.add_argument("--plain", action="store_true", help="also the towers' own modules under autocast")
    parser.add_argument("--eager", action="store_true", help="also the fast towers without compilation")
    parser.add_argument("--kernels", action="store_true", help="profile ten steps instead, on a GPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    variants: dict[str, dict[str, Any]] = {"fast": {}}
    if arguments.eager:
        variants["eager"] = {"speed": "fast"}
    if arguments.plain:
        variants["plain"] = {"speed": "plain"}
    full: dict[str, Any] = {"machine": machine(), "commit": commit(), "steps": arguments.steps, "runs": []}
    short: dict[str, Any] = {}
    lines: list[str] = []
    with started("auto") as runtime, tempfile.TemporaryDirectory() as folder:
        if arguments.kernels:
            tables = [kernels(shape, Path(folder), runtime) for shape in arguments.shapes]
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "step-kernels.txt").write_text("\n\n".join(tables) + "\n")
            return
        for shape in arguments.shapes:
            for variant, changes in variants.items():
                for form, views in itertools.product(arguments.forms, arguments.views):
                    began = time.perf_counter()
                    try:
                        figures = measure_shape(shape, Path(folder), runtime, views, form, arguments.steps, **changes)
                    except Exception:
                        traceback.print_exc()
                        continue
                    seconds = time.perf_counter() - began
                    lines.append(line(f"{shape} {form} {views} {variant}", figures))
                    print(lines[-1], f" all in {seconds:.0f} s", flush=True)
                    run = {"shape": shape, "form": form, "views": views, "towers": variant, "seconds": seconds}
                    run |= figures.to_json()
                    full["runs"].append(run)
                    if variant == "fast":
                        entry = short.setdefault(shape, {}).setdefault(form, {})
                        if views == "clean":
                            entry |= {"ms": round(figures.milliseconds, 2), "gib": round(figures.memory_gib, 2)}
                        else:
                            entry["paired_ms"] = round(figures.milliseconds, 2)
                    write(arguments.out, short, full)
                    gc.collect()
                    if torch.cuda.is_available():
                        torch.cuda.empty_cache()
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
