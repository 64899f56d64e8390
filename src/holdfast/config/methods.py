"""Sections of the methods, one a method; `method.name` chooses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast.config.base import Config, MovingAverage, NonNegativeFloat, PositiveFloat


class ContrastConfig(Config):
    """Settings of the global contrastive loss, shared by the methods that use it."""

    temperature: PositiveFloat = 0.05
    """tau."""
    gamma_pairs: MovingAverage = 0.8
    """gamma_1, of the moving averages of g, one of each direction per pair."""


class HoldfastConfig(ContrastConfig):
    """method.name = "holdfast": target objective under one retention constraint a protected task."""

    name: Literal["holdfast"] = "holdfast"
    beta: NonNegativeFloat = 200.0
    """Penalty."""
    beta_schedule: Literal["constant", "cosine"] = "constant"
    """`cosine` rises from 0 to beta; the paper finds it worse."""
    gamma_tasks: MovingAverage = 0.8
    """gamma_2, of the moving averages of h_k."""
    views: Literal["clean", "paired", "mismatched"] = "clean"
    """Views of constraint images. `clean`: the evaluation view, old losses cached. `paired`: one random view through
    both models. `mismatched`: random under w, clean under w_old, as in the authors' code; biased, for comparison."""
    constraint: Literal["cross_entropy", "soft_error"] = "cross_entropy"
    """The loss that must not rise. `soft_error` is 1 - the probability of the right class."""
    slack: NonNegativeFloat = 0.0
    """kappa: ask for h_k + kappa · 1.645 · sd / sqrt(n_k) <= 0 in place of h_k <= 0."""


class FinetuneConfig(ContrastConfig):
    """method.name = "finetune": the target objective alone."""

    name: Literal["finetune"] = "finetune"


METHOD_CONFIGS: dict[str, type[Config]] = {
    "holdfast": HoldfastConfig,
    "finetune": FinetuneConfig,
}
MethodConfig = Annotated[HoldfastConfig | FinetuneConfig, Field(discriminator="name")]
