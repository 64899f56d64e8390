"""Losses of labelled images, task by task, and the base of methods that classify with a linear head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.data.round import Batch, RoundData
from holdfast.methods.base import Method, class_logits, cross_entropy
from holdfast.model.classifier import Classifier
from holdfast.runtime import sum_over_ranks, sums_by, world_size


@dataclass(frozen=True)
class TaskMeans:
    """Mean loss of every task in a step."""

    share: Tensor  # [m] this rank's part of the means, scaled so that DDP's average over ranks is the mean's gradient
    mean: Tensor  # [m] over all ranks, no gradient; nan where the task was not sampled
    sampled: Tensor  # number of tasks that were

    @property
    def average(self) -> Tensor:
        """Mean over the sampled tasks of their mean loss, to differentiate."""
        return self.share.sum() / self.sampled.clamp(min=1)


def task_means(losses: Tensor, tasks: Tensor, num_tasks: int) -> TaskMeans:
    """L_k = mean over B_k of the losses [n] of its examples, for every k that has some."""
    zeros = losses.new_zeros(num_tasks)
    count = sum_over_ranks(zeros.index_add(0, tasks, torch.ones_like(losses)))
    local = sums_by(tasks, losses, num_tasks) / count.clamp(min=1)
    mean = torch.where(count > 0, sum_over_ranks(local), torch.nan)
    return TaskMeans(world_size() * local, mean, (count > 0).sum())


def mean_over_ranks(losses: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Mean of losses [n] that are ``total`` over all ranks: a term to differentiate, and its value."""
    local = losses.sum() / total
    return world_size() * local, sum_over_ranks(local)


class LinearMethod(Method):
    """An image encoder with a linear head W, initialised from the prompts' text features: the text tower rests.

    W_c stands in for the feature of class c; logits are W_c · E1(x) / tau_0 as everywhere.
    """

    linear = True
    uses_negatives = False

    def prepare(self, old: Classifier, data: RoundData) -> None:
        """Remember the number of protected tasks."""
        super().prepare(old, data)
        self.num_protected = data.tasks.num_protected

    def images(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """E1 of target and protected images, in one pass: [B, D], [P, D]. The negatives have no class and no part."""
        target, protected = self.model.image_features_together(batch.target_images, batch.protected_images)
        return target, protected

    def losses(self, features: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of the linear head, one value an example: [n]."""
        return cross_entropy(self.logits(features), labels)

    def logits(self, features: Tensor) -> Tensor:
        """W_c · E1(x) / tau_0: [n, D] -> [n, K]."""
        return class_logits(features, self.model.class_matrix(), self.model.class_temperature)

    def target_labels(self, batch: Batch) -> Tensor:
        """The target's class index, once for every target image."""
        return torch.full_like(batch.target_index, self.num_protected)
