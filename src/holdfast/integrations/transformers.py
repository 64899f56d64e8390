"""Retention constraints in the ``Trainer`` of transformers, and in trainers that are built on it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import TrainerCallback

from holdfast.errors import UserError
from holdfast.files import write_atomic
from holdfast.integrations.losses import PerExampleLoss, transformers_loss
from holdfast.integrations.old_model import choose_old_model
from holdfast.integrations.protected import Collate, ProtectedRows
from holdfast.integrations.settings import RetentionSettings
from holdfast.integrations.term import RetentionTerm

STATE_FILE = "retention.pt"  # in a checkpoint folder, beside the optimizer's state
_TRIED = ("NO", "MULTI_GPU", "MULTI_CPU")  # accelerate's distributed types: one process, and DDP

_Trainer = transformers.Trainer if TYPE_CHECKING else object


class RetentionMixin(_Trainer):
    """A ``Trainer`` whose loss has the retention penalty added, on protected batches of its own.

    ``class MyTrainer(RetentionMixin, SFTTrainer)``, or the ready :class:`HoldfastTrainer`. Beside the trainer's own
    arguments it takes, by name:

    - ``protected_dataset``: rows like those of the training set, with a column that names each row's task;
    - ``retention``: :class:`~holdfast.integrations.settings.RetentionSettings`;
    - ``old_model``: in evaluation mode; default: a frozen copy of the model at its start, or the model with its
      adapters off (PEFT), or no model at all where ``retention.old_loss_column`` holds its losses;
    - ``per_example_loss``: a function of (model, batch) that returns one loss for each row; default: cross-entropy of a
      row's class, or the mean over its labelled tokens;
    - ``protected_collator``: default: the trainer's.

    The penalty is computed once for each optimizer step, in evaluation mode (no dropout, BatchNorm untouched). Its
    state lies in each checkpoint (``retention.pt``). One process or DDP; DataParallel, FSDP and DeepSpeed are refused.
    """

    def __init__(
        self,
        *args: Any,
        protected_dataset: Any,
        retention: RetentionSettings | None = None,
        old_model: nn.Module | None = None,
        per_example_loss: PerExampleLoss | None = None,
        protected_collator: Callable[[list[Any]], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        settings = retention or RetentionSettings()
        self._refuse_untried_parallelism()
        if self.model_init is not None and old_model is None and settings.old_loss_column is None:
            raise UserError("with model_init the old model is not known", do="give model= or old_model=")
        old = choose_old_model(self._trained(), old_model, column=settings.old_loss_column is not None)
        rows = ProtectedRows(self.prepare_protected_dataset(protected_dataset), settings)
        collator: Any = self.data_collator if protected_collator is None else protected_collator
        collate: Collate = self._get_collator_with_removed_columns(collator, description="protected")
        if per_example_loss is None and getattr(self, "_loss_shifts_labels", False):
            collate = _WithLabelledTokens(collate)
        self.retention_term = RetentionTerm(
            rows,
            old,
            per_example_loss or transformers_loss,
            collate,
            seed=self.args.seed,
            workers=self.args.dataloader_num_workers,
        )
        self._resumed_retention: dict[str, Any] | None = None
        self.add_callback(_Commit(self))

    def prepare_protected_dataset(self, dataset: Any) -> Any:
        """The protected rows as the trainer's own preparation would leave them; here they are ready as they come."""
        return dataset

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The trainer's own loss, with the penalty added beside the first micro-batch of an optimizer step."""
        step = self.state.global_step
        if not (model.training and torch.is_grad_enabled() and self.retention_term.due(step)):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        # Before the trainer's own rows, which move BatchNorm's statistics: the first step finds both models equal.
        with self.accelerator.autocast():
            term = self.retention_term.compute(self._trained(), step, self._prepare_inputs, self.args.device)
        term = self._micro_batches_divided_by(num_items_in_batch) * term
        result: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        return (result[0] + term, result[1]) if return_outputs else result + term

    def _trained(self) -> nn.Module:
        """The model without DDP's wrapper: gradients of protected rows are reduced with those of the trainer's own."""
        return cast(nn.Module, self.model)

    def _micro_batches_divided_by(self, num_items_in_batch: Tensor | int | None) -> int:
        """What ``training_step`` will divide the loss by: the penalty is of the whole optimizer step, and undoes it."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            by_tokens = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = by_tokens or self.compute_loss_func is not None
        return 1 if scaled else self.current_gradient_accumulation_steps

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the trainer's values, and beside the training loss what retention says of each task."""
        if "loss" in logs:
            logs.update(self.retention_term.metrics())
        super().log(logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            state = self.retention_term.state_dict()
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            write_atomic(Path(output_dir) / STATE_FILE, lambda temporary: torch.save(state, temporary))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._resumed_retention = _read_state(Path(checkpoint) / STATE_FILE)

    def _refuse_untried_parallelism(self) -> None:
        kind = str(self.accelerator.distributed_type.value)
        if self.args.n_gpu > 1:
            kind = "DataParallel"
        elif getattr(self.accelerator, "parallelism_config", None) is not None:
            kind = "tensor, context or sequence parallelism"
        elif self.is_model_parallel or getattr(self, "is_distributed_loading_by_transformers", False):
            kind = "a model split over devices"
        if kind not in _TRIED:
            raise UserError(
                "retention is tried in one process and under DDP alone",
                found=kind,
                do="start one process for each GPU with torchrun or accelerate launch, without sharding the model",
            )


class HoldfastTrainer(RetentionMixin, transformers.Trainer):
    """``transformers.Trainer`` with retention constraints; see :class:`RetentionMixin`."""


class _Commit(TrainerCallback):
    """Begins a run's term, and commits it after each optimizer step, before anything is saved."""

    def __init__(self, trainer: RetentionMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start with empty averages, or with those of the checkpoint that is resumed from."""
        trainer = self.trainer
        term, resumed = trainer.retention_term, trainer._resumed_retention  # pyright: ignore[reportPrivateUsage]
        trainer._resumed_retention = None  # pyright: ignore[reportPrivateUsage]
        term.begin(state.max_steps)
        if resumed is not None:
            term.load_state_dict(resumed)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """u moves with the weights: not where a scaler skipped the step."""
        self.trainer.retention_term.commit(not self.trainer.accelerator.optimizer_step_was_skipped)


class _WithLabelledTokens:
    """A collator that refuses rows of which a causal language model predicts no labelled token."""

    def __init__(self, collate: Collate) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        batch = self.collate(rows)
        labels = batch.get("labels")
        if labels is not None and labels.dim() == 2 and len(labels) == len(rows):
            empty = ~(labels[:, 1:] != -100).any(dim=1)
            if bool(empty.any()):
                raise UserError(
                    "a protected row has no labelled token, so that it has no loss",
                    found=f"all labels are -100 in {int(empty.sum())} of {len(rows)} rows of a batch",
                    do="leave such rows out, or do not truncate their completions",
                )
        return batch


def _read_state(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UserError(
            f"the checkpoint holds no {STATE_FILE}: it is of a run without retention",
            found=str(path.parent),
            do="resume from a checkpoint of this trainer, or start anew from those weights",
        ) from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} cannot be read", found=str(error).partition("\n")[0]) from error
