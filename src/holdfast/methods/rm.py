"""RM: the protected tasks' loss as a regulariser with one fixed weight (method section 7; paper's eq. rm)."""

from __future__ import annotations

from holdfast.config.base import NonNegativeFloat
from holdfast.config.method import ContrastConfig
from holdfast.data.round import Batch, RoundData
from holdfast.methods.base import Method, StepOutput, class_logits, cross_entropy, encode
from holdfast.methods.finetune import TargetContrast, target_objective
from holdfast.methods.labelled import task_means
from holdfast.methods.registry import register
from holdfast.model.classifier import Classifier


class RmConfig(ContrastConfig):
    """method.name = "rm": the target objective plus the protected tasks' mean loss at a fixed weight."""

    alpha: NonNegativeFloat = 1.0
    """The weight. The paper tries 0.1, 1 and 10; on Places365 1, 10, ..., 10000."""


@register("rm", settings=RmConfig)
class Rm(Method):
    """min F(w, D) + alpha/m sum_k L_k(w, D_k): ours with alpha in place of beta [u_k]_+."""

    uses_heads = True

    def __init__(self, model: Classifier, config: RmConfig, steps: int) -> None:
        super().__init__(model)
        self.config = config

    def prepare(self, old: Classifier, data: RoundData) -> None:
        """One pair of moving averages for each target pair."""
        super().prepare(old, data)
        config = self.config
        self.target = TargetContrast(len(data.target), len(data.negatives), config.temperature, config.gamma_pairs)
        self.num_protected = data.tasks.num_protected

    def forward(self, batch: Batch) -> StepOutput:
        """The target's contrastive loss, and alpha * mean over tasks of their cross-entropy."""
        features = encode(self.model, batch)
        contrast = target_objective(self.model, self.target, features, batch)
        logits = class_logits(features.protected_images, features.classes, self.model.class_temperature)
        means = task_means(cross_entropy(logits, batch.protected_task), batch.protected_task, self.num_protected)
        return StepOutput(
            {"target": contrast.surrogate, "retention": self.config.alpha * means.average},
            {"objective": contrast.objective},
            {"loss": means.mean},
        )
