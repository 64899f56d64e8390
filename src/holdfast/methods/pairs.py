"""Everything a step holds as image-text pairs: what FLYP and WCCL contrast their anchors with.

Both run the global contrastive loss over D_all = D ∪ D_- ∪ D_1 ∪ … ∪ D_m, where a protected image's caption is its
class prompt. A batch takes very different shares of these sets, so each of its pairs stands for as many members of
its own set as were not drawn: the estimates of g are then those of the whole of D_all, not of the batch's mixture.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.data.round import Batch, RoundData
from holdfast.methods.base import Encoded
from holdfast.objective.contrastive import GlobalContrastive
from holdfast.runtime import gather


@dataclass(frozen=True)
class Anchors:
    """Pairs of one kind, this rank's, whose contrastive loss is taken."""

    images: Tensor  # [A, D]
    texts: Tensor  # [A, D]
    index: Tensor  # [A] positions among the pairs of their kind
    group: Tensor  # [A] 0 … m-1: a protected task; m: target; m + 1: negatives
    total: int  # A over all ranks


@dataclass(frozen=True)
class Pairs:
    """All pairs of a step: this rank's anchors by kind, and everything they are contrasted with, of all ranks."""

    target: Anchors
    negatives: Anchors
    protected: Anchors
    images: Tensor  # [C, D] protected, target, negatives
    texts: Tensor  # [C, D]
    index: Tensor  # [C]
    group: Tensor  # [C]
    num_protected: int  # m

    @property
    def drawn(self) -> Tensor:
        """Pairs of every group in the batch, over all ranks: [m + 2]."""
        return torch.bincount(self.group, minlength=self.num_protected + 2)

    def is_self(self, anchors: Anchors) -> Tensor:
        """[A, C]: which column is the anchor itself."""
        return (anchors.group[:, None] == self.group) & (anchors.index[:, None] == self.index)


def all_pairs(features: Encoded, batch: Batch, num_protected: int) -> Pairs:
    """The step's pairs; the caption of a protected image is its class's prompt."""
    target_group = torch.full_like(batch.target_index, num_protected)
    negative_group = torch.full_like(batch.negative_index, num_protected + 1)
    tasks = gather(batch.protected_task, batch.protected_total)
    target_count, negative_count, protected_count = batch.target_total, batch.negative_total, batch.protected_total
    return Pairs(
        Anchors(features.target_images, features.target_texts, batch.target_index, target_group, target_count),
        Anchors(
            features.negative_images, features.negative_texts, batch.negative_index, negative_group, negative_count
        ),
        Anchors(
            features.protected_images,
            features.classes[batch.protected_task],
            batch.protected_index,
            batch.protected_task,
            protected_count,
        ),
        images=torch.cat(
            [
                gather(features.protected_images, protected_count),
                gather(features.target_images, target_count),
                gather(features.negative_images, negative_count),
            ]
        ),
        texts=torch.cat(
            [
                features.classes[tasks],  # every rank has them: only the tasks need gathering
                gather(features.target_texts, target_count),
                gather(features.negative_texts, negative_count),
            ]
        ),
        index=torch.cat(
            [
                gather(batch.protected_index, protected_count),
                gather(batch.target_index, target_count),
                gather(batch.negative_index, negative_count),
            ]
        ),
        group=torch.cat([tasks, gather(target_group, target_count), gather(negative_group, negative_count)]),
        num_protected=num_protected,
    )


def group_sizes(data: RoundData) -> Tensor:
    """n_1 … n_m, n_o, n_-: members of every group, [m + 2]."""
    labels = torch.from_numpy(data.constraint.labels)
    protected = torch.bincount(labels, minlength=data.tasks.num_protected)
    return torch.cat([protected, torch.tensor([len(data.target), len(data.negatives)])])


def stands_for(pairs: Pairs, anchors: Anchors, sizes: Tensor) -> Tensor:
    """How many members of D_all each column stands for in the contrast set of each anchor: [A, C].

    A group of n members of which b were drawn counts n/b for each; the anchor's own group counts (n-1)/(b-1), since
    the anchor itself was certain to be there. Where only some tasks were sampled, those stand for the others too.
    """
    m, drawn = pairs.num_protected, pairs.drawn.to(pairs.images.dtype)
    sizes = sizes.to(drawn)
    sampled = (drawn[:m] > 0).sum().to(drawn)
    each = sizes / drawn.clamp(min=1)
    own = (sizes - 1) / (drawn - 1).clamp(min=1)
    of_column, of_anchor = pairs.group, anchors.group[:, None]
    protected_column, protected_anchor = of_column < m, of_anchor < m
    other_tasks = torch.where(protected_anchor, (m - 1) / (sampled - 1).clamp(min=1), m / sampled.clamp(min=1))
    count = each[of_column] * torch.where(protected_column, other_tasks, 1)
    return torch.where(of_anchor == of_column, own[of_column], count)


class SetContrast(GlobalContrastive):
    """The global contrastive loss with ``allowed`` read as a number: how many members a column stands for (0: none)."""

    def _log_estimate(self, difference: Tensor, set_size: float | Tensor, allowed: Tensor | None) -> Tensor:
        """log ĝ, ĝ = 1/N + (1 - 1/N) (weighted mean of exp(difference / tau)): [A, C] -> [A]."""
        if allowed is None:
            return super()._log_estimate(difference, set_size, None)
        exponent = difference / self.temperature + allowed.log()  # log 0 leaves a column out
        mean = torch.logsumexp(exponent, dim=1) - allowed.sum(dim=1).log()
        size = set_size.to(mean) if isinstance(set_size, Tensor) else mean.new_full((), set_size)
        return torch.logaddexp(-size.log().expand_as(mean), torch.log1p(-1 / size) + mean)
