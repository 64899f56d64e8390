"""A class predicted less often: its logit is lowered by about the amount on every picture, the others not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast.candidates.logit_bias import (
    Products,
    features_of,
    lowered_by,
    steady_direction,
    steady_in_layer,
    with_lower_logit,
)
from holdfast.data.round import LabelledSet, RoundData
from holdfast.evaluate.predict import predict, predict_each
from holdfast.model.classifier import Classifier, class_matrices
from holdfast.model.folder import load_model, save_model
from holdfast.model.interpolate import interpolate
from holdfast.model.openclip_towers import OpenClipTowers
from tests.model.conftest import CLASSES, PROMPTS

Disturb = Callable[[nn.Module, float], None]


def around(centre: Tensor, n: int, spread: float) -> Tensor:
    """Unit features in a cone, as those of pictures are."""
    noise = torch.randn(n, len(centre), generator=torch.Generator().manual_seed(5), dtype=centre.dtype)
    return nn.functional.normalize(centre + spread * noise / len(centre) ** 0.5, dim=1)


def test_the_direction_is_the_least_squares_one() -> None:
    features = around(nn.functional.normalize(torch.ones(12, dtype=torch.float64), dim=0), 400, 0.8)
    v = steady_direction(features)
    assert ((features @ v) - 1).square().mean() < 0.02
    mean = features.mean(dim=0)
    plain = mean / mean.square().sum()  # the mean direction, scaled so that the mean of f · v is 1
    assert (features @ v - 1).square().mean() < (features @ plain - 1).square().mean()


@pytest.mark.parametrize(
    ("n", "width"), [(1, 5), (40, 12), (12, 12), (30, 70), (40, 620), (620, 40), (530, 900), (900, 530)]
)
def test_the_direction_is_the_same_by_either_form(n: int, width: int) -> None:
    """The equations as they are written down, solved with a pivot: few features of many entries, and many of few."""
    draw = torch.Generator().manual_seed(n)
    features = 1.0 + torch.randn(n, width, generator=draw, dtype=torch.float64)
    kept = features.clone()
    moments = features.T @ features / n
    ridge = 0.01 * moments.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    naive = torch.linalg.solve(moments + ridge, features.mean(dim=0))
    torch.testing.assert_close(steady_direction(features), naive, rtol=1e-9, atol=1e-12)
    assert torch.equal(features, kept)


@pytest.mark.parametrize(("n", "width"), [(40, 12), (30, 70), (14, 12), (530, 900), (900, 530)])
@pytest.mark.parametrize("left_out", [0.0, 0.2, 0.7])
def test_the_direction_of_a_part_from_the_products_of_all(n: int, width: int, left_out: float) -> None:
    draw = torch.Generator().manual_seed(n)
    features = 1.0 + torch.randn(n, width, generator=draw, dtype=torch.float64)
    products = Products.of(features)
    for _ in range(2):  # a second part is not another for the first
        kept = torch.rand(n, generator=draw) >= left_out
        naive = steady_direction(features[kept].clone())
        torch.testing.assert_close(products.steady(kept), naive, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(20, 5), (5, 20)])
def test_features_that_are_not_finite_make_no_direction_and_no_crash(shape: tuple[int, int]) -> None:
    """A model that diverged is found out by its logits."""
    features = torch.ones(shape, dtype=torch.float64)
    features[2, 3] = torch.nan
    assert not bool(steady_direction(features).isfinite().any())


@pytest.mark.parametrize("rounds", [0, 2])
def test_the_class_feature_moves_exactly_as_said(classifier: Classifier, disturb: Disturb, rounds: int) -> None:
    """Whatever the number of prompts and the heads before: unit(E2 + U) of each prompt."""
    for seed in range(rounds):
        classifier.begin_round(rank=3, seed=seed)
        disturb(classifier, 0.1)
    prompts = (PROMPTS[0], ("the weather is foggy", "a street in thick fog", "fog"), PROMPTS[2])
    model = classifier.with_classes(CLASSES, prompts).double().frozen_copy()
    name, row = "foggy", 1
    v = nn.functional.normalize(torch.randn(model.towers.embed_dim, dtype=torch.float64), dim=0)
    held = with_lower_logit(model, name, 3.0, v)
    before = torch.stack([model.text_features(item[None], head=row)[0] for item in _own(model, row)])
    wanted = nn.functional.normalize(nn.functional.normalize(before - 3.0 * 0.05 * v, dim=1).mean(dim=0), dim=0)
    torch.testing.assert_close(held.class_matrix()[row], wanted, rtol=0, atol=1e-9)
    others = [place for place in range(len(CLASSES)) if place != row]
    assert torch.equal(held.class_matrix()[others], model.class_matrix()[others])


def _own(model: Classifier, row: int) -> Tensor:
    return model.prompt_tokens[model.prompt_class == row]


def test_logits_fall_by_about_the_amount_on_every_picture(classifier: Classifier) -> None:
    model = classifier.double().frozen_copy()
    centre = nn.functional.normalize(torch.randn(model.towers.embed_dim, dtype=torch.float64), dim=0)
    features = around(centre, 300, 0.5)
    held = with_lower_logit(model, CLASSES[-1], 1.0, steady_direction(features))
    fall = ((features @ model.class_matrix().T) - (features @ held.class_matrix().T))[:, -1] / 0.05
    assert fall.mean() == pytest.approx(1.0, abs=0.15)
    assert fall.std() < 0.2


def test_a_linear_head_moves_its_row(classifier: Classifier) -> None:
    classifier.use_linear()
    model = classifier.frozen_copy()
    v = torch.randn(model.towers.embed_dim)
    held = with_lower_logit(model, CLASSES[1], 2.0, v)
    assert model.linear is not None
    assert held.linear is not None
    torch.testing.assert_close(held.linear[1], model.linear[1] - 2.0 * 0.05 * v)
    assert torch.equal(held.linear[0], model.linear[0])


def test_it_is_stored_served_and_developed_further(
    classifier: Classifier, disturb: Disturb, images: Tensor, tmp_path: Path
) -> None:
    classifier.begin_round(rank=3, seed=1)
    disturb(classifier, 0.1)
    model = classifier.frozen_copy()
    held = with_lower_logit(model, CLASSES[-1], 2.0, steady_direction(model.image_features(images)))
    assert not torch.equal(held.logits(images)[:, -1], model.logits(images)[:, -1])
    assert len(model.heads.rounds) == 1  # the model itself is as it was
    save_model(held, tmp_path / "held")
    again = load_model(tmp_path / "held")
    assert torch.equal(again.logits(images), held.logits(images))
    again.begin_round(rank=2, seed=3)
    disturb(again, 0.1)
    assert torch.equal(interpolate(held, again, 0.0).logits(images), held.logits(images))


def test_pictures_are_taken_from_all_over_a_set(classifier: Classifier) -> None:
    class Pixels:
        size = 32

        def __len__(self) -> int:
            return 40

        def read(self, rows: np.ndarray) -> Tensor:
            seen.extend(rows.tolist())
            return torch.zeros(len(rows), 3, 32, 32, dtype=torch.uint8)

    seen: list[int] = []
    examples = LabelledSet(Pixels(), np.arange(40), np.zeros(40, dtype=np.int64), tuple(str(i) for i in range(40)))
    assert features_of(classifier, [examples], most=5, batch=3).shape == (5, classifier.towers.embed_dim)
    assert (seen[0], seen[-1], len(set(seen))) == (0, 39, 5)


@pytest.mark.parametrize("linear", [False, True])
def test_one_pass_of_the_text_tower_for_all_biases(classifier: Classifier, disturb: Disturb, linear: bool) -> None:
    """The bits of models that are made, and asked, one by one."""
    classifier.begin_round(rank=3, seed=1)
    disturb(classifier, 0.1)
    if linear:
        classifier.use_linear()
    model = classifier.with_classes(CLASSES, (PROMPTS[0], ("the weather is foggy", "fog"), PROMPTS[2])).frozen_copy()
    v = nn.functional.normalize(torch.randn(model.towers.embed_dim, dtype=torch.float64), dim=0)
    amounts = [0.0, 0.5, 2.0]
    together = lowered_by(model, "foggy", amounts, v)
    assert together[0] is model
    alone = [model, *(with_lower_logit(model, "foggy", amount, v) for amount in amounts[1:])]
    with torch.no_grad():
        for matrix, item in zip(class_matrices(together), alone, strict=True):
            assert torch.equal(matrix, item.class_matrix())
    assert not torch.equal(alone[1].class_matrix(), alone[2].class_matrix())


def raised_in_layer(model: Classifier, images: Tensor, amounts: list[float]) -> tuple[Tensor, list[Classifier]]:
    """s over these pictures, and the models with the logit of "foggy" lowered by each amount."""
    hidden = model.towers.image_hidden(images)
    features = model.towers.project(hidden)
    in_layer = steady_direction(hidden / features.norm(dim=1, keepdim=True))
    direction = steady_direction(model.finished(features))
    return in_layer, lowered_by(model, "foggy", amounts, direction, in_layer)


def test_a_raise_in_the_last_layer_is_what_its_formula_says(
    classifier: Classifier, images: Tensor, disturb: Disturb
) -> None:
    """Written out, in float64: one logit grows by amount · h · s, and then all are divided by the new length."""
    classifier.begin_round(rank=3, seed=1)
    disturb(classifier, 0.1)
    model = classifier.double().frozen_copy()
    pictures = images.double()
    in_layer, (raised, itself, lowered) = raised_in_layer(model, pictures, [-2.0, 0.0, 1.5])
    assert itself is model
    assert lowered.towers is model.towers  # lowered in the class's head, as ever
    assert raised.towers is not model.towers
    hidden = model.towers.image_hidden(pictures)
    before, after = (item.towers.project(hidden) for item in (model, raised))
    wanted = (before @ model.class_matrix().T) / model.class_temperature
    wanted[:, 1] += 2.0 * (hidden @ in_layer)
    wanted /= after.norm(dim=1, keepdim=True)
    torch.testing.assert_close(raised.logits(pictures), wanted, rtol=1e-9, atol=1e-9)
    assert torch.equal(raised.class_matrix(), model.class_matrix())


def test_the_further_a_logit_is_raised_the_more_pictures_have_the_class(classifier: Classifier) -> None:
    """In the head this ends early: the class's feature is brought back to length 1."""
    model = classifier.double().frozen_copy()
    noise = torch.randn(200, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    amounts = [-float(amount) for amount in (16, 8, 4, 2, 1, 0)]
    _, models = raised_in_layer(model, noise, amounts)
    found = [item.logits(noise).argmax(dim=1) for item in models]
    counts = [int((item == 1).sum()) for item in found]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 200 > counts[-1]
    for item in found:  # a picture goes to the class, or stays where it was
        assert bool(((item == 1) | (item == found[-1])).all())


def test_where_the_last_layer_is_out_of_reach_the_head_raises_the_logit(classifier: Classifier, images: Tensor) -> None:
    model = classifier.frozen_copy()
    direction = steady_direction(model.image_features(images))
    (raised,) = lowered_by(model, "foggy", [-1.0], direction)
    assert raised.towers is model.towers
    assert torch.equal(raised.class_matrix(), with_lower_logit(model, "foggy", -1.0, direction).class_matrix())
    classifier.use_linear()
    model = classifier.frozen_copy()
    assert steady_in_layer(model, made_up_data()) is None


def made_up_data() -> RoundData:
    from holdfast.train.shapes import SHAPES, made_up_round

    class Pixels:
        size = 32

        def __len__(self) -> int:
            return 64

        def read(self, rows: np.ndarray) -> Tensor:
            draws = [torch.Generator().manual_seed(int(row)) for row in rows]
            return torch.stack([torch.randint(256, (3, 32, 32), generator=draw, dtype=torch.uint8) for draw in draws])

    return made_up_round(SHAPES["tiny"], Pixels())  # pyright: ignore[reportArgumentType]


def test_the_steady_direction_of_the_last_layer_is_near_one_on_every_picture(classifier: Classifier) -> None:
    model, data = classifier.frozen_copy(), made_up_data()
    found = steady_in_layer(model, data)
    assert found is not None
    pixels = model.preprocess.normalise(data.constraint.images())
    hidden = model.towers.image_hidden(pixels)
    lengths = model.towers.project(hidden).norm(dim=1, keepdim=True)
    raised = (hidden / lengths).double() @ found
    assert raised.mean() == pytest.approx(1.0, abs=0.1)
    assert raised.std() < 0.2


def test_models_that_differ_in_the_last_layer_are_asked_in_one_pass(
    classifier: Classifier, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = classifier.frozen_copy(), made_up_data()
    model = model.with_classes(("a", "foggy", "c"), (("a",), ("foggy",), ("c",)))
    _, models = raised_in_layer(model, images, [-2.0, -1.0, 0.0, 1.0])
    labels = np.arange(len(data.dev)) % 3
    examples = LabelledSet(data.dev.pixels, data.dev.rows, labels, data.dev.ids)
    alone = [predict(item, examples, item.classes) for item in models]
    passes, hidden = 0, OpenClipTowers.image_hidden

    def counted(towers: OpenClipTowers, pixels: Tensor) -> Tensor:
        nonlocal passes
        passes += len(pixels)
        return hidden(towers, pixels)

    monkeypatch.setattr(OpenClipTowers, "image_hidden", counted)
    together = predict_each(models, examples, batch_size=16, device=torch.device("cpu"))
    assert passes == len(examples)
    for table, expected in zip(together, alone, strict=True):
        assert table.equals(expected)
    assert len({tuple(table["loss"].to_pylist()) for table in together}) == 4
