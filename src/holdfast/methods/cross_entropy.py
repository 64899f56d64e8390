"""Supervised training on all classes with equal weight: how a base model is tuned, and fine-tuning with replay."""

from __future__ import annotations

import torch

from holdfast.config.methods import CrossEntropyConfig
from holdfast.data.tasks import Batch
from holdfast.methods.base import Method, StepOutput, class_logits, cross_entropy
from holdfast.model.classifier import Classifier
from holdfast.runtime import sum_over_ranks, world_size


class CrossEntropy(Method):
    """Mean over classes of the mean cross-entropy over class prompts; no moving averages, no constraints."""

    uses_heads = True

    def __init__(self, model: Classifier, config: CrossEntropyConfig, steps: int) -> None:
        super().__init__(model)
        self.uses_heads = config.heads

    def forward(self, batch: Batch) -> StepOutput:
        """One loss over the images of target and protected classes."""
        labels = torch.cat([torch.full_like(batch.target_index, len(self.model.classes) - 1), batch.protected_task])
        features = self.model.image_features(torch.cat([batch.target_images, batch.protected_images]))
        losses = cross_entropy(
            class_logits(features, self.model.class_features(), self.model.class_temperature), labels
        )
        zeros = losses.new_zeros(len(self.model.classes))
        count = sum_over_ranks(zeros.index_add(0, labels, torch.ones_like(losses)))
        per_class = zeros.index_add(0, labels, losses) / count.clamp(min=1)
        loss = per_class.sum() / (count > 0).sum()
        return StepOutput({"target": world_size() * loss}, {"objective": sum_over_ranks(loss)})
