"""Optimizers and schedules: Algorithm 1 in its plain form, and AdamW with a cosine schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from holdfast.config import TrainConfig


class PlainStep(Optimizer):
    """The last two lines of Algorithm 1: v <- (1-theta) v + theta G;  w <- w - eta v.  At the start v = 0."""

    found_inf: Tensor | None = None  # set by the loop: a step that is not finite leaves w and v as they are

    def __init__(self, parameters: Iterable[nn.Parameter] | list[dict[str, Any]], lr: float, theta: float) -> None:
        super().__init__(parameters, {"lr": lr, "theta": theta})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of w and v."""
        for group in self.param_groups:
            for parameter in cast("list[nn.Parameter]", group["params"]):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "v" not in state:
                    state["v"] = torch.zeros_like(parameter)
                v: Tensor = state["v"]
                new = torch.lerp(v, parameter.grad, group["theta"])
                if self.found_inf is not None:
                    new = torch.where(self.found_inf > 0, v, new)
                v.copy_(new)
                move = v if self.found_inf is None else torch.where(self.found_inf > 0, 0, v)
                parameter.sub_(group["lr"] * move)


def build_optimizer(
    config: TrainConfig, named: list[tuple[str, nn.Parameter]], device: torch.device
) -> PlainStep | AdamW:
    """Parameter groups: matrices decay, gains and biases do not; heads may have a learning rate of their own."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in named:
        groups.setdefault((parameter.ndim >= 2, ".heads." in f".{name}"), []).append(parameter)
    described = [
        {
            "params": members,
            "weight_decay": config.weight_decay if decays else 0.0,
            "lr": config.learning_rate if not heads else config.head_learning_rate or config.learning_rate,
        }
        for (decays, heads), members in sorted(groups.items())
    ]
    for group in described:
        group["base_lr"] = group["lr"]
    if config.optimizer == "plain":
        optimizer = PlainStep(described, lr=config.learning_rate, theta=config.ema_weight)
    else:
        optimizer = AdamW(described, lr=config.learning_rate, fused=device.type == "cuda")
    place_learning_rates(optimizer, device)
    return optimizer


def place_learning_rates(optimizer: Optimizer, device: torch.device) -> None:
    """On a GPU learning rates are numbers on the device, read when a step runs: a recorded step then finds its own.

    Called when an optimizer is made, and again when its state was loaded: a checkpoint may come from another device.
    """
    for group in optimizer.param_groups:
        rate = float(group["lr"])
        if device.type != "cuda":
            group["lr"] = rate
        elif isinstance(optimizer, AdamW):
            group["lr"] = torch.tensor(rate, device=device)
        else:
            group["lr"] = torch.tensor(rate, dtype=torch.float64, device=device)
        if isinstance(optimizer, AdamW):
            group["fused"] = group["capturable"] = device.type == "cuda"


def learning_rate_factor(config: TrainConfig, step: int) -> float:
    """Share of the base learning rate at a step (from 0): linear warm-up, then half a cosine to 0, or constant."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return (1 + math.cos(math.pi * progress)) / 2


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Scale every group's base learning rate."""
    for group in optimizer.param_groups:
        rate = group["base_lr"] * factor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
