"""DER and DER++: dark experience replay, the old model's logits kept on protected images (method section 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.config.base import NonNegativeFloat
from holdfast.config.method import MethodConfig
from holdfast.data.round import Batch
from holdfast.methods.base import StepOutput, cross_entropy
from holdfast.methods.labelled import LinearMethod, mean_over_ranks
from holdfast.methods.registry import register
from holdfast.model.classifier import Classifier
from holdfast.runtime import gather, sum_over_ranks, world_size


class DerConfig(MethodConfig):
    """method.name = "der": cross-entropy on the target, old logits kept on protected images."""

    alpha: NonNegativeFloat = 1.0
    """Weight of the squared difference to the old logits. The paper tries 0.1, 1 and 10."""
    beta: NonNegativeFloat = 0.0
    """Weight of the cross-entropy on a second draw of protected images: 0 is DER, above 0 is DER++."""


@register("der", settings=DerConfig)
class Der(LinearMethod):
    """Cross-entropy on the target + alpha * MSE to w_old's logits + beta * cross-entropy on a second draw.

    beta = 0 is DER: every protected image of the step keeps its logits. beta > 0 is DER++: each task's images are
    split into two disjoint halves, anew in every step; one keeps its logits, the other is the second draw. The step's
    budget of images is then the same for both, and for the other methods.
    """

    def __init__(self, model: Classifier, config: DerConfig, steps: int) -> None:
        super().__init__(model)
        self.config = config

    def forward(self, batch: Batch) -> StepOutput:
        """The terms of DER or DER++."""
        target, protected = self.images(batch)
        loss, value = mean_over_ranks(self.losses(target, self.target_labels(batch)), batch.target_total)
        logits = self.logits(protected)
        with torch.no_grad():  # the same pictures, through the same views
            old = self.old.logits(batch.protected_images, self._old_classes())
        second = second_draw(batch) if self.config.beta else torch.zeros_like(batch.protected_task, dtype=torch.bool)
        kept = _mean((logits - old).square().mean(dim=1), ~second)
        retention = self.config.alpha * kept
        if self.config.beta:
            retention = retention + self.config.beta * _mean(cross_entropy(logits, batch.protected_task), second)
        return StepOutput({"target": loss, "retention": retention}, {"objective": value})

    def _old_classes(self) -> Tensor:
        """The frozen model's class features: computed once."""
        if not hasattr(self, "_old_matrix"):
            self._old_matrix = self.old.class_matrix()
        return self._old_matrix


def second_draw(batch: Batch) -> Tensor:
    """Which of this rank's protected images make up the second draw: every other one of each task, [P].

    Every other one in the order of their positions, counted over all ranks; which half comes first depends on the
    draw, so that no image serves one purpose only.
    """
    index = gather(batch.protected_index, batch.protected_total)
    task = gather(batch.protected_task, batch.protected_total)
    before = (batch.protected_task[:, None] == task) & (index < batch.protected_index[:, None])
    return (before.sum(dim=1) + index.sum()) % 2 == 1


def _mean(losses: Tensor, chosen: Tensor) -> Tensor:
    """Mean over the chosen examples of all ranks, to differentiate; 0 where there are none."""
    count = sum_over_ranks(chosen.sum()).clamp(min=1)
    return world_size() * losses.where(chosen, 0).sum() / count
