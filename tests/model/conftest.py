from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from holdfast.model.classifier import Classifier
from holdfast.model.openclip import TINY, build_towers, load_towers
from holdfast.model.towers import TwoTowers

CLASSES = ("clear", "foggy", "snowy")
PROMPTS = (("the weather is clear",), ("the weather is foggy",), ("a photo of snow falling on a street",))


@pytest.fixture(scope="session")
def _tiny() -> TwoTowers:
    return load_towers("tiny", seed=3)


@pytest.fixture
def towers(_tiny: TwoTowers) -> TwoTowers:
    return copy.deepcopy(_tiny)


@pytest.fixture
def classifier(towers: TwoTowers) -> Classifier:
    return Classifier(towers, CLASSES, PROMPTS, 0.05)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def disturb() -> Callable[[torch.nn.Module, float], None]:
    """Stands in for training: every trainable parameter moves."""

    def move(module: torch.nn.Module, size: float = 0.05) -> None:
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.add_(noise.to(parameter.dtype) * size)

    return move


@pytest.fixture
def variant() -> Callable[..., TwoTowers]:
    """A tiny model with another text or vision configuration."""

    def build(
        *, text: dict[str, object] | None = None, vision: dict[str, object] | None = None, **top: object
    ) -> TwoTowers:
        config = copy.deepcopy(TINY) | top
        config["text_cfg"] = config["text_cfg"] | (text or {})
        config["vision_cfg"] = config["vision_cfg"] | (vision or {})
        view = {"size": 32, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
        return build_towers({"kind": "openclip", "architecture": "variant", "config": config, "preprocess": view})

    return build
