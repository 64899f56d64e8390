"""The last layer's fits of a round, and the models on the line towards them: candidates, as a checkpoint's are.

The fit (:mod:`holdfast.candidates.last_layer`) starts from a model: the old one, or a checkpoint whose image tower
moved. The judgement that it stays near is then the checkpoint's. There is one fit on all pictures and one for each
fold, which has not seen its images.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.candidates.crossfit import Folds, out_of_fold
from holdfast.candidates.directions import target_direction
from holdfast.candidates.last_layer import LastLayerFit, can_fit, distillation, fit_last_layer, generalisation_gaps
from holdfast.candidates.logit_bias import lowered_by, steady_direction, steady_in_layer, with_target_bias
from holdfast.candidates.refit import Pictures, TargetRefit, refit_from_features, see_pictures
from holdfast.config import CandidatesConfig
from holdfast.data.loader import ViewSettings
from holdfast.data.round import LabelledSet, RoundData
from holdfast.evaluate.predict import predict_each_on_ranks
from holdfast.model.classifier import Classifier
from holdfast.model.workers import each_in_a_thread
from holdfast.runtime import Runtime
from holdfast.shared import once

_VIEWS = 2  # of a picture, where pictures are few


@dataclass(frozen=True)
class _Change:
    """From the start to the model of a lambda: a share of the fit and, where wanted, a refit of the target on it."""

    fit: LastLayerFit
    lam: float
    refit: TargetRefit | None
    steady: Tensor  # the direction of a target bias

    @classmethod
    def of(
        cls,
        start: Classifier,
        name: str,
        fit: LastLayerFit,
        lam: float,
        taught: Pictures,
        all_: Pictures,
        *,
        refit: bool,
        near: TargetRefit | None = None,
    ) -> _Change:
        """A refit is fitted on ``taught``, beginning ``near``; the bias is by how the model sees all pictures."""
        model, seen = fit.applied(start, lam), fit.seen_after(all_, lam)
        if not refit:
            return cls(fit, lam, None, steady_direction(model.finished(seen.features)))
        direction = None if fit.directions is None else target_direction(model, name)
        found = refit_from_features(model, name, direction, *fit.seen_after(taught, lam).tensors, start=near)
        return cls(fit, lam, found, found.steady_after(model, seen))

    def to(self, device: torch.device | str) -> _Change:
        refit = None if self.refit is None else self.refit.to(device)
        return _Change(self.fit.to(device), self.lam, refit, self.steady.to(device))

    def applied(self, start: Classifier) -> Classifier:
        model = self.fit.applied(start, self.lam)
        return model if self.refit is None else self.refit.applied(model)


class LastLayerFits:
    """The fit on all pictures of a round, and for each fold the one that has not seen it; made once, by who asks."""

    def __init__(
        self,
        start: Classifier,
        data: RoundData,
        views: ViewSettings,
        *,
        in_tower: bool,
        folds: Folds | None,
        constrained: bool = False,  # where there are folds: without any there is no gap to be known
    ) -> None:
        self.start, self.data, self.views, self.in_tower, self.folds = start, data, views, in_tower, folds
        self.constrained = constrained and folds is not None
        self._found: tuple[Pictures, list[tuple[LastLayerFit, Pictures]]] | None = None

    def possible(self) -> bool:
        """Whether there can be any."""
        return can_fit(self.start, self.data.tasks.target, in_tower=self.in_tower)

    @cached_property
    def steady_in_layer(self) -> Tensor | None:
        """By what the start says: a fit moves neither what the last layer sees nor lengths by much."""
        return steady_in_layer(self.start, self.data) if self.in_tower else None

    def changes(self, lam: float, *, refit: bool) -> tuple[_Change, ...]:
        """The change on all pictures, and those of the folds."""
        pictures, fits = self._fitted()
        name = self.data.tasks.target
        fit, part = fits[0]
        whole = _Change.of(self.start, name, fit, lam, part, pictures, refit=refit)
        near = whole.refit
        rest = [
            _Change.of(self.start, name, fit, lam, part, pictures, refit=refit, near=near) for fit, part in fits[1:]
        ]
        return whole, *rest

    def _fitted(self) -> tuple[Pictures, list[tuple[LastLayerFit, Pictures]]]:
        if self._found is None:
            pictures = see_pictures(
                self.start,
                self.data,
                in_tower=self.start.linear is None,
                crop_scale=self.views.crop_scale,
                flip=self.views.flip,
                dev=self.folds is not None,
                most_views=_VIEWS,
            )
            name = self.data.tasks.target
            distill = distillation(self.start, name, pictures)  # of a fold's fit, too: it stands for the whole one
            if self.folds is None:
                self._found = pictures, [(fit_last_layer(self.start, name, pictures, distill=distill), pictures)]
                return self._found
            place = torch.from_numpy(self.folds.of_ids(pictures.ids)).to(pictures.labels.device)
            parts = [pictures, *(pictures.where(place != fold) for fold in range(self.folds.count))]
            fits = self._fit_each(parts, distill, None)
            if self.constrained:
                gaps = generalisation_gaps(self.start, fits[0], fits[1:], pictures, place)
                fits = self._fit_each(parts, distill, gaps)
            self._found = pictures, list(zip(fits, parts, strict=True))
        return self._found

    def _fit_each(self, parts: Sequence[Pictures], distill: float, gaps: Tensor | None) -> list[LastLayerFit]:
        def fit(part: Pictures) -> LastLayerFit:
            return fit_last_layer(self.start, self.data.tasks.target, part, gaps=gaps, distill=distill)

        if parts[0].hidden.is_cuda:
            return [fit(part) for part in parts]
        return each_in_a_thread(fit, parts)


class LastLayerModels:
    """Models on the line from the start model to the last layer's fit, as `CandidateModels` are towards training."""

    def __init__(
        self,
        config: CandidatesConfig,
        fits: LastLayerFits,
        runtime: Runtime,
        *,
        refit: bool,  # whether the target is refitted on top
        key: Hashable = None,  # all that the models depend on, where jobs of a study share them
    ) -> None:
        self.config, self.fits, self.runtime, self.refit = config, fits, runtime, refit
        self.key = None if key is None else (key, refit)
        self._changes: dict[float, tuple[_Change, ...]] = {}

    @property
    def biases(self) -> list[float]:
        """What is taken off the target's logit, in ascending order."""
        return sorted(set(self.config.target_bias))

    def predictions(self, lam: float, examples: LabelledSet, batch: int) -> list[pa.Table]:
        """What the candidates of a lambda say, one table a bias: each example by a fit that has not seen it."""
        if self.key is None:
            return self._predictions(lam, examples, batch)
        key = ("last layer predictions", self.key, lam, examples.key, batch)
        return once(key, lambda: self._predictions(lam, examples, batch))

    def _predictions(self, lam: float, examples: LabelledSet, batch: int) -> list[pa.Table]:
        fits = self.fits
        if fits.folds is None:
            return predict_each_on_ranks(self._biased(lam, self.biases), examples, batch, self.runtime)

        def without(fold: int, part: LabelledSet) -> list[pa.Table]:
            change = self._at(lam)[1 + fold]
            model = change.applied(fits.start)
            models = lowered_by(model, fits.data.tasks.target, self.biases, change.steady, fits.steady_in_layer)
            return predict_each_on_ranks(models, part, batch, self.runtime)

        return out_of_fold(examples, fits.folds, without)

    def model(self, lam: float, bias: float) -> Classifier:
        """One candidate."""
        return self._biased(lam, [bias])[0]

    def _biased(self, lam: float, amounts: Sequence[float]) -> list[Classifier]:
        fits = self.fits
        in_layer = fits.steady_in_layer if min(amounts) < 0 else None
        return with_target_bias(self._at(lam)[0].applied(fits.start), fits.data, amounts, in_layer)

    def _at(self, lam: float) -> tuple[_Change, ...]:
        """What the first rank finds, on every rank: the bits of a sum depend on the machine."""
        if lam not in self._changes:
            made = self._made(lam) if self.key is None else once(("last layer", self.key, lam), lambda: self._made(lam))
            self._changes[lam] = made
        return self._changes[lam]

    def _made(self, lam: float) -> tuple[_Change, ...]:
        found: list[Any] = [None]
        if self.runtime.is_main:
            found[0] = tuple(change.to("cpu") for change in self.fits.changes(lam, refit=self.refit))
        if self.runtime.world > 1:
            dist.broadcast_object_list(found)
        return tuple(change.to(self.runtime.device) for change in found[0])
