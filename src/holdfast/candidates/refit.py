"""The target's logit fitted anew, with everything else left as it is.

Training moves every boundary between classes a little, and on a few hundred images a class chance decides which of them
pays for it. Here only one logit moves. What the model says among the other classes stays what it was for *every*
picture, so that a picture of a protected class can be lost to the target and to nothing else. There are two forms.

*In the last layer of the image tower*, E1(x) = h(x) A, where that may move. With the direction d that the target alone
sees,

    r = E2_c less its projection on the span of the other classes' features,     d = r / |r|²
    A <- A + p dᵀ        adds h(x) · p to E1(x) · E2_c, and nothing to E1(x) · E2_k of any other class k

The length of E1 changes too, by which all logits of a picture are divided alike: no order changes but the target's.

*In the head of the class*, where the tower is frozen or ends in something else: E2_c <- unit(E2_c + p).

p minimises a cross-entropy over the round's own pictures with a ridge: in the first form a convex problem in as many
unknowns as h has entries, solved in seconds, with protected pictures told from the target with room to spare. In a head
that room is not to be had, for want of length, and how readily the target is named is left to
:mod:`holdfast.candidates.logit_bias`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from holdfast.candidates.directions import target_direction
from holdfast.candidates.logit_bias import moved_class, prompt_features, steady_direction
from holdfast.candidates.solver import logistic, minimise, minimise_linear
from holdfast.data.round import LabelledSet, PairSet, RoundData, View
from holdfast.data.transforms import random_views
from holdfast.model.classifier import Classifier, full_precision
from holdfast.model.feature_store import encode_set
from holdfast.runtime import derive_seed

_IN_TOWER = (0.1, 3.0)  # share of the loss that is the target's, the others' being shared out evenly; and the room:
_IN_HEAD = (1 / 3, 0.0)  # the target's logit counts for so much more on protected pictures
_WON = 0.5  # of its own pictures that the model misses the target must win as many, or it is named more readily
_RIDGE = 0.01  # on the weights of features that are scaled to a spread of about 1
VIEWS, MOST = 4, 10_000  # views of a picture, the evaluation view among them; and pictures, views counted, in all


@dataclass(frozen=True)
class TargetRefit:
    """A change of one class's logit, small enough to be kept beside a model."""

    name: str
    weights: Tensor  # p
    direction: Tensor | None  # d; None where the head of the class moves

    start: Tensor | None = None  # the unknowns of the fit, from which a fit on nearly the same pictures begins

    def to(self, device: torch.device | str) -> TargetRefit:
        """The same on another device."""
        direction = None if self.direction is None else self.direction.to(device)
        return TargetRefit(self.name, self.weights.to(device), direction)

    def steady_after(self, model: Classifier, pictures: Pictures) -> Tensor:
        """The direction of a target bias (:func:`steady_direction`) by how the changed model sees these pictures."""
        features = pictures.features.double()
        if self.direction is not None:
            features = features + (pictures.hidden.double() @ self.weights)[:, None] * self.direction.double()
        return steady_direction(model.finished(features))

    @torch.no_grad()
    def applied(self, model: Classifier) -> Classifier:
        """The model with the change, for looking at: all but the weights that move is shared."""
        if self.direction is None:
            return moved_class(model, self.name, self.weights)
        changed = model.copy_with_own_last_layer()
        layer = changed.towers.image_projection
        assert layer is not None
        layer.add_(torch.outer(self.weights, self.direction).to(layer))
        return changed


@dataclass(frozen=True)
class Pictures:
    """What a tower says of views of pictures: h (or E1 where the tower stays), E1 before normalisation, and classes."""

    hidden: Tensor
    features: Tensor
    labels: Tensor  # class indices of the model
    ids: tuple[str, ...]  # of the example that each is a view of

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a fit reads."""
        return self.hidden, self.features, self.labels

    def where(self, kept: Tensor) -> Pictures:
        """Those of a mask [n]."""
        ids = tuple(item for item, keep in zip(self.ids, kept.tolist(), strict=True) if keep)
        return Pictures(self.hidden[kept], self.features[kept], self.labels[kept], ids)


@dataclass(frozen=True)
class Design:
    """What a logit is linear in: entries that are centred and scaled, and an offset.

    An entry of spread s is divided by sqrt(s² + mean of all s²), and all of them then by one number, so that their
    spreads are 1 on average. Divided by s alone, an entry that is nearly constant in the few pictures at hand would
    count as much as any other, and could change the logit of a new picture by any amount.
    Centre and offset need an entry that is the same for every picture; ``steady`` s with entries · s near 1 stands in
    for it.
    """

    columns: Tensor  # [n, width + 1], the offset's last
    centre: Tensor  # [width]
    scale: Tensor  # [width]
    steady: Tensor  # [width]

    @classmethod
    def of(cls, entries: Tensor, steady: Tensor | None = None) -> Design:
        """Of entries [n, width] as a logit sees them; ``steady`` is their :func:`steady_direction`, if it is known."""
        steady = steady_direction(entries) if steady is None else steady
        column, centre = entries @ steady, entries.mean(dim=0)
        columns = torch.cat([entries, column[:, None]], dim=1)
        centred = columns[:, :-1].addcmul_(column[:, None], centre, value=-1)
        spread = centred.std(dim=0)
        usual = spread.square().mean()
        scale = (spread.square() + usual).rsqrt()
        scale = torch.where(usual > 0, scale / (spread * scale).square().mean().sqrt(), 0)
        centred.mul_(scale)
        return cls(columns, centre, scale, steady)

    def weights(self, unknown: Tensor) -> Tensor:
        """p with entries · p = columns · unknown: [width + 1] or [width + 1, K] -> [width] or [width, K]."""
        u, b = unknown[:-1], unknown[-1]
        if unknown.ndim == 1:
            return u * self.scale + (b - (u * self.centre * self.scale).sum()) * self.steady
        shift = b - (self.centre * self.scale) @ u
        return u * self.scale[:, None] + self.steady[:, None] * shift


def refit_target(
    model: Classifier,
    data: RoundData,
    *,
    in_tower: bool = True,
    crop_scale: tuple[float, float] = (0.7, 1.0),
    flip: bool = False,
) -> TargetRefit:
    """Fit the target's logit on constraint and target pictures; ``in_tower`` allows the image tower's last layer.

    Pictures are seen in their evaluation view, and in random ones as in training where they are few.
    """
    name = data.tasks.target
    direction = target_direction(model, name) if in_tower else None
    seen = see_pictures(model, data, in_tower=direction is not None, crop_scale=crop_scale, flip=flip)
    return refit_from_features(model, name, direction, *seen.tensors)


def refit_from_features(
    model: Classifier,
    name: str,
    direction: Tensor | None,
    hidden: Tensor,
    features: Tensor,
    labels: Tensor,
    start: TargetRefit | None = None,
    steady: Tensor | None = None,
) -> TargetRefit:
    """The same from what the tower says of pictures: h, E1 before normalisation, and class indices.

    Without a direction the head of the class moves, and E1 stands in for h. A ``start`` that is near makes it fast, and
    so does the :func:`steady_direction` of the entries (:func:`entries_of`), where it is known.
    """
    row, tau = model.class_index(name), model.class_temperature
    features = features.double()
    with torch.no_grad():
        logits = features @ model.class_matrix().double().T / _lengths(model, features) / tau
    entries = entries_of(model, hidden, features)
    own = prompt_features(model, name) if direction is None and model.linear is None else None

    def moved(p: Tensor) -> Tensor:
        if own is None:
            return logits[:, row] + entries @ p / tau
        prompts = functional.normalize(own + p, dim=1)
        return entries @ functional.normalize(prompts.mean(dim=0), dim=0) / tau

    share, margin = _IN_HEAD if direction is None else _IN_TOWER
    design = Design.of(entries, steady)
    unknown = None if start is None else start.start
    found, unknown = _solve(design, logits, labels, row, moved, tau, share, margin, unknown, linear=own is None)
    raised = tau * design.steady  # raises the target's logit by 1
    with torch.no_grad():
        more = _forward(lambda amount: moved(found + amount * raised), logits, labels, row)
    return TargetRefit(name, found + more * raised, direction, unknown)


def entries_of(model: Classifier, hidden: Tensor, features: Tensor) -> Tensor:
    """What a logit is linear in, in float64: h by the length that E1 is divided by."""
    return hidden.double() / _lengths(model, features.double())


def _lengths(model: Classifier, features: Tensor) -> Tensor:
    return features.norm(dim=1, keepdim=True) if model.towers.unit_features else torch.ones_like(features[:, :1])


def _forward(raised: Callable[[float], Tensor], logits: Tensor, labels: Tensor, row: int) -> float:
    """By how much more the target's logit must be raised for it to win enough of its own pictures; mostly by nothing.

    Where classes lie close the safest fit names the target less readily than before, and there would be nothing to
    choose from but the old model.
    """
    own = labels == row
    others = logits.index_fill(1, torch.tensor([row], device=logits.device), -torch.inf).amax(dim=1)[own]
    before = (logits[own, row] > others).double().mean()
    wanted = float(before + _WON * (1 - before))

    def won(amount: float) -> float:
        return float((raised(amount)[own] > others).double().mean())

    low, high = 0.0, 1.0
    if won(low) >= wanted:
        return low
    while won(high) < wanted and high < 64:
        high *= 2
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if won(middle) >= wanted else (middle, high)
    return high


def _solve(
    design: Design,
    logits: Tensor,
    labels: Tensor,
    row: int,
    moved: Callable[[Tensor], Tensor],
    temperature: float,
    share: float,
    margin: float,
    start: Tensor | None,
    *,
    linear: bool,
) -> tuple[Tensor, Tensor]:
    """p of least loss, and the unknowns behind it, in float64: weights under the ridge, and a free offset.

    ``design`` is what the target's logit sees, ``logits`` [n, K] are those of before.
    """
    counts = torch.bincount(labels, minlength=logits.shape[1])
    each = (1 - share) / max(1, int((counts > 0).sum()) - 1)
    weight = torch.where(labels == row, share, each).double() / counts[labels]
    place = torch.tensor([row], device=logits.device)
    room = margin * (labels != row)
    unknown = torch.zeros(design.columns.shape[1], dtype=torch.float64, device=logits.device)
    unknown = (unknown if start is None else start.clone()).requires_grad_()

    def weights() -> Tensor:
        return temperature * design.weights(unknown)

    if linear:
        # Among the other classes nothing changes: what is left is a logistic regression of the target against them.
        others = logits.index_fill(1, place, -torch.inf).logsumexp(dim=1)
        ridge = torch.full_like(unknown, _RIDGE, requires_grad=False)
        ridge[-1] = 0
        sign = torch.where(labels == row, 1.0, -1.0).double()
        offset = logits[:, row] + room - others
        if _waits(logits):
            with torch.no_grad():
                unknown.copy_(logistic(design.columns, offset, sign, weight, ridge, unknown.detach()))
        else:
            minimise_linear(
                unknown,
                design.columns,
                ridge,
                lambda reached: (weight * functional.softplus(-sign * (offset + reached))).sum(),
            )
        return weights().detach(), unknown.detach()

    def loss() -> Tensor:
        raised = logits.index_copy(1, place, (moved(weights()) + room)[:, None])
        value = (weight * functional.cross_entropy(raised, labels, reduction="none")).sum()
        return value + _RIDGE * unknown[:-1].square().sum()

    minimise(unknown, loss)
    return weights().detach(), unknown.detach()


def _waits(tensor: Tensor) -> bool:
    """Whether a number that the host asks for is waited for: few large steps are then faster than many small ones."""
    return tensor.is_cuda


@torch.no_grad()
def see_pictures(
    model: Classifier,
    data: RoundData,
    *,
    in_tower: bool,
    crop_scale: tuple[float, float],
    flip: bool,
    dev: bool = False,
    most_views: int = VIEWS,
) -> Pictures:
    """The round's training pictures, and dev pictures too where these are to teach."""
    taught: list[tuple[LabelledSet | PairSet, np.ndarray]] = [
        (data.constraint, data.constraint.labels),
        (data.target, np.full(len(data.target), data.tasks.target_index)),
    ]
    if dev:
        taught.append((data.dev, data.dev.labels))
    sets: list[tuple[LabelledSet | PairSet, np.ndarray]] = []
    for item, labels in taught:
        rows = np.linspace(0, len(item) - 1, min(MOST // 2, len(item))).round().astype(np.int64)
        sets.append((item, np.stack([rows, labels[rows]])))
    count = sum(rows.shape[1] for _, rows in sets)
    views = min(most_views, max(1, MOST // count))
    places = [model.class_index(name) for name in data.tasks.classes]
    found: list[tuple[Tensor, Tensor]] = []
    labels_seen: list[int] = []
    ids: list[str] = []
    for number in range(views):
        for which, (item, (rows, labels)) in enumerate(sets):
            seed = derive_seed("target fit", number, which)
            chosen = random_views(len(rows), seed, crop_scale=crop_scale, flip=flip) if number else None
            found.extend(_features(model, item, rows, chosen, in_tower))
            labels_seen.extend(places[label] for label in labels)
            ids.extend(item.ids[row] for row in rows)
    hidden, features = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Pictures(hidden, features, torch.tensor(labels_seen, device=features.device), tuple(ids))


def _features(
    model: Classifier, examples: LabelledSet | PairSet, rows: np.ndarray, view: View | None, in_tower: bool
) -> list[tuple[Tensor, Tensor]]:
    towers = model.towers
    found: list[tuple[Tensor, Tensor]] = []
    what = "hidden" if in_tower else "features"
    for _, seen in encode_set(towers, examples, towers.projection, what=what, positions=rows, view=view):
        values = full_precision(seen)
        found.append((values, towers.project(values) if in_tower else values))
    return found
