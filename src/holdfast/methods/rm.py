"""RM: the protected tasks' loss as a regulariser with one fixed weight (method section 7; paper's eq. rm)."""

from __future__ import annotations

from holdfast.config.base import NonNegativeFloat
from holdfast.config.method import Views
from holdfast.data.round import Batch, RoundData
from holdfast.methods.base import StepOutput, class_logits, cross_entropy
from holdfast.methods.finetune import TargetContrast, target_objective
from holdfast.methods.forms import Form, FormConfig, FormMethod
from holdfast.methods.labelled import task_means
from holdfast.methods.registry import register
from holdfast.model.classifier import Classifier


class RmConfig(FormConfig):
    """method.name = "rm": the target objective plus the protected tasks' mean loss at a fixed weight."""

    form: Form = "default"
    """`published` hands over the best checkpoint as it was trained: no interpolation, no refit, no target bias.
    `authors` does so too, and is the authors' released code: alpha is multiplied by tau_0, negatives have a head of
    their own, constraint images are seen through random views, views are mirrored and turned by up to 15 degrees, and
    the learning rate warms up over 500 steps."""
    alpha: NonNegativeFloat = 1.0
    """The weight. The paper tries 0.1, 1 and 10, on Places365 1, 10, ..., 10000: with the authors' code, which
    multiplies it by tau_0 = 0.05 (0.01)."""

    def protected_views(self) -> Views:
        """The authors' code sees every training image through a random view."""
        return "paired" if self.is_authors else "clean"


@register("rm", settings=RmConfig)
class Rm(FormMethod):
    """min F(w, D) + alpha/m sum_k L_k(w, D_k): ours with alpha in place of beta [u_k]_+."""

    uses_heads = True

    def __init__(self, model: Classifier, config: RmConfig, steps: int) -> None:
        super().__init__(model, config)
        self.config = config

    def prepare(self, old: Classifier, data: RoundData) -> None:
        """One pair of moving averages for each target pair."""
        super().prepare(old, data)
        config = self.config
        contrast_set = config.contrast_set(len(data.negatives))
        self.target = TargetContrast(len(data.target), contrast_set, config.temperature, config.gamma_pairs)
        self.num_protected = data.tasks.num_protected

    def forward(self, batch: Batch) -> StepOutput:
        """The target's contrastive loss, and alpha * mean over tasks of their cross-entropy."""
        features = self.encode(batch)
        contrast = target_objective(self.model, self.target, features, batch)
        logits = class_logits(features.protected_images, features.classes, self.model.class_temperature)
        means = task_means(cross_entropy(logits, batch.protected_task), batch.protected_task, self.num_protected)
        alpha = self.config.alpha * self.config.retention_scale(self.model.class_temperature)
        return StepOutput(
            {"target": contrast.surrogate, "retention": alpha * means.average},
            {"objective": contrast.objective},
            {"loss": means.mean},
        )
