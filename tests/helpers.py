"""Small rounds for tests: real batches of made-up pictures, the tiny architecture, a few seconds at most."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.data.round import LabelledSet, PairSet, RoundData
from holdfast.data.task import TaskSpec


class ArrayPixels:
    """Pictures in an array."""

    def __init__(self, images: np.ndarray) -> None:
        self.array = images

    @property
    def size(self) -> int:
        return self.array.shape[-1]

    def __len__(self) -> int:
        return len(self.array)

    def read(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(self.array[rows])


def made_up_round(
    counts: tuple[int, ...] = (13, 7, 9), target: int = 11, negatives: int = 17, seed: int = 0, size: int = 32
) -> RoundData:
    """Pictures whose mean colour depends on the class, plus noise; ``counts`` images a protected task."""
    random = np.random.default_rng(seed)
    names = [f"class {k}" for k in range(len(counts) + 1)]
    colours = random.integers(40, 215, (len(names), 3, 1, 1))

    def pictures(label: int, count: int) -> np.ndarray:
        noise = random.integers(-40, 40, (count, 3, size, size))
        return np.clip(colours[label] + noise, 0, 255).astype(np.uint8)

    protected = [pictures(k, count) for k, count in enumerate(counts)]
    images = np.concatenate([*protected, pictures(len(counts), target), pictures(0, negatives)])
    pixels = ArrayPixels(images)
    labels = np.repeat(np.arange(len(counts)), counts)
    total = len(labels)

    def ids(start: int, count: int) -> tuple[str, ...]:
        return tuple(f"picture-{row}" for row in range(start, start + count))

    dev_rows = np.arange(total + target)
    dev = LabelledSet(pixels, dev_rows, np.concatenate([labels, np.full(target, len(counts))]), ids(0, total + target))
    return RoundData(
        tasks=TaskSpec(names[-1], tuple(names[:-1]), tuple((f"a photo of {name}",) for name in names)),
        target=PairSet(
            pixels,
            np.arange(total, total + target),
            tuple(f"seen {i} a {names[-1]}" for i in range(target)),
            ids(total, target),
        ),
        negatives=PairSet(
            pixels,
            np.arange(total + target, len(images)),
            tuple(f"something else {i}" for i in range(negatives)),
            ids(total + target, negatives),
        ),
        constraint=LabelledSet(pixels, np.arange(total), labels, ids(0, total)),
        dev=dev,
        open_test=lambda: dev,
        open_sealed=lambda: dev,
    )


def passes_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pictures each pass of an OpenCLIP image tower sees, from now on."""
    from holdfast.model.openclip_towers import OpenClipTowers

    seen: list[int] = []
    for name in ("image_features", "image_hidden"):
        plain = getattr(OpenClipTowers, name)

        def counted(towers: OpenClipTowers, images: Tensor, plain: Any = plain) -> Tensor:
            seen.append(len(images))
            return plain(towers, images)

        monkeypatch.setattr(OpenClipTowers, name, counted)
    return seen
