"""The product's loop against a plain PyTorch loop that does the same arithmetic, side by side on a CPU.

    OMP_NUM_THREADS=2 python benchmarks/cpu_loop.py        # writes benchmarks/results/cpu_loop.json

The plain loop has the method's forward pass, ``backward``, AdamW and the update of the moving averages, and nothing
else: no logging, no gradient shares, no look for values that are not finite, no checkpoint, no signal handling. Both
run in turns in one process. Processor time is compared as well as the clock: it does not count what other processes do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, machine
from holdfast.artifacts import RunFolder
from holdfast.data.loader import BatchMaker, RoundSampler
from holdfast.data.round import RoundData
from holdfast.methods.base import Method
from holdfast.runtime import Runtime
from holdfast.train.loop import TrainSpec, batch_sizes, train
from holdfast.train.shapes import SHAPES, made_up_round, made_up_run, train_config, write_pictures

CPU = Runtime(torch.device("cpu"))


def plain_loop(method: Method, data: RoundData, plan: TrainSpec) -> None:
    sampler = RoundSampler(data, batch_sizes(plan.config), plan.seed)
    view = method.model.preprocess
    maker = BatchMaker(data, method.model.towers, view.mean, view.std, plan.views, CPU)
    optimizer = AdamW(method.trainable(), lr=plan.config.learning_rate, weight_decay=plan.config.weight_decay)
    for step in range(plan.config.steps):
        output = method(maker.make(sampler.draw(step)))
        output.surrogate.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        method.commit(torch.tensor(True))


def timed(what: str, steps: int, data: RoundData, folder: Path) -> tuple[float, float]:
    """Seconds by the clock and of the processor, set-up not counted."""
    shape = SHAPES["tiny"]
    config = train_config(shape, steps=steps, device="cpu", checkpoint_every=steps)
    method, plan = made_up_run(shape, data, config, CPU, paired=False)
    plan = replace(plan, evaluate_every=steps)
    clock, processor = time.perf_counter(), time.process_time()
    if what == "plain":
        plain_loop(method, data, plan)
    else:
        train(method, data, plan, CPU, RunFolder.create(folder / f"run-{time.monotonic_ns()}"))
    return time.perf_counter() - clock, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"plain": [], "product": []}
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES["tiny"]
        data = made_up_round(shape, write_pictures(Path(folder) / "pixels.bin", shape.images, 32))
        timed("plain", 5, data, Path(folder))
        for turn in range(arguments.turns):
            for what in ("plain", "product") if turn % 2 else ("product", "plain"):
                found[what].append(timed(what, arguments.steps, data, Path(folder)))
    milliseconds = {
        what: {
            "clock": 1000 * statistics.median(item for item, _ in times) / arguments.steps,
            "processor": 1000 * statistics.median(item for _, item in times) / arguments.steps,
        }
        for what, times in found.items()
    }
    ratio = {kind: milliseconds["product"][kind] / milliseconds["plain"][kind] for kind in ("clock", "processor")}
    result = {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "steps": arguments.steps,
        "turns": arguments.turns,
        "milliseconds_a_step": milliseconds,
        "product_over_plain": ratio,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "cpu_loop.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
