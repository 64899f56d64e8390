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
The more pictures of a class there are to learn from, the less the old judgement counts (:func:`distillation`).
All terms are convex in p, so that the minimum is the only one; it is found in seconds.

Where images are counted out of fold, the classes' losses are constraints in place of terms (the retention problem
itself, with a multiplier for every class instead of one weight for all):

    minimise over p   share · CE(target) + distill · KL(q_old, q_new) as above + ridge · |p|²
    subject to        CE(k) of the new model - CE(k) of the old one <= -gap_k        for every protected class k

gap_k is by how much the first fit's loss of class k is larger out of fold than in it: in its own pictures any fit keeps
every class, and a constraint without that room would say nothing about new ones (:func:`generalisation_gaps`).

What is fitted is an end of an interpolation, as a trained checkpoint is: candidates lie at lambda in (0, 1], and an
image is counted by a fit that has not seen it. Fits without constraints are also made with the target refitted on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.candidates.directions import class_directions
from holdfast.candidates.refit import Design, Pictures
from holdfast.candidates.solver import minimise_linear
from holdfast.model.classifier import Classifier
from holdfast.runtime import sums_by

_SHARE = 0.25  # of the cross-entropy that is the target's
_DISTILL, _BOOST = 30.0, 2.0  # as in training (method.distill_weight, method.label_boost)
_FEW = 60  # pictures of a protected class, up to which the old judgement counts in full
_RIDGE = 0.01
_STEPS, _STEPS_NEAR = 100, 50  # of the solver, from nothing and after a change of the multipliers
_TRUE, _MOST, _STRENGTH = 1e-3, 12, 0.3  # constraints: to which precision, in how many rounds, with which first penalty
_LEFT = 0.05  # of a class's old loss: no constraint asks for less


@dataclass(frozen=True)
class LastLayerFit:
    """A change of the logits of all classes, small enough to be kept beside a model."""

    weights: Tensor  # p, [width, K]
    directions: Tensor | None  # d, [K, D]; None where the rows of a linear head move
    multipliers: Tensor | None = None  # of every class's constraint, [K]: 0 where it costs nothing to keep the class

    def to(self, device: torch.device | str) -> LastLayerFit:
        """The same on another device."""
        directions = None if self.directions is None else self.directions.to(device)
        multipliers = None if self.multipliers is None else self.multipliers.to(device)
        return LastLayerFit(self.weights.to(device), directions, multipliers)

    @torch.no_grad()
    def applied(self, model: Classifier, lam: float = 1.0) -> Classifier:
        """The model with a share of the change, for looking at: all but the weights that move is shared."""
        if self.directions is None:
            changed = model.with_classes(model.classes, model.prompts)
            assert changed.linear is not None
            rows = changed.linear.detach() + lam * self.weights.T.to(changed.linear)
            changed.linear = nn.Parameter(rows, requires_grad=False)
            return changed
        changed = model.copy_with_own_last_layer()
        layer = changed.towers.image_projection
        assert layer is not None
        layer.add_((lam * self.weights @ self.directions).to(layer))
        return changed

    def seen_after(self, pictures: Pictures, lam: float) -> Pictures:
        """What the changed tower says of these pictures."""
        if self.directions is None:
            return pictures
        added = lam * (pictures.hidden.double() @ self.weights.double()) @ self.directions.double()
        return replace(pictures, features=pictures.features.double() + added)


def can_fit(model: Classifier, name: str, *, in_tower: bool) -> bool:
    """Whether the last layer can move the logits of classes one by one, the target's among them."""
    if model.linear is not None:
        return True
    if not in_tower or model.towers.image_projection is None:
        return False
    return bool(class_directions(model.class_matrix())[1][model.class_index(name)])


@dataclass(frozen=True)
class _Seen:
    """Pictures as the fit sees them: what logits are linear in, the logits of the old model, and classes."""

    entries: Tensor  # [n, width]
    logits: Tensor  # [n, K]
    labels: Tensor

    @classmethod
    def of(cls, model: Classifier, pictures: Pictures) -> _Seen:
        hidden, features = pictures.hidden.double(), pictures.features.double()
        lengths = features.norm(dim=1, keepdim=True) if model.towers.unit_features else torch.ones_like(features[:, :1])
        with torch.no_grad():
            logits = features @ model.class_matrix().double().T / lengths / model.class_temperature
        return cls((hidden if model.linear is None else features) / lengths, logits, pictures.labels)

    def losses(self, fit: LastLayerFit | None, temperature: float) -> Tensor:
        """Cross-entropy of every picture after a fit, or before any, [n]."""
        added = 0.0 if fit is None else self.entries @ fit.weights.double() / temperature
        return functional.cross_entropy(self.logits + added, self.labels, reduction="none")


class _Constraints:
    """mean loss of class k - limit_k <= 0 for every protected class, by the augmented Lagrangian method.

        penalty  = 1 / (2 rho) sum over k of [mu_k + rho g_k]_+²        g_k: loss less limit
        mu_k    <- [mu_k + rho g_k]_+                                   after each solution

    The multipliers converge to those of the problem; rho doubles while the constraints come true slowly.
    """

    def __init__(self, labels: Tensor, row: int, limits: Tensor) -> None:
        images = torch.bincount(labels, minlength=len(limits))
        self.constrained = (images > 0).index_fill(0, torch.tensor([row], device=labels.device), value=False)
        self.mean = functional.one_hot(labels, len(limits)).double().T / images.clamp(min=1)[:, None]
        self.limits, self.rho, self.before = limits, _STRENGTH, float("inf")
        self.multipliers = torch.zeros_like(limits)

    def penalty(self, losses: Tensor) -> Tensor:
        """Of the losses of all pictures, [n]."""
        return self._raised(losses).square().sum() / (2 * self.rho)

    def _raised(self, losses: Tensor) -> Tensor:
        over = self.mean @ losses - self.limits
        return (self.multipliers + self.rho * over).clamp(min=0) * self.constrained

    def update(self, losses: Tensor) -> bool:
        """Take the next multipliers; whether constraints and complementary slackness hold now."""
        raised = self._raised(losses)
        violation = float((raised - self.multipliers).abs().max()) / self.rho
        self.multipliers = raised
        if violation > self.before / 4:
            self.rho *= 2
        self.before = violation
        return violation < _TRUE


def distillation(model: Classifier, name: str, pictures: Pictures) -> float:
    """What the old judgement weighs: 30 with n <= 60 pictures of a protected class (on average), with more 30 (60/n)².

    A few dozen labels say less about new pictures than the old model does, hundreds say more.
    """
    row = model.class_index(name)
    labels = {item: label for item, label in zip(pictures.ids, pictures.labels.tolist(), strict=True) if label != row}
    each = len(labels) / max(1, len(set(labels.values())))
    return _DISTILL * min(1.0, _FEW / max(1.0, each)) ** 2


def fit_last_layer(
    model: Classifier, name: str, pictures: Pictures, gaps: Tensor | None = None, *, distill: float | None = None
) -> LastLayerFit:
    """The change of least loss over pictures of all classes.

    With ``gaps`` [K] every protected class is constrained to a loss that is lower than the old one by its gap.
    ``distill`` is :func:`distillation` of these pictures, or of all where these are a part.
    It begins from nothing: what a solver has left after its last step would still hold what a near fit knew, and a
    fold's fit must not know its images.
    """
    row, tau = model.class_index(name), model.class_temperature
    count = len(model.classes)
    seen = _Seen.of(model, pictures)
    if model.linear is not None:
        directions, free = None, torch.ones(count, dtype=torch.bool, device=seen.logits.device)
    else:
        directions, free = class_directions(model.class_matrix())
    design = Design.of(seen.entries)
    constraints = None
    if gaps is not None:
        old = _class_means(seen.losses(None, tau), seen.labels, count)
        constraints = _Constraints(seen.labels, row, old - gaps.to(old).minimum((1 - _LEFT) * old))
    weight = distillation(model, name, pictures) if distill is None else distill
    found = _solve(design, seen, row, free, weight, constraints)
    weights = tau * design.weights(found)  # logits are E1 · E2_k / tau_0, and entries are divided by the length of E1
    return LastLayerFit(weights, directions, None if constraints is None else constraints.multipliers)


def generalisation_gaps(
    model: Classifier, whole: LastLayerFit, folds: Sequence[LastLayerFit], pictures: Pictures, place: Tensor
) -> Tensor:
    """By how much the loss of every class is larger where a fit has not seen its pictures: [K], 0 at least.

    ``place`` [n] is the fold of each picture, -1 where it is in every fit. A class without a picture in a fold has 0.
    """
    seen, tau = _Seen.of(model, pictures), model.class_temperature
    inside, outside = seen.losses(whole, tau), seen.losses(None, tau)
    for number, fit in enumerate(folds):
        outside = torch.where(place == number, seen.losses(fit, tau), outside)
    dealt = place >= 0
    return _class_means((outside - inside)[dealt], seen.labels[dealt], len(model.classes)).clamp(min=0)


def _class_means(values: Tensor, labels: Tensor, count: int) -> Tensor:
    """[n] -> [K], 0 for a class without any."""
    return sums_by(labels, values, count) / torch.bincount(labels, minlength=count).clamp(min=1)


def _solve(
    design: Design, seen: _Seen, row: int, free: Tensor, distill: float, constraints: _Constraints | None
) -> Tensor:
    """The unknowns of least loss, [width + 1, K], in float64; rows are entries of the design, the last its offset."""
    logits, labels = seen.logits, seen.labels
    count = logits.shape[1]
    protected = torch.arange(count, device=logits.device) != row
    images = torch.bincount(labels, minlength=count)
    each = (1 - _SHARE) / max(1, int((images > 0).sum()) - 1)
    weight = torch.where(labels == row, _SHARE, each).double() / images[labels]
    learnt = weight if constraints is None else weight * (labels == row)
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
    unknown = torch.zeros(columns.shape[1], count, dtype=torch.float64, device=logits.device, requires_grad=True)

    def losses(reached: Tensor) -> tuple[Tensor, Tensor]:
        moved = logits + reached * taken
        fitted = functional.cross_entropy(moved, labels, reduction="none")
        kept = (old.exp() * (old - moved[:, protected].log_softmax(dim=1))).sum(dim=1)
        return fitted, (learnt * fitted + weight * distill * kept).sum()

    def loss(reached: Tensor) -> Tensor:
        fitted, value = losses(reached)
        return value if constraints is None else value + constraints.penalty(fitted)

    minimise_linear(unknown, columns, ridge, loss, steps=_STEPS)
    if constraints is not None:
        for _ in range(_MOST):
            with torch.no_grad():
                done = constraints.update(losses(columns @ unknown)[0])
            if done:
                break
            minimise_linear(unknown, columns, ridge, loss, steps=_STEPS_NEAR)
    found = unknown.detach() * taken
    return torch.cat([basis @ found[:-1], found[-1:]])


def _basis(columns: Tensor) -> Tensor:
    """An orthonormal basis of the space that the rows of [n, width] span: [width, at most n]."""
    if len(columns) >= columns.shape[1]:
        return torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device)
    return torch.linalg.qr(columns.T).Q
