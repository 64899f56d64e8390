"""Sections of a round: model, training, evaluation, certificate, and the round itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationInfo, model_validator

from holdfast.config.base import (
    LARGEST,
    Config,
    FilePath,
    Many,
    MovingAverage,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Two,
    parse,
)
from holdfast.config.claim import CandidatesConfig, CertifyConfig
from holdfast.config.data import DataConfig, TaskConfig, check_templates
from holdfast.config.known import check_kind
from holdfast.config.method import MethodConfig
from holdfast.config.renamed import upgraded
from holdfast.errors import UserError

DEFAULT_METHOD = "holdfast"
Freeze = Literal["nothing", "image", "text", "backbones", "towers"]


class ModelConfig(Config):
    """[model]: the old model, and what may be added to it."""

    start: FilePath | None = None
    """A holdfast model folder (of `holdfast tune`, `holdfast import` or an earlier round), or a transformers or
    sentence-transformers CLIP or SigLIP, timm or OpenCLIP folder as it is. Excludes architecture and weights."""
    text: FilePath | None = None
    """A sentence-transformers folder of a text tower (Transformer, Pooling, Dense) in place of the one that start has,
    such as clip-ViT-B-32-multilingual-v1. Only where start is a transformers or sentence-transformers folder."""
    architecture: str | None = None
    """An OpenCLIP architecture such as ViT-B-16; `conse`, a zero-shot model of holdfast[parts] that needs no weights;
    or `tiny`, which is built offline. `conse-128` takes pictures of 128 pixels in place of 224."""
    weights: str | None = None
    """An OpenCLIP tag such as `openai`, or a file (safetensors, or a torch file that loads with weights_only)."""
    head_rank: NonNegative = 32
    """Rank r of the task-dependent heads, at most the width of either tower's features; 0 for none."""
    class_temperature: PositiveFloat | None = None
    """tau_0, of the softmax over class prompts. Default: that of the model folder, or 0.05."""
    freeze: Freeze = "nothing"
    """What is not trained. `backbones` leaves the last linear layer of each tower (W for texts) and the heads: with
    train.augment = false what lies below is computed once. `towers` leaves the heads only."""

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if self.start is not None and (self.architecture or self.weights):
            raise ValueError("give either start (a model folder) or architecture and weights, not both")
        if self.start is None and not self.architecture:
            raise ValueError("give start (a model folder) or architecture (and weights)")
        if self.text is not None and self.start is None:
            raise ValueError("text is the text tower for the image tower in start: give start too")
        return self


class TrainConfig(Config):
    """[train]: the one loop."""

    steps: Positive = 2000
    """Optimizer steps."""
    only_if_needed: bool = False
    """`holdfast develop` trains only where candidates that need no training are not enough: the best of them holds on
    dev images and passes with a chance of one in two at least, and the target reaches the average accuracy of protected
    classes. `develop --train` trains in any case; `init` writes `true`."""
    batch: Annotated[int, Field(ge=2, le=LARGEST)] = 256
    """Image-text pairs a step, over all ranks: target pairs and negatives together."""
    target_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of target pairs in a batch."""
    tasks_per_step: Positive | None = None
    """|B_c|, protected tasks visited in a step. Default: all."""
    images_per_task: Positive = 10
    """|B_k|, constraint images of each visited task."""
    optimizer: Literal["adamw", "plain"] = "adamw"
    """`plain` is Algorithm 1 to the letter: v <- (1-theta) v + theta G, w <- w - eta v."""
    learning_rate: PositiveFloat = 1e-5
    """Of AdamW, or eta of the plain form."""
    head_learning_rate: PositiveFloat | None = None
    """Of the task-dependent heads. Default: what the method says (holdfast: method.head_lr_multiplier times
    learning_rate), else the same."""
    ema_weight: MovingAverage = 0.1
    """theta of the plain form."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of AdamW."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate: cosine decay to zero, or constant."""
    warmup_steps: NonNegative = 0
    """Steps in which the learning rate rises linearly."""
    clip_norm: PositiveFloat | None = None
    """Gradients are scaled down to this norm. Default: never."""
    precision: Literal["auto", "float32", "bf16", "float64"] = "auto"
    """`auto`: bf16 where the device has it, else float32. Weights, similarities and losses stay float32."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    speed: Literal["auto", "plain", "fast", "compiled", "graphs"] = "auto"
    """How a step is computed; results agree up to rounding. `plain` calls the model's own modules. `fast` leaves out
    what no feature depends on and keeps activations in the working precision. `compiled` also compiles the blocks, on a
    GPU. `graphs` also records a step as a CUDA graph and replays it, on one GPU. `auto`: plain on a CPU, graphs on a
    GPU where the method allows it, else compiled."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    shard: Literal["none", "full"] = "none"
    """`full`: each rank holds a part of the weights, gradients and optimizer state (FSDP2), for towers that do not fit.
    Changes no result; a run may be resumed with and without it. One rank has nothing to share out."""
    augment: bool = True
    """Random views of target pairs and negatives, and of constraint images (`constraint_views`)."""
    constraint_views: Positive = 8
    """Views of a constraint image that steps choose from: the evaluation view and random ones that stay the same for
    the whole round, so that what the old model says of them is computed once. Fewer where constraint images are many
    (10,000 views in all), and one, the evaluation view, where `augment` is false."""
    crop_scale: Two[float] = (0.7, 1.0)
    """Least and greatest share of the picture's area in a random view."""
    flip: bool = False
    """Random views may be mirrored. Off by default: digits, letters and lane markings have a handedness."""
    rotation: Annotated[float, Field(ge=0, le=180)] = 0.0
    """Random views are turned by at most so many degrees, either way; corners that this leaves empty are black."""
    log_every: Positive = 10
    """Steps between lines of `metrics.jsonl`."""
    checkpoint_every: Positive = 200
    """Steps between checkpoints to resume from."""
    keep_checkpoints: Positive = 2
    """Checkpoints that are kept."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop_scale {self.crop_scale} must satisfy 0 < least <= greatest <= 1")
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below steps ({self.steps})")
        if not 1 <= self.target_pairs < self.batch:
            raise ValueError(f"batch {self.batch} with target_share {self.target_share:g} leaves one side empty")
        return self

    @property
    def target_pairs(self) -> int:
        """Target pairs of a step; the rest of the batch are negatives."""
        return round(self.batch * self.target_share)


class EvaluateConfig(Config):
    """[evaluate]: how often the model is evaluated on dev images."""

    every: Positive = 200
    """Steps between evaluations; each makes a candidate."""
    batch: Positive = 256
    """Images in a batch of predictions."""
    keep_candidates: Positive = 3
    """Candidates whose weights are kept: the best so far by the rule of choice, and the last."""


def _settings(values: Any, info: ValidationInfo) -> Any:
    """[method] as the settings of the method that it names. A file is looked for from the ``root`` of the context."""
    if not isinstance(values, Mapping):
        return values
    values = {"name": DEFAULT_METHOD, **values}
    if not isinstance(values["name"], str):
        return MethodConfig.model_validate({"name": values["name"]})  # raises: it is no string
    from holdfast.methods.registry import read_settings  # torch: only where a round is read to be run

    context = info.context or {}
    try:
        return read_settings(values, context.get("root", Path()))
    except UserError as error:
        where = f"{context['where']}: method.name: " if "where" in context else ""
        raise UserError(
            f"{where}{error.message}", expected=error.expected, found=error.found, do=error.do
        ) from error.__cause__


def default_method() -> MethodConfig:
    """The settings of the method that a round without [method] is run with."""
    from holdfast.methods.registry import find

    return find(DEFAULT_METHOD).settings()


class RoundSections(Config):
    """The sections of a ROUND.toml; [method] is not looked into: only the method's own module knows its settings."""

    seed: NonNegative = 0
    """Seed of every random draw: constraint images, heads, batches, views."""
    task: TaskConfig
    data: DataConfig
    model: ModelConfig
    method: Any = None
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    candidates: CandidatesConfig = CandidatesConfig()
    certify: CertifyConfig = CertifyConfig()
    """Asked for wherever there are sealed images."""


class RoundConfig(RoundSections):
    """A ROUND.toml: one round of development, from data to verdict."""

    method: Annotated[SerializeAsAny[MethodConfig], BeforeValidator(_settings)] = Field(default_factory=default_method)

    @model_validator(mode="after")
    def _method_fits(self) -> Self:
        self._take_defaults_of_the_method()
        self.method.check_training(self.train)
        self.method.check_candidates(self.candidates)
        if not self.method.trains() and not self.candidates.refit_target:
            raise ValueError(f"method.name = {self.method.name!r} is nothing without candidates.refit_target = true")
        return self

    def _take_defaults_of_the_method(self) -> None:
        """Keys of other sections that the method has values for, where the round gives none."""
        for name, defaults in self.method.section_defaults(self.train).items():
            section: Config = getattr(self, name)
            missing = {key: value for key, value in defaults.items() if key not in section.model_fields_set}
            if missing:  # a round is frozen once it has been validated, and this is part of that
                object.__setattr__(self, name, section.model_copy(update=missing))

    @classmethod
    def section_of(cls, key: str, value: Any, root: Path) -> type[Config] | None:
        """[method] is read as the settings of the method that it names."""
        name = value.get("name", DEFAULT_METHOD) if key == "method" and isinstance(value, Mapping) else None
        if not isinstance(name, str):
            return None
        from holdfast.methods.registry import find

        return find(name, root).settings

    @property
    def lambdas(self) -> tuple[float, ...]:
        """lambda of the candidates, in order: where nothing is trained there is but one."""
        return self.candidates.lambdas if self.method.trains() else (0.0,)

    @property
    def fits_last_layer(self) -> bool:
        """Whether candidates are made from a fit of the last layer."""
        candidates = self.candidates
        return candidates.last_layer and candidates.refit_target and self.method.fits_last_layer()

    @property
    def last_step(self) -> int:
        """The step of the last evaluation."""
        return self.train.steps if self.method.trains() else 0

    @property
    def trained(self) -> TrainConfig:
        """[train] with the heads' learning rate worked out."""
        rate = self.method.head_learning_rate(self.train.learning_rate)
        if rate is None or self.train.head_learning_rate is not None:
            return self.train
        return self.train.model_copy(update={"head_learning_rate": rate})


def check_sections(values: dict[str, Any], where: str) -> RoundSections:
    """Find the mistakes of a ROUND.toml in every section but [method]; the sections.

    A method's module imports torch, which takes seconds: whoever misspelt another key hears of it at once.
    """
    check_kind(values, where)
    today, _ = upgraded(values)  # former names are hinted at once, when the round is read
    return parse(RoundSections, today, where)


class TuneConfig(Config):
    """A TUNE.toml: make a base model on a labelled source, as the paper makes its own."""

    seed: NonNegative = 0
    """Seed of every random draw."""
    classes: Many[str] | None = None
    """Classes to tune on. Default: all of the data."""
    template: str | Many[str] = "a photo of a {}"
    """As in `[task]` of a round."""
    names: dict[str, str] = Field(default_factory=dict)
    """As in `[task]` of a round."""
    at_most: dict[str, Positive] = Field(default_factory=dict)
    """Class -> how many of its images to tune on: a base model that hardly knows a rare class."""
    objective: Literal["contrastive", "cross_entropy"] = "contrastive"
    """Global contrastive loss over all classes with their prompts as captions, or cross-entropy over the prompts."""
    temperature: PositiveFloat = 0.05
    """tau of the contrastive loss."""
    gamma_pairs: MovingAverage = 0.8
    """gamma_1 of its moving averages."""
    data: DataConfig
    model: ModelConfig
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.train.only_if_needed:
            raise ValueError("train.only_if_needed is for rounds: a base model is always trained")
        if self.train.constraint_views != TrainConfig().constraint_views:  # a run's own record names the default, too
            raise ValueError("train.constraint_views is for rounds: `holdfast tune` makes no use of it")
        check_templates((self.template,) if isinstance(self.template, str) else self.template)
        names = self.classes or ()
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)}: listed twice under classes")
        return self
