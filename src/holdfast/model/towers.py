"""The two-tower protocol: what holdfast asks of a model, and nothing more.

OpenCLIP is one adapter (:mod:`holdfast.model.clip`); a tower put together from other parts is another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Preprocess:
    """The evaluation view: shorter side resized to ``size``, centre crop, scaled to [0, 1], normalised."""

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"  # or "bilinear"


class TwoTowers(nn.Module, ABC):
    """An image tower E1 and a text tower E2 = W · Ē2(u, t) (method section 5)."""

    preprocess: Preprocess
    embed_dim: int  # D
    text_width: int  # width of the text backbone's features

    @abstractmethod
    def image_features(self, images: Tensor) -> Tensor:
        """E1 before normalisation: [n, 3, S, S] normalised pixels -> [n, D]."""

    @abstractmethod
    def text_backbone(self, tokens: Tensor) -> Tensor:
        """Ē2: [n, L] tokens -> [n, text_width], before the projection."""

    @property
    @abstractmethod
    def projection(self) -> Tensor:
        """W, laid out for ``backbone @ projection``: [text_width, D]. A parameter of the towers."""

    @abstractmethod
    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Texts -> int64 tokens [n, L]."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """JSON that :func:`holdfast.model.clip.build_towers` rebuilds the architecture from (no weights)."""
