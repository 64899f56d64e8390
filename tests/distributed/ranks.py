"""Runs of a small round, alone or as one rank of several: what the tests of many ranks start in processes."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.artifacts import RunFolder
from holdfast.config import TrainConfig
from holdfast.data.loader import ViewSettings, with_constraint_views
from holdfast.data.round import RoundData
from holdfast.errors import TrainingError
from holdfast.methods import build_method
from holdfast.methods.base import Method
from holdfast.methods.co2l import Co2lConfig
from holdfast.methods.der import DerConfig
from holdfast.methods.finetune import FinetuneConfig
from holdfast.methods.flyp import FlypConfig
from holdfast.methods.gem import GemConfig
from holdfast.methods.holdfast import HoldfastConfig, ResearchConfig
from holdfast.methods.rm import RmConfig
from holdfast.methods.wccl import WcclConfig
from holdfast.model.classifier import Classifier
from holdfast.model.openclip import load_towers
from holdfast.runtime import Runtime
from holdfast.train.loop import TrainSpec, train
from holdfast.train.parallel import place
from tests.helpers import made_up_round

STEPS = 20
METHODS: dict[str, Any] = {
    "holdfast": HoldfastConfig(),
    "holdfast published": HoldfastConfig(form="published", beta=50.0),
    "holdfast paired": HoldfastConfig(
        form="published", beta=50.0, research=ResearchConfig(views="paired", tightening=1.0)
    ),
    "holdfast fast": HoldfastConfig(form="published", beta=50.0),
    "holdfast backbones": HoldfastConfig(),
    "rm": RmConfig(),
    "finetune": FinetuneConfig(),
    "flyp": FlypConfig(),
    "wccl": WcclConfig(),
    "gem": GemConfig(),
    "co2l": Co2lConfig(),
    "der": DerConfig(beta=1.0),
}
SETTINGS: dict[str, dict[str, Any]] = {
    # Old and new agree at the start, so that some of the heads' first gradients are next to nothing, and AdamW scales
    # up their rounding (by 1e4 a step where they are below its eps). Algorithm 1's own update leaves it as small as it
    # is, and does not hide how long a gradient is.
    "holdfast paired": {"optimizer": "plain", "learning_rate": 1e-2, "clip_norm": 0.5},
    "holdfast fast": {
        "optimizer": "plain",
        "learning_rate": 1e-2,
        "speed": "fast",
        "checkpoint_activations": True,
        "clip_norm": 0.5,
    },
    "holdfast backbones": {"optimizer": "plain", "learning_rate": 1e-2, "augment": False},
}


def round_data() -> RoundData:
    """Tasks of uneven sizes, one of them smaller than a step's minibatch."""
    return made_up_round(counts=(13, 2, 9, 5), target=11, negatives=17)


def method_of(name: str, data: RoundData) -> Method:
    towers = load_towers("tiny", None, seed=1).double()
    # The token table is most of the tiny model and sees a few rows only: frozen, a step is four times as fast.
    old = Classifier(towers, data.tasks.classes, data.tasks.prompts, 0.05).frozen_copy()
    new = old.copy().requires_grad_(True)
    built = build_method(new, METHODS[name], STEPS)
    for part, parameter in new.towers.named_parameters():
        parameter.requires_grad_("token_embedding" not in part and "logit_scale" not in part)
    if name == "holdfast backbones":
        new.towers.freeze_backbones()
    if SETTINGS.get(name, {}).get("checkpoint_activations"):
        new.towers.checkpoint_activations()
    if built.linear:
        for parameter in new.towers.text_parameters():
            parameter.requires_grad_(False)
        new.use_linear()
    elif built.uses_heads:
        new.begin_round(4, 0)
    built.prepare(old, data)
    return built.double()


def plan_of(name: str, **changes: Any) -> TrainSpec:
    settings: dict[str, Any] = {
        "steps": STEPS,
        "batch": 10,
        "target_share": 0.4,
        "tasks_per_step": 3,
        "images_per_task": 3,
        "learning_rate": 1e-4,
        "log_every": 5,
        "checkpoint_every": 8,
        "device": "cpu",
        "precision": "float64",
    }
    config = TrainConfig(**(settings | SETTINGS.get(name, {}) | changes))
    views = ViewSettings(config.augment, METHODS[name].protected_views(), (0.7, 1.0), True)
    return TrainSpec(config, views, 0, "sha256:test", evaluate_every=1, resume="holdfast develop --resume RUN")


def run(
    name: str, runtime: Runtime, folder: Path | None = None, die_after: int | None = None, **changes: Any
) -> Method:
    """A whole run; with ``die_after``, rank 1 kills itself after that step. Constraint images have fixed views."""
    spec = plan_of(name, **changes)
    data = with_constraint_views(round_data(), spec.views, spec.config.constraint_views, spec.seed)
    method = method_of(name, data)

    def evaluate(done: int, method: Method) -> dict[str, Any]:
        if done == die_after and runtime.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert all(type(parameter) is nn.Parameter for parameter in method.model.parameters())  # whole, sharded or not
        return {"checksum": sum(float(parameter.detach().sum()) for parameter in method.model.parameters())}

    run_folder = None if folder is None else RunFolder(folder)
    train(method, data, spec, runtime, run_folder, evaluate)
    return method


def held(name: str, runtime: Runtime) -> tuple[int, int, int]:
    """How many weights there are; how many of them this rank holds in shards, and how many in the model itself."""
    method = method_of(name, round_data())
    model = method.model
    everything = sum(parameter.numel() for parameter in model.parameters())
    place(method, plan_of(name, shard="full").config, runtime)
    parts = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in method.parameters()]
    return everything, sum(part.numel() for part in parts), sum(parameter.numel() for parameter in model.parameters())


def meet(rank: int, world: int, meeting: str) -> Runtime:
    """Join the others."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(minutes=30)
    )
    return Runtime(torch.device("cpu"), rank, world)


def one_rank(
    rank: int, world: int, meeting: str, out: str, names: list[str], folder: str | None, options: dict[str, Any]
) -> None:
    """What a spawned process does: meet the others, run, save the result (or the error's text)."""
    runtime = meet(rank, world, meeting)
    where = Path(folder) if folder else None
    try:
        states = {name: run(name, runtime, where, **options).state_dict() for name in names}
        torch.save(states, Path(out) / f"{rank}.pt")
        if options.get("shard") == "full":
            torch.save(held(names[0], runtime), Path(out) / f"{rank}-held.pt")
    except TrainingError as error:
        (Path(out) / f"{rank}.txt").write_text(error.text())
        os._exit(1)  # the process group is broken; leaving it in order would wait for the dead
    dist.destroy_process_group()
