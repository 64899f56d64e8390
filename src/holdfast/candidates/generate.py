"""The models that a round may ship: between old and new weights, with the target refitted, and with a target bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.candidates.logit_bias import with_target_bias
from holdfast.candidates.refit import TargetRefit, refit_target
from holdfast.config import CandidatesConfig
from holdfast.data.loader import ViewSettings
from holdfast.data.round import RoundData
from holdfast.model.classifier import Classifier
from holdfast.model.interpolate import interpolate
from holdfast.runtime import Runtime


class CandidateModels:
    """Models on the line from the old weights (lambda 0) to a checkpoint's (lambda 1)."""

    def __init__(
        self,
        config: CandidatesConfig,
        old: Classifier,
        checkpoint: Classifier | None,  # None: nothing is trained yet, lambda is 0
        data: RoundData,
        views: ViewSettings,
        runtime: Runtime,
        *,
        in_tower: bool,  # whether the refit may move a direction of the image tower
    ) -> None:
        self.config, self.old, self.checkpoint, self.data = config, old, checkpoint, data
        self.views, self.runtime, self.in_tower = views, runtime, in_tower
        self.refits: dict[float, TargetRefit] = {}  # by lambda

    @property
    def biases(self) -> list[float]:
        """What is taken off the target's logit, in ascending order."""
        return sorted(set(self.config.target_bias))

    def at(self, lam: float) -> Classifier:
        """The model at lambda, its target refitted where the config says so."""
        model = self._between(lam)
        if not self.config.refit_target:
            return model
        if lam not in self.refits:
            self.refits[lam] = self._refit(model)
        return self.refits[lam].applied(model)

    def model(self, lam: float, bias: float) -> Classifier:
        """One candidate."""
        return with_target_bias(self.at(lam), self.data, [bias])[0]

    def class_matrices(self, model: Classifier) -> Sequence[Tensor]:
        """Class matrices of the candidates that share a model's image tower, one a bias."""
        with torch.no_grad():
            return [biased.class_matrix() for biased in with_target_bias(model, self.data, self.biases)]

    def _between(self, lam: float) -> Classifier:
        if lam == 0:
            return self.old
        assert self.checkpoint is not None
        if lam == 1:
            return self.checkpoint
        return interpolate(self.old, self.checkpoint, lam).to(self.runtime.device)

    def _refit(self, model: Classifier) -> TargetRefit:
        """What the first rank finds, on every rank: the bits of a sum depend on the machine."""
        found: list[Any] = [None]
        if self.runtime.is_main:
            found[0] = refit_target(
                model, self.data, in_tower=self.in_tower, crop_scale=self.views.crop_scale, flip=self.views.flip
            ).to("cpu")
        if self.runtime.world > 1:
            dist.broadcast_object_list(found)
        return found[0].to(self.runtime.device)
