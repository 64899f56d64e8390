"""The method: target objective under one retention constraint a protected task (Algorithm 1, method section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.config import HoldfastConfig
from holdfast.data.tasks import Batch, RoundData
from holdfast.methods.base import (
    LOSSES,
    Encoded,
    Method,
    StepOutput,
    balanced_cross_entropy,
    class_logits,
    clean_logits,
    encode,
)
from holdfast.methods.finetune import TargetContrast
from holdfast.model.classifier import Classifier
from holdfast.objective.retention import RetentionPenalty


class Holdfast(Method):
    """minimise F(w, D) subject to h_k(w) = L_k(w, D_k) - L_k(w_old, D_k) <= 0 for k = 1 … m."""

    uses_heads = True
    recordable = True
    old_losses: Tensor  # [n] of the constraint set's evaluation views, where those are what is compared

    def __init__(self, model: Classifier, config: HoldfastConfig, steps: int) -> None:
        super().__init__(model)
        self.config, self.steps = config, steps
        self.loss = LOSSES[config.constraint]

    def prepare(self, old: Classifier, data: RoundData) -> None:
        """Estimators sized to the data; old losses cached where the view is fixed."""
        super().prepare(old, data)
        config = self.config
        self.target = TargetContrast(len(data.target), len(data.negatives), config.temperature, config.gamma_pairs)
        m = data.tasks.num_protected
        labels = torch.from_numpy(data.constraint.labels).to(old.towers.projection.device)
        clean = self.loss(clean_logits(old, data.constraint), labels)  # l(w_old, x, y) on evaluation views
        sizes = torch.bincount(labels, minlength=m)
        means = clean.new_zeros(m).index_add(0, labels, clean) / sizes
        self.retention = RetentionPenalty(
            m,
            config.beta,
            config.gamma_tasks,
            schedule=config.beta_schedule,
            total_steps=self.steps,
            slack=config.slack,
            task_sizes=sizes,
            ask=config.reserve * means,
            dual_rate=config.dual_rate,
            commit="later",
        )
        self.register_buffer("old_losses", clean if config.views == "clean" else clean[:0])

    def forward(self, batch: Batch) -> StepOutput:
        """G_1 and G_2 of Algorithm 1, as surrogates."""
        features = encode(self.model, batch)
        contrast = self.target(features, batch)
        logits = class_logits(features.protected_images, features.classes, self.model.class_temperature)
        new = self.loss(logits, batch.protected_task)
        retention = self.retention(new, self._old_losses(batch), batch.protected_task)
        parts = {"target": contrast.surrogate, "retention": retention.penalty}
        if self.config.replay:
            parts["replay"] = self.config.replay * self._replay(features, logits, batch)
        return StepOutput(
            parts,
            {"objective": contrast.objective},
            {"h": retention.h, "u": retention.u, "weight": retention.weight},
        )

    def _replay(self, features: Encoded, protected_logits: Tensor, batch: Batch) -> Tensor:
        """Mean over classes of the mean cross-entropy, so that classes are told apart and not only held in place."""
        target_logits = class_logits(features.target_images, features.classes, self.model.class_temperature)
        target = torch.full_like(batch.target_index, len(self.model.classes) - 1)
        return balanced_cross_entropy(
            torch.cat([target_logits, protected_logits]), torch.cat([target, batch.protected_task])
        )

    @torch.no_grad()
    def _old_losses(self, batch: Batch) -> Tensor:
        """l(w_old, x, y) on the same pictures: cached, or through the old model on the same random view."""
        if self.config.views == "clean":
            return self.old_losses[batch.protected_index]
        images = batch.protected_images if batch.protected_old_images is None else batch.protected_old_images
        return self.loss(self.old.logits(images, self._old_classes()), batch.protected_task)

    def _old_classes(self) -> Tensor:
        """The frozen model's class features: computed once."""
        if not hasattr(self, "_old_matrix"):
            self._old_matrix = self.old.class_matrix()
        return self._old_matrix
