"""WCCL: a weighted sum of the contrastive losses of the protected tasks and of the target (method section 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.config.base import Fraction
from holdfast.config.method import ContrastConfig
from holdfast.data.round import Batch, RoundData
from holdfast.methods.base import Method, StepOutput, encode
from holdfast.methods.pairs import Anchors, Pairs, SetContrast, all_pairs, group_sizes, stands_for
from holdfast.methods.registry import register
from holdfast.model.classifier import Classifier
from holdfast.objective.contrastive import Contrast


class WcclConfig(ContrastConfig):
    """method.name = "wccl": weighted contrastive losses of the protected tasks and of the target."""

    alpha: Fraction = 0.9
    """Weight of the protected tasks' mean; the target has 1 - alpha. The paper tries 0.5, 0.9, 0.99."""


@register("wccl", settings=WcclConfig)
class Wccl(Method):
    """min alpha/m sum_k GCL(D_k) + (1-alpha) GCL(D_o); a pair is contrasted with all that lies outside its own task.

    ::

        T_ik^- = {t_j : (x_j, t_j) in D_all \\ D_k} ∪ {t_i},     I_ik^- likewise

    Where the negatives are protected images themselves (the default without outside pairs), those of task k belong to
    D_k and are no negatives of its pairs.
    """

    reads_texts = True
    sizes: Tensor
    negative_task: Tensor
    shared: Tensor

    def __init__(self, model: Classifier, config: WcclConfig, steps: int) -> None:
        super().__init__(model)
        self.config = config

    def prepare(self, old: Classifier, data: RoundData) -> None:
        """Moving averages of target and protected pairs; which negatives are members of a protected task."""
        super().prepare(old, data)
        temperature, gamma = self.config.temperature, self.config.gamma_pairs
        self.target = SetContrast(len(data.target), temperature, gamma)
        self.protected = SetContrast(len(data.constraint), temperature, gamma)
        self.register_buffer("sizes", group_sizes(data), persistent=False)
        task_of = dict(zip(data.constraint.ids, data.constraint.labels.tolist(), strict=True))
        m = data.tasks.num_protected
        task = torch.tensor([task_of.get(item, m + 1) for item in data.negatives.ids])
        self.register_buffer("negative_task", task, persistent=False)
        # Negatives that are members of each task, [m + 2]; the last two groups are no tasks.
        shared = torch.bincount(task, minlength=m + 2) * (torch.arange(m + 2) < m)
        self.register_buffer("shared", shared, persistent=False)

    def forward(self, batch: Batch) -> StepOutput:
        """alpha * mean over sampled tasks of their loss, (1-alpha) * the target's."""
        m, alpha = len(self.sizes) - 2, self.config.alpha
        pairs = all_pairs(encode(self.model, batch), batch, m)
        per_anchor = 1 / pairs.drawn.clamp(min=1).to(pairs.images.dtype)
        sampled = (pairs.drawn[:m] > 0).sum().clamp(min=1).to(per_anchor)
        target = self._contrast(self.target, pairs.target, pairs, (1 - alpha) * per_anchor)
        protected = self._contrast(self.protected, pairs.protected, pairs, alpha / sampled * per_anchor)
        return StepOutput(
            {"target": target.surrogate, "retention": protected.surrogate},
            {"objective": target.objective + protected.objective},
        )

    def _contrast(self, contrast: SetContrast, anchors: Anchors, pairs: Pairs, weight: Tensor) -> Contrast:
        own_task = anchors.group[:, None] == self._tasks_of(pairs)  # the anchor itself is one of its own task
        outside = self.sizes.sum() - self.sizes[anchors.group] - self.shared[anchors.group]
        return contrast(
            anchors.images,
            anchors.texts,
            pairs.images,
            pairs.texts,
            anchors.index,
            anchors.total,
            set_size=outside + 1,
            allowed=stands_for(pairs, anchors, self.sizes).masked_fill(own_task, 0),
            weight=weight[anchors.group],
        )

    def _tasks_of(self, pairs: Pairs) -> Tensor:
        """The task that each column is a member of, where it is one: [C]."""
        is_negative = pairs.group == len(self.sizes) - 1
        return torch.where(is_negative, self.negative_task[torch.where(is_negative, pairs.index, 0)], pairs.group)
