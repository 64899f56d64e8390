"""The method: target objective under one retention constraint a protected task (Algorithm 1, method section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from holdfast.config.base import Config, Fraction, MovingAverage, NonNegativeFloat, PositiveFloat, PositiveFraction
from holdfast.config.method import Views
from holdfast.data.round import Batch, RoundData
from holdfast.methods.base import (
    LOSSES,
    StepOutput,
    balanced_cross_entropy,
    class_logits,
    constraint_logits,
    cross_entropy,
)
from holdfast.methods.finetune import TargetContrast, target_objective
from holdfast.methods.forms import Form, FormConfig, FormMethod
from holdfast.methods.registry import register
from holdfast.model.classifier import Classifier
from holdfast.objective.retention import RetentionPenalty
from holdfast.runtime import rows_of_rank, sums_by, world_size

_CACHED = 2 * 2**30  # bytes of old logits that are kept; more constraint images are asked about in every step
_LEAST = 16  # pairs of either kind about which the old model is asked, or all: in small steps a sample is mostly noise
_FEW = 100  # constraint images of a task, up to which the old model's judgement counts in full


# The method of the paper and of its authors' code: what their experiments use, and nothing that was added since.
_PUBLISHED: dict[str, Any] = {
    "beta": 200.0,
    "gamma_tasks": 0.8,
    "replay": 0.0,
    "target_share": 0.0,
    "target_logit_margin": 0.0,
    "distill_weight": 0.0,
    "distill_share": 1.0,
    "label_boost": 0.0,
    "contrastive_weight": 1.0,
    "head_lr_multiplier": 1.0,
}


class ResearchConfig(Config):
    """[method.research]: variants of the method that were compared and are not what a user needs."""

    beta_schedule: Literal["constant", "cosine"] = "constant"
    """`cosine` rises from 0 to beta; the paper finds it worse."""
    views: Views = "clean"
    """Views of constraint images. `clean`: those of `train.constraint_views`, old losses cached. `paired`: one random
    view through both models, another in every step. `mismatched`: random under w, clean under w_old, as in the
    authors' code; biased, for comparison."""
    constraint: Literal["cross_entropy", "soft_error"] = "cross_entropy"
    """The loss that must not rise. `soft_error` is 1 - the probability of the right class."""
    tightening: NonNegativeFloat = 0.0
    """kappa: require h_k + kappa · 1.645 · sd / sqrt(n_k) <= 0 in place of h_k <= 0."""
    required_improvement: Fraction = 0.0
    """Require each protected task to improve by this share of its old loss: h_k <= -share · L_k(w_old)."""
    dual_rate: NonNegativeFloat = 0.0
    """Speed of the multipliers that add to beta [u_k]_+; 0 for none, as in the paper."""


class HoldfastConfig(FormConfig):
    """method.name = "holdfast": target objective under one retention constraint a protected task."""

    form: Form = "default"
    """The values of keys that are not given. `default` is what did best on dev images (docs/appendix/research.md and
    studies.md). `published` is the paper's text: clean views, cross-entropy, a constant penalty of 200, none of the
    additions, and the best checkpoint as it was trained: no interpolation, no refit, no target bias. `authors` is the
    authors' released code: as `published`, and the constraints' gradient is multiplied by tau_0, negatives have a head
    of their own, constraint images are seen through random views under the new model alone, views are mirrored and
    turned by up to 15 degrees, and the learning rate warms up over 500 steps."""
    beta: NonNegativeFloat = 20.0
    """Penalty. Published: 200. The paper tries 100, 200 and 400, on Places365 600, 1000 and 4000: with the authors'
    code, which multiplies it by tau_0 = 0.05 (0.01); in the units of the paper's text and of the default these are 5,
    10 and 20 (6, 10 and 40)."""
    gamma_tasks: MovingAverage = 0.2
    """gamma_2, of the moving averages of h_k. Published: 0.8."""
    replay: NonNegativeFloat = 1.0
    """Weight of the cross-entropy over all classes, protected classes with equal weight. Published: 0, as all that
    follow unless stated otherwise."""
    target_share: Fraction = 1 / 6
    """Share of the target in the replay, whatever the number of protected classes; 0 for the weight of one class."""
    target_logit_margin: NonNegativeFloat = 1.0
    """Added to the target's logit on protected images in the replay: they must be separated from the target by it."""
    distill_weight: NonNegativeFloat = 30.0
    """Weight of the divergence from the old model's judgement among protected classes, on every picture of a step:
    constraint images, target pairs and negatives. It takes no labels. This is its weight where a protected task has 100
    constraint images or fewer (on average); with n of them it is (100/n)² of that: the more there is to learn from, the
    less the old model's judgement counts."""
    distill_share: PositiveFraction = 0.25
    """Share of a step's target pairs and negatives about which the old model is asked: a random sample of fixed size,
    at least 16 of either. Each stands for as many as were not asked about, so that the loss and its gradient are the
    same on average. Constraint images all count. 1 asks about every picture: the old model's pass over all of them."""
    label_boost: NonNegativeFloat = 2.0
    """Added to the right class's old logit on constraint images before it is distilled: better than the old model, by
    the same measure for every class."""
    contrastive_weight: NonNegativeFloat = 1.0
    """Weight of the target objective F."""
    head_lr_multiplier: PositiveFloat = 30.0
    """Learning rate of the task-dependent heads in multiples of train.learning_rate, where train.head_learning_rate is
    not given. Published: 1."""

    research: ResearchConfig = ResearchConfig()
    """Variants for comparison."""

    @model_validator(mode="before")
    @classmethod
    def _published_form(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("form") not in ("published", "authors"):
            return values
        values = {**_PUBLISHED, **values}
        if values["form"] == "authors":
            values["research"] = _with_views(values.get("research", {}), "mismatched")
        return values

    @classmethod
    def published(cls) -> HoldfastConfig:
        """The paper's form."""
        return cls(form="published")

    def fits_last_layer(self) -> bool:
        """The published forms test the checkpoint as it was trained."""
        return self.form == "default"

    def protected_views(self) -> Views:
        """As [method.research] says."""
        return self.research.views

    def head_learning_rate(self, learning_rate: float) -> float:
        """The heads start at 0 and learn faster than towers that are trained already."""
        return self.head_lr_multiplier * learning_rate

    def kkt_penalty(self) -> float:
        """beta."""
        return self.beta


def _with_views(research: Any, views: Views) -> Any:
    """[method.research] with these views, where it names none."""
    if isinstance(research, dict):
        return {"views": views, **research}
    if isinstance(research, ResearchConfig) and "views" not in research.model_fields_set:
        return research.model_copy(update={"views": views})
    return research


@dataclass(frozen=True)
class _Asked:
    """The pairs of a step about which the old model is asked: the first of a draw, which is in random order.

    No random number of its own is drawn, so that resuming and the number of ranks change nothing, and the number is the
    same in every step, so that steps can be recorded.
    """

    rows: int  # of this rank: its first ones
    weight: float  # of each: for how many pairs of the step it stands

    @classmethod
    def of(cls, share: float, total: int) -> _Asked:
        """A share of ``total`` pairs over all ranks."""
        count = min(total, max(_LEAST, round(share * total)))
        return cls(rows_of_rank(count), total / max(1, count))


@register("holdfast", settings=HoldfastConfig)
class Holdfast(FormMethod):
    """minimise F(w, D) subject to h_k(w) = L_k(w, D_k) - L_k(w_old, D_k) <= 0 for k = 1 … m."""

    uses_heads = True
    graph_safe = True
    is_target: Tensor  # [K] 1 at the target
    old_losses: Tensor  # [n · V] of the constraint set's fixed views, where w_old sees those
    old_logits: Tensor  # [n · V, K] of the same; without rows where the old model is asked in every step

    def __init__(self, model: Classifier, config: HoldfastConfig, steps: int) -> None:
        super().__init__(model, config)
        self.config, self.steps = config, steps
        self.loss = LOSSES[config.research.constraint]

    def prepare(self, old: Classifier, data: RoundData) -> None:
        """Estimators sized to the data; old losses cached where the view is fixed."""
        super().prepare(old, data)
        config = self.config
        contrast_set = config.contrast_set(len(data.negatives))
        self.target = TargetContrast(len(data.target), contrast_set, config.temperature, config.gamma_pairs)
        m = self.num_protected = data.tasks.num_protected
        labels = torch.from_numpy(data.constraint.labels).to(old.towers.projection.device)
        sizes = torch.bincount(labels, minlength=m)
        logits = constraint_logits(old, data)
        of_views = labels.repeat_interleave(data.views_each)
        clean = self.loss(logits, of_views)  # l(w_old, x, y) on the views that stay the same
        self.distill_weight = config.distill_weight * min(1.0, _FEW * m / max(1, len(labels))) ** 2
        means = sums_by(of_views, clean, m) / (data.views_each * sizes)
        self.retention = RetentionPenalty(
            m,
            config.beta,
            config.gamma_tasks,
            schedule=config.research.beta_schedule,
            total_steps=self.steps,
            tightening=config.research.tightening,
            task_sizes=sizes,
            required_improvement=config.research.required_improvement * means,
            dual_rate=config.research.dual_rate,
            commit="later",
        )
        self.register_buffer("is_target", (torch.arange(m + 1, device=labels.device) == m).to(clean.dtype))
        self.register_buffer("old_losses", clean[:0] if config.research.views == "paired" else clean)
        fixed = config.research.views == "clean"
        kept = fixed and config.distill_weight > 0 and logits.nbytes <= _CACHED
        self.register_buffer("old_logits", logits if kept else logits[:0], persistent=False)

    def forward(self, batch: Batch) -> StepOutput:
        """G_1 and G_2 of Algorithm 1, as surrogates."""
        features = self.encode(batch)
        contrast = target_objective(self.model, self.target, features, batch)
        pictures = torch.cat([features.target_images, features.negative_images, features.protected_images])
        logits = class_logits(pictures, features.classes, self.model.class_temperature)
        of_target, _, of_protected = logits.split(features.counts)
        old = self._old_logits(batch) if self.config.distill_weight else None
        new = self.loss(of_protected, batch.protected_task)
        retention = self.retention(new, self._old_losses(batch, old), batch.protected_task)
        scale = self.config.retention_scale(self.model.class_temperature)
        parts = {"target": self.config.contrastive_weight * contrast.surrogate, "retention": scale * retention.penalty}
        if self.config.replay:
            parts["replay"] = self.config.replay * self._replay(of_target, of_protected, batch)
        if old is not None:
            parts["distillation"] = self.distill_weight * self._distillation(logits, old, batch)
        return StepOutput(
            parts,
            {"objective": contrast.objective},
            {"h": retention.h, "u": retention.u, "weight": scale * retention.weight},
        )

    def _replay(self, of_target: Tensor, of_protected: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy of target and protected classes, so that they are told apart and not only held in place.

        On protected pictures the target's logit counts for ``target_logit_margin`` more than it is: they must be told
        from the target with room to spare, since it is there that new pictures of a protected class are lost.
        """
        target = torch.full_like(batch.target_index, self.num_protected)
        of_protected = of_protected + self.config.target_logit_margin * self.is_target
        share = self.config.target_share
        if not share:  # every class weighs the same
            together = torch.cat([of_target, of_protected])
            return balanced_cross_entropy(together, torch.cat([target, batch.protected_task]))
        learnt = world_size() * cross_entropy(of_target, target).sum() / batch.target_total  # as DDP averages ranks
        return share * learnt + (1 - share) * balanced_cross_entropy(of_protected, batch.protected_task)

    def _distillation(self, new: Tensor, old: Tensor, batch: Batch) -> Tensor:
        """Mean over all pictures of KL(old, new) of the judgement among the protected classes alone.

        ``new`` [B + N + P, K] is of every picture, ``old`` of those that were asked about. Of pairs these are a sample,
        and each stands for as many as were not: the expectation over draws is the mean over all pictures.

        It needs no labels: pairs from outside say as much as constraint images on what must stay as it is. The target's
        logit is free. Where labels are known, ``label_boost`` moves the old judgement towards them.
        """
        target, negatives = self._asked(batch)
        if len(old) < len(new):
            counts = [len(batch.target_index), len(batch.negative_index), len(batch.protected_index)]
            of_target, of_negatives, of_protected = new.split(counts)
            new = torch.cat([of_target[: target.rows], of_negatives[: negatives.rows], of_protected])
        if self.config.label_boost:
            own = torch.nn.functional.one_hot(batch.protected_task, old.shape[1])
            lifted = self.config.label_boost * own.to(old.dtype)
            old = old + torch.cat([lifted.new_zeros(len(old) - len(lifted), old.shape[1]), lifted])
        old_log, new_log = (logits[:, : self.num_protected].log_softmax(dim=1) for logits in (old, new))
        divergence = (old_log.exp() * (old_log - new_log)).sum(dim=1)
        weights = [divergence.new_full((kind.rows,), kind.weight) for kind in (target, negatives)]
        divergence = divergence * torch.cat([*weights, divergence.new_ones(len(batch.protected_index))])
        return world_size() * divergence.sum() / (batch.target_total + batch.negative_total + batch.protected_total)

    def _asked(self, batch: Batch) -> tuple[_Asked, _Asked]:
        """Target pairs and negatives about which the old model is asked in a step."""
        share = self.config.distill_share
        return _Asked.of(share, batch.target_total), _Asked.of(share, batch.negative_total)

    @torch.no_grad()
    def _old_logits(self, batch: Batch) -> Tensor:
        """w_old on the pictures that it is asked about, in the order of the features: [at most B + N + P, K]."""
        known = len(self.old_logits) > 0
        target, negatives = self._asked(batch)
        pairs = (batch.target_images.first(target.rows), batch.negative_images.first(negatives.rows))
        asked = [images for images in (*pairs, *(() if known else (batch.protected_images,))) if len(images)]
        logits = self.old_logits[:0]  # a rank of many may have no picture to ask about
        if asked:
            features = torch.cat(self.old.image_features_together(*asked))
            logits = class_logits(features, self._old_classes(), self.old.class_temperature)
        return torch.cat([logits, self.old_logits[batch.protected_row]]) if known else logits

    @torch.no_grad()
    def _old_losses(self, batch: Batch, known: Tensor | None) -> Tensor:
        """l(w_old, x, y) on the same pictures: cached, or through the old model on the same random view."""
        if self.config.research.views != "paired":
            return self.old_losses[batch.protected_row]
        if known is not None:
            return self.loss(known[len(known) - len(batch.protected_task) :], batch.protected_task)
        return self.loss(self.old.logits(batch.protected_images, self._old_classes()), batch.protected_task)

    def _old_classes(self) -> Tensor:
        """The frozen model's class features: computed once."""
        if not hasattr(self, "_old_matrix"):
            self._old_matrix = self.old.class_matrix()
        return self._old_matrix
