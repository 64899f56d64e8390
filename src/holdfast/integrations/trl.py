"""Retention constraints in TRL's ``SFTTrainer``."""

from __future__ import annotations

from typing import Any

from trl.trainer.sft_trainer import SFTTrainer

from holdfast.integrations.transformers import RetentionMixin


class HoldfastSFTTrainer(RetentionMixin, SFTTrainer):
    """``trl.SFTTrainer`` with retention constraints; see :class:`~holdfast.integrations.transformers.RetentionMixin`.

    Protected rows may hold texts, messages or prompts with completions, as the training rows do. They are prepared in
    the same way, but never packed: each is one example.
    """

    def prepare_protected_dataset(self, dataset: Any) -> Any:
        """Tokenize protected rows as the training rows; those that hold ``input_ids`` are ready."""
        if "input_ids" in getattr(dataset, "column_names", ["input_ids"]):
            return dataset
        trainer: Any = self
        return trainer._prepare_dataset(
            dataset, self.processing_class, self.args, packing=False, formatting_func=None, dataset_name="protected"
        )
