"""Time and memory of a step, from the product's own loop: the two shapes of the paper, clean and paired views.

    python benchmarks/step.py                       # writes benchmarks/results/step.json and step-full.json
    python benchmarks/step.py --shapes tiny --out /tmp/results

Pictures are read from a packed file and augmented on the device; losses are logged every ten steps and gradient shares
measured as in any round.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, machine
from holdfast.runtime import Runtime, started
from holdfast.train.bench import Figures, measure
from holdfast.train.shapes import SHAPES, made_up_round, made_up_run, train_config, write_pictures


def one(shape_name: str, folder: Path, runtime: Runtime, paired: bool, steps: int, **changes: Any) -> Figures:
    shape = SHAPES[shape_name]
    config = train_config(shape, **changes)
    size = 224 if shape.architecture.startswith("ViT") else 32
    path = folder / f"{shape_name}.bin"
    pixels = write_pictures(path, shape.images, size)
    method, plan = made_up_run(shape, made_up_round(shape, pixels), config, runtime, paired=paired)
    return measure(method, made_up_round(shape, pixels), plan, runtime, steps=steps)


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
    parser.add_argument("--plain", action="store_true", help="also the towers' own modules under autocast")
    parser.add_argument("--eager", action="store_true", help="also the fast towers without compilation")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    variants: dict[str, dict[str, Any]] = {"fast": {}}
    if arguments.eager:
        variants["eager"] = {"compile": False}
    if arguments.plain:
        variants["plain"] = {"towers": "plain"}
    full: dict[str, Any] = {"machine": machine(), "commit": commit(), "steps": arguments.steps, "runs": []}
    short: dict[str, Any] = {}
    lines: list[str] = []
    with started("auto") as runtime, tempfile.TemporaryDirectory() as folder:
        for shape in arguments.shapes:
            for variant, changes in variants.items():
                for views in arguments.views:
                    began = time.perf_counter()
                    try:
                        figures = one(shape, Path(folder), runtime, views == "paired", arguments.steps, **changes)
                    except Exception:
                        traceback.print_exc()
                        continue
                    seconds = time.perf_counter() - began
                    lines.append(line(f"{shape} {views} {variant}", figures))
                    print(lines[-1], f" all in {seconds:.0f} s", flush=True)
                    run = {"shape": shape, "views": views, "towers": variant, "seconds": seconds, **figures.to_json()}
                    full["runs"].append(run)
                    if variant == "fast":
                        entry = short.setdefault(shape, {})
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
