"""All logits fitted in the last layer: the optimum of its problem, each class by itself, counted out of fold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax
from torch import Tensor, nn

from holdfast.candidates import last_layer
from holdfast.candidates.crossfit import Folds
from holdfast.candidates.directions import class_directions, target_direction
from holdfast.candidates.last_layer import can_fit, distillation, fit_last_layer, generalisation_gaps
from holdfast.candidates.last_layer_models import LastLayerFits, LastLayerModels
from holdfast.candidates.refit import Design, Pictures, refit_from_features
from holdfast.config import CandidatesConfig
from holdfast.data.loader import ViewSettings
from holdfast.data.round import RoundData
from holdfast.model.classifier import Classifier
from holdfast.model.folder import load_model, save_model
from holdfast.model.interpolate import interpolate
from holdfast.runtime import Runtime
from tests.model.conftest import CLASSES, PROMPTS
from tests.model.test_refit import bright_round, seen

TARGET = CLASSES[2]


@pytest.fixture(autouse=True)
def to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver goes on until it is at the bottom; a round stops where logits differ by a tenth at most."""
    monkeypatch.setattr("holdfast.candidates.last_layer._STEPS", 1000)
    monkeypatch.setattr("holdfast.candidates.last_layer._STEPS_NEAR", 1000)


def pictures_of(model: Classifier, n: int = 60) -> Pictures:
    hidden, features, labels = seen(model, n)
    return Pictures(hidden, features, labels, tuple(str(row) for row in range(n)))


def test_each_direction_is_seen_by_one_class_alone() -> None:
    matrix = nn.functional.normalize(torch.randn(5, 12, dtype=torch.float64), dim=1)
    directions, free = class_directions(matrix)
    torch.testing.assert_close(matrix @ directions.T, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)
    assert free.all()
    twin = torch.cat([matrix, matrix[2:3] + 1e-3 * torch.randn(1, 12, dtype=torch.float64)])
    assert class_directions(twin)[1].tolist() == [True, True, False, True, True, False]  # two that look the same
    same = torch.cat([matrix, matrix[:1]])
    assert class_directions(same)[1].tolist() == [False, True, True, True, True, False]
    assert not class_directions(torch.randn(13, 12, dtype=torch.float64))[1].any()  # more classes than dimensions


def plain_loss(change: np.ndarray, model: Classifier, pictures: Pictures) -> float:
    """What is minimised, of a change of the logits [n, K], written down plainly, but for the ridge."""
    f, y = pictures.features.double().numpy(), pictures.labels.numpy()
    matrix = model.class_matrix().detach().double().numpy()
    old = f @ matrix.T / np.linalg.norm(f, axis=1, keepdims=True) / 0.05
    new, total = old + change, 0.0
    for k, share in ((2, 0.25), (0, 0.375), (1, 0.375)):
        for i in np.flatnonzero(y == k):
            value = -log_softmax(new[i])[k]
            lifted = old[i, :2] + (2.0 * (np.arange(2) == k) if k != 2 else 0.0)
            before, after = log_softmax(lifted), log_softmax(new[i, :2])
            value += 30.0 * float((np.exp(before) * (before - after)).sum())
            total += share * value / (y == k).sum()
    return total


@pytest.mark.parametrize("n", [90, 20])  # more pictures than entries of h, and fewer
def test_it_finds_the_optimum(classifier: Classifier, n: int) -> None:
    """Against scipy on the plain loss; the ridge is written down in the unknowns that it is on."""
    model = classifier.double().frozen_copy()
    pictures = pictures_of(model, n)
    found = fit_last_layer(model, TARGET, pictures)
    lengths = pictures.features.norm(dim=1, keepdim=True)
    design = Design.of(pictures.hidden / lengths)
    columns, width = design.columns.numpy(), pictures.hidden.shape[1]
    assert (n < width) == (n == 20)
    ridge = np.full((width + 1, 3), 0.01)
    ridge[-1, 2] = 0.0

    def whole(unknown: np.ndarray) -> float:
        u = unknown.reshape(width + 1, 3)
        return plain_loss(columns @ u, model, pictures) + float((ridge * u**2).sum())

    def slope(unknown: np.ndarray) -> np.ndarray:  # by autograd, of the same plain loss in torch
        u = torch.tensor(unknown.reshape(width + 1, 3), requires_grad=True)
        torch_loss(design.columns @ u, model, pictures).backward()
        assert u.grad is not None
        return (u.grad.numpy() + 2 * ridge * unknown.reshape(width + 1, 3)).ravel()

    best = minimize(whole, np.zeros(3 * (width + 1)), jac=slope, method="L-BFGS-B", options={"maxiter": 2000})
    got = (pictures.hidden / lengths @ found.weights / 0.05).numpy()
    np.testing.assert_allclose(got, columns @ best.x.reshape(width + 1, 3), atol=0.02)
    assert plain_loss(got, model, pictures) < plain_loss(np.zeros_like(got), model, pictures) - 0.01


def constrained_parts(change: Tensor, model: Classifier, pictures: Pictures) -> tuple[Tensor, Tensor]:
    """What is minimised under constraints, but for the ridge, and every class's loss: written down plainly."""
    f, y = pictures.features.double(), pictures.labels
    old = (f @ model.class_matrix().detach().double().T / f.norm(dim=1, keepdim=True) / 0.05).detach()
    losses = nn.functional.cross_entropy(old + change, y, reduction="none")
    each = torch.stack([losses[y == k].mean() for k in range(3)])
    lifted = old[:, :2] + 2.0 * nn.functional.one_hot(y, 3)[:, :2] * (y != 2)[:, None]
    before, after = lifted.log_softmax(dim=1), (old + change)[:, :2].log_softmax(dim=1)
    moved = (before.exp() * (before - after)).sum(dim=1)
    kept = sum(share * moved[y == k].mean() for k, share in ((2, 0.25), (0, 0.375), (1, 0.375)))
    return 0.25 * each[2] + 30.0 * kept, each


@pytest.mark.parametrize("gap", [(0.0, 0.0, 0.0), (0.2, 0.0, 0.0), (0.3, 0.25, 0.0)])
def test_constraints_hold_at_the_optimum_with_the_right_multipliers(
    classifier: Classifier, monkeypatch: pytest.MonkeyPatch, gap: tuple[float, ...]
) -> None:
    """The conditions of Karush, Kuhn and Tucker, which are those of the optimum in a convex problem."""
    monkeypatch.setattr("holdfast.candidates.last_layer._TRUE", 1e-7)
    monkeypatch.setattr("holdfast.candidates.last_layer._MOST", 200)
    model = classifier.double().frozen_copy()
    pictures = pictures_of(model, 90)
    found = fit_last_layer(model, TARGET, pictures, torch.tensor(gap))
    assert found.multipliers is not None
    entries = pictures.hidden / pictures.features.norm(dim=1, keepdim=True)
    design = Design.of(entries)
    change = entries @ found.weights / 0.05
    unknown = torch.linalg.lstsq(design.columns, change, driver="gelsd").solution
    torch.testing.assert_close(design.columns @ unknown, change, rtol=0, atol=1e-6)
    ridge = torch.full_like(unknown, 0.01)
    ridge[-1, 2] = 0.0
    unknown.requires_grad_()
    value, each = constrained_parts(design.columns @ unknown, model, pictures)
    old = constrained_parts(torch.zeros_like(change), model, pictures)[1]
    over = (each - old + torch.tensor(gap))[:2].detach()
    assert over.max() < 1e-5
    assert (found.multipliers >= 0).all()
    assert found.multipliers[2] == 0
    assert (found.multipliers[:2] * over).abs().max() < 1e-5
    assert not any(gap) or found.multipliers.max() > 1e-3  # keeping that much costs the target something
    lagrangian = value + (ridge * unknown.square()).sum() + (found.multipliers * each).sum()
    (slope,) = torch.autograd.grad(lagrangian, unknown)
    assert slope.abs().max() < 2e-3


def test_a_constraint_asks_for_no_more_than_there_is(classifier: Classifier) -> None:
    model = classifier.double().frozen_copy()
    found = fit_last_layer(model, TARGET, pictures_of(model, 90), torch.tensor([1e6, 0.0, 0.0]))
    assert found.weights.isfinite().all()


def test_the_gap_is_what_images_lose_that_a_fit_has_not_seen(classifier: Classifier) -> None:
    model = classifier.double().frozen_copy()
    pictures = pictures_of(model, 60)
    place = torch.arange(60) // 3 % 4 - 1  # a quarter is in every fit
    whole = fit_last_layer(model, TARGET, pictures)
    folds = [fit_last_layer(model, TARGET, pictures.where(place != fold)) for fold in range(3)]
    gaps = generalisation_gaps(model, whole, folds, pictures, place)

    def loss(fit: object, row: int) -> float:
        assert isinstance(fit, type(whole))
        hidden, features = pictures.hidden[row], pictures.features[row]
        old = model.class_matrix().double() @ features / features.norm() / 0.05
        new = (old + hidden @ fit.weights / features.norm() / 0.05).detach()
        return float(-new.log_softmax(dim=0)[pictures.labels[row]])

    for k in range(3):
        rows = [row for row in range(60) if pictures.labels[row] == k and place[row] >= 0]
        differences = [loss(folds[int(place[row])], row) - loss(whole, row) for row in rows]
        assert float(gaps[k]) == pytest.approx(max(0.0, float(np.mean(differences))), abs=1e-5)
    assert gaps.max() > 0.01


def test_the_old_judgement_counts_less_the_more_pictures_there_are(classifier: Classifier) -> None:
    """In full up to 60 pictures of a protected class, views of one picture counted once and the target's not at all."""
    model = classifier.double().frozen_copy()

    def of(each: int, of_target: int = 7, views: int = 1) -> float:
        labels = [0] * each + [1] * each + [2] * of_target
        ids = [str(number) for number in range(len(labels))]
        empty = torch.zeros(len(ids) * views, 1)
        return distillation(model, TARGET, Pictures(empty, empty, torch.tensor(labels * views), tuple(ids * views)))

    assert of(5) == of(60) == of(60, of_target=500) == of(30, views=2) == 30.0
    assert of(120) == of(120, of_target=500, views=3) == pytest.approx(7.5)
    assert of(600) == pytest.approx(0.3)


def test_a_fold_is_fitted_with_what_the_old_judgement_weighs_in_the_whole_fit(
    classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fold has fewer pictures, and still stands for the fit on all of them."""
    monkeypatch.setattr("holdfast.candidates.last_layer._FEW", 2)
    weighed: list[float] = []
    solve = last_layer._solve  # pyright: ignore[reportPrivateUsage]

    def watched(*given: Any) -> Tensor:
        weighed.append(given[4])
        return solve(*given)

    monkeypatch.setattr("holdfast.candidates.last_layer._solve", watched)
    data = bright_round(10)
    folds = Folds(3, {name: place % 3 for place, name in enumerate(data.dev.ids)})
    models(classifier, data, folds, constrained=True).fits.changes(1.0, refit=False)
    assert len(weighed) == 2 * (1 + 3)
    assert len(set(weighed)) == 1
    assert 0 < weighed[0] < 30


def test_an_entry_that_hardly_varies_counts_for_little() -> None:
    """A new picture in which it does vary, by as much as others do, must not be moved farther by it than by others."""
    draw = torch.Generator().manual_seed(0)
    entries = torch.randn(40, 6, generator=draw, dtype=torch.float64) + 3.0
    label = (torch.arange(40) % 2).double()
    entries[:, 5] = 1e-4 * label  # tells the classes apart, by a hair
    design = Design.of(entries)
    assert design.scale[5] < 2 * design.scale[:5].max()  # divided by its spread: ten thousand times as large
    spread = design.columns[:, :-1].std(dim=0)
    assert spread[5] < 0.01
    assert spread.square().mean().sqrt() == pytest.approx(1.0, rel=0.01)
    again = Design.of(7.0 * entries)
    torch.testing.assert_close(again.columns, design.columns, atol=1e-9, rtol=1e-6)


def test_entries_that_do_not_vary_are_left_alone() -> None:
    design = Design.of(torch.full((5, 3), 2.0, dtype=torch.float64))
    assert design.columns.isfinite().all()
    assert design.weights(torch.ones(4, dtype=torch.float64)).isfinite().all()


def torch_loss(change: Tensor, model: Classifier, pictures: Pictures) -> Tensor:
    f, y = pictures.features.double(), pictures.labels
    old = (f @ model.class_matrix().detach().double().T / f.norm(dim=1, keepdim=True) / 0.05).detach()
    new = old + change
    weight = torch.tensor([0.375, 0.375, 0.25])[y].double() / torch.bincount(y, minlength=3)[y]
    lifted = old[:, :2] + 2.0 * nn.functional.one_hot(y, 3)[:, :2] * (y != 2)[:, None]
    before, after = lifted.log_softmax(dim=1), new[:, :2].log_softmax(dim=1)
    kept = (before.exp() * (before - after)).sum(dim=1)
    return (weight * (nn.functional.cross_entropy(new, y, reduction="none") + 30.0 * kept)).sum()


@pytest.mark.parametrize("lam", [0.25, 1.0])
def test_every_logit_moves_by_what_was_fitted_for_it(classifier: Classifier, lam: float) -> None:
    """For pictures that the fit never saw: E1 · E2_k changes by lambda h · p_k, and lambda interpolates weights."""
    model = classifier.double().frozen_copy()
    fit = fit_last_layer(model, TARGET, pictures_of(model))
    changed = fit.applied(model, lam)
    pictures = torch.randn(50, 3, 32, 32, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    with torch.no_grad():
        before = model.towers.image_features(pictures) @ model.class_matrix().T
        after = changed.towers.image_features(pictures) @ changed.class_matrix().T
        added = lam * model.towers.image_hidden(pictures) @ fit.weights
    assert (added.abs().amax(dim=0) > 1e-4).all()  # every class moved
    torch.testing.assert_close(after, before + added, rtol=0, atol=1e-9)
    between = interpolate(model, fit.applied(model), lam)
    torch.testing.assert_close(between.logits(pictures), changed.logits(pictures), rtol=0, atol=1e-9)


def test_classes_that_look_the_same_stay_as_they_are(classifier: Classifier) -> None:
    names = (*CLASSES, "again")
    model = classifier.with_classes(names, (*PROMPTS, PROMPTS[0])).double().frozen_copy()
    fit = fit_last_layer(model, TARGET, pictures_of(model))
    assert not fit.weights[:, [0, 3]].any()
    assert fit.weights[:, [1, 2]].any(dim=0).all()
    assert can_fit(model, TARGET, in_tower=True)
    assert not can_fit(model, "again", in_tower=True)
    assert not can_fit(model, TARGET, in_tower=False)


def test_rows_of_a_linear_head_move(classifier: Classifier) -> None:
    classifier.use_linear()
    model = classifier.double().frozen_copy()
    hidden, features, labels = seen(model)
    del hidden
    pictures = Pictures(features, features, labels, tuple(map(str, range(len(labels)))))
    changed = fit_last_layer(model, TARGET, pictures).applied(model, 0.5)
    assert changed.towers is model.towers
    assert changed.linear is not None
    assert model.linear is not None
    assert (changed.linear - model.linear).abs().amax(dim=1).gt(0).all()
    right = [(item.logits_of(item.finished(features), item.class_matrix()).argmax(1) == labels).sum() for item in
             (model, changed)]  # fmt: skip
    assert right[1] > right[0]


def models(
    classifier: Classifier, data: RoundData, folds: Folds | None, *, refit: bool = False, constrained: bool = False
) -> LastLayerModels:
    config = CandidatesConfig(interpolation=(0.0, 0.5, 1.0), target_bias=(0.0, 1.0))
    views = ViewSettings(augment_pairs=True, protected="clean", crop_scale=(0.7, 1.0), flip=False)
    fits = LastLayerFits(classifier.frozen_copy(), data, views, in_tower=True, folds=folds, constrained=constrained)
    return LastLayerModels(config, fits, Runtime(torch.device("cpu")), refit=refit)


def test_an_image_is_counted_by_a_fit_that_has_not_seen_it(
    classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bright_round(10)
    folds = Folds(3, {name: place % 3 for place, name in enumerate(data.dev.ids)})
    fitted: list[set[str]] = []

    def noted(model: Classifier, name: str, pictures: Pictures, **given: Any) -> object:
        fitted.append(set(pictures.ids))
        return fit_last_layer(model, name, pictures, **given)

    monkeypatch.setattr("holdfast.candidates.last_layer_models.fit_last_layer", noted)
    made = models(classifier, data, folds)
    tables = made.predictions(0.5, data.dev, 16)
    parts = [{name for name, place in folds.of.items() if place != fold} for fold in range(3)]
    # What ships is fitted on all of them. Fits are made side by side, in any order.
    assert sorted(map(sorted, fitted)) == sorted(map(sorted, [set(data.dev.ids), *parts]))
    assert [table["example_id"].to_pylist() for table in tables] == [list(data.dev.ids)] * 2
    made.predictions(1.0, data.dev, 16)
    assert len(fitted) == 4  # one fit for every lambda
    fold, rows = 1, [place for place in range(len(data.dev)) if place % 3 == 1]
    old = made.fits.start
    pixels = old.preprocess.normalise(data.dev.images())[rows]
    labels = torch.from_numpy(data.dev.labels)[rows]

    def losses(without: int) -> Tensor:
        alone = fit_last_layer(old, TARGET, seen_without(made, without, folds)).applied(old, 0.5)
        return nn.functional.cross_entropy(alone.logits(pixels), labels, reduction="none").detach()

    counted = torch.tensor(tables[0].take(pa.array(rows))["loss"].to_pylist())
    torch.testing.assert_close(counted, losses(fold), rtol=0, atol=1e-3)
    for other in (0, 2, -9):  # fits that have seen these images say otherwise; the last one has seen all
        assert not torch.allclose(counted, losses(other), rtol=0, atol=1e-3)


def seen_without(made: LastLayerModels, fold: int, folds: Folds) -> Pictures:
    from holdfast.candidates.refit import see_pictures

    pictures = see_pictures(
        made.fits.start, made.fits.data, in_tower=True, crop_scale=(0.7, 1.0), flip=False, dev=True, most_views=2
    )
    return pictures.where(torch.from_numpy(folds.of_ids(pictures.ids)) != fold)


def test_few_steps_are_enough(classifier: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a round's solver leaves undone moves logits, of which some are 2, by a tenth or so."""
    model = classifier.double().frozen_copy()
    pictures = pictures_of(model, 90)
    whole = fit_last_layer(model, TARGET, pictures)
    monkeypatch.setattr("holdfast.candidates.last_layer._STEPS", 100)
    soon = fit_last_layer(model, TARGET, pictures)
    entries = pictures.hidden / pictures.features.norm(dim=1, keepdim=True) / 0.05
    assert (entries @ whole.weights).abs().max() > 2
    assert (entries @ (soon.weights - whole.weights)).abs().max() < 0.3


def test_it_learns_is_stored_and_developed_further(classifier: Classifier, tmp_path: Path) -> None:
    data = bright_round()
    made = models(classifier, data, None)
    changed = made.model(1.0, 0.0)
    pictures = changed.preprocess.normalise(data.dev.images())
    labels = torch.from_numpy(data.dev.labels)
    before, after = (
        (item.logits(pictures).argmax(dim=1) == labels).double().mean() for item in (made.fits.start, changed)
    )
    assert after > before
    assert after > 0.95
    save_model(changed, tmp_path / "fitted")
    assert torch.equal(load_model(tmp_path / "fitted").logits(pictures), changed.logits(pictures))
    lower = made.model(1.0, 1.0).logits(pictures)
    torch.testing.assert_close(lower[:, :2], changed.logits(pictures)[:, :2], rtol=0, atol=1e-4)
    assert (lower[:, 2] < changed.logits(pictures)[:, 2]).all()


def test_the_target_is_refitted_on_top(classifier: Classifier) -> None:
    """As a refit of the fitted model would be, and without the fold that it is counted on."""
    data = bright_round(10)
    folds = Folds(2, {name: place % 2 for place, name in enumerate(data.dev.ids)})
    made = models(classifier, data, folds, refit=True)
    old = made.fits.start
    for fold in (0, 1):
        left = seen_without(made, fold, folds)
        fit = fit_last_layer(old, TARGET, left)
        between = fit.applied(old, 0.5)
        with torch.no_grad():
            seen_by = replace(left, features=between.towers.project(left.hidden))
        plain = refit_from_features(between, TARGET, target_direction(between, TARGET), *seen_by.tensors).applied(
            between
        )
        found = made._at(0.5)[1 + fold].applied(old)  # pyright: ignore[reportPrivateUsage]
        pixels = old.preprocess.normalise(data.dev.images())
        torch.testing.assert_close(found.logits(pixels), plain.logits(pixels), rtol=0, atol=0.05)
        assert not torch.allclose(between.logits(pixels), plain.logits(pixels), atol=0.2)
    tables = made.predictions(0.5, data.dev, 16)
    assert [table["example_id"].to_pylist() for table in tables] == [list(data.dev.ids)] * 2


@pytest.mark.parametrize("constrained", [False, True])
def test_what_a_fold_leaves_out_has_no_part_in_its_fit(
    classifier: Classifier, monkeypatch: pytest.MonkeyPatch, constrained: bool
) -> None:
    """Nor by where the solver begins, which shows in where it stops: here after few steps."""
    monkeypatch.setattr("holdfast.candidates.last_layer._STEPS", 5)
    monkeypatch.setattr("holdfast.candidates.last_layer._STEPS_NEAR", 5)
    monkeypatch.setattr("holdfast.candidates.last_layer._MOST", 3)
    data = bright_round(10)
    folds = Folds(2, {name: place % 2 for place, name in enumerate(data.dev.ids)})
    made = models(classifier, data, folds, constrained=constrained)
    old = made.fits.start
    parts = [seen_without(made, fold, folds) for fold in (0, 1)]
    alone = [fit_last_layer(old, TARGET, part) for part in parts]
    if constrained:
        pictures = seen_without(made, -9, folds)
        place = torch.from_numpy(folds.of_ids(pictures.ids))
        gaps = generalisation_gaps(old, fit_last_layer(old, TARGET, pictures), alone, pictures, place)
        alone = [fit_last_layer(old, TARGET, part, gaps) for part in parts]
    for fit, change in zip(alone, made._at(1.0)[1:], strict=True):  # pyright: ignore[reportPrivateUsage]
        torch.testing.assert_close(change.fit.weights, fit.weights, rtol=0, atol=1e-9)
        assert (change.fit.multipliers is not None) == constrained
