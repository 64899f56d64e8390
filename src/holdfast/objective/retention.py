"""Retention constraints: one a protected task, for any PyTorch model (method section 4).

Nothing here knows about CLIP, or about the objective that the constraints stand beside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from holdfast.objective.estimators import Deferred, MovingAverage, commit_all
from holdfast.runtime import sum_over_ranks, sums_by, world_size

Schedule = Literal["constant", "cosine"]
_Z95 = 1.6448536269514722


@dataclass(frozen=True)
class Retention:
    """What one step says of every task. Tasks that had no example in the step carry their last u and no h."""

    penalty: Tensor  # its gradient is G_2; add it to your loss
    h: Tensor  # [m] ĥ_k, nan where the task was not sampled
    u: Tensor  # [m] moving average of h_k
    weight: Tensor  # [m] effective weight beta [u_k]_+ of a task in this step (see ``tightening``)


class RetentionPenalty(Deferred):
    """beta/(2m) sum_k [h_k]_+^2 with h_k = mean of new minus old loss on task k, estimated from minibatches.

    ::

        ĥ_k  = mean over B_k of l(w, x, y) - l(w_old, x, y)
        u_k <- (1-gamma_2) u_k + gamma_2 ĥ_k                       first visit: u_k = ĥ_k
        G_2  = 1/|B_c| sum over sampled k of beta [u_k]_+ grad ĥ_k

    Call it with per-example losses of the new and the old model **on the same images and the same views**. Its buffers
    (u, the flags, the step count) are the algorithm's state: save them with your checkpoint, and resume.

    ``tightening`` (0 in the paper) makes the constraint know its sample: h_k + tightening · 1.645 · sd_k / sqrt(n_k)
    <= 0, where sd_k is the spread of the differences and n_k the size of the task's constraint set (``task_sizes``).
    The added term vanishes at w_old, so w_old stays feasible.

    ``required_improvement`` [m] (0 in the paper) demands more than retention: h_k + required_improvement_k <= 0.
    Training that only keeps the losses of its sample where they were loses a little on new images; a small required
    improvement makes up for it.

    ``dual_rate`` (0 in the paper) adds a multiplier to each effective weight. It moves by dual_rate · u_k a step (u_k
    with required_improvement and tightening added) and never falls below 0, so that a constraint that stays violated
    by little gains weight too.

    ``commit``: ``"now"`` updates u in the forward pass, for loops of your own; ``"later"`` waits for
    :func:`holdfast.objective.estimators.commit_all`, once the step has proved finite.

    Misuse is a ``ValueError``. Shapes, types and a missing gradient are always looked at. Values (task ids within 0 …
    m-1; with ``commit="now"`` old losses that are finite) are looked at where they lie on the CPU: on a GPU that would
    make the host wait in every step. There an id out of range ends in CUDA's own assertion; ids are never clamped.
    """

    steps: Tensor
    sizes: Tensor
    required_improvement: Tensor
    multiplier: Tensor

    def __init__(
        self,
        num_tasks: int,
        beta: float = 200.0,
        gamma: float = 0.8,
        *,
        schedule: Schedule = "constant",
        total_steps: int | None = None,
        tightening: float = 0.0,
        task_sizes: Tensor | None = None,
        required_improvement: Tensor | None = None,
        dual_rate: float = 0.0,
        commit: Literal["now", "later"] = "now",
    ) -> None:
        super().__init__()
        if num_tasks < 1:
            raise ValueError(f"at least one protected task is needed, got {num_tasks}")
        if schedule == "cosine" and not total_steps:
            raise ValueError("a cosine-increasing beta needs total_steps")
        if tightening and task_sizes is None:
            raise ValueError("tightening needs task_sizes, the number of constraint images of each task")
        self.num_tasks, self.beta, self.schedule = num_tasks, beta, schedule
        self.total_steps, self.tightening, self.commit_when = total_steps, tightening, commit
        self.u = MovingAverage(num_tasks, gamma)
        self.second_moment = MovingAverage(num_tasks, gamma) if tightening else None
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.dual_rate = dual_rate
        self.register_buffer("multiplier", torch.zeros(num_tasks))
        self._next_multiplier: Tensor | None = None
        self.register_buffer(
            "required_improvement",
            torch.zeros(num_tasks) if required_improvement is None else required_improvement.float(),
        )
        self.register_buffer("sizes", torch.ones(num_tasks) if task_sizes is None else task_sizes.float())

    def beta_now(self) -> Tensor:
        """The penalty of this step: constant, or rising as half a cosine from 0 to beta over ``total_steps``."""
        if self.schedule == "constant" or self.total_steps is None:
            return torch.full((), self.beta, device=self.steps.device)
        progress = (self.steps / self.total_steps).clamp(max=1)
        return self.beta * (1 - torch.cos(math.pi * progress)) / 2

    def forward(self, new_losses: Tensor, old_losses: Tensor, tasks: Tensor) -> Retention:
        """Penalty and report from per-example losses [n] and task ids [n] in 0 … m-1."""
        self._check(new_losses, old_losses, tasks)
        difference = new_losses - old_losses.detach()
        zeros = difference.new_zeros(self.num_tasks)
        count = sum_over_ranks(zeros.index_add(0, tasks, torch.ones_like(difference)))
        present = count > 0
        share = 1 / count.clamp(min=1)
        local = sums_by(tasks, difference, self.num_tasks) * share  # this rank's part of ĥ_k
        h = sum_over_ranks(local)
        u = self.u.propose_everywhere(h, present)
        constraint, differentiable = u + self.required_improvement, local
        if self.second_moment is not None:
            local_square = sums_by(tasks, difference.square(), self.num_tasks) * share
            square = self.second_moment.propose_everywhere(sum_over_ranks(local_square), present)
            spread = (square - u.square()).clamp(min=0).sqrt()
            moved = spread > 1e-6  # at w_old the spread is nil and has no gradient
            factor = torch.where(moved, self.tightening * _Z95 / self.sizes.sqrt(), 0)
            constraint = constraint + factor * spread
            # grad sd = (grad E[d²] - 2 u grad E[d]) / (2 sd)
            differentiable = local + factor / (2 * spread.clamp(min=1e-6)) * (local_square - 2 * u * local)
        multiplier = self.multiplier
        if self.dual_rate:
            moved_by = torch.where(present, self.dual_rate * constraint, 0)
            multiplier = self._next_multiplier = (self.multiplier + moved_by).clamp(min=0)
        weight = torch.where(present, multiplier + self.beta_now() * constraint.clamp(min=0), 0)
        penalty = world_size() * (weight * differentiable).sum() / present.sum().clamp(min=1)
        if self.commit_when == "now" and self.training:
            commit_all(self, torch.isfinite(penalty.detach()))
        return Retention(penalty, torch.where(present, h, torch.nan), u, weight)

    def _check(self, new: Tensor, old: Tensor, tasks: Tensor) -> None:
        """Refuse what would be a wrong penalty without an error; no host synchronisation on a GPU."""
        for name, losses in (("new", new), ("old", old)):
            if losses.dim() != 1:
                kind = "a scalar" if losses.dim() == 0 else f"a tensor of shape {list(losses.shape)}"
                raise ValueError(f"{name}_losses must be per-example losses [n] (reduction='none'), got {kind}")
            if not losses.is_floating_point():
                raise ValueError(f"{name}_losses must be floating point, got {losses.dtype}")
        if tasks.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"task ids must be integers (int64 or int32), got {tasks.dtype}")
        if not new.shape == old.shape == tasks.shape:
            lengths = f"{len(new)} new losses, {len(old)} old losses, task ids of shape {list(tasks.shape)}"
            raise ValueError(f"new losses, old losses and task ids must be of the same examples, got {lengths}")
        if self.training and torch.is_grad_enabled() and not new.requires_grad:
            raise ValueError(
                "new_losses carry no gradient: compute them from the model that is trained, with gradients"
            )
        if tasks.device.type == "cpu" and len(tasks):
            low, high = (int(bound) for bound in torch.aminmax(tasks))
            if low < 0 or high >= self.num_tasks:
                wrong = low if low < 0 else high
                raise ValueError(f"task ids must lie in 0 … {self.num_tasks - 1}, got {wrong}")
        # With "later" the caller judges whether the step was finite.
        if self.commit_when == "now" and old.device.type == "cpu" and not bool(torch.isfinite(old).all()):
            raise ValueError("old_losses must be finite, got nan or inf: look at the old model and its examples")

    def commit(self, finite: Tensor) -> None:
        """Count the step and move the multipliers; the averages commit themselves."""
        self.steps += finite
        if self._next_multiplier is not None:
            self.multiplier.copy_(torch.where(finite, self._next_multiplier, self.multiplier))
            self._next_multiplier = None
