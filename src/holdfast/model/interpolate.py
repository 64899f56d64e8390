"""The walk from the old model to the new one: w(λ) = (1 − λ) w_old + λ w_new."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holdfast.errors import UserError
from holdfast.model.classifier import Classifier
from holdfast.model.heads import HeadRound


def interpolate(old: Classifier, new: Classifier, lam: float, *, share: bool = False) -> Classifier:
    """The model at λ on the straight line from ``old`` (λ = 0) to ``new`` (λ = 1).

    Towers go linearly. A head added since goes as W_k(λ) = (1 − λ) W_k,old + λ W_k,new: the scale of its U Vᵀ becomes
    λ times what it was. (U and V interpolated each for itself would give (1−λ)² and λ² terms and a mixed one.) Both
    ends are exact: λ = 0 gives the old logits bit for bit, λ = 1 the new ones.

    With ``share`` weights of the towers that are equal at both ends are not copied: the model holds the old one's
    memory, and may be looked at but not trained.
    """
    if not 0 <= lam <= 1:
        raise UserError("lambda must lie between 0 and 1", found=str(lam))
    if old.towers.spec() != new.towers.spec() or old.classes != new.classes or old.prompts != new.prompts:
        raise UserError(
            "these two models do not lie on one line", expected="one architecture, one label space and the same prompts"
        )
    if old.class_temperature != new.class_temperature:
        raise UserError("these two models have different class temperatures")
    between = new.copy_sharing(_equal(old, new)) if share else new.frozen_copy()
    with torch.no_grad():
        _lerp_module(between.towers, old.towers, lam)
        _scale_heads(between, old, lam)
        _lerp_linear(between, old, lam)
    return between


def _lerp(start: Tensor, end: Tensor, lam: float) -> Tensor:
    # torch.lerp steps from the nearer end, so that both ends come out exactly.
    return torch.lerp(start.to(end.device), end, lam)


def _lerp_module(between: nn.Module, old: nn.Module, lam: float) -> None:
    """``between`` holds the new values and receives the mixed ones, buffers (BatchNorm's statistics) included."""
    for new_value, old_value in zip(_tensors(between), _tensors(old), strict=True):
        if new_value.data_ptr() == old_value.data_ptr():  # shared, and equal at both ends
            continue
        if new_value.is_floating_point():
            new_value.copy_(_lerp(old_value, new_value, lam))
        elif lam == 0:
            new_value.copy_(old_value)


def _equal(old: Classifier, new: Classifier) -> list[tuple[Tensor, Tensor]]:
    """Tensors of the new model's towers that are the old one's, too, each with that one."""
    pairs = zip(_all_tensors(new.towers), _all_tensors(old.towers), strict=True)
    return [(mine, its) for mine, its in pairs if mine.device == its.device and _equal_values(mine, its)]


def _all_tensors(module: nn.Module) -> list[Tensor]:
    """Those that no file of weights holds, too."""
    return [*module.parameters(), *module.buffers()]


def _equal_values(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def _tensors(module: nn.Module) -> list[Tensor]:
    return list(module.state_dict(keep_vars=True).values())


def _scale_heads(between: Classifier, old: Classifier, lam: float) -> None:
    """Rounds that both share stay; those that only the new model has are scaled by λ."""
    mine, theirs = between.heads.rounds, old.heads.rounds
    shared = len(theirs)
    if shared > len(mine) or not all(_same(a, b) for a, b in zip(mine, theirs, strict=False)):
        raise UserError(
            "the new model did not grow from the old one",
            expected="the heads of earlier rounds, unchanged",
            do="interpolate between a model and the one it was developed from",
        )
    for added in mine[shared:]:
        added.scale.mul_(lam)


def _same(left: HeadRound, right: HeadRound) -> bool:
    if left.classes != right.classes:
        return False
    pairs = zip(_tensors(left), _tensors(right), strict=True)
    return all(a.shape == b.shape and torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def _lerp_linear(between: Classifier, old: Classifier, lam: float) -> None:
    """A linear head meets the old one, or what the old model's prompts say."""
    if between.linear is None:
        if old.linear is not None:
            raise UserError("the old model classifies with a linear head, the new one with prompts")
        return
    start = old.class_matrix()
    between.linear.copy_(_lerp(start, between.linear, lam))
