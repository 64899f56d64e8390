"""Out-of-fold predictions: no image is counted by a fit that has seen it, and no fold depends on chance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from holdfast.candidates import crossfit
from holdfast.candidates.crossfit import Folds, counted_images, cross_fit, make_folds, out_of_fold
from holdfast.candidates.directions import target_direction
from holdfast.candidates.refit import Pictures, refit_from_features
from holdfast.data.round import LabelledSet, PairSet, RoundData
from holdfast.data.seen import Seen, Use
from holdfast.data.task import TaskSpec
from holdfast.model.classifier import Classifier
from tests.model.conftest import CLASSES

NOTHING = frozenset[str]()  # the old model was trained on no image


class NoPixels:
    size = 8

    def __len__(self) -> int:
        return 1000

    def read(self, rows: np.ndarray) -> Tensor:
        return torch.zeros(len(rows), 3, 8, 8, dtype=torch.uint8)


def round_of(pixels: NoPixels, *, train: int = 12, dev: int = 7) -> tuple[RoundData, pa.Table]:
    """Two protected classes and a target with as many training and dev images each."""
    names = CLASSES[:3]

    def labelled(role: str, count: int, classes: range) -> LabelledSet:
        ids = tuple(f"{role}-{names[k]}-{n}" for k in classes for n in range(count))
        return LabelledSet(pixels, np.arange(len(ids)), np.repeat(np.array(classes), count), ids)

    constraint, judged = labelled("train", train, range(2)), labelled("dev", dev, range(3))
    # The last picture of the target has two captions.
    ids = (*(f"train-{names[2]}-{n}" for n in range(train)), f"train-{names[2]}-{train - 1}", "from-elsewhere")
    target = PairSet(pixels, np.arange(len(ids)), ("a",) * len(ids), ids)
    tasks = TaskSpec(names[2], tuple(names[:2]), (("a",), ("b",), ("c",)))
    own = [*constraint.ids, *dict.fromkeys(ids[:-1]), *judged.ids]
    roles = pa.table(
        {
            "example_id": own,
            "class": [item.split("-")[1] for item in own],
            "role": [item.split("-")[0] for item in own],
            "picture": [f"pixels of {item}" for item in own],
            "group": pa.array([None] * len(own), pa.string()),
        }
    )
    return RoundData(tasks, target, target, constraint, judged, lambda: judged, lambda: judged), roles


def test_each_class_is_spread_evenly_and_the_same_images_make_the_same_folds() -> None:
    data, roles = round_of(NoPixels())
    folds = make_folds(data, roles, NOTHING, 5)
    assert folds is not None
    assert set(folds.of) == set(roles["example_id"].to_pylist())  # pairs from elsewhere never count
    for name in data.tasks.classes:
        sizes = np.bincount([fold for item, fold in folds.of.items() if item.split("-")[1] == name], minlength=5)
        assert sizes.max() - sizes.min() <= 1
    again = make_folds(data, roles.take(np.arange(len(roles))[::-1]), NOTHING, 5)
    assert again == folds


def test_only_images_that_the_old_model_has_not_seen_count() -> None:
    data, roles = round_of(NoPixels())
    trained = data.constraint.ids[0], data.constraint.ids[1]
    seen = Seen.of([(trained[0], "another name", Use.TRAINED), ("a copy", f"pixels of {trained[1]}", Use.FITTED)])
    folds = make_folds(data, roles, seen.keys(Use.TRAINED, Use.FITTED), 5)
    assert folds is not None
    assert set(roles["example_id"].to_pylist()) - set(folds.of) == set(trained)
    counted = counted_images(data, folds)
    assert counted.ids[: len(data.dev)] == data.dev.ids
    assert len(set(counted.ids)) == len(counted.ids) == len(folds.of)
    assert [data.tasks.classes[k] for k in counted.labels] == [item.split("-")[1] for item in counted.ids]
    unknown = make_folds(data, roles, None, 5)  # a model from elsewhere may have seen any of them
    assert unknown is not None
    assert set(unknown.of) == set(data.dev.ids)
    assert counted_images(data, unknown).ids == data.dev.ids


def test_a_group_lies_in_one_fold() -> None:
    data, roles = round_of(NoPixels())
    videos = [f"video {n // 3}" for n in range(len(roles))]
    roles = roles.set_column(roles.column_names.index("group"), "group", pa.array(videos))
    folds = make_folds(data, roles, NOTHING, 5)
    assert folds is not None
    where = {(video, folds.of[item]) for video, item in zip(videos, roles["example_id"].to_pylist(), strict=True)}
    assert len(where) == len(set(videos))


def test_no_folds_for_many_images_for_other_pixels_or_where_none_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    data, roles = round_of(NoPixels())
    assert make_folds(data, roles, NOTHING, 0) is None
    apart = replace(data, dev=replace(data.dev, pixels=NoPixels()))
    folds = make_folds(apart, roles, NOTHING, 5)
    assert folds is not None
    assert set(folds.of) == set(data.dev.ids)
    monkeypatch.setattr(crossfit, "MOST", len(data.dev) + len(data.constraint) + len(data.target) - 1)
    assert make_folds(data, roles, NOTHING, 5) is None


def test_every_example_is_predicted_once_by_its_own_fold_and_comes_back_in_its_place() -> None:
    data, _ = round_of(NoPixels())
    folds = Folds(3, {item: place % 2 for place, item in enumerate(data.dev.ids)})  # the third fold is empty
    asked: list[tuple[int, tuple[str, ...]]] = []

    def predict(fold: int, part: LabelledSet) -> list[pa.Table]:
        asked.append((fold, part.ids))
        return [pa.table({"example_id": part.ids, "label": part.labels, "bias": [bias] * len(part)}) for bias in (0, 1)]

    tables = out_of_fold(data.dev, folds, predict)
    assert [fold for fold, _ in asked] == [0, 1]
    assert all(folds.of[item] == fold for fold, ids in asked for item in ids)
    for bias, table in enumerate(tables):
        assert tuple(table["example_id"].to_pylist()) == data.dev.ids
        assert table["label"].to_pylist() == list(data.dev.labels)
        assert set(table["bias"].to_pylist()) == {bias}


@pytest.fixture
def pictures(classifier: Classifier) -> tuple[Classifier, Pictures, Folds]:
    """Two views each of 40 pictures of noise whose labels their features tell in part; the last 10 never count."""
    model = classifier.double().frozen_copy()
    views = torch.randn(80, 3, 32, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    with torch.no_grad():
        hidden = model.towers.image_hidden(views)
        features = model.towers.project(hidden)
    score = hidden[:40, 0] - hidden[:40, 1]
    labels = torch.where(score > score.median(), 2, torch.arange(40) % 2).repeat(2)
    ids = tuple(f"{n}" for n in range(40)) * 2
    return model, Pictures(hidden, features, labels, ids), Folds(3, {f"{n}": n % 3 for n in range(30)})


@pytest.mark.parametrize("in_tower", [True, False])
def test_each_fold_is_the_fit_without_its_pictures(
    pictures: tuple[Classifier, Pictures, Folds], in_tower: bool
) -> None:
    """Against a fit from scratch on what is left; both views of a picture are left out."""
    model, seen, folds = pictures
    direction = target_direction(model, CLASSES[2]) if in_tower else None
    if not in_tower:
        seen = replace(seen, hidden=seen.features)
    found = cross_fit(model, CLASSES[2], direction, seen, folds)
    torch.testing.assert_close(
        found.whole.weights, refit_from_features(model, CLASSES[2], direction, *seen.tensors).weights
    )
    for fold, (fit, steady) in enumerate(found.folds):
        kept = torch.tensor([folds.of.get(item) != fold for item in seen.ids])
        assert int((~kept).sum()) == 20
        plain = refit_from_features(model, CLASSES[2], direction, *(values[kept] for values in seen.tensors))
        entries = seen.hidden / seen.features.norm(dim=1, keepdim=True)
        torch.testing.assert_close(entries @ fit.weights, entries @ plain.weights, rtol=0.01, atol=0.003)
        after = fit.applied(model)
        with torch.no_grad():
            features = after.finished(after.towers.project(seen.hidden) if in_tower else seen.features)
        assert float((features @ steady).mean()) == pytest.approx(1, abs=0.1)


def test_what_a_picture_is_called_does_not_change_its_own_prediction(
    pictures: tuple[Classifier, Pictures, Folds],
) -> None:
    """The label of a picture that counts reaches the whole fit, and every fold but its own."""
    model, seen, folds = pictures
    direction = target_direction(model, CLASSES[2])
    place = next(n for n in range(30) if int(seen.labels[n]) == 0)
    labels = seen.labels.clone()
    labels[[place, place + 40]] = 2
    before, after = (
        cross_fit(model, CLASSES[2], direction, replace(seen, labels=item), folds) for item in (seen.labels, labels)
    )
    entry = seen.hidden[place] / seen.features[place].norm()
    own = folds.of[seen.ids[place]]

    def moved(which: int) -> float:
        return abs(float(entry @ (after.folds[which][0].weights - before.folds[which][0].weights)))

    assert moved(own) < 0.05 * min(moved(fold) for fold in range(3) if fold != own)
    assert abs(float(entry @ (after.whole.weights - before.whole.weights))) > 20 * moved(own)
