"""What a user says about retention, whichever loop runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import UserError
from holdfast.objective.retention import Schedule


@dataclass(frozen=True)
class RetentionSettings:
    """Constraints on protected tasks, and the protected batch of an optimizer step.

    The protected batch is drawn for all ranks together: ``tasks_per_step`` tasks with ``rows_per_task`` rows each. What
    a step draws depends on the seed and on the step alone.
    """

    beta: float = 20.0  # weight of the constraints
    gamma: float = 0.8  # weight of this step's estimate in the moving average u_k
    schedule: Schedule = "constant"  # "cosine": beta rises from 0 over the run
    tightening: float = 0.0  # these three as in RetentionPenalty
    required_improvement: float = 0.0
    dual_rate: float = 0.0
    tasks: int | Sequence[str] | None = None  # number or names of the tasks; None: what the task column holds
    task_column: str | int = "task"  # ids 0 … m-1 or names of tasks; an integer is a position in rows that are tuples
    old_loss_column: str | int | None = None  # losses of the old model, computed before: no second model in memory
    tasks_per_step: int | None = None  # None: all of them
    rows_per_task: int = 8
    rows_per_forward: int | None = None  # None: the protected batch at once; fewer rows need less memory, and more time
    seed: int | None = None  # None: the seed of the trainer

    def __post_init__(self) -> None:
        if not (math.isfinite(self.beta) and self.beta >= 0):
            raise UserError("beta must be a number of at least 0", found=str(self.beta))
        if not 0 < self.gamma <= 1:
            raise UserError("gamma must lie above 0 and be at most 1", found=str(self.gamma))
        for name in ("tasks_per_step", "rows_per_task", "rows_per_forward"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(f"{name} must be a whole number of at least 1", found=repr(value))
