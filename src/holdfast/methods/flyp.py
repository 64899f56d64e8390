"""FLYP: fine-tune as one pre-trains, by contrast on everything there is (method section 7; paper's eq. flyp)."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.config.method import ContrastConfig
from holdfast.data.round import Batch, RoundData
from holdfast.methods.base import Method, StepOutput, encode
from holdfast.methods.pairs import Anchors, Pairs, SetContrast, all_pairs, group_sizes, stands_for
from holdfast.methods.registry import register
from holdfast.model.classifier import Classifier
from holdfast.objective.contrastive import Contrast


class FlypConfig(ContrastConfig):
    """method.name = "flyp": global contrastive loss on everything, protected images with their class prompt."""


@register("flyp", settings=FlypConfig)
class Flyp(Method):
    """min 1/n_all sum over D_all of L_ctr(w; x_i, t_i, D_all, D_all): everybody is everybody else's negative."""

    reads_texts = True
    sizes: Tensor

    def __init__(self, model: Classifier, config: FlypConfig, steps: int) -> None:
        super().__init__(model)
        self.config = config

    def prepare(self, old: Classifier, data: RoundData) -> None:
        """Moving averages of every pair there is: target, negatives, protected."""
        super().prepare(old, data)
        temperature, gamma = self.config.temperature, self.config.gamma_pairs
        self.target = SetContrast(len(data.target), temperature, gamma)
        self.negatives = SetContrast(len(data.negatives), temperature, gamma)
        self.protected = SetContrast(len(data.constraint), temperature, gamma)
        self.register_buffer("sizes", group_sizes(data), persistent=False)
        self.num_protected, self.all = data.tasks.num_protected, int(self.sizes.sum())  # m, n_all

    def forward(self, batch: Batch) -> StepOutput:
        """The loss of all anchors, each kind at its share of D_all."""
        pairs = all_pairs(encode(self.model, batch), batch, self.num_protected)
        target = self._contrast(self.target, pairs.target, pairs)
        negatives = self._contrast(self.negatives, pairs.negatives, pairs)
        protected = self._contrast(self.protected, pairs.protected, pairs)
        objective = target.objective + negatives.objective + protected.objective
        return StepOutput(
            {"target": target.surrogate + negatives.surrogate, "retention": protected.surrogate},
            {"objective": objective},
        )

    def _contrast(self, contrast: SetContrast, anchors: Anchors, pairs: Pairs) -> Contrast:
        # 1/n_all sum over D_all, estimated from the batch: a member of a group of n, of which b were drawn, has n/b.
        # Sampled tasks stand for the others too.
        m, drawn = self.num_protected, pairs.drawn.to(pairs.images.dtype)
        of_tasks = m / (drawn[:m] > 0).sum().clamp(min=1).to(drawn)
        weight = (self.sizes / drawn.clamp(min=1) / self.all)[anchors.group]
        return contrast(
            anchors.images,
            anchors.texts,
            pairs.images,
            pairs.texts,
            anchors.index,
            anchors.total,
            set_size=self.all,
            allowed=stands_for(pairs, anchors, self.sizes).masked_fill(pairs.is_self(anchors), 0),
            weight=torch.where(anchors.group < m, weight * of_tasks, weight),
        )
