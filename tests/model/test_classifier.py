from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import UserError
from holdfast.model.classifier import Classifier
from holdfast.model.towers import TwoTowers


def test_logits_against_a_naive_version(towers: TwoTowers, images: Tensor) -> None:
    prompts = (("fog", "a foggy day"), ("snow",), ("rain", "a rainy day", "the weather is rainy"))
    classifier = Classifier(towers, ("fog", "snow", "rain"), prompts, 0.01).double()
    images = images.double()
    expected = torch.empty(len(images), 3, dtype=torch.float64)
    for c, group in enumerate(prompts):
        features = [towers.text_backbone(towers.tokenize([text]))[0] @ towers.projection for text in group]
        mean = torch.stack([feature / feature.norm() for feature in features]).mean(0)
        for i, image in enumerate(images):
            encoded = towers.image_features(image[None])[0]
            expected[i, c] = (encoded / encoded.norm()) @ (mean / mean.norm()) / 0.01
    torch.testing.assert_close(classifier.logits(images), expected, rtol=0, atol=1e-9)
    matrix = classifier.class_matrix()
    assert torch.equal(classifier.logits(images, matrix), classifier.logits(images))


def test_similarities_are_float32_under_autocast(classifier: Classifier, images: Tensor) -> None:
    classifier.begin_round(rank=2, seed=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert classifier.towers.image_features(images).dtype == torch.bfloat16
        features, matrix = classifier.image_features(images), classifier.class_features()
        logits = classifier.logits(images)
    assert features.dtype == matrix.dtype == logits.dtype == torch.float32
    exact = features.double() @ matrix.double().T / classifier.class_temperature
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-4)  # bf16 would be off by a tenth


def test_linear_head_starts_where_the_prompts_are(
    classifier: Classifier, images: Tensor, disturb: Callable[[nn.Module, float], None]
) -> None:
    before = classifier.logits(images)
    linear = classifier.use_linear()
    assert torch.equal(classifier.logits(images), before)
    assert "linear" in dict(classifier.named_parameters())
    classifier.towers.freeze(image=True, text=True)
    disturb(classifier, 0.1)
    expected = classifier.image_features(images) @ linear.T / classifier.class_temperature
    torch.testing.assert_close(classifier.logits(images), expected)
    assert not torch.equal(classifier.logits(images), before)
    swapped = classifier.with_classes(("snowy", "clear"), (("snow",), ("clear",)))
    assert swapped.linear is not None
    assert torch.equal(swapped.linear, linear[[2, 0]])


def test_frozen_copy_stays_behind(
    classifier: Classifier, images: Tensor, disturb: Callable[[nn.Module, float], None]
) -> None:
    old = classifier.frozen_copy()
    before = old.logits(images)
    disturb(classifier, 0.1)
    assert torch.equal(old.logits(images), before)
    assert not any(parameter.requires_grad for parameter in old.parameters())
    assert any(parameter.requires_grad for parameter in classifier.parameters())


def test_training_after_inference_mode(classifier: Classifier, images: Tensor) -> None:
    classifier.begin_round(rank=2, seed=0)
    with torch.inference_mode():
        classifier.logits(images)
    classifier.logits(images).sum().backward()
    assert classifier.heads.rounds[0].U.grad is not None


def test_label_spaces_that_make_no_sense(towers: TwoTowers) -> None:
    with pytest.raises(UserError, match="named twice"):
        Classifier(towers, ("a", "a"), (("x",), ("y",)), 0.05)
    with pytest.raises(UserError, match="no prompt"):
        Classifier(towers, ("a", "b"), (("x",), ()), 0.05)
    with pytest.raises(UserError, match="at least two"):
        Classifier(towers, ("a",), (("x",),), 0.05)
    with pytest.raises(UserError, match="temperature"):
        Classifier(towers, ("a", "b"), (("x",), ("y",)), 0.0)
    with pytest.raises(UserError, match="did you mean 'foggy'"):
        Classifier(towers, ("foggy", "b"), (("x",), ("y",)), 0.05).class_index("fogy")


def test_a_copy_with_its_own_last_layer_shares_everything_else(
    classifier: Classifier, images: Tensor, disturb: Callable[[nn.Module, float], None]
) -> None:
    classifier.begin_round(rank=3, seed=1)
    disturb(classifier, 0.1)
    wanted = [parameter.requires_grad for parameter in classifier.parameters()]
    before = classifier.logits(images)
    copied = classifier.copy_with_own_last_layer()
    assert torch.equal(copied.logits(images), before)
    assert [parameter.requires_grad for parameter in classifier.parameters()] == wanted
    assert not any(parameter.requires_grad for parameter in copied.parameters())
    last = {id(parameter) for parameter in classifier.towers.image_projection_parameters()}
    assert len(last) == 1
    for mine, its in zip(classifier.parameters(), copied.parameters(), strict=True):
        assert (mine.data_ptr() == its.data_ptr()) == (id(mine) not in last)
    layer = copied.towers.image_projection
    assert layer is not None
    layer.add_(1.0)
    assert not torch.equal(copied.logits(images), before)
    assert torch.equal(classifier.logits(images), before)
    copied.double()  # whatever becomes of the copy as a whole, the model stays what it is
    assert classifier.logits(images).dtype == torch.float32
    assert torch.equal(classifier.logits(images), before)
