"""A zero-shot model of the same parts that needs no training: ConSE (Norouzi et al., 2014).

EfficientNet-lite0 keeps the classifier that it was trained with. The k likeliest of its 1000 ImageNet classes say where
a picture lies among sentences: their probabilities weigh the MiniLM embeddings of their names.

    P(x) = softmax over the k largest logits of the classifier / T, zero elsewhere
    E1(x) = [P(x), f(x) / |f(x)|] A        f(x): the 1280 features below the classifier
    A = [e(name) - mean over all names; 0],     W = 1, less the same mean for sentences

The rows of A for f(x) begin at zero, so that E1 is ConSE to the letter. They are there to be trained and refitted: a
class that ImageNet does not know is told apart by its features, not by which known classes it resembles.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from holdfast.data.prompts import fill
from holdfast.errors import UserError
from holdfast.model.bert import Bert
from holdfast.model.efficientnet import FEATURES
from holdfast.model.feature_store import encode_sentences
from holdfast.model.sentence_towers import (
    HEAD,
    MINILM,
    TOKENIZER,
    SentenceTowers,
    load_local,
    packages,
    size_of,
    tokenizer_of,
)

_CLASSES = 1000
_LIKELIEST, _TEMPERATURE = 30, 2.0  # chosen on paintings, cartoons (PACS) and captions (Flickr8k), not on photographs
_TEMPLATE = "a photo of a {}"


class ConseTowers(SentenceTowers):
    """E1 = ImageNet probabilities times embeddings of the classes' names, Ē2 = the MiniLM sentence embedding."""

    def __init__(
        self,
        tokenizer: bytes,
        *,
        image_size: int,
        classes: int,
        likeliest: int,
        temperature: float,
        bert: dict[str, Any],
    ) -> None:
        super().__init__(tokenizer, image_size=image_size, bert=bert)
        if not 1 <= likeliest <= classes or not temperature > 0:
            raise UserError(
                "the model's settings make no probabilities",
                expected=f"1 to {classes} classes and a temperature above 0",
                found=f"{likeliest} classes, temperature {temperature}",
            )
        self.embed_dim = self.text_width
        self._settings = {
            "image_size": image_size,
            "classes": classes,
            "likeliest": likeliest,
            "temperature": temperature,
            "bert": bert,
        }
        self._likeliest, self._temperature = likeliest, temperature
        self.classes = nn.Linear(FEATURES, classes)
        self.last = nn.Linear(classes + FEATURES, self.embed_dim, bias=False)
        self.sentence = Bert(bert)
        self.weight = nn.Parameter(torch.eye(self.text_width))
        self.bias = nn.Parameter(torch.zeros(self.embed_dim))
        self.eval()

    @classmethod
    def load(cls, architecture: str, weights: str | Path | None, *, seed: int) -> ConseTowers:
        """``conse`` or ``conse-SIZE`` (pixels). Weights: None for the packages' own, ``random``, or a local file."""
        size = size_of(architecture, "conse")
        picture_file, sentence_folder = packages()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            towers = cls(
                (sentence_folder / TOKENIZER).read_bytes(),
                image_size=size,
                classes=_CLASSES,
                likeliest=_LIKELIEST,
                temperature=_TEMPERATURE,
                bert=copy.deepcopy(MINILM),
            )
        if weights is None:
            head = towers.load_packages(picture_file, sentence_folder)
            towers.classes.load_state_dict({name.removeprefix(f"{HEAD}."): value for name, value in head.items()})
            towers.place_classes(imagenet_classes())
        elif str(weights) != "random":
            load_local(towers, Path(weights), "conse")
        return towers

    @classmethod
    def from_spec(cls, spec: dict[str, Any], assets: dict[str, bytes]) -> ConseTowers:
        """Rebuild from :meth:`spec` and the tokenizer's file; neither package is needed."""
        tokenizer = tokenizer_of(assets)
        with torch.random.fork_rng(devices=[]):
            return cls(tokenizer, **copy.deepcopy(spec["settings"]))

    @torch.no_grad()
    def place_classes(self, names: Sequence[str]) -> None:
        """A from the names of the classifier's classes, and the mean that sentences lose."""
        embedded = encode_sentences(self, [fill(_TEMPLATE, name) for name in names])
        mean = embedded.mean(dim=0)
        self.bias.copy_(-mean)
        self.last.weight.zero_()
        self.last.weight[:, : len(names)] = (embedded - mean).T

    @override
    def image_features(self, images: Tensor) -> Tensor:
        return self.last(self.image_hidden(images))

    @override
    def image_hidden(self, images: Tensor) -> Tensor:
        features = self.image(images)
        return torch.cat([self._probabilities(features), functional.normalize(features, dim=-1)], dim=1)

    def _probabilities(self, features: Tensor) -> Tensor:
        logits = self.classes(features)
        values, places = logits.topk(self._likeliest, dim=1)
        return torch.zeros_like(logits).scatter(1, places, (values / self._temperature).softmax(dim=1))

    @property
    @override
    def image_projection(self) -> Tensor:
        return self.last.weight.T

    @property
    @override
    def projection_bias(self) -> Tensor:
        return self.bias

    @override
    def spec(self) -> dict[str, Any]:
        return {"kind": "conse", "settings": copy.deepcopy(self._settings)}

    @override
    def image_parameters(self) -> Iterable[nn.Parameter]:
        return [*self.image.parameters(), *self.classes.parameters(), *self.last.parameters()]

    @override
    def text_parameters(self) -> Iterable[nn.Parameter]:
        return [*super().text_parameters(), self.bias]


def imagenet_classes() -> list[str]:
    """Names of ImageNet's 1000 classes in the order of its classifiers, as torchvision has them."""
    from torchvision.models import get_model_weights

    return list(get_model_weights("mobilenet_v2")["DEFAULT"].meta["categories"])
