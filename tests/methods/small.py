"""A two-tower model and a round small enough to write every loss down by hand, in float64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.data.round import Batch, Images, LabelledSet, PairSet, RoundData, Texts
from holdfast.data.task import TaskSpec
from holdfast.methods.base import Method
from holdfast.model.classifier import Classifier
from holdfast.model.towers import Preprocess, TwoTowers

SIDE, WIDTH, WORDS = 4, 6, 40


class SmallTowers(TwoTowers):
    """A layer of tanh for pictures, averaged word vectors for texts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.preprocess = Preprocess(SIDE, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
        self.embed_dim, self.text_width = WIDTH, 5
        self.image = nn.Parameter(torch.randn(3 * SIDE * SIDE, WIDTH, generator=generator) / 4)
        self.words = nn.Parameter(torch.randn(WORDS, self.text_width, generator=generator))
        self.W = nn.Parameter(torch.randn(self.text_width, WIDTH, generator=generator))

    def image_features(self, images: Tensor) -> Tensor:
        return torch.tanh(images.flatten(1) @ self.image)

    def text_backbone(self, tokens: Tensor) -> Tensor:
        return self.words[tokens].mean(dim=1)

    @property
    def projection(self) -> Tensor:
        return self.W

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        return torch.tensor([[sum(map(ord, text)) % WORDS, len(text) % WORDS] for text in texts])

    def spec(self) -> dict[str, Any]:
        return {"small": True}

    def image_parameters(self) -> Iterable[nn.Parameter]:
        return [self.image]

    def text_parameters(self) -> Iterable[nn.Parameter]:
        return [self.words, self.W]


@dataclass(frozen=True)
class ArrayPixels:
    """Pictures in memory."""

    pictures: Tensor

    @property
    def size(self) -> int:
        return SIDE

    def __len__(self) -> int:
        return len(self.pictures)

    def read(self, rows: np.ndarray) -> Tensor:
        return self.pictures[torch.from_numpy(rows)]


def small_data(
    sizes: Sequence[int] = (3, 2, 4), target: int = 4, negatives: int = 5, shared_negatives: int = 0
) -> RoundData:
    """A round of ``len(sizes)`` protected tasks; the first ``shared_negatives`` negatives are constraint images."""
    generator = torch.Generator().manual_seed(7)
    total = sum(sizes) + target + negatives
    pixels = ArrayPixels(torch.randint(0, 256, (total, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8))
    names = tuple(f"class{k}" for k in range(len(sizes)))
    tasks = TaskSpec("wanted", names, tuple((f"a photo of {name}",) for name in (*names, "wanted")))
    n = sum(sizes)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    constraint = LabelledSet(pixels, np.arange(n), labels, tuple(f"c{i}" for i in range(n)))
    rows = np.arange(n + target, total)
    rows[:shared_negatives] = np.arange(shared_negatives)
    ids = tuple(f"c{i}" if i < shared_negatives else f"n{i}" for i in range(negatives))
    texts = tuple(f"some picture {'x' * i}" for i in range(negatives))
    closed = _never
    return RoundData(
        tasks,
        PairSet(
            pixels, np.arange(n, n + target), tuple(f"wanted {'y' * i}" for i in range(target)), tuple("t" * target)
        ),
        PairSet(pixels, rows, texts, ids),
        constraint,
        constraint,
        closed,
        closed,
    )


def _never() -> LabelledSet:
    raise AssertionError("no method reads test or sealed images")


def small_model(data: RoundData, seed: int = 0, class_temperature: float = 0.3) -> Classifier:
    """A classifier in float64."""
    spec = data.tasks
    return Classifier(SmallTowers(seed), spec.classes, spec.prompts, class_temperature).double()


def prepared(method: Method, data: RoundData, old_seed: int = 1) -> Method:
    """The method over its data, with an old model that differs from the new one."""
    if method.linear:
        method.model.use_linear()
    method.prepare(small_model(data, old_seed).frozen_copy(), data)
    return method.double()


def batch_of(
    data: RoundData,
    target: Sequence[int],
    negatives: Sequence[int],
    protected: Sequence[int],
    tokenize: Any,
    rank: int = 0,
    world: int = 1,
) -> Batch:
    """The batch (or one rank's share of it) of given positions."""
    totals = (len(target), len(negatives), len(protected))
    t, n, p = (np.asarray(item, dtype=np.int64)[rank::world] for item in (target, negatives, protected))
    labels = data.constraint.labels[p]
    return Batch(
        target_images=Images(_floats(data.target.images(t))),
        target_texts=Texts(tokenize([data.target.texts[i] for i in t])),
        target_index=torch.from_numpy(t),
        negative_images=Images(_floats(data.negatives.images(n))),
        negative_texts=Texts(tokenize([data.negatives.texts[i] for i in n])),
        negative_index=torch.from_numpy(n),
        protected_images=Images(_floats(data.constraint.images(p))),
        protected_task=torch.from_numpy(labels),
        protected_index=torch.from_numpy(p),
        tasks=torch.from_numpy(np.unique(data.constraint.labels[np.asarray(protected, dtype=np.int64)])),
        target_total=totals[0],
        negative_total=totals[1],
        protected_total=totals[2],
    )


def with_second_views(batch: Batch) -> Batch:
    """The batch with its target and protected pictures once more, mirrored."""
    return replace(
        batch,
        target_images_again=Images(batch.target_images.pixels.flip(3)),
        protected_images_again=Images(batch.protected_images.pixels.flip(3)),
    )


def whole_batch(data: RoundData, method: Method) -> Batch:
    """Everything there is in one batch."""
    everything = range(len(data.target)), range(len(data.negatives)), range(len(data.constraint))
    return batch_of(data, *everything, method.model.towers.tokenize)


def _floats(pictures: Tensor) -> Tensor:
    return (pictures.double() / 255 - 0.5) / 0.25


def gradient(value: Tensor, model: Classifier) -> Tensor:
    """Flat gradient over every parameter of the model, zeros where there is none."""
    parameters = list(model.parameters())
    found = torch.autograd.grad(value, parameters, allow_unused=True, retain_graph=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(found, parameters, strict=True)]
    )


@dataclass(frozen=True)
class Pair:
    """One image-text pair, for the naive versions."""

    image: Tensor  # [D]
    text: Tensor  # [D]
    kind: str  # "target", "negative" or the task's number
    identity: str


def pairs_of(model: Classifier, data: RoundData) -> list[Pair]:
    """D_all as a plain list; a protected image's caption is its class prompt."""
    prompts = [model.towers.tokenize([prompt]) for (prompt,) in data.tasks.prompts]
    pairs: list[Pair] = []
    for which, kind in ((data.target, "target"), (data.negatives, "negative")):
        for i, text in enumerate(which.texts):
            image = model.image_features(_floats(which.images(np.array([i]))))[0]
            caption = model.text_features(model.towers.tokenize([text]))[0]
            pairs.append(Pair(image, caption, kind, f"{kind}{which.ids[i]}{i}"))
    for i, label in enumerate(data.constraint.labels):
        image = model.image_features(_floats(data.constraint.images(np.array([i]))))[0]
        pairs.append(Pair(image, model.text_features(prompts[label])[0], str(label), f"protected{i}"))
    return pairs


def naive_contrastive(anchor: Pair, contrast: Sequence[Pair], tau: float) -> Tensor:
    """tau log g_1 + tau log g_2 of one pair, ``contrast`` holding the anchor itself (method section 3)."""
    own = anchor.image @ anchor.text
    g1 = torch.stack([torch.exp((anchor.image @ other.text - own) / tau) for other in contrast]).mean()
    g2 = torch.stack([torch.exp((other.image @ anchor.text - own) / tau) for other in contrast]).mean()
    return tau * g1.log() + tau * g2.log()
