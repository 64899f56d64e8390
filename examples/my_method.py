"""A method in one file: settings, class, registration. Here Learning without Forgetting (Li and Hoiem, 2016).

holdfast develop examples/my_method.toml
"""

from __future__ import annotations

import torch

from holdfast import Method, MethodConfig, StepOutput, register
from holdfast.config.base import NonNegativeFloat, PositiveFloat
from holdfast.data.round import Batch
from holdfast.methods.base import class_logits, cross_entropy
from holdfast.methods.labelled import mean_over_ranks
from holdfast.model.classifier import Classifier


class LwfConfig(MethodConfig):
    """[method] with name = "my_method.py"."""

    weight: NonNegativeFloat = 1.0
    """Weight of the distillation."""
    softening: PositiveFloat = 2.0
    """Temperature that both models' logits are divided by before they are compared."""


@register("lwf", settings=LwfConfig)
class Lwf(Method):
    """Cross-entropy on target images, and on every image the old model's prediction among the protected classes."""

    uses_negatives = False

    def __init__(self, model: Classifier, config: LwfConfig, steps: int) -> None:
        super().__init__(model)
        self.config = config

    def forward(self, batch: Batch) -> StepOutput:
        """Losses of one step; the loop calls backward."""
        images, target = (batch.target_images, batch.protected_images), len(self.model.classes) - 1
        features = torch.cat(self.model.image_features_together(*images))
        new = class_logits(features, self.model.class_features(), self.model.class_temperature)
        with torch.no_grad():
            features = torch.cat(self.old.image_features_together(*images))
            old = class_logits(features, self.old.class_matrix(), self.old.class_temperature)
        labels = torch.full_like(batch.target_index, target)
        gain, value = mean_over_ranks(cross_entropy(new[: len(labels)], labels), batch.target_total)
        expected, found = ((logits[:, :target] / self.config.softening) for logits in (old, new))
        distance = -(expected.softmax(dim=1) * found.log_softmax(dim=1)).sum(dim=1)
        kept, _ = mean_over_ranks(distance, batch.target_total + batch.protected_total)
        return StepOutput({"target": gain, "retention": self.config.weight * kept}, {"objective": value})
