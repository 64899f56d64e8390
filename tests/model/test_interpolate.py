from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import UserError
from holdfast.model.classifier import Classifier
from holdfast.model.interpolate import interpolate
from holdfast.model.openclip import load_towers

Disturb = Callable[[nn.Module, float], None]


@pytest.fixture
def ends(classifier: Classifier, disturb: Disturb) -> tuple[Classifier, Classifier]:
    """An old model with one round behind it, and the model of its second round."""
    classifier.begin_round(rank=3, seed=1)
    disturb(classifier, 0.1)
    old = classifier.frozen_copy()
    classifier.begin_round(rank=4, seed=2)
    disturb(classifier, 0.1)
    return old, classifier


def test_both_ends_are_exact(ends: tuple[Classifier, Classifier], images: Tensor) -> None:
    old, new = ends
    # Far from the old weights, where w_old + (w_new − w_old) is not w_new any more in float32.
    new.towers.load_state_dict(load_towers("tiny", seed=77).state_dict())
    assert torch.equal(interpolate(old, new, 0.0).logits(images), old.logits(images))
    assert torch.equal(interpolate(old, new, 1.0).logits(images), new.logits(images))
    assert not torch.equal(old.logits(images), new.logits(images))


@pytest.mark.parametrize("lam", [0.1, 0.5, 0.9])
def test_every_matrix_lies_on_the_straight_line(ends: tuple[Classifier, Classifier], lam: float) -> None:
    old, new = (model.double() for model in ends)
    between = interpolate(old, new, lam)
    for name in new.classes:
        start, end, here = (model.heads.dense(model.towers.projection, name) for model in (old, new, between))
        torch.testing.assert_close(here, (1 - lam) * start + lam * end, rtol=0, atol=1e-14)
    for start, end, here in zip(
        old.towers.parameters(), new.towers.parameters(), between.towers.parameters(), strict=True
    ):
        torch.testing.assert_close(here, (1 - lam) * start + lam * end, rtol=0, atol=1e-14)


def test_the_ends_are_not_touched(ends: tuple[Classifier, Classifier], images: Tensor) -> None:
    old, new = ends
    before = old.logits(images), new.logits(images)
    interpolate(old, new, 0.3)
    assert torch.equal(old.logits(images), before[0])
    assert torch.equal(new.logits(images), before[1])


def test_walking_back_twice(ends: tuple[Classifier, Classifier], images: Tensor) -> None:
    old, new = (model.double() for model in ends)
    half = interpolate(old, new, 0.5)
    images = images.double()
    once, twice = interpolate(old, new, 0.25), interpolate(old, half, 0.5)
    torch.testing.assert_close(once.logits(images), twice.logits(images), rtol=0, atol=1e-10)


def test_linear_heads(classifier: Classifier, images: Tensor, disturb: Disturb) -> None:
    old = classifier.frozen_copy()
    linear = classifier.use_linear()
    disturb(classifier, 0.1)
    assert torch.equal(interpolate(old, classifier, 0.0).logits(images), old.logits(images))
    half = interpolate(old, classifier, 0.5)
    assert half.linear is not None
    torch.testing.assert_close(half.linear, (old.class_features() + linear) / 2)
    with pytest.raises(UserError, match="linear head"):
        interpolate(classifier, old, 0.5)


def test_models_that_are_no_ends_of_a_line(ends: tuple[Classifier, Classifier], disturb: Disturb) -> None:
    old, new = ends
    with pytest.raises(UserError, match="lambda"):
        interpolate(old, new, 1.5)
    with pytest.raises(UserError, match="one line"):
        interpolate(old.with_classes(("a", "b"), (("a",), ("b",))), new, 0.5)
    with pytest.raises(UserError, match="did not grow"):
        interpolate(new, old, 0.5)
    with torch.no_grad():
        new.heads.rounds[0].U.add_(1)
    with pytest.raises(UserError, match="did not grow"):
        interpolate(old, new, 0.5)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("moved", ["last layers", "all"])
def test_shared_weights_are_those_that_did_not_move(
    ends: tuple[Classifier, Classifier], images: Tensor, disturb: Disturb, lam: float, moved: str
) -> None:
    old, new = ends
    if moved == "last layers":
        new.towers.load_state_dict(old.towers.state_dict())
        new.requires_grad_(False)
        for parameter in (*new.towers.image_projection_parameters(), *new.towers.projection_parameters()):
            parameter.requires_grad_(True)
        disturb(new.towers, 0.1)
    plain, shared = interpolate(old, new, lam), interpolate(old, new, lam, share=True)
    for (name, expected), value in zip(plain.state_dict().items(), shared.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name
    assert torch.equal(shared.logits(images), plain.logits(images))
    held = {id(mine) for mine, its in zip(old.towers.parameters(), shared.towers.parameters(), strict=True)
            if mine.data_ptr() == its.data_ptr()}  # fmt: skip
    still = {id(mine) for mine, its in zip(old.towers.parameters(), new.towers.parameters(), strict=True)
             if torch.equal(mine, its)}  # fmt: skip
    assert held == still
    assert len(held) > 10 if moved == "last layers" else True
    before = old.logits(images), new.logits(images)
    last = shared.towers.image_projection
    assert last is not None
    if moved == "all" or lam > 0:
        last.add_(1.0)
    assert torch.equal(old.logits(images), before[0])
    assert torch.equal(new.logits(images), before[1])
