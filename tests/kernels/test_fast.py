"""Every fast path against the plain one: value and gradient in float64, a stated tolerance in bf16."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.config import TrainConfig
from holdfast.data.loader import ViewSettings
from holdfast.kernels import fast
from holdfast.kernels.text_packing import plan_rows, row_width
from holdfast.methods import build_method
from holdfast.methods.cross_entropy import CrossEntropyConfig
from holdfast.methods.holdfast import Holdfast, HoldfastConfig
from holdfast.model.classifier import Classifier
from holdfast.model.compute import ComputeMode, computing
from holdfast.model.openclip import TINY, load_towers
from holdfast.model.openclip_towers import OpenClipTowers
from holdfast.model.towers import Preprocess
from holdfast.runtime import Runtime
from holdfast.train.loop import TrainSpec, train
from tests.helpers import made_up_round

EXACT = ComputeMode(torch.float64)


def towers(**changes: Any) -> OpenClipTowers:
    """Tiny towers in float64, with biases and gains that are not 0 and 1."""
    config = copy.deepcopy(TINY)
    config["vision_cfg"] |= changes.pop("vision_cfg", {})
    config |= changes
    torch.manual_seed(3)
    built = OpenClipTowers("tiny", config, Preprocess(32, (0.5,) * 3, (0.25,) * 3)).double()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return built


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


TEXTS = ["a", "a photo of a rather foggy street in the early morning", "the weather is clear", "tunnel"]


def value_and_gradient(model: OpenClipTowers, how: ComputeMode | None, what: str) -> dict[str, Tensor]:
    model.zero_grad()
    with computing(how):
        found = model.image_features(images()) if what == "image" else model.text_backbone(model.tokenize(TEXTS))
    weight = torch.linspace(-1, 2, found.numel(), dtype=found.dtype).view_as(found)
    (weight * found + found.square()).sum().backward()
    gradients = {name: item.grad for name, item in model.named_parameters() if item.grad is not None}
    return {"value": found.detach(), **gradients}


def test_a_row_that_is_picked_several_times_has_the_sum_of_its_gradients() -> None:
    values, which = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True), torch.tensor([3, 0, 3, 3, 1])
    weight = torch.randn(5, 3, 4, dtype=torch.float64)
    got, expected = fast._rows_of(values, which), values[which]
    assert torch.equal(got, expected)
    gradients = [torch.autograd.grad((weight * found).sum(), values)[0] for found in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


@pytest.mark.parametrize("what", ["image", "text"])
@pytest.mark.parametrize("changes", [{}, {"quick_gelu": True}, {"vision_cfg": {"no_ln_pre": True}}], ids=str)
def test_value_and_gradient_are_those_of_the_modules(what: str, changes: dict[str, Any]) -> None:
    model = towers(**changes)
    plain, quick = value_and_gradient(model, None, what), value_and_gradient(model, EXACT, what)
    assert plain.keys() == quick.keys()
    assert len(plain) > 20
    for name, value in plain.items():
        torch.testing.assert_close(quick[name], value, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("at_least", [1, 8])
def test_texts_that_share_rows_have_the_features_they_have_alone(at_least: int) -> None:
    model = towers()
    texts = [*TEXTS, "a b c d e f g h i j k l m n o p", "c", ""]
    tokens = model.shorten(model.tokenize(texts))
    lengths = model.lengths(tokens)
    assert lengths is not None
    rows = plan_rows(lengths.numpy(), tokens.shape[1], row_width(32), at_least)
    assert (rows.text >= 0).sum() == lengths.sum()

    def found(how: ComputeMode | None) -> dict[str, Tensor]:
        model.zero_grad()
        with computing(how):
            features = model.text_backbone_in_rows(tokens, rows)
        (torch.linspace(-1, 2, features.numel(), dtype=features.dtype).view_as(features) * features).sum().backward()
        gradients = {name: item.grad for name, item in model.named_parameters() if item.grad is not None}
        return {"value": features.detach(), **gradients}

    alone, shared = found(None), found(EXACT)  # without fast towers rows are left aside
    assert alone.keys() == shared.keys()
    for name, value in alone.items():
        torch.testing.assert_close(shared[name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_rows_are_filled_longest_first_and_hold_every_token_once() -> None:
    lengths = np.array([5, 16, 3, 9, 2, 7])
    rows = plan_rows(lengths, 16, 16, 1)
    assert len(rows.source) == 8  # three are needed; shapes come in eights
    assert int((rows.text >= 0).any(dim=1).sum()) == 3
    placed = rows.source[rows.text >= 0]
    assert sorted(placed.tolist()) == [16 * i + j for i, length in enumerate(lengths) for j in range(length)]
    for text, end in enumerate(rows.end.tolist()):
        assert rows.text.flatten()[end] == text
        assert rows.position.flatten()[end] == lengths[text] - 1


def run_of_the_loop(**changes: Any) -> dict[str, Tensor]:
    data = made_up_round()
    old = Classifier(load_towers("tiny", None, seed=1).double(), data.tasks.classes, data.tasks.prompts, 0.05)
    new = old.copy()
    new.begin_round(4, 0)
    method = Holdfast(new, HoldfastConfig(beta=50.0), 6)
    method.prepare(old.requires_grad_(False), data)
    # Algorithm 1 to the letter: AdamW divides a gradient by its own size, and at the start, where old and new agree,
    # the heads' gradient is nothing but rounding.
    settings: dict[str, Any] = {"steps": 6, "batch": 8, "images_per_task": 3, "device": "cpu"}
    config = TrainConfig(**settings, optimizer="plain", learning_rate=0.05, precision="float64", **changes)
    plan = TrainSpec(config, ViewSettings(True, "paired", (0.7, 1.0), True), 0, "sha256:test", evaluate_every=6)
    train(method.double(), data, plan, Runtime(torch.device("cpu")))
    return method.state_dict()


def test_a_run_with_fast_towers_ends_where_the_plain_one_ends() -> None:
    plain, quick = run_of_the_loop(speed="plain"), run_of_the_loop(speed="fast")
    assert plain.keys() == quick.keys()
    assert plain["retention.u.value"].abs().min() > 1e-4  # the models have parted
    for name, value in plain.items():
        torch.testing.assert_close(quick[name], value, rtol=1e-10, atol=1e-10, msg=name)


FROZEN_METHODS: dict[str, Any] = {
    "published": HoldfastConfig(form="published", beta=50.0),
    "default": HoldfastConfig(),
    "cross_entropy": CrossEntropyConfig(),
}


def heads_only(caches: bool, monkeypatch: pytest.MonkeyPatch, frozen: str, which: str) -> tuple[dict[str, Tensor], int]:
    """State after a run in which towers are frozen, and how many pictures the image tower was shown in its steps."""
    if not caches:
        monkeypatch.setattr("holdfast.train.feature_cache.LIMIT", 0)
    data = made_up_round()
    old = Classifier(load_towers("tiny", None, seed=1).double(), data.tasks.classes, data.tasks.prompts, 0.05)
    new = old.copy()
    new.towers.freeze(image=frozen != "text", text=frozen != "image")
    new.begin_round(4, 0)
    method = build_method(new, FROZEN_METHODS[which], 6)
    method.prepare(old.requires_grad_(False), data)
    shown: list[int] = []  # whole sets are encoded by several threads, through `image_hidden`
    for name in ("image_features", "image_hidden"):
        run = getattr(new.towers, name)

        def counted(images: Tensor, run: Callable[[Tensor], Tensor] = run) -> Tensor:
            shown.append(len(images))
            return run(images)

        monkeypatch.setattr(new.towers, name, counted)
    config = TrainConfig(
        steps=6,
        batch=8,
        images_per_task=3,
        optimizer="plain",
        learning_rate=0.05,
        precision="float64",
        device="cpu",
        augment=False,
    )
    plan = TrainSpec(config, ViewSettings(False, "clean", (0.7, 1.0), False), 0, "sha256:test", evaluate_every=6)
    train(method.double(), data, plan, Runtime(torch.device("cpu")))
    return method.state_dict(), sum(shown)


@pytest.mark.parametrize(
    ("frozen", "which"),
    [
        *((name, "published") for name in ("towers", "image", "text")),
        ("towers", "default"),
        ("towers", "cross_entropy"),
    ],
)
def test_features_of_frozen_towers_are_computed_once_and_change_nothing(
    frozen: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached, shown = heads_only(True, monkeypatch, frozen, which)
    again, shown_again = heads_only(False, monkeypatch, frozen, which)
    data = made_up_round()
    once = len(data.target) + len(data.negatives) + len(data.constraint)
    assert shown == (once if frozen != "text" else shown_again)
    assert shown_again == 6 * ((4 if which == "cross_entropy" else 8) + 9)
    moved = "model.heads._rounds.0.U"
    assert cached[moved].abs().max() > 1e-6
    for name, value in again.items():
        torch.testing.assert_close(cached[name], value, rtol=1e-10, atol=1e-11, msg=name)


def test_recomputed_activations_change_nothing() -> None:
    model = towers()
    plain = value_and_gradient(model, EXACT, "image")
    model.checkpoint_activations()
    for name, value in value_and_gradient(model, EXACT, "image").items():
        assert torch.equal(plain[name], value), name


def test_towers_that_are_built_otherwise_keep_their_modules() -> None:
    averaged = towers(vision_cfg={"pool_type": "avg"})
    plain = averaged.image_features(images())
    with computing(EXACT):
        assert torch.equal(averaged.image_features(images()), plain)


def test_bf16_stays_within_two_percent_of_float32() -> None:
    model = load_towers("tiny", None, seed=0)
    pictures, tokens = images(16).float(), model.tokenize(TEXTS)
    with torch.no_grad(), computing(ComputeMode(torch.bfloat16)):
        rough = model.image_features(pictures), model.text_backbone(tokens)
    with torch.no_grad():
        exact = model.image_features(pictures), model.text_backbone(tokens)
    for item, other in zip(rough, exact, strict=True):
        assert item.dtype == torch.float32  # the last projection and all similarities stay float32
        assert (item - other).norm() / other.norm() < 0.02
        assert not torch.equal(item, other)


def test_texts_shortened_to_different_lengths_have_the_features_they_have_alone() -> None:
    model = Classifier(towers(), ["a", "b"], [["a photo of a"], ["b"]], 0.05)
    tokens = model.towers.tokenize(TEXTS)
    short, long = model.towers.shorten(tokens[:1]), model.towers.shorten(tokens[1:])
    assert short.shape[1] < long.shape[1] < tokens.shape[1] + 1
    of_captions, of_plain, classes = model.text_features_together(short, 0, long)
    torch.testing.assert_close(of_captions, model.text_features(tokens[:1], 0), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(of_plain, model.text_features(tokens[1:]), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(classes, model.class_features(), rtol=1e-12, atol=1e-13)
