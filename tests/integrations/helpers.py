"""Small models and rows for the tests of other people's loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback, TrainingArguments

from holdfast.integrations import HoldfastTrainer, RetentionSettings


class Net(nn.Module):
    """A classifier with everything that protected rows must not touch."""

    def __init__(self, dropout: float = 0.0, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(4, 8), middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"logits": logits} if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


def net_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["x"])["logits"], batch["labels"], reduction="none")


def protected_rows(count: int = 20) -> list[dict[str, Any]]:
    """Three tasks of uneven sizes."""
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(count, 4, generator=random, dtype=torch.float64)
    tasks = [0] * (count // 2) + [1] * (count // 4)
    tasks += [2] * (count - len(tasks))
    return [{"x": row, "labels": task, "task": task} for row, task in zip(rows, tasks, strict=True)]


def target_rows(count: int = 8) -> list[dict[str, Any]]:
    """One row over and over: a loss that does not depend on how batches are put together."""
    return [{"x": torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64), "labels": 2}] * count


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    default: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "lr_scheduler_type": "linear",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    return TrainingArguments(**{**default, **options})


SETTINGS = RetentionSettings(beta=5.0, gamma=0.5, tasks_per_step=2, rows_per_task=3)


def trainer(
    folder: Path,
    model: nn.Module | None = None,
    retention: RetentionSettings = SETTINGS,
    callbacks: list[TrainerCallback] | None = None,
    protected: Any = None,
    old_model: nn.Module | None = None,
    **options: Any,
) -> HoldfastTrainer:
    """A trainer of a small net, computing the penalty in float64."""
    result = HoldfastTrainer(
        model or Net(),
        arguments(folder, **options),
        train_dataset=target_rows(),  # pyright: ignore[reportArgumentType]
        protected_dataset=protected_rows() if protected is None else protected,
        retention=retention,
        per_example_loss=net_loss,
        old_model=old_model,
        callbacks=callbacks,
    )
    result.retention_term.penalty.double()
    return result


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


class StopAt(TrainerCallback):
    """Ends a run as a kill does: in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise InterruptedError


def constant(step: int) -> float:
    return 1.0


def naive(
    steps: int,
    retention: RetentionSettings = SETTINGS,
    *,
    seed: int = 42,
    decay: bool = True,
    own: Callable[[int], float] = constant,
) -> dict[str, Tensor]:
    """The same run as a plain loop: weights after it. ``own`` weighs the target's loss in a step."""
    from holdfast import RetentionPenalty
    from holdfast.integrations.protected import ProtectedRows

    model, old, rows = Net(), Net().eval(), protected_rows()
    penalty = RetentionPenalty(3, retention.beta, retention.gamma).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    target = target_rows(1)[0]
    draws = ProtectedRows(rows, retention).steps(seed, 0, 0, 1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / steps) if decay else 0.1
        drawn = [rows[position] for position in next(draws)]
        batch = {
            "x": torch.stack([row["x"] for row in drawn]),
            "labels": torch.tensor([row["labels"] for row in drawn]),
        }
        kept = penalty(net_loss(model, batch), net_loss(old, batch), torch.tensor([row["task"] for row in drawn]))
        loss = own(step) * cross_entropy(model(target["x"][None])["logits"], torch.tensor([2])) + kept.penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)
