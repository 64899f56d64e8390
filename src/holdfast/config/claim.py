"""Sections that say what is claimed: what is to be proven, and which models may be tested for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from holdfast.config.base import Config, FilePath, Many, Positive


class CertifyConfig(Config):
    """[certify]: what is to be proven on the sealed images."""

    margin: float | dict[str, float] = 0.02
    """epsilon: the loss of accuracy you are ready to accept, fixed beforehand; one number, or one a task."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """1 - delta: how sure the certificate has to be."""
    query_budget: Positive = 1
    """R: how many times this sealed set may be queried; each query is tested at (1 - confidence) / R."""
    target_gain: bool = True
    """Claim also that the target improved."""
    equal_groups: bool = False
    """Where a source names groups: every group counts the same, whatever its size. Otherwise images do, and the claim
    is about groups no larger than the largest one that is not sealed."""
    test_sealed: bool = True
    """Test on the sealed images when the round ends. `false` leaves that to `holdfast certify RUN`."""
    ledger: FilePath | None = None
    """Folder of the ledger of sealed sets. Default: $HOLDFAST_LEDGER, or the user's own."""
    first: FilePath | None = None
    """A further model folder to certify against, with the same margins: a project's first model, so that what rounds
    lose does not add up."""

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        margins = self.margin if isinstance(self.margin, dict) else {"margin": self.margin}
        for name, margin in margins.items():
            if not 0 <= margin < 1:
                raise ValueError(f"the margin {margin:g} ({name}) must lie in [0, 1): write 2 % as 0.02")
        return self

    def margins_of(self, tasks: Iterable[str]) -> dict[str, float]:
        """The margin of every task; 0 for one that a mapping leaves out, which only a round without a test may."""
        given = self.margin
        return {task: given.get(task, 0.0) if isinstance(given, dict) else given for task in tasks}


class CandidatesConfig(Config):
    """[candidates]: which models a round tests, besides the checkpoint that training found."""

    interpolation: Many[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """lambda: models between the old weights (0) and the new ones (1). At 0 only the target's logit is new, by
    `refit_target`; without that it is left out."""
    checkpoints: Many[Literal["best", "last"]] = ("best", "last")
    """Which checkpoints interpolations lead to. `best` is the one that is best on dev images as it is, by retention
    first: often an early one, which has moved least. `last` has learnt most, and retains again half way back."""
    refit_target: bool = True
    """Refit the target's logit in every candidate but checkpoints as they were trained and fits of all logits, and
    nothing else: predictions among protected classes stay as they are. It moves one direction of the image tower's last
    layer, or the target's head where that tower is frozen."""
    last_layer: bool = True
    """Methods `holdfast` and `last_layer`: also fit the logits of all classes in the last layer, near the old model,
    and interpolate towards that. It takes seconds, no training. Where training moved the image tower, a fit
    without constraints also starts from its checkpoints. Where the last layer is frozen, or `refit_target` is false,
    there is no such candidate."""
    last_layer_constraints: bool = True
    """Fit the last layer under one retention constraint for each protected class, tightened by how much larger its loss
    is on images that a fit has not seen. Where it is false, or no image is counted out of fold (`folds`), one weight
    holds for all classes, and interpolations are made once as they are and once with the target refitted on top."""
    folds: Annotated[int, Field(ge=0)] = 5
    """In rounds of at most 3,000 training and dev images the refit learns from dev images too, and images are counted
    out of fold: each by a fit that has not seen it. The refit of the old model also counts training images that this
    model has not seen, by its record or because its weights were published by others. 0 fits on training images
    alone."""
    target_bias: Many[float] = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
    """How much is taken off the target's logit: each lambda gives a candidate for each of these, and those that predict
    the target less often take fewer images away from protected classes. Below 0 it is added, in the image tower's last
    layer where that may move: where protected classes have room to spare, the target gains more."""
    least_chance: Annotated[float, Field(ge=0, le=1)] = 0.25
    """A candidate is tested on the sealed images only where its chance to pass, by its dev images, is at least this;
    else the old model is handed back and the sealed set stays unspent."""
    test_more_candidates: bool = False
    """After the candidate that is chosen test also those that gain more and lost nothing on dev images; the last one
    that passes is handed back."""

    @property
    def lambdas(self) -> tuple[float, ...]:
        """lambda of the candidates, in order."""
        return tuple(sorted({lam for lam in self.interpolation if lam > 0 or self.refit_target}))

    @property
    def largest_number(self) -> int:
        """How many candidates there are at most: those at lambda 0 are the same for every checkpoint."""
        moved = sum(lam > 0 for lam in self.lambdas)
        checkpoints = len(set(self.checkpoints))
        ends = checkpoints + (2 + checkpoints) * self.last_layer
        places = moved * ends + len(self.lambdas) - moved
        return (places + checkpoints * self.as_trained) * len(set(self.target_bias))

    @property
    def as_trained(self) -> bool:
        """Whether checkpoints as they were trained stand beside those with a refitted target."""
        return self.refit_target and 1.0 in self.lambdas

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        if any(not 0 <= lam <= 1 for lam in self.interpolation):
            raise ValueError(f"interpolation {self.interpolation} must lie in [0, 1]")
        if not self.lambdas:
            raise ValueError(f"interpolation {self.interpolation} leaves no candidate but the old model")
        if not self.checkpoints:
            raise ValueError('checkpoints must name "best", "last" or both')
        if self.folds == 1:
            raise ValueError("folds = 1 leaves nothing to fit on: at least 2, or 0 for none")
        if not self.target_bias:
            raise ValueError("target_bias must hold at least one number")
        return self
