"""Where a run's weights lie: whole on every rank, or each rank a part of every matrix.

The loop asks for the same few things in both cases: losses of a batch, flat gradients, their length, a state that can
be saved, and the whole model where somebody else needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.config import TrainConfig
from holdfast.methods.base import Method
from holdfast.runtime import Runtime, average_over_ranks, in_group, sum_over_ranks

State = dict[str, Any]
# Newer versions of torch call the option that leaves buffers alone in every forward pass by another name.
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"


def shards(config: TrainConfig) -> bool:
    """Whether each rank holds a part of the weights."""
    return config.shard == "full" and in_group()


def place(method: Method, config: TrainConfig, runtime: Runtime, *, recorded: bool = False) -> Whole:
    """The method's weights as the config wants them; ``recorded``: for steps that are recorded and played back."""
    if shards(config):
        from holdfast.train.sharded import Sharded  # a second to import, and one rank does without

        return Sharded(method, runtime)
    return Whole(method, runtime, recorded=recorded)


class Whole:
    """Every rank holds the whole model: one rank, or several whose gradients are averaged.

    DDP does that beside the backward pass. Where steps are recorded it is done behind it, in one collective operation:
    DDP decides on the host what to send when, and counts its steps there.
    """

    sharded: ClassVar[bool] = False

    def __init__(self, method: Method, runtime: Runtime, *, recorded: bool = False) -> None:
        self.method, self.runtime = method, runtime
        self.module: nn.Module = method
        self._averages = recorded and in_group()
        if in_group() and not recorded:
            # Moving averages are every rank's own business: all make the same update, none is overwritten by another.
            options: dict[str, Any] = {_BUFFERS: False, "find_unused_parameters": len(method.phases()) > 1}
            self.module = DistributedDataParallel(method, **options)
        self._find_parameters()

    def _find_parameters(self) -> None:
        """What is trained, in a fixed order; once, because gathered weights stand in for sharded ones now and then."""
        self.named = [
            (name, parameter) for name, parameter in self.method.named_parameters() if parameter.requires_grad
        ]
        self.parameters = [item for _, item in self.named]

    # -- gradients --------------------------------------------------------------------------------------------------

    def gradient_of(self, loss: Tensor) -> Tensor:
        """Gradient of one term over all ranks, flat, without touching ``.grad``; the graph stays."""
        gradients = torch.autograd.grad(loss, self.parameters, retain_graph=True, allow_unused=True)
        flat = torch.cat([or_zeros(g, item).flatten() for g, item in zip(gradients, self.parameters, strict=True)])
        return sum_over_ranks(flat) / self.runtime.world

    def gradient(self) -> Tensor:
        """``.grad`` of all parameters, flat: [p]."""
        return torch.cat([or_zeros(parameter.grad, parameter).flatten() for parameter in self.parameters])

    def put_gradient(self, flat: Tensor) -> None:
        """The inverse of :meth:`gradient`."""
        for parameter, part in zip(
            self.parameters, flat.split([parameter.numel() for parameter in self.parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter)

    def total(self, sums: Tensor) -> Tensor:
        """Sums over the entries of flat gradients, made sums over all of them."""
        return sums

    def average(self) -> None:
        """Make ``.grad`` that of all ranks, where the backward pass has not done so."""
        if self._averages:
            average_over_ranks([parameter.grad for parameter in self.parameters if parameter.grad is not None])

    def norm(self) -> Tensor:
        """Length of the gradient, 0-dimensional."""
        return nn.utils.get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])

    # -- the whole model --------------------------------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Generator[Method]:
        """The method with an ordinary model that holds all weights: to evaluate, to save. All ranks come along."""
        yield self.method

    def state(self, optimizer: Optimizer) -> tuple[State, State] | None:
        """State of method and optimizer as one rank alone would have it, on the first rank. All ranks come along."""
        return (self.method.state_dict(), optimizer.state_dict()) if self.runtime.is_main else None

    def load(self, optimizer: Optimizer, method_state: State, optimizer_state: State) -> None:
        """The inverse of :meth:`state`, on every rank; how many ranks wrote it does not matter."""
        self.method.load_state_dict(method_state)
        optimizer.load_state_dict(optimizer_state)

    def end(self) -> None:
        """The run is over: the method holds the whole result."""


def or_zeros(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """A parameter's gradient, where it has one."""
    return torch.zeros_like(parameter) if gradient is None else gradient
