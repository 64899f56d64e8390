"""The Trainer of transformers with the penalty, against a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn

from holdfast.errors import UserError
from holdfast.integrations import HoldfastTrainer, RetentionSettings, frozen_copy
from holdfast.integrations.transformers import STATE_FILE
from tests.integrations.helpers import (
    SETTINGS,
    Net,
    StopAt,
    arguments,
    assert_equal,
    naive,
    net_loss,
    protected_rows,
    target_rows,
    trainer,
    weights,
)

Tried = Callable[..., None]


@pytest.mark.parametrize(("micro", "accumulation", "rows"), [(4, 1, 8), (2, 2, 8), (2, 2, 6), (1, 4, 8)])
def test_equals_a_plain_loop_whatever_the_accumulation(
    tmp_path: Path, micro: int, accumulation: int, rows: int
) -> None:
    """Six rows in micro-batches of two end each epoch with a step of one micro-batch."""
    built = trainer(tmp_path, per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation)
    built.train_dataset = target_rows(rows)  # pyright: ignore[reportAttributeAccessIssue]
    built.train()
    assert_equal(weights(built.model), naive(6), 1e-12)
    plain = naive(6, replace(SETTINGS, beta=0.0))
    assert (plain["layers.0.weight"] - naive(6)["layers.0.weight"]).abs().max() > 1e-3


def test_equals_a_plain_loop_where_the_loss_counts_its_items(tmp_path: Path) -> None:
    """Models that divide by num_items_in_batch themselves: the trainer does not divide their loss again."""

    class Counting(Net):
        def forward(
            self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any
        ) -> dict[str, torch.Tensor]:
            found = super().forward(x, labels)
            if labels is not None and "num_items_in_batch" in kwargs:
                found["loss"] = found["loss"] * len(labels) / kwargs["num_items_in_batch"]
            return found

    built = trainer(tmp_path, Counting(), per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert built.model_accepts_loss_kwargs
    built.train()
    assert_equal(weights(built.model), naive(6), 1e-12)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_bits(tmp_path: Path, accumulation: int) -> None:
    options: dict[str, Any] = {
        "optim": "adamw_torch",
        "save_strategy": "steps",
        "save_steps": 3,
        "gradient_accumulation_steps": accumulation,
    }
    settings = replace(SETTINGS, schedule="cosine", dual_rate=0.1, tightening=0.5)
    whole = trainer(tmp_path / "whole", Net(0.3, norm=True), settings, **options)
    whole.train()
    with pytest.raises(InterruptedError):
        trainer(tmp_path / "cut", Net(0.3, norm=True), settings, [StopAt(4)], **options).train()
    resumed = trainer(tmp_path / "cut", Net(0.3, norm=True), settings, **options)
    resumed.train(resume_from_checkpoint=True)
    assert_equal(weights(resumed.model), weights(whole.model))
    assert_equal(resumed.retention_term.penalty.state_dict(), whole.retention_term.penalty.state_dict())
    assert not list((tmp_path / "cut").rglob("*.tmp"))


def test_protected_rows_see_no_dropout_and_leave_batch_norm_alone(tmp_path: Path) -> None:
    beside = []

    class Watch(StopAt):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert all(part.training for part in built.model.modules())
            beside.append(built.retention_term.metrics())

    built = trainer(tmp_path, Net(0.5, norm=True), replace(SETTINGS, beta=0.0), [Watch(-1)])
    built.train()
    assert all(value == 0.0 for name, value in beside[0].items() if "/h/" in name)  # the start is the old model
    assert any(value != 0.0 for name, value in beside[1].items() if "/h/" in name)
    plain = HoldfastTrainer.__mro__[2](  # transformers.Trainer
        Net(0.5, norm=True), arguments(tmp_path), train_dataset=target_rows()
    )
    plain.train()
    assert_equal(weights(built.model), weights(plain.model))  # running statistics and random numbers, too


def test_the_old_model_stays_as_it_was(tmp_path: Path) -> None:
    built = trainer(tmp_path)
    old = built.retention_term.old
    assert old is not None
    before = weights(old.module)
    built.train()
    assert_equal(weights(old.module), before)
    assert not any(parameter.requires_grad for parameter in old.module.parameters())
    with pytest.raises(AssertionError):
        assert_equal(weights(built.model), before)


def test_a_copy_does_not_run_a_forward_that_was_bound_to_the_model() -> None:
    """As TRL and accelerate bind them: the copy would run the model that is trained."""
    model = Net()
    bound = model.forward

    def patched(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return bound(x)

    model.forward = patched  # pyright: ignore[reportAttributeAccessIssue]
    copied, x = frozen_copy(model), torch.ones(1, 4, dtype=torch.float64)
    before = copied(x)["logits"]
    with torch.no_grad():
        model.layers[0].weight.add_(1.0)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert torch.equal(copied(x)["logits"], before)
    assert not torch.equal(model(x)["logits"], before)


def test_old_losses_of_a_column_need_no_old_model(tmp_path: Path) -> None:
    rows, old = protected_rows(), Net().eval()
    batch = {"x": torch.stack([row["x"] for row in rows]), "labels": torch.tensor([row["labels"] for row in rows])}
    losses = net_loss(old, batch).tolist()
    rows = [{**row, "old": loss} for row, loss in zip(rows, losses, strict=True)]
    built = trainer(tmp_path, retention=replace(SETTINGS, old_loss_column="old"), protected=rows)
    assert built.retention_term.old is None
    built.train()
    assert_equal(weights(built.model), naive(6), 1e-6)  # a column is read as float32


def test_few_rows_at_a_time_are_the_same_gradient(tmp_path: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for rows in (None, 2):
        built = trainer(tmp_path, Net(0.5), replace(SETTINGS, rows_per_forward=rows))
        built.train()
        found.append(weights(built.model))
    assert_equal(found[1], found[0], 1e-12)


def test_training_again_starts_with_empty_averages(tmp_path: Path) -> None:
    built = trainer(tmp_path)
    built.train()
    first = built.retention_term.penalty.state_dict()["steps"].clone()
    built.train()
    assert int(first) == int(built.retention_term.penalty.steps) == 6


def test_evaluation_has_no_penalty_and_logs_name_the_tasks(tmp_path: Path) -> None:
    named = [{**row, "task": "abc"[row["task"]]} for row in protected_rows()]
    built = trainer(
        tmp_path,
        protected=named,
        retention=replace(SETTINGS, tasks=("a", "b", "c"), tasks_per_step=None),
        logging_strategy="steps",
        logging_steps=2,
    )
    built.eval_dataset = target_rows(2)  # pyright: ignore[reportAttributeAccessIssue]
    built.train()
    expected = {f"retention/{kind}/{task}" for kind in ("h", "u", "weight") for task in "abc"}
    assert expected <= built.state.log_history[0].keys()
    target = target_rows(1)[0]
    with torch.no_grad():
        loss = built.model.eval()(target["x"][None], torch.tensor([2]))["loss"]
    assert built.evaluate()["eval_loss"] == pytest.approx(float(loss))


# -- misuse --------------------------------------------------------------------------------------------------------


def without(rows: list[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != column} for row in rows]


def with_task(task: Any) -> list[dict[str, Any]]:
    return [*protected_rows(), {**protected_rows()[0], "task": task}]


@pytest.mark.parametrize(
    ("rows", "settings", "sentence"),
    [
        (with_task(3), {"tasks": 3}, "protected row 20 has a task id out of range"),
        (with_task(-1), {}, "protected row 20 has a task id out of range"),
        (with_task(1.5), {}, "protected row 20 has no integer as its task id"),
        (with_task(None), {}, "protected row 20 has no integer as its task id"),
        (with_task(True), {}, "protected row 20 has no integer as its task id"),
        (without(protected_rows(), "task"), {}, "protected rows have no column 'task'"),
        (protected_rows(), {"tasks": 4}, "task '3' has no protected rows"),
        ([], {}, "the protected dataset is empty"),
        (iter([]), {}, "must have a length"),
        ([{**row, "task": "night"} for row in protected_rows()], {"tasks": ["nigth"]}, "unknown task 'night'"),
        ([{**row, "old": float("nan")} for row in protected_rows()], {"old_loss_column": "old"}, "no finite number"),
        ([{**row, "old": float("inf")} for row in protected_rows()], {"old_loss_column": "old"}, "no finite number"),
    ],
)
def test_rows_that_cannot_be_protected(
    tmp_path: Path, tried: Tried, rows: Any, settings: dict[str, Any], sentence: str
) -> None:
    tried("bad inputs")
    with pytest.raises(UserError, match=sentence):
        trainer(tmp_path, protected=rows, retention=replace(SETTINGS, **settings))


@pytest.mark.parametrize("wrong", [{"beta": -1.0}, {"beta": float("nan")}, {"gamma": 0.0}, {"rows_per_task": 0}])
def test_settings_that_mean_nothing(tried: Tried, wrong: dict[str, Any]) -> None:
    tried("bad inputs")
    with pytest.raises(UserError, match=next(iter(wrong))):
        RetentionSettings(**wrong)


def test_losses_that_are_none_of_each_row(tmp_path: Path, tried: Tried) -> None:
    wrong: dict[str, Callable[..., Any]] = {
        "as a mean has it": lambda model, batch: net_loss(model, batch).mean(),
        "must return one loss for each": lambda model, batch: net_loss(model, batch)[1:],
        "carry no gradient": lambda model, batch: net_loss(model, batch).detach(),
        "are not finite": lambda model, batch: net_loss(model, batch) / 0.0,
    }
    for sentence, loss in wrong.items():
        tried("bad inputs")
        built = trainer(tmp_path)
        built.retention_term.loss = loss
        with pytest.raises(UserError, match=sentence):
            built.train()


def test_old_models_that_are_none(tmp_path: Path, tried: Tried) -> None:
    tried("bad inputs", 4)
    model = Net()
    with pytest.raises(UserError, match="shares parameters"):
        trainer(tmp_path, model, old_model=nn.ModuleList([model.layers]).eval())
    with pytest.raises(UserError, match="in training mode"):
        trainer(tmp_path, model, old_model=Net().train())
    with pytest.raises(UserError, match="both given"):
        trainer(tmp_path, model, replace(SETTINGS, old_loss_column="old"), old_model=Net().eval())

    def start() -> Net:
        return Net()

    with pytest.raises(UserError, match="with model_init the old model is not known"):
        HoldfastTrainer(model_init=start, args=arguments(tmp_path), protected_dataset=protected_rows())


def test_checkpoints_of_other_runs(tmp_path: Path, tried: Tried) -> None:
    tried("bad inputs", 4)
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    first = trainer(tmp_path, **options)
    first.train()
    state = tmp_path / "checkpoint-3" / STATE_FILE
    other = Net()
    with torch.no_grad():
        other.layers[0].weight.mul_(1.01)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(UserError, match="another old model"):
        trainer(tmp_path, other, **options).train(resume_from_checkpoint=True)
    tasks = replace(SETTINGS, tasks=("a", "b", "c"))
    with pytest.raises(UserError, match="protects other tasks"):
        trainer(tmp_path, retention=tasks, **options).train(resume_from_checkpoint=True)
    state.write_bytes(b"cut short")
    with pytest.raises(UserError, match="cannot be read"):
        trainer(tmp_path, **options).train(resume_from_checkpoint=True)
    state.unlink()
    with pytest.raises(UserError, match="of a run without retention"):
        trainer(tmp_path, **options).train(resume_from_checkpoint=True)


def test_what_was_not_tried_is_refused(tmp_path: Path, tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    built = trainer(tmp_path)
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.XLA):
        tried("bad inputs")
        with monkeypatch.context() as patch:
            patch.setattr(type(built.accelerator), "distributed_type", property(lambda _, kind=kind: kind))
            with pytest.raises(UserError, match=f"under DDP alone\n  found:    {kind.value}"):
                built._refuse_untried_parallelism()  # pyright: ignore[reportPrivateUsage]
    built.args._n_gpu = 2  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(UserError, match="DataParallel"):
        built._refuse_untried_parallelism()  # pyright: ignore[reportPrivateUsage]
