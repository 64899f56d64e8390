"""A class that is predicted less often, or more: its logit moved by about the same amount on every picture.

A round that gains on its target can lose pictures of other classes to it. A bias on the target's logit trades the one
for the other, and the weights can carry it: with v such that f · v is near 1 for every picture's feature f,

    E2_c <- unit(E2_c - amount · tau_0 · v)        lowers s_c(x) / tau_0 by about ``amount``

which is one more factor of rank one in the class's head, so that models with it are stored, served, exported and
developed further like any other.

Raised like that a class gains little: E2_c + amount · tau_0 · v grows longer, and brought back to length 1 it tells its
own pictures from others by less. Where the last layer of the image tower may move, E1(x) = h(x) A, the logit is raised
there: with s such that h · s / |E1| is near 1 for every picture, and d of :mod:`holdfast.candidates.directions`,

    A <- A + amount · tau_0 · s dᵀ                 raises s_c(x) / tau_0 by about ``amount``, and changes no other order
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.candidates.directions import target_direction
from holdfast.data.round import LabelledSet, PairSet, RoundData
from holdfast.model.classifier import Classifier, full_precision
from holdfast.model.feature_store import What, encode_set
from holdfast.model.heads import HeadRound
from holdfast.model.prompt_features import prompt_backbone

_RIDGE = 0.01  # of the mean square of a feature's entry: enough to keep v short where features are few
_BLOCK = 256  # rows of a symmetric product that are computed together


def steady_direction(features: Tensor) -> Tensor:
    """v with f · v as near to 1 as can be over features F [n, D], by least squares with a small ridge r: [D].

        v = (Fᵀ F + r)⁻¹ Fᵀ 1 = Fᵀ (F Fᵀ + r)⁻¹ 1        r = _RIDGE · |F|² / D

    The first form is solved where features have fewer entries than there are of them, the second elsewhere.
    """
    features = features.double()
    n, width = features.shape
    if n < width:
        return features.T @ _solved(_gram(features), torch.ones_like(features[:, 0]), width)
    return _solved(_gram(features.T), features.sum(dim=0), width)


@dataclass(frozen=True)
class Products:
    """F Fᵀ of features F [n, D] where n < D, and else Fᵀ F: directions of many parts of them, by one large product."""

    features: Tensor
    product: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Products:
        """Of features as :func:`steady_direction` takes them."""
        features = features.double()
        lower = _gram(features if features.shape[0] < features.shape[1] else features.T)
        return cls(features, lower.tril() + lower.tril(-1).T)

    def steady(self, kept: Tensor) -> Tensor:
        """:func:`steady_direction` of the features of a mask [n]; up to rounding."""
        n, width = self.features.shape
        count = int(kept.sum())
        if n < width:
            part, ones = self.features[kept], torch.ones(count, dtype=torch.float64, device=kept.device)
            return part.T @ _solved(self.product[kept][:, kept], ones, width)
        if count < max(width, n // 2):
            return steady_direction(self.features[kept])
        left_out = self.features[~kept]
        total = self.features.sum(dim=0) - left_out.sum(dim=0)
        return _solved(self.product - _gram(left_out.T), total, width)


def _gram(rows: Tensor) -> Tensor:
    """rows @ rows.T, of which a CPU computes little more than the lower half: what lies above is not read."""
    count = len(rows)
    if rows.is_cuda or count < 2 * _BLOCK:
        return rows @ rows.T
    product = rows.new_zeros(count, count)
    for start in range(0, count, _BLOCK):
        end = min(start + _BLOCK, count)
        torch.mm(rows[start:end], rows[:end].T, out=product[start:end, :end])
    return product


def _solved(gram: Tensor, right: Tensor, width: int) -> Tensor:
    """(gram + r)⁻¹ right, from the lower half of ``gram``, which is written to; its trace is |F|²."""
    gram.diagonal().add_(_RIDGE * gram.diagonal().sum() / width)
    factor, failed = torch.linalg.cholesky_ex(gram)
    if bool(failed):  # values that are not finite, or zero throughout: said, or handed on, by a solver that pivots
        return torch.linalg.solve(gram.tril() + gram.tril(-1).T, right)
    return torch.cholesky_solve(right[:, None], factor)[:, 0]


@torch.no_grad()
def features_of(
    model: Classifier,
    sets: Sequence[LabelledSet | PairSet],
    *,
    what: What = "features",
    most: int = 500,
    batch: int = 256,
) -> Tensor:
    """What the tower says of the evaluation views of at most ``most`` pictures of each set, evenly spread over it.

    E1, [n, D]; or ``what`` its last layer sees, [n, width].
    """
    found: list[Tensor] = []
    for examples in sets:
        rows = torch.linspace(0, len(examples) - 1, min(most, len(examples))).round().long().numpy()
        encoded = encode_set(model.towers, examples, model.towers.projection, what=what, positions=rows, batch=batch)
        found += [model.finished(seen) if what == "features" else full_precision(seen) for _, seen in encoded]
    return torch.cat(found)


@torch.no_grad()
def steady_in_layer(model: Classifier, data: RoundData) -> Tensor | None:
    """s with h · s / |E1| near 1 over the round's pictures, [width]; None where the tower ends in something else."""
    if model.linear is not None or model.towers.image_projection is None:
        return None
    hidden = features_of(model, [data.constraint, data.target], what="hidden")
    features = model.towers.project(hidden).double()
    lengths = features.norm(dim=1, keepdim=True) if model.towers.unit_features else torch.ones_like(features[:, :1])
    return steady_direction(hidden.double() / lengths)


def with_lower_logit(model: Classifier, name: str, amount: float, direction: Tensor) -> Classifier:
    """A copy of the model whose logit of class ``name`` is lower by about ``amount``; its towers are shared.

    ``direction`` is :func:`steady_direction` of pictures as this model sees them.
    """
    return moved_class(model, name, -amount * model.class_temperature * direction)


@torch.no_grad()
def moved_class(model: Classifier, name: str, move: Tensor) -> Classifier:
    """A copy of the model with unit(E2 + move) for each prompt of a class; its towers are shared.

    A row of a linear head is moved as it is, and not brought back to length 1.
    """
    return _moved_class(model, name, [move])[0]


def _moved_class(model: Classifier, name: str, moves: Sequence[Tensor]) -> list[Classifier]:
    """The same for each of several moves."""
    if model.linear is not None:
        return [_moved_row(model, model.class_index(name), move) for move in moves]
    # The prompts' projections P have lengths s. With V such that P-before-projection · V = s, adding U Vᵀ makes each
    # of them s (E2 + U), whatever the number of prompts.
    backbone, projected = _prompts(model, name)
    lengths = torch.linalg.pinv(backbone) @ projected.norm(dim=1)
    projection = model.towers.projection
    found: list[Classifier] = []
    for move in moves:
        moved = model.with_classes(model.classes, model.prompts)
        added = HeadRound((name,), moved.towers.embed_dim, moved.towers.text_width, 1).requires_grad_(False)
        added.to(device=projection.device, dtype=projection.dtype)
        added.U[0, :, 0] = move.to(added.U)
        added.V[0, :, 0] = lengths.to(added.V)
        moved.heads.append(added)
        found.append(moved)
    return found


def _moved_row(model: Classifier, row: int, move: Tensor) -> Classifier:
    moved = model.with_classes(model.classes, model.prompts)
    assert moved.linear is not None
    lowered = moved.linear.detach().clone()
    lowered[row] += move.to(lowered)
    moved.linear = nn.Parameter(lowered, requires_grad=False)
    return moved


@torch.no_grad()
def prompt_features(model: Classifier, name: str) -> Tensor:
    """E2 of each prompt of a class under its head, in float64: [prompts, D]."""
    return nn.functional.normalize(_prompts(model, name)[1], dim=1)


def with_target_bias(
    model: Classifier, data: RoundData, amounts: Sequence[float], in_layer: Tensor | None = None
) -> list[Classifier]:
    """The model with the target's logit lowered by each of the amounts, by what it sees in the round's pictures.

    ``in_layer`` is :func:`steady_in_layer` of a model with this one's tower, where the last layer may move.
    """
    if not any(amounts):
        return [model] * len(amounts)
    direction = steady_direction(features_of(model, [data.constraint, data.target]))
    return lowered_by(model, data.tasks.target, amounts, direction, in_layer)


@torch.no_grad()
def lowered_by(
    model: Classifier, name: str, amounts: Sequence[float], direction: Tensor, in_layer: Tensor | None = None
) -> list[Classifier]:
    """The model with a class's logit lowered by each of the amounts; for nothing it is the model itself.

    Amounts below 0 raise it, in the last layer where ``in_layer`` is given and the other classes leave it a direction.
    """
    own = target_direction(model, name) if in_layer is not None and min(amounts, default=0.0) < 0 else None
    in_head = [amount for amount in amounts if amount > 0 or (amount < 0 and own is None)]
    moves = [-amount * model.class_temperature * direction for amount in in_head]
    moved = dict(zip(in_head, _moved_class(model, name, moves) if moves else (), strict=True))
    if in_layer is not None and own is not None:
        moved |= {amount: _raised(model, -amount, in_layer, own) for amount in amounts if amount < 0}
    return [moved[amount] if amount else model for amount in amounts]


def _raised(model: Classifier, amount: float, in_layer: Tensor, own: Tensor) -> Classifier:
    changed = model.copy_with_own_last_layer()
    layer = changed.towers.image_projection
    assert layer is not None
    layer.add_(torch.outer(amount * model.class_temperature * in_layer, own).to(layer))
    return changed


def _prompts(model: Classifier, name: str) -> tuple[Tensor, Tensor]:
    """Backbone features of a class's prompts, and W_c of them before they are normalised, in float64."""
    own = model.prompt_tokens[model.prompt_class == model.class_index(name)]
    backbone = full_precision(prompt_backbone(model.towers, own)).double()
    weight, bias = model.towers.projection.double(), model.towers.projection_bias
    projected = backbone @ weight if bias is None else backbone @ weight + bias.double()
    change = model.heads.change_of_one(backbone.to(model.towers.projection), name)
    return backbone, projected if change is None else projected + change.double()
