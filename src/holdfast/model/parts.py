"""Two towers put together from parts: an EfficientNet-lite0 and a MiniLM sentence encoder, both pretrained alone.

The parts have never met: an adapter and W bring them together, and `holdfast tune` trains these. A model of the same
parts that needs no training is the one of :mod:`holdfast.model.conse`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from holdfast.model.bert import Bert
from holdfast.model.efficientnet import FEATURES
from holdfast.model.sentence_towers import (
    MINILM,
    TOKENIZER,
    SentenceTowers,
    load_local,
    packages,
    size_of,
    tokenizer_of,
)

_DIM, _HIDDEN = 256, 512


class PartTowers(SentenceTowers):
    """E1 = adapter(EfficientNet-lite0), Ē2 = the mean-pooled MiniLM sentence embedding, W a projection of its own."""

    def __init__(self, tokenizer: bytes, *, image_size: int, embed_dim: int, hidden: int, bert: dict[str, Any]) -> None:
        super().__init__(tokenizer, image_size=image_size, bert=bert)
        self.embed_dim = embed_dim
        self._settings = {"image_size": image_size, "embed_dim": embed_dim, "hidden": hidden, "bert": bert}
        self.adapter = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, hidden), nn.GELU(), nn.Linear(hidden, embed_dim)
        )
        self.sentence = Bert(bert)
        self.weight = nn.Parameter(torch.randn(self.text_width, embed_dim) * self.text_width**-0.5)
        self.eval()

    @classmethod
    def load(cls, architecture: str, weights: str | Path | None, *, seed: int) -> PartTowers:
        """``parts`` or ``parts-SIZE`` (pixels). Weights: None for the packages' own, ``random``, or a local file.

        The adapter and W are random in the first case too: the parts have never met. `holdfast tune` introduces them.
        """
        size = size_of(architecture, "parts")
        picture_file, sentence_folder = packages()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            towers = cls(
                (sentence_folder / TOKENIZER).read_bytes(),
                image_size=size,
                embed_dim=_DIM,
                hidden=_HIDDEN,
                bert=copy.deepcopy(MINILM),
            )
        if weights is None:
            towers.load_packages(picture_file, sentence_folder)
        elif str(weights) != "random":
            load_local(towers, Path(weights), "parts")
        return towers

    @classmethod
    def from_spec(cls, spec: dict[str, Any], assets: dict[str, bytes]) -> PartTowers:
        """Rebuild from :meth:`spec` and the tokenizer's file; neither package is needed."""
        tokenizer = tokenizer_of(assets)
        with torch.random.fork_rng(devices=[]):
            return cls(tokenizer, **copy.deepcopy(spec["settings"]))

    @override
    def image_features(self, images: Tensor) -> Tensor:
        return self.adapter(self.image(images))

    @property
    @override
    def image_projection(self) -> Tensor:
        return self._last.weight.T

    @property
    @override
    def image_projection_bias(self) -> Tensor:
        return self._last.bias

    @property
    def _last(self) -> nn.Linear:
        return cast(nn.Linear, self.adapter[-1])

    @override
    def image_hidden(self, images: Tensor) -> Tensor:
        return self.adapter[:-1](self.image(images))

    @override
    def spec(self) -> dict[str, Any]:
        return {"kind": "parts", "settings": copy.deepcopy(self._settings)}

    @override
    def image_parameters(self) -> Iterable[nn.Parameter]:
        return [*self.image.parameters(), *self.adapter.parameters()]
