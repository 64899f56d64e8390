"""What frozen towers say, computed once: rounds that train heads only, or one tower, do not ask again every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.data.loaders import ViewSettings
from holdfast.data.tasks import CachedImages, CachedTexts, LabelledSet, PairSet, RoundData
from holdfast.data.views import look
from holdfast.model.classifier import Classifier

LIMIT = 4 * 2**30  # bytes; larger sets are encoded step by step
_BATCH = 256


@dataclass(frozen=True)
class Frozen:
    """Features of whole sets, for the towers that are frozen."""

    images: CachedImages | None
    texts: CachedTexts | None


@torch.no_grad()
def frozen_features(model: Classifier, data: RoundData, views: ViewSettings, *, texts: bool = True) -> Frozen:
    """Encode what no step can change: pictures where no view is random, and texts (if any step asks for them)."""
    images_rest, texts_rest = rest(model, data, views)
    return Frozen(
        CachedImages(_images(model, data.target), _images(model, data.negatives), _images(model, data.constraint))
        if images_rest
        else None,
        CachedTexts(_texts(model, data.target), _texts(model, data.negatives), _backbone(model, model.prompt_tokens))
        if texts and texts_rest
        else None,
    )


def rest(model: Classifier, data: RoundData, views: ViewSettings) -> tuple[bool, bool]:
    """Whether no step need ask the image tower, and the text tower: frozen, the same every time, and not too much."""
    towers = model.towers
    size = towers.projection.element_size()
    pictures = len(data.target) + len(data.negatives) + len(data.constraint)
    captions = len(data.target) + len(data.negatives)
    clean = not views.augment_pairs and views.protected == "clean"
    images_rest = clean and not any(one.requires_grad for one in towers.image_parameters())
    texts_rest = not any(one.requires_grad for one in towers.text_parameters())
    return (
        images_rest and pictures * towers.embed_dim * size < LIMIT,
        texts_rest and captions * towers.text_width * size < LIMIT,
    )


def _images(model: Classifier, examples: PairSet | LabelledSet) -> Tensor:
    """E1 of the evaluation views of a set: [n, D]."""
    weight, view = model.towers.projection, model.preprocess
    parts = [
        model.image_features(
            look(examples.images(slice(i, i + _BATCH)).to(weight.device), view.mean, view.std, None, weight.dtype)
        )
        for i in range(0, len(examples), _BATCH)
    ]
    return torch.cat(parts)


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
