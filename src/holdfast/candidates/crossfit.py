"""Out-of-fold predictions: the images that choose also teach.

A refit has few images to learn from, and the choice among refits fewer still. Both get more where they share them: the
images are dealt into folds, and for each fold the target's logit is fitted on all the others. What a fold's images
are counted as was then predicted by a fit that has not seen them, and the candidate itself is fitted on all of them.

An image may count if the weights below the refit have not seen it either: a dev image always does, a training image
where nothing was trained in this round (lambda 0) and the old model knows it no better than a dev image: by its record,
or because its weights were published by others, who knew nothing of the round's roles.
Images of one group (a video, a patient) lie in one fold.

In rounds with many images neither is short, and a fit takes longer: there, dev images choose and teach nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from holdfast.candidates.logit_bias import Products
from holdfast.candidates.refit import Pictures, TargetRefit, entries_of, refit_from_features
from holdfast.data.round import LabelledSet, RoundData
from holdfast.data.task import Role
from holdfast.files import fingerprint_bytes, image_key
from holdfast.model.classifier import Classifier

MOST = 3000  # training and dev images of a round that is cross-fitted


@dataclass(frozen=True)
class Folds:
    """Which images are left out together. ``of`` holds every image that may count; all others are in every fit."""

    count: int
    of: Mapping[str, int]  # example id -> fold

    def of_ids(self, ids: Iterable[str]) -> np.ndarray:
        """The fold of each example, -1 where it is in every fit."""
        return np.array([self.of.get(item, -1) for item in ids], dtype=np.int64)

    def only(self, ids: Iterable[str]) -> Folds:
        """The same for fewer examples."""
        return Folds(self.count, {item: self.of[item] for item in ids if item in self.of})


@dataclass(frozen=True)
class CrossFit:
    """A refit on all images, and for each fold the one that was fitted without it, with its bias's direction."""

    whole: TargetRefit
    folds: tuple[tuple[TargetRefit, Tensor], ...] = ()

    def to(self, device: torch.device | str) -> CrossFit:
        """The same on another device."""
        moved = tuple((refit.to(device), steady.to(device)) for refit, steady in self.folds)
        return CrossFit(self.whole.to(device), moved)


def make_folds(data: RoundData, roles: pa.Table, trained_on: Collection[str] | None, count: int) -> Folds | None:
    """Deal dev images, and training images that the old model has not seen, into folds; None where it is not worth it.

    ``trained_on`` are keys of the images that it was trained on; None where that may be any of the training images.
    Each class is spread evenly, in the order of a hash of the examples' names, so that the same images always make the
    same folds.
    """
    if count < 2 or len(data.dev) + len(data.constraint) + len(data.target) > MOST:
        return None
    together = data.dev.pixels is data.constraint.pixels is data.target.pixels
    may_count = {*data.dev.ids, *(_unseen(roles, trained_on) if together else ())}
    dealt: dict[str, list[str]] = defaultdict(list)
    groups: dict[str, str] = {}
    for identity, name, group in zip(
        *(roles[key].to_pylist() for key in ("example_id", "class", "group")), strict=True
    ):
        if identity in may_count:
            dealt[name].append(identity)
            if group is not None:
                groups[identity] = group
    folds: dict[str, int] = {}
    for ids in dealt.values():
        alone = sorted((item for item in ids if item not in groups), key=_shuffled)
        folds |= {item: place % count for place, item in enumerate(alone)}
    folds |= {item: int(_shuffled(group), 16) % count for item, group in groups.items()}
    return Folds(count, folds)


def _unseen(roles: pa.Table, trained_on: Collection[str] | None) -> list[str]:
    """Training images of the round's own source that the old model was not trained on."""
    if trained_on is None:
        return []
    rows = zip(*(roles[key].to_pylist() for key in ("example_id", "picture", "role")), strict=True)
    return [
        identity
        for identity, picture, role in rows
        if role == Role.TRAIN.value and image_key(identity) not in trained_on and image_key(picture) not in trained_on
    ]


def _shuffled(name: str) -> str:
    return fingerprint_bytes(f"fold\t{name}".encode()).rpartition(":")[2]


def counted_images(data: RoundData, folds: Folds) -> LabelledSet:
    """The images that a candidate of lambda 0 is counted on: dev images first, then the training images in folds.

    A target picture with several captions counts once.
    """
    known = set(data.dev.ids)
    ids, rows, labels = list(data.dev.ids), list(data.dev.rows), list(data.dev.labels)
    target = np.full(len(data.target), data.tasks.target_index)
    for item, classes in ((data.constraint, data.constraint.labels), (data.target, target)):
        for identity, row, label in zip(item.ids, item.rows, classes, strict=True):
            if identity in folds.of and identity not in known:
                known.add(identity)
                ids.append(identity)
                rows.append(row)
                labels.append(label)
    return LabelledSet(data.dev.pixels, np.array(rows, dtype=np.int64), np.array(labels, dtype=np.int64), tuple(ids))


def cross_fit(
    model: Classifier, name: str, direction: Tensor | None, pictures: Pictures, folds: Folds | None
) -> CrossFit:
    """Fit the target's logit on all pictures and, for each fold, on the pictures of the others."""
    whole = refit_from_features(model, name, direction, *pictures.tensors)
    if folds is None:
        return CrossFit(whole)
    place = torch.from_numpy(folds.of_ids(pictures.ids)).to(pictures.labels.device)
    products = Products.of(entries_of(model, pictures.hidden, pictures.features))
    fits: list[tuple[TargetRefit, Tensor]] = []
    for fold in range(folds.count):
        kept = place != fold
        part, steady = (values[kept] for values in pictures.tensors), products.steady(kept)
        fit = refit_from_features(model, name, direction, *part, start=whole, steady=steady)
        fits.append((fit, fit.steady_after(model, pictures)))
    return CrossFit(whole, tuple(fits))


def out_of_fold(
    examples: LabelledSet, folds: Folds, predict: Callable[[int, LabelledSet], list[pa.Table]]
) -> list[pa.Table]:
    """Tables of all examples, in their order: ``predict`` is given each fold and the examples in it."""
    place = folds.of_ids(examples.ids)
    parts: list[list[pa.Table]] = []
    order: list[np.ndarray] = []
    for fold in range(folds.count):
        here = np.flatnonzero(place == fold)
        if len(here):
            parts.append(predict(fold, examples.at(here)))
            order.append(here)
    back = np.argsort(np.concatenate(order))
    return [pa.concat_tables(tables).take(back) for tables in zip(*parts, strict=True)]
