"""Frozen towers: every method (one of a reader's own too) does with kept features what it does with pixels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.data.loader import BatchSizes, RoundSampler
from holdfast.data.round import Batch, Images, Texts
from holdfast.errors import UserError
from holdfast.methods.base import Method, StepOutput
from holdfast.methods.cross_entropy import CrossEntropyConfig
from holdfast.methods.finetune import FinetuneConfig
from holdfast.model.classifier import Classifier
from holdfast.model.openclip import load_towers
from holdfast.train.bench import step_flop
from holdfast.train.feature_cache import build_feature_cache, can_cache
from tests.helpers import made_up_round
from tests.train.small import CLEAN, METHODS, Make, built, losses_and_state, pictures_shown, prepared

FREEZES = ("image", "text", "towers")


@pytest.mark.parametrize("freeze", FREEZES)
@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_runs_with_frozen_towers_and_features_change_nothing(
    name: str, freeze: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = made_up_round()
    if freeze == "towers" and name in ("flyp", "wccl", "lwf of the docs"):
        with pytest.raises(UserError, match="nothing to train"):
            prepared(METHODS[name], data, freeze)
        return
    with_views, _ = losses_and_state(prepared(METHODS[name], data, freeze), data, augment=True)
    assert all(torch.isfinite(term) for term in with_views)
    kept = prepared(METHODS[name], data, freeze)
    assert can_cache(kept, data, CLEAN) == (freeze != "text", freeze != "image" or kept.linear)
    terms, state = losses_and_state(kept, data, augment=False)
    monkeypatch.setattr("holdfast.train.feature_cache.LIMIT", 0)
    again = prepared(METHODS[name], data, freeze)
    before = {key: value.clone() for key, value in again.model.state_dict().items()}
    plain_terms, plain_state = losses_and_state(again, data, augment=False)
    assert any(not torch.equal(before[key], plain_state[f"model.{key}"]) for key in before)  # it has learnt something
    torch.testing.assert_close(torch.stack(terms), torch.stack(plain_terms), rtol=1e-12, atol=1e-12)
    for key, value in plain_state.items():
        torch.testing.assert_close(state[key], value, rtol=1e-11, atol=1e-12, msg=key)


def test_the_image_tower_rests_for_old_and_new_model(monkeypatch: pytest.MonkeyPatch) -> None:
    data = made_up_round()
    method = prepared(METHODS["der"], data, "image")
    shown = pictures_shown(method, monkeypatch)  # several threads encode whole sets, through `image_hidden`
    losses_and_state(method, data, augment=False)
    once = len(data.target) + len(data.negatives) + len(data.constraint)
    assert {which: sum(counts) for which, counts in shown.items()} == {"new": once, "old": 0}


class TakesPixels(Method):
    """A method that looks at pixels itself."""

    def __init__(self, model: Classifier) -> None:
        super().__init__(model)

    def forward(self, batch: Batch) -> StepOutput:
        pixels = batch.target_images.pixels
        return StepOutput({"target": pixels.square().mean() * self.model.class_features().sum()})


class SaysSo(TakesPixels):
    reads_pixels = True


def test_pixels_that_were_not_read_are_an_error_that_says_what_to_do(tried: Callable[..., None]) -> None:
    tried("bad inputs")
    data = made_up_round()
    with pytest.raises(UserError, match="pixels that were not read") as caught:
        losses_and_state(prepared(TakesPixels, data, "image"), data, augment=False)
    assert "reads_pixels" in caught.value.do
    terms, _ = losses_and_state(prepared(SaysSo, data, "image"), data, augment=False)
    assert terms[0] != 0


def test_features_are_handed_out_by_models_with_that_very_tower_only(tried: Callable[..., None]) -> None:
    tried("bad inputs")
    data = made_up_round()
    method = prepared(METHODS["der"], data, "image")
    kept = build_feature_cache(method, data, CLEAN).images
    assert kept is not None
    images = Images(None, kept.target)
    assert torch.equal(method.model.image_features(images), kept.target.features)
    assert torch.equal(method.old.image_features(images), kept.target.features)
    other = Classifier(load_towers("tiny", None, seed=2), data.tasks.classes, data.tasks.prompts, 0.05).double()
    with pytest.raises(UserError, match="pixels that were not read"):
        other.image_features(images)
    with pytest.raises(UserError, match="pixels that were not read"):
        other.image_features_together(images, images)


def test_an_old_model_with_another_image_tower_sees_pixels() -> None:
    data = made_up_round()
    method = prepared(METHODS["der"], data, "image")
    with torch.no_grad():
        next(iter(method.old.towers.image_parameters())).add_(0.01)
    assert can_cache(method, data, CLEAN)[0] is False
    assert build_feature_cache(method, data, CLEAN).images is None
    losses_and_state(method, data, augment=False)


def test_a_batch_moves_as_a_whole() -> None:
    data = made_up_round()
    kept = build_feature_cache(prepared(METHODS["der"], data, "image"), data, CLEAN).images
    assert kept is not None
    index = torch.arange(2)
    images, texts = Images(None, kept.target.rows(index)), Texts(index[:, None])
    batch = Batch(images, texts, index, images, texts, index, images, index, index, index, 2, 2, 2)
    moved = batch.to(torch.device("meta"))
    assert moved.target_images.kept is not None
    assert moved.target_images.kept.features.device.type == "meta"
    assert moved.target_texts.tokens.device.type == "meta"
    assert moved.target_total == 2


def test_nothing_to_train_is_refused_before_the_old_model_is_asked(tried: Callable[..., None]) -> None:
    data = made_up_round()
    makes: list[Make] = [
        *(METHODS[name] for name in ("holdfast", "finetune", "cross_entropy", "rm", "flyp", "wccl")),
        built(CrossEntropyConfig(heads=False)),
    ]
    for make in makes:
        tried("bad inputs")
        with pytest.raises(UserError, match="nothing to train") as caught:
            prepared(make, data, "towers", head_rank=0)
        assert "freeze" in caught.value.do
    method = prepared(built(FinetuneConfig()), data, "towers")
    method.requires_grad_(False)  # after it was prepared
    with pytest.raises(UserError, match="nothing to train"):
        losses_and_state(method, data, augment=False)


def test_towers_that_rest_count_no_work() -> None:
    data = made_up_round()
    draw = RoundSampler(data, BatchSizes(4, 4, None, 3), 0).draw(0)
    work = [step_flop(prepared(METHODS["der"], data, freeze), data, draw, CLEAN) for freeze in ("nothing", "image")]
    assert work[0] > 0
    assert work[1] == 0
