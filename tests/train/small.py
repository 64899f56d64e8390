"""Methods over tiny towers that are frozen in part, and short runs of them in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.config import TrainConfig
from holdfast.data.loader import ViewSettings
from holdfast.data.round import RoundData
from holdfast.methods import build_method
from holdfast.methods.base import Method
from holdfast.methods.der import DerConfig
from holdfast.methods.holdfast import HoldfastConfig
from holdfast.methods.registry import BUILT_IN, find
from holdfast.model.classifier import Classifier
from holdfast.model.openclip import load_towers
from holdfast.runtime import Runtime
from holdfast.train.loop import TrainSpec, train
from tests.helpers import made_up_round

EXAMPLES = Path(__file__).parents[2] / "examples"
LAST_LAYERS = ("model.visual.proj", "weight")  # of the tiny towers: what `backbones` leaves to train
CLEAN = ViewSettings(False, "clean", (0.7, 1.0), False)
Make = Callable[[Classifier], Method]


def lwf(model: Classifier) -> Method:
    """The method that docs/how-to/researchers.md shows, as a user's round finds it."""
    registered = find("my_method.py", EXAMPLES)
    return registered.method(model, registered.settings(), 4)


def built(config: Any) -> Make:
    return lambda model: build_method(model, config, 4)


METHODS: dict[str, Make] = {
    **{name: built(find(name).settings()) for name in BUILT_IN if find(name).settings().trains()},
    "published": built(HoldfastConfig(form="published", beta=50.0)),
    "der++": built(DerConfig(beta=1.0)),
    "lwf of the docs": lwf,
}


@lru_cache(maxsize=1)
def start() -> Classifier:
    tasks = made_up_round().tasks
    return Classifier(load_towers("tiny", None, seed=1), tasks.classes, tasks.prompts, 0.05).double()


def prepared(make: Make, data: RoundData, freeze: str, head_rank: int = 4) -> Method:
    """A method over a copy of the old model, trained as [model] freeze says; everything in float64."""
    old = start()
    new = old.copy()
    method = make(new)
    new.requires_grad_(False)
    trained = {
        "image": new.towers.text_parameters(),
        "text": new.towers.image_parameters(),
        "backbones": [item for name, item in new.towers.named_parameters() if name in LAST_LAYERS],
        "nothing": [*new.towers.image_parameters(), *new.towers.text_parameters()],
    }.get(freeze, [])
    of_texts = {id(item) for item in new.towers.text_parameters()} if method.linear else set[int]()
    for parameter in trained:
        parameter.requires_grad_(id(parameter) not in of_texts)
    if method.linear:
        new.use_linear()
    elif method.uses_heads and head_rank:
        new.begin_round(head_rank, 0)
    method.double().prepare(old.frozen_copy(), data)
    return method.double()


def losses_and_state(method: Method, data: RoundData, *, augment: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Every term of every step, and where the run ends."""
    terms: list[Tensor] = []
    method.register_forward_hook(lambda _, __, output: terms.extend(part.detach() for part in output.parts.values()))
    settings: dict[str, Any] = {"steps": 4, "batch": 8, "images_per_task": 3, "device": "cpu", "augment": augment}
    config = TrainConfig(**settings, optimizer="plain", learning_rate=0.02, precision="float64")
    views = ViewSettings(augment, "clean", (0.7, 1.0), False)
    train(method, data, TrainSpec(config, views, 0, "sha256:test", evaluate_every=4), Runtime(torch.device("cpu")))
    return terms, method.state_dict()


def pictures_shown(method: Method, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """How many pictures each tower sees from now on."""
    shown: dict[str, list[int]] = {"new": [], "old": []}
    for (which, model), name in product(
        (("new", method.model), ("old", method.old)), ("image_features", "image_hidden")
    ):
        run = getattr(model.towers, name)

        def counted(images: Tensor, which: str = which, run: Callable[[Tensor], Tensor] = run) -> Tensor:
            shown[which].append(len(images))
            return run(images)

        monkeypatch.setattr(model.towers, name, counted)
    return shown
