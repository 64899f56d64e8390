"""Retention constraints in a ``LightningModule``: a mixin for the loss, a callback for the protected rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as lightning
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import default_collate

from holdfast.errors import UserError
from holdfast.integrations.losses import PerExampleLoss
from holdfast.integrations.old_model import choose_old_model
from holdfast.integrations.protected import ProtectedRows
from holdfast.integrations.settings import RetentionSettings
from holdfast.integrations.term import RetentionTerm

_Module = lightning.LightningModule if TYPE_CHECKING else object


class RetentionModule(_Module):
    """A ``LightningModule`` that adds ``self.retention_loss()`` to what its ``training_step`` returns.

    ::

        class Net(RetentionModule, LightningModule):
            def training_step(self, batch, batch_idx):
                return cross_entropy(self(batch[0]), batch[1]) + self.retention_loss()

    The protected rows and the old model come with :class:`RetentionCallback`; without it, and outside of training, the
    penalty is 0. Its buffers are part of the module's ``state_dict``, as ``retention_penalty``.
    """

    _retention: RetentionTerm | None = None  # the callback's

    def attach_retention(self, term: RetentionTerm) -> None:
        """Have :meth:`retention_loss` compute this term; its buffers become the module's, its old model does not."""
        self._retention, self.retention_penalty = term, term.penalty

    def retention_loss(self) -> Tensor | float:
        """The penalty of this optimizer step, beside its first micro-batch; 0 beside the others."""
        term = self._retention
        if term is None or not self.trainer.training or not term.due(self.trainer.global_step):
            return 0.0
        penalty = term.compute(self, self.trainer.global_step, self._to_own_device, self.device)
        # Lightning divides what training_step returns by the number of micro-batches.
        return self.trainer.accumulate_grad_batches * penalty

    def _to_own_device(self, batch: Any) -> Any:
        return self.transfer_batch_to_device(batch, self.device, 0)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then let u move with the weights: once for each optimizer step, before anything is saved."""
        super().optimizer_step(*args, **kwargs)
        if self._retention is not None:
            self._retention.commit()


class RetentionCallback(lightning.Callback):
    """Protected rows and old model of a :class:`RetentionModule`; logs h, u and weight of each task.

    - ``protected_dataset``: map-style, rows as mappings or tuples, with a task for each row
      (``retention.task_column``: a name, or a position in tuples);
    - ``per_example_loss``: a function of (module, batch) that returns one loss for each row. It is called with the
      module and with the old one, both in evaluation mode;
    - ``old_model``: in evaluation mode; default: a frozen copy of the module at its start. It lies in the callback, so
      that optimizer and checkpoints never see it;
    - ``seed``: of the protected batches.

    One device or DDP; other strategies, manual optimization and several optimizers are refused.
    """

    def __init__(
        self,
        protected_dataset: Any,
        per_example_loss: PerExampleLoss,
        retention: RetentionSettings | None = None,
        *,
        old_model: nn.Module | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        self.rows = ProtectedRows(protected_dataset, retention or RetentionSettings())
        self.loss, self.old_model, self.collate = per_example_loss, old_model, collate
        self.num_workers, self.seed = num_workers, seed
        self.term: RetentionTerm | None = None
        self._resumed = False

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Take the old model and register the penalty, before a checkpoint is loaded."""
        if stage != "fit":
            return
        _refuse_untried(trainer, pl_module)
        if self.term is None:
            column = self.rows.settings.old_loss_column is not None
            old = choose_old_model(pl_module, self.old_model, column=column)
            self.term = RetentionTerm(self.rows, old, self.loss, self.collate, seed=self.seed, workers=self.num_workers)
        self._resumed = False
        cast(RetentionModule, pl_module).attach_retention(self.term)

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Begin with empty averages, or go on with those that the checkpoint brought."""
        assert self.term is not None
        old = self.term.old
        if self.old_model is None and old is not None and _names(old.module) != _names(pl_module):
            raise UserError(
                "the module's layers were not there yet when the old model was copied",
                do="build them in __init__, or give old_model=",
            )
        steps = trainer.estimated_stepping_batches if self.rows.settings.schedule == "cosine" else 1
        if steps == float("inf"):
            raise UserError("a cosine-increasing beta needs the number of steps", do="set max_steps or max_epochs")
        (self.term.go_on if self._resumed else self.term.begin)(int(steps))

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Log; a module that never asked for its penalty is refused."""
        assert self.term is not None
        if self.term.last is None:
            raise UserError("training_step has not added the penalty", do="return loss + self.retention_loss()")
        if trainer._logger_connector.should_update_logs:  # pyright: ignore[reportPrivateUsage]
            pl_module.log_dict(self.term.metrics())

    def state_dict(self) -> dict[str, Any]:
        """Seed, tasks and old model; the averages are buffers of the module."""
        return {} if self.term is None else self.term.identity()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint stopped; one of other tasks or of another old model is refused."""
        if self.term is not None and state_dict:
            self.term.check_identity(state_dict)
            self._resumed = True


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}


def _refuse_untried(trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
    if not isinstance(module, RetentionModule):
        raise UserError(
            "RetentionCallback needs a module that adds the penalty",
            found=type(module).__name__,
            do="derive it from RetentionModule and LightningModule, and return loss + self.retention_loss()",
        )
    if not module.automatic_optimization:
        raise UserError("retention needs automatic optimization", do="leave automatic_optimization as it is")
    strategy = trainer.strategy
    if not isinstance(strategy, SingleDeviceStrategy) and type(strategy) is not DDPStrategy:
        raise UserError(
            "retention is tried on one device and under DDP alone",
            found=type(strategy).__name__,
            do="use strategy='ddp', or one device",
        )
