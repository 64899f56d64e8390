"""Features kept on disk: the bits that would have been computed, or none at all."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.artifacts import read_predictions
from holdfast.config import RoundConfig, parse
from holdfast.data.round import LabelledSet
from holdfast.data.transforms import random_views
from holdfast.errors import UserError
from holdfast.evaluate.predict import predict
from holdfast.model import feature_store
from holdfast.model.classifier import Classifier
from holdfast.model.feature_store import (
    FeatureStore,
    MemoryStore,
    encode_sentences,
    encode_set,
    features_kept,
    user_store,
)
from holdfast.model.folder import load_model, model_fingerprint
from holdfast.model.openclip import load_towers
from holdfast.model.openclip_towers import OpenClipTowers
from holdfast.rounds.develop import develop
from tests.helpers import made_up_round, passes_of
from tests.processes import Forked
from tests.rounds.test_round import ROUND

LIMIT = 1 << 30


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    return FeatureStore(tmp_path / "features", LIMIT)


@pytest.fixture
def model() -> Classifier:
    tasks = made_up_round().tasks
    return Classifier(load_towers("tiny", None, seed=1), tasks.classes, tasks.prompts, 0.05).requires_grad_(False)


def features(model: Classifier, examples: LabelledSet, store: FeatureStore | None, **options: Any) -> Tensor:
    with features_kept(store):
        return torch.cat([found for _, found in encode_set(model.towers, examples, model.towers.projection, **options)])


def test_features_are_computed_once_and_are_the_same_bits(
    model: Classifier, store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    dev = made_up_round().dev
    seen = passes_of(monkeypatch)
    plain = features(model, dev, None)
    first = features(model, dev, store)
    passes = len(seen)
    again = features(model, dev, FeatureStore(store.folder, LIMIT))  # as another process would
    assert len(seen) == passes
    assert torch.equal(plain, first)
    assert torch.equal(plain, again)


def test_other_weights_views_pixels_and_types_are_other_features(
    model: Classifier, store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    dev = made_up_round().dev
    rows = np.arange(7)
    features(model, dev, store, positions=rows)
    seen = passes_of(monkeypatch)
    view = random_views(7, 0, crop_scale=(0.5, 1.0), flip=True)
    for options in ({"view": view}, {"positions": rows[::-1].copy()}, {"positions": rows[:6]}):
        expected = features(model, dev, None, **{"positions": rows, **options})
        before = len(seen)
        assert torch.equal(features(model, dev, store, **{"positions": rows, **options}), expected)
        assert len(seen) == before + 1
    with torch.no_grad():
        model.towers.model.visual.conv1.weight.flatten()[0] += 1e-3
    before = len(seen)
    features(model, dev, store, positions=rows)
    assert len(seen) == before + 1
    double = model.copy().double()
    assert features(double, dev, store, positions=rows).dtype == torch.float64
    assert len(seen) == before + 2


def test_a_change_of_the_last_layer_needs_no_new_pass(
    model: Classifier, store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the layer sees is found; what is made of it is the new layer's."""
    dev = made_up_round().dev
    before = features(model, dev, store)
    layer = model.towers.image_projection
    assert layer is not None
    with torch.no_grad():
        layer[0] += 1.0
    expected = features(model, dev, None)
    assert not torch.equal(expected, before)
    seen = passes_of(monkeypatch)
    assert torch.equal(features(model, dev, store), expected)
    assert seen == []


class CountedPixels:
    """Pictures, and how many were read."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels, self.read_so_far = pixels, 0
        self.size = pixels.shape[-1]

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, rows: np.ndarray) -> Tensor:
        self.read_so_far += len(rows)
        return self.pixels[torch.from_numpy(rows)]


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_was_asked_for_before_is_found_without_files_and_pictures(
    model: Classifier, store: FeatureStore, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    """For as long as neither weights, rows nor views are others; models that share the backbone share it, too."""
    dev = made_up_round().dev
    pixels = CountedPixels(dev.images())
    examples = LabelledSet(pixels, np.arange(len(dev)), dev.labels, dev.ids)
    kept: Any = MemoryStore() if in_memory else store
    view = random_views(len(dev), 0, crop_scale=(0.5, 1.0), flip=True)

    def found(of: Classifier, **options: Any) -> int:
        """The pictures that were read."""
        before = pixels.read_so_far
        plain = features(of, examples, None, **options)
        again = pixels.read_so_far
        assert torch.equal(features(of, examples, kept, **options), plain)
        assert again > before
        return pixels.read_so_far - again

    assert found(model) == len(dev)
    assert found(model, view=view) == len(dev)
    for path in store.folder.glob("*"):
        path.unlink()
    other = model.copy_with_own_last_layer()
    with torch.no_grad():
        other.towers.model.visual.proj[0] += 1.0
    hashed = pixels_hashed(monkeypatch)
    for same in (model, other, model):
        assert found(same) == found(same, view=view) == 0
    assert hashed == []
    assert found(model, positions=np.arange(len(dev))[::-1].copy()) == len(dev)
    assert found(model, view=random_views(len(dev), 1, crop_scale=(0.5, 1.0), flip=True)) == len(dev)
    alike = LabelledSet(CountedPixels(dev.images() // 2), examples.rows, dev.labels, dev.ids)
    assert torch.equal(features(model, alike, kept), features(model, alike, None))
    with torch.no_grad():
        model.towers.model.visual.conv1.weight.flatten()[0] += 1e-3  # both models hold it
    assert found(other) == len(dev)


def pixels_hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys that are worked out from now on."""
    keys: list[str] = []
    plain = feature_store._key

    def noted(*arguments: Any) -> str:
        keys.append(plain(*arguments))
        return keys[-1]

    monkeypatch.setattr(feature_store, "_key", noted)
    return keys


def test_memory_is_bounded(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path / "features", 10 * 5000)
    for number in range(30):
        store.put(f"{number}", torch.full((1024,), float(number)))
    assert sum(batch.nbytes for batch in store._recent.values()) <= store.limit
    assert list(store._recent)[-1] == "29"


@pytest.mark.parametrize("kind", ["tiny", "parts-64", "conse-64"])
def test_what_is_left_out_of_the_key_is_the_last_layer_and_nothing_else(kind: str) -> None:
    """Each other parameter, moved alone, is another tower."""
    towers = load_towers(kind, "random" if kind != "tiny" else None, seed=1).requires_grad_(False)

    def digest() -> str:
        found = hashlib.sha256()
        feature_store._add_tower(found, towers, towers.preprocess, last_layer=False)
        return found.hexdigest()

    start = digest()
    last = {item.data_ptr() for item in (towers.image_projection, towers.image_projection_bias) if item is not None}
    for parameter in towers.image_parameters():
        parameter.flatten()[0] += 1.0
        assert (digest() == start) == (parameter.data_ptr() in last)
        parameter.flatten()[0] -= 1.0
        start = digest()


def test_threads_say_what_the_tower_says(model: Classifier) -> None:
    """Blocks, passes and views of more pictures than one block holds; a view belongs to its picture."""
    dev = made_up_round().dev
    count = feature_store._BLOCK + 37
    rows = np.random.default_rng(0).integers(0, len(dev), count)
    view = random_views(count, 3, crop_scale=(0.5, 1.0), flip=True)
    towers = model.towers
    plain = torch.cat(
        [
            towers.image_features(x)
            for _, x in towers.preprocess.batches(dev, towers.projection, positions=rows, batch=64, view=view)
        ]
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = features(model, dev, None, positions=rows, view=view)
        assert torch.get_num_threads() == 3
        inside: list[int] = []
        thread = threading.Thread(target=lambda: inside.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert inside == [3]  # threads that begin later are not left with one
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    assert torch.equal(found, features(model, dev, None, positions=rows, view=view))  # however many threads there are


def test_autocast_of_the_caller_holds_in_the_threads(model: Classifier) -> None:
    dev = made_up_round().dev
    with torch.autocast("cpu", torch.bfloat16):
        assert features(model, dev, None).dtype == torch.bfloat16
    assert features(model, dev, None).dtype == torch.float32


def test_a_fault_in_a_thread_and_an_early_end_leave_no_thread(
    model: Classifier, monkeypatch: pytest.MonkeyPatch, tried: Callable[..., None]
) -> None:
    tried("faults")
    dev = made_up_round().dev
    encoded = encode_set(model.towers, dev, model.towers.projection)
    next(encoded)
    encoded.close()

    def broken(towers: OpenClipTowers, images: Tensor) -> Tensor:
        raise MemoryError("no room")

    monkeypatch.setattr(OpenClipTowers, "image_hidden", broken)
    with pytest.raises(MemoryError, match="no room"):
        features(model, dev, None)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tower")]


def test_hidden_values_leave_the_tower_as_it_is(model: Classifier) -> None:
    """Also for somebody who asks for features in the middle of it."""
    towers = model.towers
    assert isinstance(towers, OpenClipTowers)
    _, images = next(iter(towers.preprocess.batches(made_up_round().dev, towers.projection)))
    expected = towers.image_features(images)
    meanwhile: list[Tensor] = []
    visual = towers.model.visual

    def recorded(*_: object) -> None:
        meanwhile.append(visual.proj)

    handle = visual.ln_post.register_forward_hook(recorded)
    hidden = towers.image_hidden(images)
    handle.remove()
    assert meanwhile[0] is visual.proj is not None
    assert torch.equal(towers.project(hidden), expected)
    assert torch.equal(towers.image_features(images), expected)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "a folder", "no tensors", "another length"])
def test_a_damaged_file_is_computed_again(
    model: Classifier, store: FeatureStore, tried: Callable[..., None], damage: str
) -> None:
    tried("bad inputs")
    dev = made_up_round().dev
    plain = features(model, dev, store)
    for path in list(store.folder.iterdir()):
        content = path.read_bytes()
        if damage == "a folder":
            path.unlink()
            path.mkdir()
        elif damage == "flipped":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        else:
            sizes = {"truncated": len(content) // 2, "empty": 0, "no tensors": 40, "another length": len(content) - 4}
            path.write_bytes(content[: sizes[damage]])
    for _ in range(2):
        another = FeatureStore(store.folder, LIMIT)  # as another process would: this one has it in memory
        assert torch.equal(features(model, dev, another), plain)


def test_a_folder_that_cannot_be_written_is_no_fault(
    model: Classifier, tmp_path: Path, tried: Callable[..., None]
) -> None:
    tried("faults")
    (tmp_path / "file").write_text("no folder")
    dev = made_up_round().dev
    assert torch.equal(
        features(model, dev, FeatureStore(tmp_path / "file" / "features", LIMIT)), features(model, dev, None)
    )


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    batch = torch.zeros(1024)
    store = FeatureStore(tmp_path / "features", 10 * 5000)
    for number in range(9):
        store.put(f"{number}", batch)
        os.utime(store.folder / f"{number}", (number, number))
    abandoned = store.folder / ".10.abcd.tmp"
    abandoned.write_bytes(b"half of it")
    os.utime(abandoned, (0, 0))
    assert store.get("0") is not None  # used now
    for number in range(10, 14):
        store.put(f"{number}", batch)
    store.prune()
    left = {path.name for path in store.folder.iterdir()}
    assert sum(path.stat().st_size for path in store.folder.iterdir()) <= store.limit
    assert {"0", "13"} <= left
    assert not {"1", "2", abandoned.name} & left


def test_what_somebody_writes_now_stays(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path / "features", LIMIT)
    store.put("a", torch.zeros(3))
    writing = store.folder / ".b.abcd.tmp"
    writing.write_bytes(b"half of it")
    store.prune()
    assert {path.name for path in store.folder.iterdir()} == {"a", writing.name}


def test_two_processes_keep_the_same_batches(tmp_path: Path) -> None:
    script = f"""
import torch
from pathlib import Path
from holdfast.model.feature_store import FeatureStore
store = FeatureStore(Path({str(tmp_path / "features")!r}), {LIMIT})
for turn in range(50):
    for key in "abc":
        found = store.get(key)
        assert found is None or torch.equal(found, torch.full((2000,), float(ord(key)))), key
        store.put(key, torch.full((2000,), float(ord(key))))
    if turn % 10 == 0:
        store.prune()
"""
    running = [Forked("-c", script) for _ in range(2)]
    ended = [(process.communicate()[1], process.returncode) for process in running]
    assert [code for _, code in ended] == [0, 0], ended


def test_the_switch_and_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tried: Callable[..., None]) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    found = user_store()
    assert found is not None
    assert found.folder == tmp_path / "features"
    monkeypatch.setenv("HOLDFAST_FEATURES", "0.5")
    assert user_store() == FeatureStore(tmp_path / "features", 1 << 29)
    monkeypatch.setenv("HOLDFAST_FEATURES", "off")
    assert user_store() is None
    for wrong in ("lots", "-1", "nan", "inf"):
        tried("bad inputs")
        monkeypatch.setenv("HOLDFAST_FEATURES", wrong)
        with pytest.raises(UserError, match="is no size"):
            user_store()


def test_sentences_are_encoded_once_and_are_the_same_bits(
    model: Classifier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    towers, asked = model.towers, list[int]()
    plain = OpenClipTowers.text_backbone

    def counted(towers: OpenClipTowers, tokens: Tensor) -> Tensor:
        asked.append(len(tokens))
        return plain(towers, tokens)

    monkeypatch.setattr(OpenClipTowers, "text_backbone", counted)
    sentences = [f"a photo of {word}" for word in ("a dog", "a house by the sea", "rain")]
    with torch.no_grad():
        expected = torch.cat([plain(towers, towers.tokenize(part)) for part in (sentences[:2], sentences[2:])])
    assert torch.equal(encode_sentences(towers, sentences, batch=2), expected)
    assert asked == [2, 1]
    assert torch.equal(encode_sentences(towers, sentences, batch=2), expected)
    assert asked == [2, 1]
    (file,) = (tmp_path / "features").iterdir()
    file.write_bytes(file.read_bytes()[:-1])  # damaged
    assert torch.equal(encode_sentences(towers, sentences, batch=2), expected)
    encode_sentences(towers, sentences[:2], batch=2)  # other sentences
    with torch.no_grad():
        next(iter(towers.text_backbone_parameters())).mul_(1.5)  # other weights
    encode_sentences(towers, sentences, batch=2)
    assert asked == [2, 1, 2, 1, 2, 2, 1]
    monkeypatch.setenv("HOLDFAST_FEATURES", "off")
    encode_sentences(towers, sentences, batch=2)
    assert asked == [2, 1, 2, 1, 2, 2, 1, 2, 1]


def test_predictions_outside_the_block_are_not_kept(model: Classifier, store: FeatureStore) -> None:
    data = made_up_round()
    with features_kept(store):
        kept = predict(model, data.dev, model.classes)
        with features_kept(None):
            predict(model, data.constraint, model.classes)
    count = len(list(store.folder.iterdir()))
    assert predict(model, data.dev, model.classes) == kept
    assert len(list(store.folder.iterdir())) == count


def round_config(root: Path, name: str, freeze: str) -> RoundConfig:
    values = {**ROUND, "method": {"name": name}, "model": {**ROUND["model"], "freeze": freeze}}
    if freeze != "nothing":
        values["train"] = {**ROUND["train"], "augment": False}
    values["certify"] = {**values["certify"], "ledger": str(root / "ledger")}
    return parse(RoundConfig, values, "ROUND")


@pytest.mark.parametrize(
    ("method", "freeze"), [("refit", "nothing"), ("holdfast", "towers"), ("holdfast", "backbones")]
)
def test_a_round_ends_in_the_same_bits_with_and_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, freeze: str
) -> None:
    """Without the store, with an empty one, and from a full one, in which the second run computes next to nothing."""
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    seen = passes_of(monkeypatch)
    results: list[Any] = []
    passes: list[int] = []
    for number, switch in enumerate(("off", "1", "1")):
        monkeypatch.setenv("HOLDFAST_FEATURES", switch)
        seen.clear()
        root = tmp_path / str(number)  # each with a ledger of its own
        ended = develop(round_config(root, method, freeze), root / "run", root, quiet=True)
        passes.append(sum(seen))
        tables = [read_predictions(path) for path in sorted((root / "run" / "predictions").glob("*-dev.parquet"))]
        results.append((tables, model_fingerprint(load_model(ended.folder.model)), ended.chosen))
        if number == 0:
            assert not (tmp_path / "cache" / "features").exists()
    assert results[0] == results[1] == results[2]
    assert passes[2] < passes[1] <= passes[0]
    assert 4 * passes[2] < passes[0]  # what is left are sealed and test pictures, once
