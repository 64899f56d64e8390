"""freeze = "backbones": the last layers are trained, what lies below is computed once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.artifacts import RunFolder
from holdfast.config import RoundConfig, TrainConfig, TuneConfig, parse
from holdfast.data.loader import BatchSizes, RoundSampler, ViewSettings
from holdfast.data.round import Images, RoundData
from holdfast.errors import UserError
from holdfast.methods.base import Method
from holdfast.model.folder import load_model
from holdfast.model.openclip import load_towers
from holdfast.model.openclip_towers import OpenClipTowers
from holdfast.model.towers import Preprocess, TwoTowers
from holdfast.rounds.prepare import prepare_round
from holdfast.rounds.tune import tune
from holdfast.runtime import Runtime, started
from holdfast.train.bench import step_flop
from holdfast.train.compute_mode import compute_mode
from holdfast.train.feature_cache import build_feature_cache, can_cache
from holdfast.train.loop import TrainSpec, train
from tests.helpers import made_up_round
from tests.rounds.test_round import ROUND
from tests.train.small import CLEAN, LAST_LAYERS, METHODS, losses_and_state, pictures_shown, prepared

CPU = Runtime(torch.device("cpu"))
VIEW = Preprocess(32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
RESNET: dict[str, Any] = {
    "embed_dim": 32,
    "vision_cfg": {"layers": [1, 1, 1, 1], "width": 32, "image_size": 32, "patch_size": None},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def without_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.train.feature_cache.LIMIT", 0)


def ready(name: str, data: RoundData) -> Method:
    """A method whose old model has another last layer than the new one: whoever mixes them up is found out."""
    method = prepared(METHODS[name], data, "backbones")
    with torch.no_grad():
        for parameter in (*method.old.towers.image_projection_parameters(), *method.old.towers.projection_parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
            parameter.add_(noise * parameter.std() * 0.3)
    method.prepare(method.old, data)
    return method.double()


@pytest.mark.parametrize("augment", [False, True], ids=["clean views", "random views"])
@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_does_with_kept_values_what_it_does_with_pixels(
    name: str, augment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses and weights; only the last layers and heads move."""
    data = made_up_round()
    kept = ready(name, data)
    views = ViewSettings(augment, "clean", (0.7, 1.0), False)
    assert can_cache(kept, data, views) == (not augment, True)
    before = {key: value.clone() for key, value in kept.model.state_dict().items()}
    terms, state = losses_and_state(kept, data, augment=augment)
    moved = {key for key, value in before.items() if not torch.equal(value, state[f"model.{key}"])}
    trained = {f"towers.{key}" for key in (LAST_LAYERS[:1] if kept.linear else LAST_LAYERS)}
    heads = {key for key in before if key == "linear" or key.startswith("heads.")}
    assert trained <= moved <= trained | heads
    without_cache(monkeypatch)
    again = ready(name, data)
    assert can_cache(again, data, views) == (False, False)
    plain_terms, plain_state = losses_and_state(again, data, augment=augment)
    torch.testing.assert_close(torch.stack(terms), torch.stack(plain_terms), rtol=1e-11, atol=1e-12)
    for key, value in plain_state.items():
        torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-11, msg=key)


@pytest.mark.parametrize("protected", ["clean", "paired"])
@pytest.mark.parametrize("augment", [False, True])
def test_a_random_view_is_seen_in_every_step_and_a_clean_one_once(
    augment: bool, protected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = made_up_round()
    method = prepared(METHODS["der"], data, "backbones")
    shown = pictures_shown(method, monkeypatch)
    views = ViewSettings(augment, protected, (0.7, 1.0), False)
    config = TrainConfig(steps=4, batch=8, images_per_task=3, device="cpu", precision="float64", augment=augment)
    train(method, data, TrainSpec(config, views, 0, "sha256:test", evaluate_every=4), CPU)
    clean = not augment and protected == "clean"
    once = len(data.target) + len(data.negatives) + len(data.constraint)
    tasks = data.tasks.num_protected
    assert sum(shown["new"]) == (once if clean else 4 * (4 + 3 * tasks))
    assert (sum(shown["old"]) == 0) == clean


def test_the_last_layer_is_each_models_own() -> None:
    data = made_up_round()
    method = ready("der", data)
    kept = build_feature_cache(method, data, CLEAN).images
    assert kept is not None
    images = Images(None, kept.target)
    ((_, pixels),) = method.model.preprocess.batches(data.target, method.model.towers.projection)
    new, old = method.model.image_features(images), method.old.image_features(images)
    torch.testing.assert_close(new, method.model.image_features(pixels), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(old, method.old.image_features(pixels), rtol=1e-12, atol=1e-12)
    assert float((new - old).detach().abs().max()) > 1e-2
    together = method.old.image_features_together(images.first(3), Images(None, kept.protected))
    torch.testing.assert_close(together[0], old[:3], rtol=1e-12, atol=1e-12)
    assert len(together[1]) == len(data.constraint)
    new.sum().backward()
    layer = method.model.towers.model.visual.proj  # type: ignore[union-attr]
    assert layer.grad is not None  # type: ignore[union-attr]
    assert not old.requires_grad


def test_an_old_model_that_differs_below_sees_pixels() -> None:
    data = made_up_round()
    method = prepared(METHODS["der"], data, "backbones")
    assert can_cache(method, data, CLEAN)[0]
    with torch.no_grad():
        method.old.towers.image_backbone_parameters()[0].add_(0.01)
    assert not can_cache(method, data, CLEAN)[0]


@pytest.mark.parametrize("name", ["holdfast", "der"])
def test_a_run_stopped_and_resumed_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    data = made_up_round()
    config = TrainConfig(
        steps=6, batch=8, images_per_task=3, device="cpu", augment=False, checkpoint_every=3, learning_rate=1e-3
    )
    plan = TrainSpec(config, CLEAN, 0, "sha256:test", evaluate_every=3)

    def single() -> Method:
        method = prepared(METHODS[name], data, "backbones")
        method.float()
        method.old.float()
        method.prepare(method.old, data)
        return method.float()

    def stop(done: int, method: Method) -> dict[str, Any]:
        if done == 6:
            raise RuntimeError("stopped")
        return {}

    whole, resumed = single(), single()
    train(whole, data, plan, CPU, RunFolder.create(tmp_path / "whole"))
    folder = RunFolder.create(tmp_path / "parts")
    with pytest.raises(RuntimeError, match="stopped"):
        train(single(), data, plan, CPU, folder, stop)
    assert [path.name for path in folder.checkpoints.iterdir()]
    train(resumed, data, plan, CPU, folder)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


def test_fast_towers_keep_what_their_own_last_layer_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 the fast path multiplies with the last layer in full precision: kept values go the same way."""
    towers = load_towers("tiny", None, seed=1)
    config = TrainConfig(device="cpu", speed="fast", precision="bf16")
    pictures = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), compute_mode(config, torch.device("cpu")):
        assert torch.equal(towers.project(towers.image_hidden(pictures)), towers.image_features(pictures))

    def trained(caches: bool) -> dict[str, Tensor]:
        if not caches:
            without_cache(monkeypatch)
        data = made_up_round()
        method = ready("holdfast", data)
        settings: dict[str, Any] = {"steps": 4, "batch": 8, "images_per_task": 3, "device": "cpu", "augment": False}
        config = TrainConfig(**settings, speed="fast", optimizer="plain", learning_rate=0.02, precision="float64")
        train(method, data, TrainSpec(config, CLEAN, 0, "sha256:test", evaluate_every=4), CPU)
        return method.state_dict()

    kept, plain = trained(True), trained(False)
    for key, value in plain.items():
        torch.testing.assert_close(kept[key], value, rtol=1e-10, atol=1e-11, msg=key)


@pytest.mark.parametrize("kind", ["tiny", "parts-64", "conse-64"])
def test_what_is_left_to_train(kind: str) -> None:
    """The last layers by their names, and the same by either way of asking."""
    towers = load_towers(kind, None if kind == "tiny" else "random", seed=1)
    expected = {
        "tiny": set(LAST_LAYERS),
        "parts-64": {"adapter.3.weight", "adapter.3.bias", "weight"},
        "conse-64": {"last.weight", "weight", "bias"},
    }[kind]
    left = {id(parameter) for parameter in towers.left_to_train("backbones")}
    assert {name for name, value in towers.named_parameters() if id(value) in left} == expected
    assert {name for name, value in towers.freeze_backbones().named_parameters() if value.requires_grad} == expected


def resnet() -> TwoTowers:
    """A tower that ends in attention pooling."""
    return OpenClipTowers("RN-tiny", RESNET, VIEW)


def test_a_tower_without_a_last_layer_is_refused(tried: Callable[..., None]) -> None:
    tried("bad inputs")
    with pytest.raises(UserError, match="leaves nothing to train") as caught:
        resnet().left_to_train("backbones")
    assert "linear layer" in caught.value.expected
    assert "OpenClipTowers" in caught.value.found
    assert '"image"' in caught.value.do
    assert resnet().left_to_train("backbones", linear=True) == []  # the head is trained, and the tower rests


@pytest.mark.parametrize("method", ["holdfast", "der"])
def test_a_round_says_so_before_it_trains(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Callable[..., None]
) -> None:
    """Towers that keep their last layer inside, without a linear head and with one."""
    monkeypatch.setattr(OpenClipTowers, "image_projection", None)
    config = round_config(tmp_path, name=method)
    with started("cpu") as runtime:
        if method == "holdfast":
            tried("bad inputs")
            with pytest.raises(UserError, match="leaves nothing to train"):
                prepare_round(config, tmp_path, runtime)
            return
        trained = prepare_round(config, tmp_path, runtime).method
    assert [name for name, value in trained.named_parameters() if value.requires_grad] == ["model.linear"]


def round_config(root: Path, **method: Any) -> RoundConfig:
    values = {**ROUND, "method": method, "model": {"architecture": "tiny", "freeze": "backbones", "head_rank": 4}}
    values["train"] = {**ROUND["train"], "augment": False}
    values["certify"] = {**values["certify"], "ledger": str(root / "ledger")}
    return parse(RoundConfig, values, "ROUND")


def test_a_round_trains_last_layers_and_heads(tmp_path: Path) -> None:
    with started("cpu") as runtime:
        ready = prepare_round(round_config(tmp_path, name="holdfast"), tmp_path, runtime)
    trained = {name for name, value in ready.method.named_parameters() if value.requires_grad}
    heads = {name for name in trained if name.startswith("model.heads.")}
    assert heads
    assert trained - heads == {f"model.towers.{name}" for name in LAST_LAYERS}
    assert can_cache(ready.method, ready.assembled.data, CLEAN) == (True, True)


@pytest.mark.parametrize("objective", ["contrastive", "cross_entropy"])
def test_tuning_moves_last_layers_alone(objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_settings = {"steps": 30, "batch": 8, "images_per_task": 2, "augment": False, "device": "cpu"}
    values = {
        "objective": objective,
        "classes": ["three", "five", "eight"],
        "data": {"source": {"kind": "digits"}, "roles": {"dev": 0.2, "sealed": 0.0, "test": 0.0}},
        "model": {"architecture": "tiny", "freeze": "backbones"},
        "train": {**train_settings, "learning_rate": 1e-2, "log_every": 30},
    }
    read: list[int] = []
    backbone = OpenClipTowers.text_backbone

    def counted(towers: OpenClipTowers, tokens: Tensor) -> Tensor:
        read.append(len(tokens))
        return backbone(towers, tokens)

    monkeypatch.setattr(OpenClipTowers, "text_backbone", counted)
    tune(parse(TuneConfig, values, "TUNE"), tmp_path / "out", tmp_path, quiet=True)
    assert len(read) < 10  # the sets, the prompts, evaluations: not every step
    before, after = load_towers("tiny", None, seed=0).state_dict(), load_model(tmp_path / "out" / "model").towers
    moved = {key for key, value in after.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == set(LAST_LAYERS)


def test_backbones_that_rest_count_no_work() -> None:
    data = made_up_round()
    draw = RoundSampler(data, BatchSizes(4, 4, None, 3), 0).draw(0)
    method = prepared(METHODS["holdfast"], data, "backbones")
    seen = ViewSettings(True, "clean", (0.7, 1.0), False)
    assert step_flop(method, data, draw, CLEAN) == 0
    images = step_flop(method, data, draw, seen)
    whole = step_flop(prepared(METHODS["holdfast"], data, "nothing"), data, draw, seen)
    assert 0 < images < whole / 3
