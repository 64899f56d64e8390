"""Fixed views of constraint images: which a step sees, and what the old model says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config import RoundConfig, TrainConfig
from holdfast.data.loader import BatchMaker, BatchSizes, RoundSampler, ViewSettings, with_constraint_views
from holdfast.data.round import Batch, RoundData
from holdfast.data.transforms import fixed_views, normalize_views, random_views
from holdfast.methods import holdfast as module
from holdfast.methods.base import StepOutput, clean_logits, constraint_logits, cross_entropy
from holdfast.methods.holdfast import Holdfast, HoldfastConfig
from holdfast.runtime import Runtime
from tests.helpers import made_up_round
from tests.train.small import built, losses_and_state, prepared, start

VIEWS = ViewSettings(True, "clean", (0.3, 0.6), True)
SIZES = BatchSizes(target=3, negatives=4, tasks=None, per_task=3)
ONE = Runtime(torch.device("cpu"))


def data_with_views(each: int = 3) -> RoundData:
    return with_constraint_views(made_up_round(), VIEWS, each, seed=5)


def batches(data: RoundData, steps: int, views: ViewSettings = VIEWS, runtime: Runtime = ONE) -> list[Batch]:
    preprocess = start().preprocess
    sampler = RoundSampler(data, SIZES, seed=0)
    maker = BatchMaker(data, start().towers, preprocess.mean, preprocess.std, views, runtime, torch.float64)
    return [maker.make(sampler.draw(step)) for step in range(steps)]


def test_the_first_view_is_the_whole_picture_and_the_others_are_random() -> None:
    view = fixed_views(4, 3, 7, crop_scale=(0.3, 0.6), flip=True, rotation=10.0)
    drawn = random_views(12, 7, crop_scale=(0.3, 0.6), flip=True, rotation=10.0)
    assert view.angle is not None
    assert drawn.angle is not None
    first = torch.arange(12) % 3 == 0
    assert torch.equal(view.box[first], torch.tensor([[0.0, 0.0, 1.0, 1.0]]).expand(4, 4))
    assert not view.flip[first].any()
    assert not view.angle[first].any()
    for mine, random in ((view.box, drawn.box), (view.flip, drawn.flip), (view.angle, drawn.angle)):
        assert torch.equal(mine[~first], random[~first])
    pictures = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    plain = (normalize_views(pictures, (0, 0, 0), (1, 1, 1), given, torch.float64) for given in (None, view[first]))
    torch.testing.assert_close(*plain, atol=1e-6, rtol=0)


def test_a_step_sees_each_constraint_image_through_one_of_its_views() -> None:
    data, preprocess = data_with_views(), start().preprocess
    assert data.views_each == 3
    assert data.constraint_views is not None
    seen: set[int] = set()
    for batch in batches(data, 12):
        assert batch.protected_view is not None
        assert torch.equal(batch.protected_view // 3, batch.protected_index)
        pixels = data.constraint.images(batch.protected_index.numpy())
        expected = normalize_views(
            pixels, preprocess.mean, preprocess.std, data.constraint_views[batch.protected_view], torch.float64
        )
        assert torch.equal(batch.protected_images.pixels, expected)
        seen |= set(batch.protected_view.tolist())
    assert len(seen) > 2 * len(data.constraint)  # of three views each, most were seen


def test_views_are_a_function_of_seed_and_step_and_shared_out_over_ranks() -> None:
    data = data_with_views()
    one, again = batches(data, 5), batches(data, 5)[4]
    assert torch.equal(one[4].protected_row, again.protected_row)
    ranks = [batches(data, 5, runtime=replace(ONE, rank=rank, world=2)) for rank in (0, 1)]
    for step, batch in enumerate(one):
        assert torch.equal(ranks[0][step].protected_row, batch.protected_row[0::2])
        assert torch.equal(ranks[1][step].protected_row, batch.protected_row[1::2])


@pytest.mark.parametrize("kept", [True, False])
def test_the_old_model_is_compared_on_the_view_that_the_new_one_sees(kept: bool, monkeypatch: Any) -> None:
    if not kept:  # too many numbers to keep: the old model is asked in every step
        monkeypatch.setattr(module, "_CACHED", 0)
    data = data_with_views()
    method = prepared(built(HoldfastConfig(distill_weight=1.0, label_boost=0.0)), data, "none")
    assert isinstance(method, Holdfast)
    assert len(method.old_logits) == (3 * len(data.constraint) if kept else 0)
    for batch in batches(data, 3):
        output: StepOutput = method(batch)
        # The new model is still the old one: no loss has risen on the same view, and nothing is to be distilled.
        assert float(output.per_task["h"].abs().max()) < 1e-9
        assert float(output.parts["distillation"].detach().abs()) < 1e-9
        elsewhere = replace(batch, protected_view=(batch.protected_row // 3) * 3 + (batch.protected_row + 1) % 3)
        assert float(method(elsewhere).per_task["h"].abs().max()) > 1e-4


def test_logits_of_all_views_against_one_picture_at_a_time() -> None:
    data, model = data_with_views(), start()
    assert data.constraint_views is not None
    found = constraint_logits(model, data)
    preprocess, matrix = model.preprocess, model.class_matrix()
    for row in range(len(found)):
        pixels = data.constraint.images(np.array([row // 3]))
        view = data.constraint_views[row : row + 1]
        seen = normalize_views(pixels, preprocess.mean, preprocess.std, view, torch.float64)
        torch.testing.assert_close(found[row : row + 1], model.logits(seen, matrix))
    labels = torch.from_numpy(data.constraint.labels)
    whole = cross_entropy(found[::3], labels)
    torch.testing.assert_close(whole, cross_entropy(clean_logits(model, data.constraint), labels), atol=1e-5, rtol=1e-5)


def test_how_many_views_there_are() -> None:
    data = made_up_round()
    few = len(data.constraint)
    assert with_constraint_views(data, VIEWS, 8, 0).views_each == 8
    assert with_constraint_views(data, VIEWS, 1, 0) is data
    for clean in (replace(VIEWS, augment_pairs=False), replace(VIEWS, protected="paired")):
        assert with_constraint_views(data, clean, 8, 0) is data
    assert with_constraint_views(data, VIEWS, 10_000, 0).views_each == 10_000 // few
    many = replace(data, constraint=replace(data.constraint, rows=np.zeros(3000, dtype=np.int64),
                                            labels=np.zeros(3000, dtype=np.int64), ids=("a",) * 3000))  # fmt: skip
    assert with_constraint_views(many, VIEWS, 8, 0).views_each == 3
    assert TrainConfig().constraint_views == 8


@pytest.mark.parametrize(("form", "views"), [("default", 8), ("published", 1), ("authors", 1)])
def test_the_papers_forms_see_the_evaluation_view_or_one_of_their_own(form: str, views: int) -> None:
    values = {
        "task": {"target": "b", "protected": ["a"]},
        "data": {"source": {"kind": "folder", "path": "x"}},
        "model": {"architecture": "tiny"},
    }
    for name in ("holdfast", "rm"):
        given: dict[str, Any] = {**values, "method": {"name": name, "form": form}}
        assert RoundConfig.model_validate(given).train.constraint_views == views
        given["train"] = {"constraint_views": 4}
        assert RoundConfig.model_validate(given).train.constraint_views == 4


def test_a_run_with_views_differs_from_one_without_and_repeats_itself() -> None:
    make = built(HoldfastConfig(distill_weight=1.0))
    terms = [
        losses_and_state(prepared(make, data, "none"), data, augment=True)[0]
        for data in (data_with_views(), data_with_views(), made_up_round())
    ]
    assert all(torch.equal(first, second) for first, second in zip(terms[0], terms[1], strict=True))
    assert any(not torch.equal(first, second) for first, second in zip(terms[0], terms[2], strict=True))
