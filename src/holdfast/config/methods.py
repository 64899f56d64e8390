"""Sections of the methods, one a method; `method.name` chooses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from holdfast.config.base import Config, Fraction, MovingAverage, NonNegativeFloat, PositiveFloat


class ContrastConfig(Config):
    """Settings of the global contrastive loss, shared by the methods that use it."""

    temperature: PositiveFloat = 0.05
    """tau."""
    gamma_pairs: MovingAverage = 0.8
    """gamma_1, of the moving averages of g, one of each direction per pair."""


# The paper's form of the method: what its experiments use, and nothing that was added since.
_PUBLISHED: dict[str, Any] = {
    "beta": 200.0,
    "gamma_tasks": 0.8,
    "replay": 0.0,
    "target_share": 0.0,
    "target_logit_margin": 0.0,
    "distill_weight": 0.0,
    "label_boost": 0.0,
    "contrastive_weight": 1.0,
    "head_lr_multiplier": 1.0,
}


class ResearchConfig(Config):
    """[method.research]: variants of the method that were compared and are not what a user needs."""

    beta_schedule: Literal["constant", "cosine"] = "constant"
    """`cosine` rises from 0 to beta; the paper finds it worse."""
    views: Literal["clean", "paired", "mismatched"] = "clean"
    """Views of constraint images. `clean`: the evaluation view, old losses cached (published). `paired`: one random
    view through both models. `mismatched`: random under w, clean under w_old, as in the authors' code; biased, for
    comparison."""
    constraint: Literal["cross_entropy", "soft_error"] = "cross_entropy"
    """The loss that must not rise. `soft_error` is 1 - the probability of the right class."""
    tightening: NonNegativeFloat = 0.0
    """kappa: require h_k + kappa · 1.645 · sd / sqrt(n_k) <= 0 in place of h_k <= 0."""
    required_improvement: Fraction = 0.0
    """Require each protected task to improve by this share of its old loss: h_k <= -share · L_k(w_old)."""
    dual_rate: NonNegativeFloat = 0.0
    """Speed of the multipliers that add to beta [u_k]_+; 0 for none, as in the paper."""


class HoldfastConfig(ContrastConfig):
    """method.name = "holdfast": target objective under one retention constraint a protected task."""

    name: Literal["holdfast"] = "holdfast"
    form: Literal["default", "published"] = "default"
    """What keys that are not given stand for: `default` is what did best on dev images (docs/research.md, studies.md),
    `published` is the paper's form: clean views, cross-entropy, a constant penalty of 200, and none of what comes
    after it."""
    beta: NonNegativeFloat = 20.0
    """Penalty. Published: 200."""
    gamma_tasks: MovingAverage = 0.2
    """gamma_2, of the moving averages of h_k. Published: 0.8."""
    replay: NonNegativeFloat = 1.0
    """Weight of the cross-entropy over all classes, protected classes with equal weight. Published: 0, as all that
    follow unless said otherwise."""
    target_share: Fraction = 1 / 6
    """Share of the target in the replay, whatever the number of protected classes; 0 for the weight of one class."""
    target_logit_margin: NonNegativeFloat = 1.0
    """Added to the target's logit on protected images in the replay: they must be told from the target with room."""
    distill_weight: NonNegativeFloat = 30.0
    """Weight of the divergence from the old model's judgement among protected classes, on every picture of a step:
    constraint images, target pairs and negatives. It takes no labels. This is its weight where a protected task has 100
    constraint images or fewer (on average); with n of them it is sqrt(100/n) of that: the more there is to learn from,
    the less the old model's judgement counts."""
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
        if isinstance(values, dict) and values.get("form") == "published":
            return {**_PUBLISHED, **values}
        return values

    @classmethod
    def published(cls) -> HoldfastConfig:
        """The paper's form."""
        return cls(form="published")

    def as_published(self) -> HoldfastConfig:
        """The paper's form, with this section's temperature and gamma_1."""
        return HoldfastConfig(form="published", temperature=self.temperature, gamma_pairs=self.gamma_pairs)


class FinetuneConfig(ContrastConfig):
    """method.name = "finetune": the target objective alone."""

    name: Literal["finetune"] = "finetune"


class CrossEntropyConfig(Config):
    """method.name = "cross_entropy": supervised training on all classes with equal weight."""

    name: Literal["cross_entropy"] = "cross_entropy"
    heads: bool = True
    """Train task-dependent heads, too."""


class FlypConfig(ContrastConfig):
    """method.name = "flyp": global contrastive loss on everything, protected images with their class prompt."""

    name: Literal["flyp"] = "flyp"


class WcclConfig(ContrastConfig):
    """method.name = "wccl": weighted contrastive losses of the protected tasks and of the target."""

    name: Literal["wccl"] = "wccl"
    alpha: Fraction = 0.9
    """Weight of the protected tasks' mean; the target has 1 - alpha. The paper tries 0.5, 0.9, 0.99."""


class GemConfig(Config):
    """method.name = "gem": the target's gradient, turned so that no protected task's loss rises to first order."""

    name: Literal["gem"] = "gem"
    gamma: NonNegativeFloat = 0.5
    """Least weight of a protected task's gradient once any of them is violated. The paper tries 0.5 and 1."""


class Co2lConfig(Config):
    """method.name = "co2l": asymmetric supervised contrast and relation distillation, then a linear classifier."""

    name: Literal["co2l"] = "co2l"
    temperature: PositiveFloat = 0.1
    """tau, of the supervised contrast. The paper tries 0.05 and 0.1."""
    kappa: PositiveFloat = 0.2
    """Temperature of the new model's relations. The paper tries 0.1 and 0.2."""
    kappa_old: PositiveFloat = 0.01
    """kappa*, temperature of the old model's relations. The paper tries 0.01 and 0.1."""
    distillation: NonNegativeFloat = 1.0
    """lambda, weight of the relation distillation. The paper tries 0.1, 1 and 10."""
    classifier_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the run's steps that train the linear classifier, on frozen features, at the end."""


class DerConfig(Config):
    """method.name = "der": cross-entropy on the target, old logits kept on protected images."""

    name: Literal["der"] = "der"
    alpha: NonNegativeFloat = 1.0
    """Weight of the squared difference to the old logits. The paper tries 0.1, 1 and 10."""
    beta: NonNegativeFloat = 0.0
    """Weight of the cross-entropy on a second draw of protected images: 0 is DER, above 0 is DER++."""


class RmConfig(ContrastConfig):
    """method.name = "rm": the target objective plus the protected tasks' mean loss at a fixed weight."""

    name: Literal["rm"] = "rm"
    alpha: NonNegativeFloat = 1.0
    """The weight. The paper tries 0.1, 1 and 10; on Places365 1, 10, ..., 10000."""


METHOD_CONFIGS: dict[str, type[Config]] = {
    "holdfast": HoldfastConfig,
    "finetune": FinetuneConfig,
    "cross_entropy": CrossEntropyConfig,
    "flyp": FlypConfig,
    "wccl": WcclConfig,
    "gem": GemConfig,
    "co2l": Co2lConfig,
    "der": DerConfig,
    "rm": RmConfig,
}
MethodConfig = Annotated[
    HoldfastConfig
    | FinetuneConfig
    | CrossEntropyConfig
    | FlypConfig
    | WcclConfig
    | GemConfig
    | Co2lConfig
    | DerConfig
    | RmConfig,
    Field(discriminator="name"),
]
