"""Supervised training on all classes with equal weight: how a base model is tuned, and fine-tuning with replay."""

from __future__ import annotations

import torch

from holdfast.config.method import MethodConfig
from holdfast.data.round import Batch
from holdfast.methods.base import Method, StepOutput, balanced_cross_entropy, class_logits
from holdfast.methods.registry import register
from holdfast.model.classifier import Classifier
from holdfast.runtime import sum_over_ranks, world_size


class CrossEntropyConfig(MethodConfig):
    """method.name = "cross_entropy": supervised training on all classes with equal weight."""

    heads: bool = True
    """Train task-dependent heads, too."""


@register("cross_entropy", settings=CrossEntropyConfig)
class CrossEntropy(Method):
    """Mean over classes of the mean cross-entropy over class prompts; no moving averages, no constraints."""

    uses_heads = True
    uses_negatives = False
    graph_safe = True

    def __init__(self, model: Classifier, config: CrossEntropyConfig, steps: int) -> None:
        super().__init__(model)
        self.uses_heads = config.heads

    def forward(self, batch: Batch) -> StepOutput:
        """One loss over the images of target and protected classes."""
        labels = torch.cat([torch.full_like(batch.target_index, len(self.model.classes) - 1), batch.protected_task])
        features = self.model.image_features_together(batch.target_images, batch.protected_images)
        logits = class_logits(torch.cat(features), self.model.class_matrix(batch.prompts), self.model.class_temperature)
        loss = balanced_cross_entropy(logits, labels)
        return StepOutput({"target": loss}, {"objective": sum_over_ranks(loss) / world_size()})
