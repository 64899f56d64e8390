"""Whether steps that are played back end where launched ones end, and whether two runs from one seed are the same bits.

    python benchmarks/recorded.py                   # on a GPU; writes benchmarks/results/recorded.json

Three runs of the product's loop from one seed: kernels launched one by one, the same once more, and recorded steps.
What is compared is every tensor of the method after the last step: weights and moving averages.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, machine
from holdfast.runtime import Runtime, started
from holdfast.train.loop import train
from holdfast.train.shapes import SHAPES, made_up_round, made_up_run, train_config, write_pictures


class Played:
    """Counts the steps that came from a recording: the loop has a part of that name for them alone."""

    def __init__(self) -> None:
        self.steps = 0

    def lap(self, part: str) -> None:
        self.steps += part == "step"


def run(shape_name: str, steps: int, folder: Path, runtime: Runtime, **changes: Any) -> tuple[dict[str, Tensor], int]:
    """State after the steps, and how many of them were played back; no step at all: the state before."""
    shape = SHAPES[shape_name]
    data = made_up_round(shape, write_pictures(folder / "pixels.bin", shape.images, shape.size))
    method, plan = made_up_run(shape, data, train_config(shape, steps=max(1, steps), **changes), runtime, paired=False)
    played = Played()
    if steps:
        train(method, data, plan, runtime, stopwatch=played)
    return {name: value.cpu() for name, value in method.state_dict().items()}, played.steps


def apart(item: dict[str, Tensor], other: dict[str, Tensor], start: dict[str, Tensor]) -> dict[str, Any]:
    """Tensors that are not the same bits, and the distance of two ends over the way from the start."""
    differ = [name for name, value in item.items() if not torch.equal(value, other[name])]
    moved = [name for name, value in item.items() if value.is_floating_point() and value.isfinite().all()]

    def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
        return sum(float((left[name].double() - right[name].double()).square().sum()) for name in moved) ** 0.5

    return {
        "tensors": len(item),
        "that_differ": len(differ),
        "first": differ[:5],
        "share_of_the_way": distance(item, other) / max(distance(item, start), 1e-30),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="bdd100k", choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    with started("auto") as runtime, tempfile.TemporaryDirectory() as name:
        where = (arguments.shape, arguments.steps, Path(name), runtime)
        start, _ = run(arguments.shape, 0, Path(name), runtime)
        launched, none = run(*where, speed="compiled")
        again, _ = run(*where, speed="compiled")
        recorded, played = run(*where)
    result = {
        "shape": arguments.shape,
        "steps": arguments.steps,
        "played_back": {"launched": none, "recorded": played},
        "launched_twice": apart(launched, again, start),
        "recorded_against_launched": apart(launched, recorded, start),
        "machine": machine(),
        "commit": commit(),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "recorded.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
