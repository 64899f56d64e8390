"""Steps of a process group, launched and recorded: NCCL's collective operations inside CUDA graphs.

    python benchmarks/ranks.py                      # a group of one rank; writes benchmarks/results/ranks.json
    torchrun --nproc-per-node 8 benchmarks/ranks.py # a rank on each GPU: not run so far
    python benchmarks/ranks.py --shape tiny         # where there is no GPU: gloo, which is never recorded

Runs of the product's loop from one seed: without a group, in a group with launched steps (DDP averages gradients beside
the backward pass), and in a group with recorded steps (one collective operation behind it). Time is that between logged
steps; what is compared is every tensor of the method after the last one. A group of one rank sends nothing: what is
measured is the launches, the copies, and what a host decides. What several GPUs add is the time of sending:
benchmarks/sharding.py computes it, and what a step would take with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, machine
from benchmarks.recorded import Played, apart
from holdfast.runtime import Runtime, choose_device
from holdfast.train.loop import train
from holdfast.train.shapes import SHAPES, made_up_round, made_up_run, train_config, write_pictures


class Clock:
    """Notes when steps were logged: their values have just been read, and nothing is under way."""

    def __init__(self) -> None:
        self.times: dict[int, float] = {}

    def step(self, done: int, values: Mapping[str, float]) -> None:
        self.times[done] = time.perf_counter()

    def evaluated(self, done: int, record: Mapping[str, Any]) -> None:
        pass

    def milliseconds(self) -> float | None:
        """A step of the second half of the run; None on ranks that log nothing."""
        if not self.times:
            return None
        last = max(self.times)
        return 1000 * (self.times[last] - self.times[last // 2]) / (last - last // 2)


def run(shape_name: str, steps: int, folder: Path, runtime: Runtime, **changes: Any) -> tuple[dict[str, Any], Any]:
    """What a run took, and its state at the end; no step at all: the state before."""
    shape = SHAPES[shape_name]
    data = made_up_round(shape, write_pictures(folder / "pixels.bin", shape.images, shape.size))
    config = train_config(shape, steps=max(1, steps), log_every=max(1, steps // 4), **changes)
    method, plan = made_up_run(shape, data, config, runtime, paired=False)
    played, clock = Played(), Clock()
    if steps:
        train(method, data, plan, runtime, progress=clock, stopwatch=played)
    state: dict[str, Tensor] = {name: value.cpu() for name, value in method.state_dict().items()}
    return {"milliseconds": clock.milliseconds(), "played_back": played.steps}, state


def join(device: torch.device) -> Runtime:
    """The group that torchrun describes, or one of this process alone."""
    if "WORLD_SIZE" not in os.environ:  # the loopback device will do
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
        os.environ.update(alone, GLOO_SOCKET_IFNAME="lo")
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)
    return Runtime(device, dist.get_rank(), dist.get_world_size())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="bdd100k", choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    device = choose_device("auto")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found: dict[str, dict[str, Any]] = {}
    ends: dict[str, dict[str, Tensor]] = {}
    with tempfile.TemporaryDirectory() as name:
        where = (arguments.shape, arguments.steps, Path(name))
        alone = Runtime(device)
        start = run(arguments.shape, 0, Path(name), alone)[1]
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            found["no group, recorded"], ends["no group, recorded"] = run(*where, alone)
        runtime = join(device)
        launched = {"speed": "compiled"} if device.type == "cuda" else {}
        try:
            found["group, launched"], ends["group, launched"] = run(*where, runtime, **launched)
            found["group, recorded"], ends["group, recorded"] = run(*where, runtime)
        finally:
            dist.destroy_process_group()
    if not runtime.is_main:
        return
    for kind, figures in found.items():
        ended = apart(ends["group, launched"], ends[kind], start)
        found[kind] = figures | ended
        took = f"{figures['milliseconds']:7.1f} ms a step, {figures['played_back']:3d} of {arguments.steps} played back"
        print(f"{kind:20s} {took}; {ended['that_differ']} of {ended['tensors']} tensors differ from launched steps")
    result = {"shape": arguments.shape, "ranks": runtime.world, "runs": found, "machine": machine(), "commit": commit()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "ranks.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
