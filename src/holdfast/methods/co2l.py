"""Co2L: asymmetric supervised contrast, relation distillation, then a linear classifier (method section 7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from holdfast.config.base import NonNegativeFloat, PositiveFloat
from holdfast.config.method import MethodConfig
from holdfast.config.round import TrainConfig
from holdfast.data.round import Batch, RoundData
from holdfast.errors import UserError
from holdfast.methods.base import Phase, StepOutput
from holdfast.methods.labelled import LinearMethod, mean_over_ranks, task_means
from holdfast.methods.registry import register
from holdfast.model.classifier import Classifier, similarity
from holdfast.runtime import gather

_REPRESENTATION, _CLASSIFIER = "representation", "classifier"


class Co2lConfig(MethodConfig):
    """method.name = "co2l": asymmetric supervised contrast and relation distillation, then a linear classifier."""

    temperature: PositiveFloat = 0.1
    """tau, of the supervised contrast. The paper tries 0.05 and 0.1."""
    kappa: PositiveFloat = 0.2
    """Temperature of the new model's relations. The paper tries 0.1 and 0.2."""
    kappa_old: PositiveFloat = 0.01
    """kappa*, temperature of the old model's relations. The paper tries 0.01 and 0.1."""
    distillation: NonNegativeFloat = 1.0
    """lambda, weight of the relation distillation. The paper tries 0.1, 1 and 10."""
    views: Literal[1, 2] = 2
    """Random views of each target and constraint image in a step. Two as in the method's own paper, so that an image's
    other view is one of its positives; one where train.augment is false."""
    classifier_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the run's steps that train the linear classifier, on frozen features, at the end."""

    def two_views(self) -> bool:
        """As ``views`` says."""
        return self.views == 2

    def check_training(self, train: TrainConfig) -> None:
        """An anchor needs a positive."""
        if train.target_pairs < 2:
            raise ValueError(f"co2l contrasts target pairs: batch {train.batch} holds {train.target_pairs} of them")


@register("co2l", settings=Co2lConfig)
class Co2l(LinearMethod):
    """Phase one trains the image encoder, phase two a linear classifier on its frozen features.

    ::

        contrast      mean over target i of -1/|P(i)| sum over p in P(i) of log softmax_p(z_i·z_a/tau), a ≠ i
        distillation  mean over i of -sum_{j≠i} softmax_j(z_i·z_j/kappa*) under w_old · log softmax_j(z_i·z_j/kappa)
        classifier    mean over classes of their mean cross-entropy

    Anchors of the contrast are views of target images, positives the other such views; protected images are negatives
    only.
    Where the image tower is frozen there is no first phase: every step trains the classifier.
    """

    def __init__(self, model: Classifier, config: Co2lConfig, steps: int) -> None:
        super().__init__(model)
        self.config, self.phase = config, _REPRESENTATION

    def prepare(self, old: Classifier, data: RoundData) -> None:
        """Check that an anchor can have a positive."""
        super().prepare(old, data)
        if len(data.target) < 2:
            message = "Co2L contrasts target images with each other"
            raise UserError(message, expected="at least two target images", found=str(len(data.target)))

    def phases(self) -> tuple[Phase, ...]:
        """Representation first, classifier second."""
        image_parameters = tuple(
            image_parameter for image_parameter in self.model.towers.image_parameters() if image_parameter.requires_grad
        )
        share = self.config.classifier_share if image_parameters else 1.0
        classifier = Phase(_CLASSIFIER, share, (self._head(),))
        return (Phase(_REPRESENTATION, 1 - share, image_parameters), classifier) if image_parameters else (classifier,)

    def begin_phase(self, phase: int) -> None:
        """Remember which phase it is."""
        self.phase = self.phases()[phase].name

    def _head(self) -> nn.Parameter:
        if self.model.linear is None:
            raise RuntimeError("Co2L needs model.use_linear() first")
        return self.model.linear

    def forward(self, batch: Batch) -> StepOutput:
        """Losses of the phase that the run is in."""
        return self._representation(batch) if self.phase == _REPRESENTATION else self._classifier(batch)

    def _representation(self, batch: Batch) -> StepOutput:
        if batch.target_total < 2:
            raise UserError("Co2L needs two target images in a batch", do="raise train.batch or train.target_share")
        target, protected = _views_of(self.model, batch)
        with torch.no_grad():
            old_target, old_protected = _views_of(self.old, batch)
        # Samples are told apart by their place: views of target images from 0 on, of protected ones below 0.
        of_target = [2 * batch.target_index + view for view in range(len(target))]
        of_protected = [-1 - 2 * batch.protected_index - view for view in range(len(protected))]
        place, everywhere = torch.cat(of_target + of_protected), _everywhere(of_target, of_protected, batch)
        anchors, others = torch.cat(target), _everywhere(target, protected, batch)
        contrast = supervised_contrast(
            similarity(anchors, others),
            place[: len(anchors), None] == everywhere,
            everywhere >= 0,
            self.config.temperature,
        )
        distillation = relation_distillation(
            similarity(torch.cat(target + protected), others),
            similarity(torch.cat(old_target + old_protected), _everywhere(old_target, old_protected, batch)),
            place[:, None] == everywhere,
            self.config.kappa,
            self.config.kappa_old,
        )
        target_total, protected_total = len(target) * batch.target_total, len(protected) * batch.protected_total
        target_term, value = mean_over_ranks(contrast, target_total)
        retention_term, distilled = mean_over_ranks(distillation, target_total + protected_total)
        return StepOutput(
            {"target": target_term, "retention": self.config.distillation * retention_term},
            {"objective": value, "distillation": distilled},
        )

    def _classifier(self, batch: Batch) -> StepOutput:
        with torch.no_grad():  # frozen features
            features = torch.cat(self.images(batch))
        labels = torch.cat([self.target_labels(batch), batch.protected_task])
        means = task_means(self.losses(features, labels), labels, self.num_protected + 1)
        per_class = means.share / means.sampled.clamp(min=1)
        return StepOutput(
            {"target": per_class[-1], "retention": per_class[:-1].sum()},
            {"objective": means.mean.nanmean()},
            {"loss": means.mean[:-1]},
        )


def _views_of(model: Classifier, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """E1 of target and protected images, once for each view, in one pass."""
    target, protected = [batch.target_images], [batch.protected_images]
    if batch.target_images_again is not None and batch.protected_images_again is not None:
        target.append(batch.target_images_again)
        protected.append(batch.protected_images_again)
    features = model.image_features_together(*target, *protected)
    return list(features[: len(target)]), list(features[len(target) :])


def _everywhere(target: Sequence[Tensor], protected: Sequence[Tensor], batch: Batch) -> Tensor:
    """What all ranks have of every view, one below the other: target, then protected."""
    of_target = [gather(view, batch.target_total) for view in target]
    return torch.cat([*of_target, *(gather(view, batch.protected_total) for view in protected)])


def supervised_contrast(similarities: Tensor, is_self: Tensor, is_target: Tensor, temperature: float) -> Tensor:
    """-1/|P(i)| sum over p of log softmax over a ≠ i of z_i·z_a/tau, one value an anchor: [B, C] -> [B]."""
    log_share = (similarities / temperature).masked_fill(is_self, -torch.inf).log_softmax(dim=1)
    positive = is_target & ~is_self
    return -log_share.where(positive, 0).sum(dim=1) / positive.sum(dim=1)


def relation_distillation(new: Tensor, old: Tensor, is_self: Tensor, kappa: float, kappa_old: float) -> Tensor:
    """Cross-entropy from the old model's relations to the new one's, one value a sample: [n, C], [n, C] -> [n]."""
    expected = (old / kappa_old).masked_fill(is_self, -torch.inf).softmax(dim=1)
    log_share = (new / kappa).masked_fill(is_self, -torch.inf).log_softmax(dim=1)
    return -(expected * log_share.where(~is_self, 0)).sum(dim=1)
