"""Plain fine-tuning: the target objective alone. What everybody does first, and what forgets."""

from __future__ import annotations

import torch

from holdfast.config.method import ContrastConfig
from holdfast.data.round import Batch, RoundData
from holdfast.methods.base import Encoded, Method, StepOutput, class_logits, cross_entropy, encode
from holdfast.methods.registry import register
from holdfast.model.classifier import Classifier
from holdfast.objective.contrastive import Contrast, GlobalContrastive
from holdfast.runtime import gather, sum_over_ranks, world_size


class FinetuneConfig(ContrastConfig):
    """method.name = "finetune": the target objective alone."""


@register("finetune", settings=FinetuneConfig)
class Finetune(Method):
    """Minimise F(w, D), and nothing else."""

    uses_heads = True
    graph_safe = True

    def __init__(self, model: Classifier, config: FinetuneConfig, steps: int) -> None:
        super().__init__(model)
        self.config = config

    def prepare(self, old: Classifier, data: RoundData) -> None:
        """One pair of moving averages for each target pair."""
        super().prepare(old, data)
        self.target = TargetContrast(
            len(data.target), len(data.negatives), self.config.temperature, self.config.gamma_pairs
        )

    def forward(self, batch: Batch) -> StepOutput:
        """The global contrastive loss of the target pairs."""
        contrast = target_objective(self.model, self.target, encode(self.model, batch), batch)
        return StepOutput({"target": contrast.surrogate}, {"objective": contrast.objective})


def target_objective(model: Classifier, contrast: TargetContrast, features: Encoded, batch: Batch) -> Contrast:
    """F: the contrast of the target pairs; for a linear head, which reads no texts, the target's cross-entropy."""
    if model.linear is None:
        return contrast(features, batch)
    logits = class_logits(features.target_images, features.classes, model.class_temperature)
    losses = cross_entropy(logits, torch.full_like(batch.target_index, len(model.classes) - 1))
    local = losses.sum() / batch.target_total
    return Contrast(world_size() * local, sum_over_ranks(local.detach()))


class TargetContrast(GlobalContrastive):
    """The target objective F: target pairs against the negatives; target pairs are never each other's negatives."""

    def __init__(self, pairs: int, negatives: float, temperature: float, gamma: float) -> None:
        super().__init__(pairs, temperature, gamma)
        self.negatives = negatives

    def forward(self, features: Encoded, batch: Batch) -> Contrast:  # pyright: ignore[reportIncompatibleMethodOverride]
        """F's surrogate and value, with the negatives of all ranks."""
        return super().forward(
            features.target_images,
            features.target_texts,
            gather(features.negative_images, batch.negative_total),
            gather(features.negative_texts, batch.negative_total),
            batch.target_index,
            batch.target_total,
            set_size=self.negatives + 1,
        )
