"""Features kept in a GPU's memory: what a pass would say, without the pass. All of it runs on a CPU, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.data.round import LabelledSet, PairSet
from holdfast.data.transforms import random_views
from holdfast.model import feature_store
from holdfast.model.classifier import Classifier
from holdfast.model.device_features import DeviceFeatures
from holdfast.model.feature_store import MemoryStore, What, encode_set, features_kept
from holdfast.model.openclip import load_towers
from holdfast.runtime import wake
from tests.helpers import made_up_round, passes_of

BATCH = 8


@pytest.fixture
def model() -> Classifier:
    tasks = made_up_round().tasks
    return Classifier(load_towers("tiny", None, seed=1), tasks.classes, tasks.prompts, 0.05).requires_grad_(False)


@pytest.fixture
def dev() -> LabelledSet:
    return made_up_round().dev


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pictures each pass of the image tower sees."""
    return passes_of(monkeypatch)


def encoded(
    model: Classifier,
    examples: LabelledSet | PairSet,
    store: MemoryStore | None,
    what: What = "hidden",
    positions: np.ndarray | None = None,
    view: Any = None,
    batch: int = BATCH,
) -> Tensor:
    towers = model.towers
    parts = feature_store.on_device(  # what encode_set does where tensors lie on a GPU
        towers, towers.preprocess, examples, towers.projection, what, store, positions, batch, view
    )
    places: list[int] = []
    found: list[Tensor] = []
    for here, part in parts:
        places += range(here.start, here.start + len(part))
        found.append(part)
    assert places == list(range(len(examples) if positions is None else len(positions)))
    return torch.cat(found)


def moved(model: Classifier, by: float = 1.0) -> None:
    """Change what the image tower says."""
    for parameter in model.towers.image_backbone_parameters():
        parameter.add_(by * torch.linspace(-0.1, 0.1, parameter.numel()).reshape(parameter.shape))


@pytest.mark.parametrize("what", ["hidden", "features"])
def test_they_are_what_the_tower_says_and_it_says_it_once(
    model: Classifier, dev: LabelledSet, passes: list[int], what: What
) -> None:
    expected = encoded(model, dev, None, what)
    passes.clear()
    store = MemoryStore()
    torch.testing.assert_close(encoded(model, dev, store, what), expected)
    assert passes == [BATCH] * -(-len(dev) // BATCH)  # all of one size
    once = encoded(model, dev, store, what)
    positions = np.array([5, 1, 1, len(dev) - 1])
    assert torch.equal(encoded(model, dev, store, what, positions), once[positions])
    part = dev.at(np.arange(3, 14, 2))
    assert torch.equal(encoded(model, part, store, what), once[3:14:2])
    assert len(passes) == -(-len(dev) // BATCH)


def test_what_is_said_of_a_picture_does_not_depend_on_which_others_were_asked_for(
    model: Classifier, dev: LabelledSet
) -> None:
    whole, parts = MemoryStore(), MemoryStore()
    first = encoded(model, dev, whole)
    encoded(model, dev, parts, positions=np.array([7, 2]))
    assert torch.equal(encoded(model, dev, parts), first)


def test_only_what_is_missing_is_computed(model: Classifier, dev: LabelledSet, passes: list[int]) -> None:
    store = MemoryStore()
    encoded(model, dev, store, positions=np.arange(BATCH))
    passes.clear()
    encoded(model, dev, store, positions=np.arange(BATCH + 2))
    assert passes == [BATCH]  # two pictures, and the pass is filled up


def test_each_view_is_its_own(model: Classifier, dev: LabelledSet, passes: list[int]) -> None:
    store = MemoryStore()
    views = [random_views(len(dev), seed, crop_scale=(0.3, 0.6), flip=True) for seed in (1, 2)]
    turned = random_views(len(dev), 3, crop_scale=(0.3, 0.6), rotation=20.0)
    for view in (None, *views, turned):
        expected = encoded(model, dev, None, view=view)
        for _ in range(2):
            torch.testing.assert_close(encoded(model, dev, store, view=view), expected)
    passes.clear()
    encoded(model, dev, store, positions=np.array([3]), view=views[1][3:4])
    assert not passes


def test_pairs_with_several_captions_are_seen_once(model: Classifier, passes: list[int]) -> None:
    target = made_up_round().target
    captions = np.repeat(np.arange(len(target)), 2)
    texts, ids = tuple(target.texts[place] for place in captions), tuple(target.ids[place] for place in captions)
    twice = PairSet(target.pixels, target.rows[captions], texts, ids)
    found = encoded(model, twice, MemoryStore())
    torch.testing.assert_close(found[::2], encoded(model, target, None))
    assert torch.equal(found[::2], found[1::2])
    assert sum(passes[: -(-len(target) // BATCH)]) < len(twice)


def test_towers_with_the_same_weights_share_and_others_do_not(
    model: Classifier, dev: LabelledSet, passes: list[int]
) -> None:
    store = MemoryStore()
    first = encoded(model, dev, store)
    passes.clear()
    assert torch.equal(encoded(model.copy(), dev, store), first)  # equal, in memory of its own
    own_layer = model.copy_with_own_last_layer()
    layer = own_layer.towers.image_projection
    assert layer is not None
    layer.add_(1.0)
    assert torch.equal(encoded(own_layer, dev, store), first)
    assert not passes
    other = model.copy()
    moved(other)
    torch.testing.assert_close(encoded(other, dev, store), encoded(other, dev, None))
    assert not torch.allclose(encoded(other, dev, store), first)
    assert not torch.allclose(encoded(own_layer, dev, store, "features"), encoded(model, dev, store, "features"))


def test_weights_that_were_written_to_are_seen_again(model: Classifier, dev: LabelledSet) -> None:
    store, other = MemoryStore(), model.copy()
    before = encoded(other, dev, store)
    moved(other)
    after = encoded(other, dev, store)
    torch.testing.assert_close(after, encoded(other, dev, None))
    assert not torch.allclose(after, before)
    assert torch.equal(encoded(model, dev, store), before)


def test_weights_that_count_no_versions_are_never_kept(model: Classifier, dev: LabelledSet, passes: list[int]) -> None:
    store = MemoryStore()
    with torch.inference_mode():
        unseen = model.copy()
        encoded(unseen, dev, store)
        passes.clear()
        encoded(unseen, dev, store)
    assert passes


def test_other_pictures_with_the_same_rows_are_others(model: Classifier, dev: LabelledSet) -> None:
    store = MemoryStore()
    encoded(model, dev, store)
    other = made_up_round(seed=5).dev
    torch.testing.assert_close(encoded(model, other, store), encoded(model, other, None))


def test_kinds_and_passes_of_another_size_are_kept_apart(
    model: Classifier, dev: LabelledSet, passes: list[int]
) -> None:
    store = MemoryStore()
    encoded(model, dev, store, "hidden")
    passes.clear()
    encoded(model, dev, store, "features")
    encoded(model, dev, store, "hidden", batch=2 * BATCH)
    assert set(passes) == {BATCH, 2 * BATCH}


def test_tables_go_where_there_are_too_many(model: Classifier, dev: LabelledSet, passes: list[int]) -> None:
    one = encoded(model, dev, None)
    store = MemoryStore()
    store.on_device = DeviceFeatures(limit=one.nbytes * 2)
    others = [model.copy() for _ in range(3)]
    for number, other in enumerate(others):
        moved(other, 1 + number)
        encoded(other, dev, store)
    passes.clear()
    encoded(others[2], dev, store)
    assert not passes
    encoded(others[0], dev, store)  # used longest ago
    assert passes


def test_a_set_that_is_too_large_is_right_and_not_kept(model: Classifier, dev: LabelledSet, passes: list[int]) -> None:
    expected = encoded(model, dev, None)
    store = MemoryStore()
    store.on_device = DeviceFeatures(limit=expected.nbytes // 2)
    for _ in range(2):
        passes.clear()
        torch.testing.assert_close(encoded(model, dev, store), expected)
        assert passes


def test_a_cpu_has_nothing_to_wake() -> None:
    assert wake(torch.device("cpu")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_woken_once_and_keeps_features(model: Classifier, dev: LabelledSet, passes: list[int]) -> None:
    device = torch.device("cuda:0")
    thread = wake(device)
    assert thread is not None
    assert wake(device) is thread
    thread.join()
    assert torch.cuda.is_initialized()
    model.to(device)
    like = model.towers.projection
    with features_kept(MemoryStore()):
        first, again = (torch.cat([part for _, part in encode_set(model.towers, dev, like)]) for _ in range(2))
    assert torch.equal(first, again)
    assert passes == [256]
    torch.testing.assert_close(first.cpu(), encoded(model.cpu(), dev, None, "features"), rtol=1e-2, atol=1e-2)
