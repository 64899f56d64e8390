"""Time and memory of a step, from the product's own loop: the two shapes of the paper, in the default form (which asks
the old model about every picture) and in the published one, with clean and paired views.

    python benchmarks/step.py                       # writes benchmarks/results/step.json and step-full.json
    python benchmarks/step.py --shapes tiny --out /tmp/results
    python benchmarks/step.py --shapes bdd100k-siglip --views clean --open-clip     # open_clip's own step beside ours
    python benchmarks/step.py --kernels             # only step-kernels.txt: which kernels ten steps are made of
    python benchmarks/step.py --kernels --shapes small --forms default

Pictures are read from a packed file and augmented on the device; losses are logged every ten steps and gradient shares
measured as in any round. With ``--open-clip`` open_clip's own step (``benchmarks/open_clip_step.py``) is timed after
each shape, in the same process, with as many pairs as the step has pictures; a large model takes minutes to compile.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import open_clip_step
from benchmarks.machine import commit, machine
from holdfast.methods import base
from holdfast.methods.forms import Form
from holdfast.model.towers import TwoTowers
from holdfast.runtime import Runtime, started
from holdfast.train.bench import Figures, measure
from holdfast.train.loop import train
from holdfast.train.shapes import SHAPES, made_up_round, made_up_run, made_up_towers, train_config, write_pictures


@lru_cache(maxsize=1)
def towers_of(architecture: str) -> TwoTowers:
    """Every run begins with a copy of these: random weights of a large model take a while to draw."""
    return made_up_towers(architecture)


def measure_shape(
    shape_name: str,
    folder: Path,
    runtime: Runtime,
    views: str,
    form: Form,
    steps: int,
    warm_up: int = 20,
    **changes: Any,
) -> Figures:
    shape = SHAPES[shape_name]
    config = train_config(shape, **changes)
    path = folder / f"{shape_name}.bin"
    pixels = write_pictures(path, shape.images, shape.size)
    data = made_up_round(shape, pixels, form=form)
    method, plan = made_up_run(
        shape, data, config, runtime, paired=views == "paired", form=form, towers=towers_of(shape.architecture)
    )
    return measure(method, data, plan, runtime, steps=steps, warm_up=warm_up)


def measure_open_clip(
    shape_name: str, steps: int, modes: Sequence[str], device: torch.device, backend: str = "inductor"
) -> dict[str, Any]:
    """open_clip's own step with as many pairs as a step of ours has pictures; what cannot be measured is left out."""
    shape = SHAPES[shape_name]
    found: dict[str, Any] = {"pairs": shape.pictures}
    for mode in modes:
        open_clip_step.free_memory()
        began = time.perf_counter()
        try:
            row = open_clip_step.measured(
                shape.architecture,
                shape.pictures,
                steps,
                compiled=mode == "compiled",
                device=device,
                backend=backend,
            )
        except Exception:  # out of memory, or no model of open_clip
            traceback.print_exc()
            continue
        found |= {f"{mode}_ms": row["ms"], f"{mode}_gib": row["gib"]}
        print(f"{shape_name} open_clip {mode} {row}  all in {time.perf_counter() - began:.0f} s", flush=True)
    open_clip_step.free_memory()
    return found


def beside(shape: str, entry: Mapping[str, Any]) -> list[str]:
    """Lines that put our forms beside open_clip's step: above 1, ours takes less time."""
    theirs = entry.get("open_clip", {})
    return [
        f"{shape} {form}: {entry[form]['ms']:.1f} ms, open_clip {mode} {theirs[f'{mode}_ms']:.1f} ms, "
        f"{theirs[f'{mode}_ms'] / entry[form]['ms']:.2f} times ours"
        for form in entry
        if form != "open_clip" and "ms" in entry[form]
        for mode in open_clip_step.MODES
        if f"{mode}_ms" in theirs
    ]


# Kernels by what they do, the first pattern that fits; names are those of cuDNN, cuBLAS, PyTorch, Triton and our own.
GROUPS = {
    "depthwise convolutions": r"depthwise|dgrad2d_c1|wgrad2d_c1|fprop2d_c1|dwconv|grouped_direct",
    "attention": r"attend|flash|fmha|attention",
    "other convolutions": r"conv|fprop|dgrad|wgrad|im2col|nchw|nhwc",
    "optimizer, gradient norm, foreach": r"multi_tensor_apply",
    "matrix products": r"gemm|nvjet|cutlass|splitk|activation_product|cublas",
    "norms": r"norm",
    "sums": r"reduce|sum",
    "random views": r"_look|normalize_views|_views|grid_sampler|upsample",
    "sorting, embeddings, indexing": r"sort|scan|index|gather|scatter|embedding",
    "copies between host and device": r"Memcpy (HtoD|DtoH)",
    "casts and copies": r"copy|memcpy|memset|fill|cat",
    "other passes over values": r".",
}


def group_of(name: str) -> str:
    """What a kernel does, by its name."""
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE))


class Kernels:
    """Notes the kernels of steps 21 to 30, with texts and pictures on one stream, so that none runs beside another."""

    def __init__(self) -> None:
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.began = self.took = 0.0

    def step(self, done: int, values: Mapping[str, float]) -> None:
        if done == 20:
            self.profile.__enter__()
            self.began = time.perf_counter()
        elif done == 30:
            torch.cuda.synchronize()
            self.took = 100 * (time.perf_counter() - self.began)
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
        return f"{kernel_table(rows)}\nby the clock, profiled: {self.took:.2f} ms a step"


def kernel_table(rows: Mapping[str, Sequence[float]]) -> str:
    """Times and milliseconds a step of kernels by name, first by what they do."""
    groups: dict[str, list[float]] = {group: [0.0, 0.0] for group in GROUPS}
    for name, row in rows.items():
        for place, value in enumerate(row):
            groups[group_of(name)][place] += value

    def described(items: Mapping[str, Sequence[float]]) -> list[str]:
        ordered = sorted(items.items(), key=lambda item: -item[1][1])
        return [f"{took:8.3f} ms {count:7.1f} times  {name[:120]}" for name, (count, took) in ordered if count]

    count, total = (sum(row[place] for row in rows.values()) for place in (0, 1))
    return "\n".join(
        [f"all {total:.2f} ms and {count:.0f} kernels a step", *described(groups), "", *described(rows)[:80]]
    )


def at_once(device: torch.device, function: Callable[[], Any], *, wanted: bool) -> Callable[[], Any]:
    """In place of ``on_side_stream``: everything on one stream."""
    value = function()
    return lambda: value


def kernels(shape_name: str, folder: Path, runtime: Runtime, form: Form) -> str:
    shape = SHAPES[shape_name]
    pixels = write_pictures(folder / f"{shape_name}.bin", shape.images, shape.size)
    data = made_up_round(shape, pixels, form=form)
    config = train_config(shape, steps=30, log_every=10)
    method, plan = made_up_run(shape, data, config, runtime, paired=False, form=form)
    side_stream, base.on_side_stream = base.on_side_stream, at_once
    noted = Kernels()
    try:
        train(method, data, plan, runtime, progress=noted)
    finally:
        base.on_side_stream = side_stream
    return f"{shape_name}, {form}: {noted.table()}"


def profile(shapes: Sequence[str], forms: Sequence[Form], out: Path, folder: Path, runtime: Runtime) -> None:
    """Print the kernels of each shape and form by what they do; all of them go into a file."""
    if runtime.device.type != "cuda":
        raise SystemExit("kernels are a GPU's: run this on one")
    tables: list[str] = []
    out.mkdir(parents=True, exist_ok=True)
    for shape, form in itertools.product(shapes, forms):
        tables.append(kernels(shape, folder, runtime, form))
        print(tables[-1].partition("\n\n")[0], flush=True)
        (out / "step-kernels.txt").write_text("\n\n".join(tables) + "\n")


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


def variants_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Ways of computing a step that are asked for: changes to [train] by name."""
    variants: dict[str, dict[str, Any]] = {"fast": {}}
    if arguments.eager:
        variants["eager"] = {"speed": "fast"}
    if arguments.plain:
        variants["plain"] = {"speed": "plain"}
    return variants


class Results:
    """What was measured so far, on the screen and in files."""

    def __init__(self, out: Path, steps: int) -> None:
        self.out = out
        self.full: dict[str, Any] = {"machine": machine(), "commit": commit(), "steps": steps, "runs": []}
        self.short: dict[str, Any] = {}
        self.lines: list[str] = []

    def add(self, shape: str, variant: str, form: Form, views: str, figures: Figures, seconds: float) -> None:
        """A run of ours."""
        self.lines.append(line(f"{shape} {form} {views} {variant}", figures))
        print(self.lines[-1], f" all in {seconds:.0f} s", flush=True)
        run = {"shape": shape, "form": form, "views": views, "towers": variant, "seconds": seconds}
        self.full["runs"].append(run | figures.to_json())
        if variant == "fast":
            entry = self.short.setdefault(shape, {}).setdefault(form, {})
            if views == "clean":
                entry |= {"ms": round(figures.milliseconds, 2), "gib": round(figures.memory_gib, 2)}
            else:
                entry["paired_ms"] = round(figures.milliseconds, 2)
        write(self.out, self.short, self.full)

    def add_open_clip(self, shape: str, theirs: dict[str, Any]) -> None:
        """open_clip's step, after ours."""
        entry = self.short.setdefault(shape, {})
        entry["open_clip"] = theirs
        self.full["runs"].append({"shape": shape, "open_clip": theirs})
        self.lines += (found := beside(shape, entry))
        print(*found, sep="\n", flush=True)
        write(self.out, self.short, self.full)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["bdd100k", "places365"], choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=20, help="steps before those that are timed")
    parser.add_argument("--views", nargs="+", default=["clean", "paired"], choices=["clean", "paired"])
    parser.add_argument(
        "--forms", nargs="+", default=["default", "published"], choices=["default", "published", "authors"]
    )
    parser.add_argument("--plain", action="store_true", help="also the towers' own modules under autocast")
    parser.add_argument("--eager", action="store_true", help="also the fast towers without compilation")
    parser.add_argument(
        "--open-clip",
        nargs="*",
        choices=open_clip_step.MODES,
        metavar="MODE",
        help="also open_clip's own step: eager, compiled, or both where none is named",
    )
    parser.add_argument("--kernels", action="store_true", help="profile ten steps instead, on a GPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    results = Results(arguments.out, arguments.steps)
    with started("auto") as runtime, tempfile.TemporaryDirectory() as folder:
        if arguments.kernels:
            profile(arguments.shapes, arguments.forms, arguments.out, Path(folder), runtime)
            return
        counts = arguments.steps, arguments.warm_up
        for shape in arguments.shapes:
            runs = itertools.product(variants_of(arguments).items(), arguments.forms, arguments.views)
            for (variant, changes), form, views in runs:
                began = time.perf_counter()
                try:
                    figures = measure_shape(shape, Path(folder), runtime, views, form, *counts, **changes)
                except Exception:
                    traceback.print_exc()
                else:
                    results.add(shape, variant, form, views, figures, time.perf_counter() - began)
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            if arguments.open_clip is not None:
                towers_of.cache_clear()
                modes = arguments.open_clip or open_clip_step.MODES
                results.add_open_clip(shape, measure_open_clip(shape, arguments.steps, modes, runtime.device))
    print("\n".join(["", *results.lines]))


if __name__ == "__main__":
    main()
