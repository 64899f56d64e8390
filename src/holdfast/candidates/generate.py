"""The models that a round may ship: between old and new weights, with the target refitted, and with a target bias."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pyarrow as pa
import torch.distributed as dist
from torch import Tensor

from holdfast.candidates.crossfit import CrossFit, Folds, cross_fit, out_of_fold
from holdfast.candidates.directions import target_direction
from holdfast.candidates.logit_bias import lowered_by, steady_in_layer, with_target_bias
from holdfast.candidates.refit import see_pictures
from holdfast.config import CandidatesConfig
from holdfast.data.loader import ViewSettings
from holdfast.data.round import LabelledSet, RoundData
from holdfast.evaluate.predict import predict_each_on_ranks
from holdfast.model.classifier import Classifier
from holdfast.model.interpolate import interpolate
from holdfast.runtime import Runtime
from holdfast.shared import once


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
        folds: Folds | None = None,  # images that teach the refit and are counted out of fold
        refit_key: Hashable = None,  # all that models at lambda 0 depend on, where jobs of a study share them
        refit: bool = True,  # False: checkpoints as they were trained, whatever the config says
    ) -> None:
        self.config, self.old, self.checkpoint, self.data = config, old, checkpoint, data
        self.views, self.runtime, self.in_tower, self.folds = views, runtime, in_tower, folds
        self.refit_key, self.refit = refit_key, refit and config.refit_target
        self.refits: dict[float, CrossFit] = {}  # by lambda
        self._steady: dict[float, Tensor | None] = {}  # by lambda
        self._last: tuple[float, Classifier] | None = None  # the interpolation that was asked for last

    @property
    def biases(self) -> list[float]:
        """What is taken off the target's logit, in ascending order."""
        return sorted(set(self.config.target_bias))

    @property
    def smallest_bias_index(self) -> int:
        """Which of the biases is closest to none."""
        return min(range(len(self.biases)), key=lambda place: abs(self.biases[place]))

    def at(self, lam: float) -> Classifier:
        """The model at lambda, its target refitted where the config says so."""
        model = self._between(lam)
        return self._fitted(lam, model).whole.applied(model) if self.refit else model

    def predictions(self, lam: float, examples: LabelledSet, batch: int) -> list[pa.Table]:
        """What the candidates of a lambda say, one table a bias: each example by a refit that has not seen it."""
        if lam == 0 and self.refit_key is not None:
            key = ("refit predictions", self.refit_key, examples.key, batch)
            return once(key, lambda: self._predictions(lam, examples, batch))
        return self._predictions(lam, examples, batch)

    def _predictions(self, lam: float, examples: LabelledSet, batch: int) -> list[pa.Table]:
        folds = self.folds_at(lam)
        if folds is None:
            models = self._biased(lam, self.biases)
            return predict_each_on_ranks(models, examples, batch, self.runtime)

        def without(fold: int, part: LabelledSet) -> list[pa.Table]:
            return predict_each_on_ranks(self.without_fold(lam, fold), part, batch, self.runtime)

        return out_of_fold(examples, folds, without)

    def without_fold(self, lam: float, fold: int) -> list[Classifier]:
        """The model at lambda, refitted without the images of a fold, with each bias."""
        model = self._between(lam)
        refit, steady = self._fitted(lam, model).folds[fold]
        name = self.data.tasks.target
        return lowered_by(refit.applied(model), name, self.biases, steady, self._steady_in_layer(lam))

    def folds_at(self, lam: float) -> Folds | None:
        """The images that are counted out of fold: at lambda 0 all that are dealt, and else the dev images."""
        return self.folds if self.folds is None or lam == 0 else self.folds.only(self.data.dev.ids)

    def model(self, lam: float, bias: float) -> Classifier:
        """One candidate."""
        return self._biased(lam, [bias])[0]

    def _biased(self, lam: float, amounts: Sequence[float]) -> list[Classifier]:
        in_layer = self._steady_in_layer(lam) if min(amounts) < 0 else None
        return with_target_bias(self.at(lam), self.data, amounts, in_layer)

    def _steady_in_layer(self, lam: float) -> Tensor | None:
        """By what the tower says before a refit: it moves neither what the last layer sees nor lengths by much."""
        if not self.in_tower or min(self.biases) >= 0:
            return None
        if lam not in self._steady:
            self._steady[lam] = steady_in_layer(self._between(lam), self.data)
        return self._steady[lam]

    def _between(self, lam: float) -> Classifier:
        if lam == 0:
            return self.old
        assert self.checkpoint is not None
        if self._last is None or self._last[0] != lam:  # every fold of a lambda asks for it; the next one does not
            # What training left as it was is the old model's own: what is kept of it need not be computed again.
            self._last = lam, interpolate(self.old, self.checkpoint, lam, share=True).to(self.runtime.device)
        return self._last[1]

    def _fitted(self, lam: float, model: Classifier) -> CrossFit:
        """What the first rank finds, on every rank: the bits of a sum depend on the machine."""
        if lam not in self.refits:
            shared = lam == 0 and self.refit_key is not None
            found = once(("refit", self.refit_key), lambda: self._refitted(lam, model)) if shared else None
            self.refits[lam] = found or self._refitted(lam, model)
        return self.refits[lam]

    def _refitted(self, lam: float, model: Classifier) -> CrossFit:
        found: list[Any] = [None]
        if self.runtime.is_main:
            found[0] = self._refit(model, self.folds_at(lam)).to("cpu")
        if self.runtime.world > 1:
            dist.broadcast_object_list(found)
        return found[0].to(self.runtime.device)

    def _refit(self, model: Classifier, folds: Folds | None) -> CrossFit:
        name = self.data.tasks.target
        direction = target_direction(model, name) if self.in_tower else None
        pictures = see_pictures(
            model,
            self.data,
            in_tower=direction is not None,
            crop_scale=self.views.crop_scale,
            flip=self.views.flip,
            dev=folds is not None,
        )
        return cross_fit(model, name, direction, pictures, folds)
