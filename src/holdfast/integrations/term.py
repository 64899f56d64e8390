"""The retention term of an optimizer step, for any loop: protected batch, both models' losses, penalty, state.

The term belongs to an optimizer step, not to a micro-batch: with gradient accumulation it is computed once, beside the
first micro-batch, and u is committed once, after the optimizer has stepped. So accumulating k micro-batches of n rows
is the same update as one batch of k·n rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast.errors import UserError
from holdfast.integrations.losses import PerExampleLoss, at_least_float32, new_losses, old_losses
from holdfast.integrations.old_model import AdaptersOff, OldModel
from holdfast.integrations.protected import Collate, ProtectedBatch, ProtectedRows
from holdfast.objective.estimators import commit_all
from holdfast.objective.retention import Retention, RetentionPenalty
from holdfast.runtime import world_size


class RetentionTerm:
    """Penalty on one protected batch for each optimizer step, with what a checkpoint must hold of it."""

    def __init__(
        self,
        rows: ProtectedRows,
        old: OldModel | None,
        loss: PerExampleLoss,
        collate: Collate,
        *,
        seed: int,
        workers: int = 0,
    ) -> None:
        settings = rows.settings
        self.rows, self.old, self.loss, self.collate, self.workers = rows, old, loss, collate, workers
        self.settings, self.seed = settings, seed if settings.seed is None else settings.seed
        m = len(rows.names)
        self.penalty = RetentionPenalty(
            m,
            settings.beta,
            settings.gamma,
            schedule=settings.schedule,
            total_steps=1,  # begin knows it
            tightening=settings.tightening,
            task_sizes=rows.sizes,
            required_improvement=torch.full((m,), settings.required_improvement),
            dual_rate=settings.dual_rate,
            commit="later",
        )
        self.last: Retention | None = None  # of the last step
        self._fresh = copy.deepcopy(self.penalty.state_dict())
        self._old_fingerprint = rows.fingerprint() if old is None else old.fingerprint()
        self.begin(total_steps=1)

    def begin(self, total_steps: int) -> None:
        """A run of training starts, with empty moving averages."""
        self.penalty.load_state_dict(self._fresh)
        self.go_on(total_steps)

    def go_on(self, total_steps: int) -> None:
        """A run of training starts, with the moving averages that the penalty has."""
        self.penalty.total_steps = max(1, total_steps)
        self.penalty.train()
        self._batches: Iterator[ProtectedBatch] | None = None
        self._next_step = self._checked_steps = 0
        self._pending_step: int | None = None
        self._finite = torch.tensor(True)

    def due(self, step: int) -> bool:
        """Whether optimizer step ``step`` (from 0) has no term yet."""
        return self._pending_step != step

    def compute(self, model: nn.Module, step: int, place: Callable[[Any], Any], device: torch.device) -> Tensor:
        """The penalty of optimizer step ``step``, to be added to the loss; :meth:`commit` follows the update."""
        batch = self._batch(step)
        inputs, tasks, rows = place(batch.inputs), batch.tasks.to(device), len(batch.tasks)
        self.penalty.to(device)
        old = self._old_losses(batch, inputs, device)
        new = at_least_float32(new_losses(self.loss, model, inputs, rows, self.settings.rows_per_forward))
        self._check_first(new, old, step)
        retention: Retention = self.penalty(new, old, tasks)
        self.last, self._pending_step = retention, step
        self._finite = torch.isfinite(retention.penalty.detach())
        return retention.penalty

    def commit(self, stepped: bool = True) -> None:
        """The optimizer has stepped (or skipped the step): u of the step becomes u."""
        if self._pending_step is not None:
            commit_all(self.penalty, self._finite & stepped)
            self._pending_step = None

    def metrics(self) -> dict[str, float]:
        """The penalty of the last step, and h, u and weight of each task by name; h only of tasks that were drawn."""
        if self.last is None:
            return {}
        result = {"retention/penalty": float(self.last.penalty.detach()) / world_size()}
        for kind in ("h", "u", "weight"):
            values = getattr(self.last, kind).tolist()
            named = zip(self.rows.names, values, strict=True)
            result |= {f"retention/{kind}/{name}": value for name, value in named if not math.isnan(value)}
        return result

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the next step reads: the penalty's buffers, the sampler's seed; and whose they are."""
        return {"penalty": self.penalty.state_dict(), **self.identity()}

    def identity(self) -> dict[str, Any]:
        """What the buffers are about. The sampler's position is the optimizer step, which the trainer saves."""
        return {"seed": self.seed, "tasks": list(self.rows.names), "old": self._old_fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the state of a checkpoint; one of other tasks or of another old model is refused."""
        self.check_identity(state)
        self.penalty.load_state_dict(state["penalty"])

    def check_identity(self, state: dict[str, Any]) -> None:
        """Refuse the state of other tasks or of another old model; take over its seed."""
        if state["tasks"] != list(self.rows.names):
            raise UserError(
                "the checkpoint protects other tasks",
                expected=", ".join(state["tasks"]),
                found=", ".join(self.rows.names),
                do="resume with the same tasks in the same order",
            )
        if state["old"] != self._old_fingerprint:
            raise UserError(
                "the checkpoint was trained against another old model",
                do="build the trainer with the model that the first run started from (the checkpoint's weights are "
                "loaded on resuming), or give that model as old_model",
            )
        self.seed = int(state["seed"])

    # -- a step --------------------------------------------------------------------------------------------------------

    def _batch(self, step: int) -> ProtectedBatch:
        if self._batches is None or step != self._next_step:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self._batches = self.rows.batches(self.collate, self.seed, step, rank, world_size(), self.workers)
        self._next_step = step + 1
        return next(self._batches)

    def _old_losses(self, batch: ProtectedBatch, inputs: Any, device: torch.device) -> Tensor:
        if self.old is None:
            assert batch.old_losses is not None
            return batch.old_losses.to(device)
        self.old.to(device)
        with self.old.active() as module:
            rows = len(batch.tasks)
            return at_least_float32(old_losses(self.loss, module, inputs, rows, self.settings.rows_per_forward))

    def _check_first(self, new: Tensor, old: Tensor, step: int) -> None:
        """Of the first batch alone, since a look at values makes the host wait for a GPU."""
        first, self._checked_steps = self._checked_steps == 0, self._checked_steps + 1
        if (first or old.device.type == "cpu") and not bool(torch.isfinite(old).all()):
            raise UserError("the old model's losses on protected rows are not finite", do="look at the old model")
        at_start = first and step == 0 and isinstance(self.old, AdaptersOff)
        if at_start and not torch.allclose(new.detach(), old, rtol=1e-3, atol=1e-4):
            raise UserError(
                "without its adapters the model is not the one that training starts from",
                found="other losses on the first protected rows",
                do="merge the adapters first (merge_and_unload) and add new ones, or give old_model=",
            )
