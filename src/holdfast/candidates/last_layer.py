"""Every class's logit fitted anew in the last layer, near the old model: what labels teach without training.

The target's refit (:mod:`holdfast.candidates.refit`) moves one logit, so that a protected class can only lose. Labelled
images of protected classes know more than that: a class that the old model is unsure of can gain from them, and what it
gains makes room for the target. Here all logits move, as far as the last layer of the image tower, E1(x) = h(x) A, or a
linear head can move them:

    d_k with d_k · E2_k = 1 and d_k · E2_j = 0 for every other class j
    A <- A + sum over k of p_k d_kᵀ        adds h(x) · p_k to E1(x) · E2_k, for every class k by itself

    minimise over p   share · CE(target) + (1 - share) · mean over protected k of CE(k)
                      + distill · the same mean of KL(q_old, q_new)        q: probabilities among protected classes
                      + ridge · |p|²                                       on standardised entries of h

The old judgement q_old is moved towards the label where one is known (``boost``), by the same measure for every class.
All terms are convex in p, so that the minimum is the only one; it is found in seconds. What is fitted is an end of an
interpolation, as a trained checkpoint is: candidates lie at lambda in (0, 1], and an image is counted by a fit that has
not seen it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from holdfast.candidates.crossfit import Folds, out_of_fold
from holdfast.candidates.logit_bias import lowered_by, steady_direction, with_target_bias
from holdfast.candidates.refit import Design, Pictures, see_pictures
from holdfast.candidates.solver import minimise
from holdfast.config import CandidatesConfig
from holdfast.data.loader import ViewSettings
from holdfast.data.round import LabelledSet, RoundData
from holdfast.evaluate.predict import predict_each_on_ranks
from holdfast.model.classifier import Classifier
from holdfast.runtime import Runtime
from holdfast.shared import once

_SHARE = 0.25  # of the cross-entropy that is the target's
_DISTILL, _BOOST = 30.0, 2.0  # as in training (method.distill_weight, method.label_boost)
_RIDGE = 0.01
_FREE = 0.05  # share of a class feature's length that all others must leave to it: below, its logit stays as it is


@dataclass(frozen=True)
class LastLayerFit:
    """A change of the logits of all classes, small enough to be kept beside a model."""

    weights: Tensor  # p, [width, K]
    directions: Tensor | None  # d, [K, D]; None where the rows of a linear head move
    start: Tensor | None = None  # the unknowns of the fit, from which a fit on nearly the same pictures begins

    def to(self, device: torch.device | str) -> LastLayerFit:
        """The same on another device."""
        directions = None if self.directions is None else self.directions.to(device)
        return LastLayerFit(self.weights.to(device), directions)

    @torch.no_grad()
    def applied(self, model: Classifier, lam: float = 1.0) -> Classifier:
        """The model with a share of the change: a copy where the image tower moves, else one that shares its towers."""
        if self.directions is None:
            changed = model.with_classes(model.classes, model.prompts)
            assert changed.linear is not None
            rows = changed.linear.detach() + lam * self.weights.T.to(changed.linear)
            changed.linear = nn.Parameter(rows, requires_grad=False)
            return changed
        changed = model.frozen_copy()
        layer = changed.towers.image_projection
        assert layer is not None
        layer.add_((lam * self.weights @ self.directions).to(layer))
        return changed

    def steady_after(self, model: Classifier, pictures: Pictures, lam: float) -> Tensor:
        """The direction of a target bias by how the changed model sees these pictures."""
        features = pictures.features.double()
        if self.directions is not None:
            features = features + lam * (pictures.hidden.double() @ self.weights.double()) @ self.directions.double()
        return steady_direction(model.finished(features))


@torch.no_grad()
def class_directions(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """d of every row of [K, D], [K, D], and which of them the other rows leave enough room for, [K]."""
    rows = matrix.double().cpu()
    directions = torch.linalg.pinv(rows, rtol=1e-9).T
    own = (rows * directions).sum(dim=1)  # below 1 where a row depends on others
    room = 1 / directions.norm(dim=1).clamp(min=1e-12)
    free = (room >= _FREE * rows.norm(dim=1)) & ((own - 1).abs() < 1e-6)
    return directions.to(matrix.device), free.to(matrix.device)


def can_fit(model: Classifier, name: str, *, in_tower: bool) -> bool:
    """Whether the last layer can move the logits of classes one by one, the target's among them."""
    if model.linear is not None:
        return True
    if not in_tower or model.towers.image_projection is None:
        return False
    return bool(class_directions(model.class_matrix())[1][model.class_index(name)])


def fit_last_layer(model: Classifier, name: str, pictures: Pictures, start: LastLayerFit | None = None) -> LastLayerFit:
    """The change of least loss over pictures of all classes; a ``start`` that is near makes it fast."""
    row, tau = model.class_index(name), model.class_temperature
    count = len(model.classes)
    hidden, features, labels = pictures.hidden.double(), pictures.features.double(), pictures.labels
    lengths = features.norm(dim=1, keepdim=True) if model.towers.unit_features else torch.ones_like(features[:, :1])
    with torch.no_grad():
        logits = features @ model.class_matrix().double().T / lengths / tau
    if model.linear is not None:
        directions, free = None, torch.ones(count, dtype=torch.bool, device=logits.device)
    else:
        directions, free = class_directions(model.class_matrix())
    design = Design.of((hidden if directions is not None else features) / lengths)
    found = _solve(design, logits, labels, row, free, None if start is None else start.start)
    weights = tau * design.weights(found)  # logits are E1 · E2_k / tau_0, and entries are divided by the length of E1
    return LastLayerFit(weights, directions, found)


def _solve(design: Design, logits: Tensor, labels: Tensor, row: int, free: Tensor, start: Tensor | None) -> Tensor:
    """The unknowns of least loss, [width + 1, K], in float64; rows are entries of the design, the last its offset."""
    count = logits.shape[1]
    protected = torch.arange(count, device=logits.device) != row
    images = torch.bincount(labels, minlength=count)
    each = (1 - _SHARE) / max(1, int((images > 0).sum()) - 1)
    weight = torch.where(labels == row, _SHARE, each).double() / images[labels]
    known = functional.one_hot(labels, count).double() * (labels != row)[:, None]
    old = (logits + _BOOST * known)[:, protected].log_softmax(dim=1)
    taken = free.double()
    # No ridge on the target's offset: how readily it is named is what the fit is to find.
    ridge = torch.full((design.columns.shape[1], count), _RIDGE, dtype=torch.float64, device=logits.device)
    ridge[-1, row] = 0
    # Fewer pictures than entries span a space of their own, outside of which the ridge leaves nothing: fit in there.
    basis = _basis(design.columns[:, :-1])
    columns = torch.cat([design.columns[:, :-1] @ basis, design.columns[:, -1:]], dim=1)
    ridge = torch.cat([ridge[: basis.shape[1]], ridge[-1:]])
    unknown = torch.zeros(columns.shape[1], count, dtype=torch.float64, device=logits.device)
    if start is not None:
        unknown = torch.cat([basis.T @ start[:-1], start[-1:]])
    unknown.requires_grad_()

    def loss() -> Tensor:
        moved = logits + (columns @ unknown) * taken
        fitted = functional.cross_entropy(moved, labels, reduction="none")
        kept = (old.exp() * (old - moved[:, protected].log_softmax(dim=1))).sum(dim=1)
        return (weight * (fitted + _DISTILL * kept)).sum() + (ridge * unknown.square()).sum()

    minimise(unknown, loss)
    found = unknown.detach() * taken
    return torch.cat([basis @ found[:-1], found[-1:]])


def _basis(columns: Tensor) -> Tensor:
    """An orthonormal basis of the space that the rows of [n, width] span: [width, at most n]."""
    if len(columns) >= columns.shape[1]:
        return torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device)
    return torch.linalg.qr(columns.T).Q


@dataclass(frozen=True)
class _CrossFit:
    """The fit on all pictures, and for each fold the one that has not seen it; directions of a bias, by lambda."""

    whole: LastLayerFit
    folds: tuple[LastLayerFit, ...]
    steady: tuple[dict[float, Tensor], ...]  # of each fold

    def to(self, device: torch.device | str) -> _CrossFit:
        steady = tuple({lam: value.to(device) for lam, value in item.items()} for item in self.steady)
        return _CrossFit(self.whole.to(device), tuple(fit.to(device) for fit in self.folds), steady)


class LastLayerModels:
    """Models on the line from the old weights to the last layer's fit, as `CandidateModels` are towards training."""

    def __init__(
        self,
        config: CandidatesConfig,
        old: Classifier,
        data: RoundData,
        views: ViewSettings,
        runtime: Runtime,
        *,
        in_tower: bool,
        folds: Folds | None,
        key: Hashable = None,  # all that the models depend on, where jobs of a study share them
    ) -> None:
        self.config, self.old, self.data, self.views, self.runtime = config, old, data, views, runtime
        self.in_tower, self.folds, self.key = in_tower, folds, key
        self._found: _CrossFit | None = None

    @property
    def biases(self) -> list[float]:
        """What is taken off the target's logit, in ascending order."""
        return sorted(set(self.config.target_bias))

    def possible(self) -> bool:
        """Whether there are such models at all."""
        return can_fit(self.old, self.data.tasks.target, in_tower=self.in_tower)

    def predictions(self, lam: float, examples: LabelledSet, batch: int) -> list[pa.Table]:
        """What the candidates of a lambda say, one table a bias: each example by a fit that has not seen it."""
        if self.key is None:
            return self._predictions(lam, examples, batch)
        key = ("last layer predictions", self.key, lam, examples.key, batch)
        return once(key, lambda: self._predictions(lam, examples, batch))

    def _predictions(self, lam: float, examples: LabelledSet, batch: int) -> list[pa.Table]:
        if self.folds is None:
            model = self._fitted().whole.applied(self.old, lam)
            return predict_each_on_ranks(model, self._matrices(model), examples, batch, self.runtime)

        def without(fold: int, part: LabelledSet) -> list[pa.Table]:
            found = self._fitted()
            model = found.folds[fold].applied(self.old, lam)
            biased = lowered_by(model, self.data.tasks.target, self.biases, found.steady[fold][lam])
            with torch.no_grad():
                matrices = [item.class_matrix() for item in biased]
            return predict_each_on_ranks(model, matrices, part, batch, self.runtime)

        return out_of_fold(examples, self.folds, without)

    def model(self, lam: float, bias: float) -> Classifier:
        """One candidate."""
        return with_target_bias(self._fitted().whole.applied(self.old, lam), self.data, [bias])[0]

    def _matrices(self, model: Classifier) -> Sequence[Tensor]:
        with torch.no_grad():
            return [item.class_matrix() for item in with_target_bias(model, self.data, self.biases)]

    def _fitted(self) -> _CrossFit:
        """What the first rank finds, on every rank: the bits of a sum depend on the machine."""
        if self._found is None:
            self._found = self._shared() if self.key is None else once(("last layer", self.key), self._shared)
        return self._found

    def _shared(self) -> _CrossFit:
        found: list[Any] = [None]
        if self.runtime.is_main:
            found[0] = self._fit().to("cpu")
        if self.runtime.world > 1:
            dist.broadcast_object_list(found)
        return found[0].to(self.runtime.device)

    def _fit(self) -> _CrossFit:
        pictures = see_pictures(
            self.old,
            self.data,
            in_tower=self.old.linear is None,
            crop_scale=self.views.crop_scale,
            flip=self.views.flip,
            dev=self.folds is not None,
        )
        name = self.data.tasks.target
        whole = fit_last_layer(self.old, name, pictures)
        if self.folds is None:
            return _CrossFit(whole, (), ())
        place = torch.from_numpy(self.folds.of_ids(pictures.ids)).to(pictures.labels.device)
        lambdas = [lam for lam in self.config.interpolation if lam > 0]
        fits: list[LastLayerFit] = []
        steady: list[dict[float, Tensor]] = []
        for fold in range(self.folds.count):
            fit = fit_last_layer(self.old, name, pictures.where(place != fold), whole)
            fits.append(fit)
            steady.append({lam: fit.steady_after(self.old, pictures, lam) for lam in lambdas})
        return _CrossFit(whole, tuple(fits), tuple(steady))
