"""A LightningModule with the penalty, against a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from holdfast.errors import UserError
from holdfast.integrations.lightning import _refuse_untried  # pyright: ignore[reportPrivateUsage]
from tests.integrations.helpers import SETTINGS, Net, assert_equal, naive, weights
from tests.integrations.modules import LitNet, callback, fit

Tried = Callable[..., None]


class StopAt(lightning.Callback):
    """Ends a run as a kill does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: lightning.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise InterruptedError


@pytest.mark.parametrize(("micro", "accumulation", "rows"), [(4, 1, 8), (2, 2, 8), (2, 2, 6)])
def test_equals_a_plain_loop_whatever_the_accumulation(
    tmp_path: Path, micro: int, accumulation: int, rows: int
) -> None:
    """Of six rows in micro-batches of two, each second step has one micro-batch, whose loss Lightning halves."""
    keep, module = callback(seed=3), LitNet()
    keep_double(keep)
    fit(tmp_path, module, keep, rows=rows, micro=micro, accumulate_grad_batches=accumulation)

    def own(step: int) -> float:
        return 0.5 if rows == 6 and step % 2 else 1.0

    assert_equal(weights(module.net), naive(6, seed=3, decay=False, own=own), 1e-12)


def keep_double(keep: Any) -> None:
    """Have the penalty computed in float64, from its setup on."""
    original = keep.setup

    def setup(*inputs: Any, **named: Any) -> None:
        original(*inputs, **named)
        keep.term.penalty.double()

    keep.setup = setup


def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    settings = replace(SETTINGS, schedule="cosine", dual_rate=0.1, tightening=0.5)
    whole, parts = LitNet(norm=True), LitNet(norm=True)
    full = callback(settings, seed=3)
    fit(tmp_path, whole, full)
    saves = ModelCheckpoint(str(tmp_path), every_n_train_steps=3, save_top_k=-1, filename="{step}")
    with pytest.raises(InterruptedError):
        fit(tmp_path, parts, callback(settings, seed=3), callbacks=[saves, StopAt(4)], enable_checkpointing=True)
    resumed, keep = LitNet(norm=True), callback(settings, seed=99)  # the checkpoint's seed wins
    fit(tmp_path, resumed, keep, ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert_equal(weights(resumed), weights(whole))
    assert int(resumed.retention_penalty.steps) == 6  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]


def test_the_old_model_is_in_no_optimizer_and_no_checkpoint(tmp_path: Path) -> None:
    module, keep = LitNet(0.3, norm=True), callback()
    trainer = fit(tmp_path, module, keep)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    buffers = {name for name in state if name.startswith("retention_penalty.")}
    assert "retention_penalty.u.value" in buffers
    assert state.keys() - buffers == {f"net.{name}" for name in Net(norm=True).state_dict()}
    assert sum(len(group["params"]) for group in trainer.optimizers[0].param_groups) == len(
        list(Net(norm=True).parameters())
    )
    assert keep.term is not None
    assert keep.term.old is not None
    assert_equal(weights(keep.term.old.module.net), weights(Net(norm=True)))  # pyright: ignore[reportArgumentType]
    assert not any(part.training for part in keep.term.old.module.modules())


def test_the_first_step_finds_both_models_equal_and_every_task_is_logged(tmp_path: Path) -> None:
    module, keep = LitNet(0.5, norm=True), callback(replace(SETTINGS, tasks_per_step=None, tasks=("a", "b", "c")))
    trainer = fit(tmp_path, module, keep, max_steps=1, log_every_n_steps=1)
    assert {name: float(trainer.logged_metrics[f"retention/h/{name}"]) for name in "abc"} == dict.fromkeys("abc", 0.0)
    assert {f"retention/{kind}/{task}" for kind in ("u", "weight") for task in "abc"} <= trainer.logged_metrics.keys()


def test_a_module_in_evaluation_mode_is_penalized_too(tmp_path: Path) -> None:
    """Lightning trains a module in the mode in which it comes."""
    keep, module = callback(seed=3), LitNet()
    keep_double(keep)
    fit(tmp_path, module.eval(), keep)
    assert_equal(weights(module.net), naive(6, seed=3, decay=False), 1e-12)


class Forgets(LitNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(**batch)["loss"]


class Manual(LitNet):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Late(LitNet):
    def setup(self, stage: str) -> None:
        self.more = torch.nn.Linear(1, 1)


def test_misuse_gets_a_sentence(tmp_path: Path, tried: Tried) -> None:
    wrong: list[tuple[lightning.LightningModule, str]] = [
        (Forgets(), "training_step has not added the penalty"),
        (Manual(), "needs automatic optimization"),
        (Late(), "were not there yet"),
        (lightning.LightningModule(), "needs a module that adds the penalty"),
    ]
    for module, sentence in wrong:
        tried("bad inputs")
        if type(module) is lightning.LightningModule:
            module.training_step = module.configure_optimizers = lambda *inputs: None  # pyright: ignore
        with pytest.raises(UserError, match=sentence):
            fit(tmp_path, module, callback())
    tried("bad inputs")
    with pytest.raises(UserError, match="under DDP alone"):
        _refuse_untried(SimpleNamespace(strategy=object()), LitNet())  # pyright: ignore[reportArgumentType]
    tried("bad inputs")
    module = LitNet()
    with pytest.raises(UserError, match="shares parameters"):
        fit(tmp_path, module, callback(old_model=module.net.eval()))


def test_checkpoints_of_another_old_model(tmp_path: Path, tried: Tried) -> None:
    tried("bad inputs")
    trainer = fit(tmp_path, LitNet(), callback())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    other = LitNet()
    with torch.no_grad():
        other.net.layers[0].weight.mul_(1.01)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(UserError, match="another old model"):
        fit(tmp_path, other, callback(), ckpt_path=str(tmp_path / "last.ckpt"), max_steps=7)
