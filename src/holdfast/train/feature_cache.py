"""What frozen towers say, computed once: rounds that train heads only, or one tower, do not ask again every step.

Features stand in a batch where pictures and texts stand (:class:`holdfast.data.round.Images`), under the name of the
tower that made them. A model whose towers carry that name hands them out when it is asked to encode. Where the last
layer of the image tower is trained and nothing else of it, what that layer sees is kept, and each model (the new one,
the old one) goes on from there with its own. Of texts it is always what W sees.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.data.loader import ViewSettings
from holdfast.data.round import Kept, KeptImages, KeptTexts, LabelledSet, PairSet, RoundData
from holdfast.methods.base import Method
from holdfast.model.classifier import Classifier
from holdfast.model.feature_store import encode_set
from holdfast.model.towers import TwoTowers

LIMIT = 4 * 2**30  # bytes; larger sets are encoded step by step
_BATCH = 256
_numbers = itertools.count()


@dataclass(frozen=True)
class FeatureCache:
    """Features of whole sets, for the towers that are frozen."""

    images: KeptImages | None
    texts: KeptTexts | None


@torch.no_grad()
def build_feature_cache(method: Method, data: RoundData, views: ViewSettings) -> FeatureCache:
    """Encode what no step can change, and name the towers that it belongs to: those of the new and the old model."""
    cache_images, cache_texts = can_cache(method, data, views)
    return FeatureCache(
        _images_of(method, data) if cache_images else None,
        _texts_of(method.model, data) if cache_texts and not _linear(method) else None,
    )


def _linear(method: Method) -> bool:
    return method.linear or method.model.linear is not None


def can_cache(method: Method, data: RoundData, views: ViewSettings) -> tuple[bool, bool]:
    """Whether no step need ask the image tower, and the text tower, below their last layers.

    They are frozen there, see the same every time, and it is not too much.
    """
    towers = method.model.towers
    size = towers.projection.element_size()
    pictures = len(data.target) + len(data.negatives) + len(data.constraint)
    captions = len(data.target) + len(data.negatives)
    clean = not views.augment_pairs and views.protected == "clean" and data.views_each == 1
    cache_images = clean and not method.reads_pixels and not _any_trained(towers.image_backbone_parameters())
    return (
        cache_images and pictures * _width(towers) * size < LIMIT and _old_has_the_same_image_tower(method),
        not _any_trained(towers.text_backbone_parameters()) and captions * towers.text_width * size < LIMIT,
    )


def _trains_last_layer(towers: TwoTowers) -> bool:
    return _any_trained(towers.image_projection_parameters())


def _width(towers: TwoTowers) -> int:
    """Of what is kept of a picture."""
    projection = towers.image_projection
    return towers.embed_dim if projection is None or not _trains_last_layer(towers) else projection.shape[0]


def _any_trained(parameters: Iterable[Tensor]) -> bool:
    return any(parameter.requires_grad for parameter in parameters)


def _old_has_the_same_image_tower(method: Method) -> bool:
    """A round begins with a copy of the old model; whoever prepares a method otherwise has pictures read."""
    return all(_same_image_tower(method.model.towers, old.towers) for old in method.prepared_with)


def _same_image_tower(tower: TwoTowers, other: TwoTowers) -> bool:
    if tower is other:
        return True
    if tower.spec() != other.spec():
        return False
    # Buffers (statistics of a BatchNorm) are those of both towers; a round changes none of them.
    if not _equal(tower.image_backbone_parameters(), other.image_backbone_parameters()):
        return False
    last = tower.image_projection_parameters(), other.image_projection_parameters()
    return _equal(tower.buffers(), other.buffers()) and (_trains_last_layer(tower) or _equal(*last))


def _equal(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(
        tensor.dtype == other.dtype and tensor.device == other.device and torch.equal(tensor, other)
        for tensor, other in zip(some, others, strict=True)
    )


def _images_of(method: Method, data: RoundData) -> KeptImages:
    model, name = method.model, f"image tower {next(_numbers)}"
    hidden = _trains_last_layer(model.towers)
    for towers in (model.towers, *(old.towers for old in method.prepared_with)):
        towers.kept_images, towers.kept_hidden = (None, name) if hidden else (name, None)
    encode = _hidden if hidden else _images
    sets = (data.target, data.negatives, data.constraint)
    return KeptImages(*(Kept(encode(model, examples), name) for examples in sets))


def _texts_of(model: Classifier, data: RoundData) -> KeptTexts:
    name = model.towers.kept_texts = f"text tower {next(_numbers)}"
    return KeptTexts(
        Kept(_texts(model, data.target), name),
        Kept(_texts(model, data.negatives), name),
        Kept(_backbone(model, model.prompt_tokens), name),
    )


def _images(model: Classifier, examples: PairSet | LabelledSet) -> Tensor:
    """E1 of the evaluation views of a set: [n, D]."""
    weight = model.towers.projection
    parts = [model.finished(features) for _, features in encode_set(model.towers, examples, weight, batch=_BATCH)]
    return torch.cat(parts) if parts else weight.new_zeros(0, model.towers.embed_dim)


def _hidden(model: Classifier, examples: PairSet | LabelledSet) -> Tensor:
    """What the last layer sees of the evaluation views of a set: [n, width]."""
    towers, weight = model.towers, model.towers.projection
    parts = [hidden for _, hidden in encode_set(towers, examples, weight, what="hidden", batch=_BATCH)]
    return torch.cat(parts) if parts else weight.new_zeros(0, _width(towers))


def _texts(model: Classifier, examples: PairSet) -> Tensor:
    """Ē2 of the texts of a set, [n, text_width]; a text that many pairs share is encoded once."""
    distinct = list(dict.fromkeys(examples.texts))
    place = {text: row for row, text in enumerate(distinct)}
    towers = model.towers
    parts = [
        _backbone(model, towers.shorten(towers.tokenize(distinct[i : i + _BATCH])))
        for i in range(0, len(distinct), _BATCH)
    ]
    rows = torch.tensor([place[text] for text in examples.texts], device=towers.projection.device)
    return torch.cat(parts)[rows]


def _backbone(model: Classifier, tokens: Tensor) -> Tensor:
    return model.towers.text_backbone(tokens.to(model.towers.projection.device))
