"""What a frozen EfficientNet-lite0 says of a picture, computed once and kept on disk: for studies on a CPU.

A round with ``model.freeze = "towers"`` asks the same network about the same pictures before training, at every look,
on the walk back and on test images. Inside :func:`remembered` its answer is looked up by the picture's pixels;
everything else, adapter included, runs as in the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.model.efficientnet import FEATURES, EfficientNetLite0


def keys_of(images: Tensor) -> np.ndarray:
    """A 64-bit key for each picture, of its pixels as bytes; normalised as the published weights expect."""
    pixels = (images * 128 + 127).round().clamp(0, 255).to(torch.uint8).contiguous().numpy()
    words = pixels.reshape(len(pixels), -1).view(np.int64)
    weights = np.random.default_rng(0).integers(-(2**63), 2**63, words.shape[1], dtype=np.int64) | 1
    return (words * weights).sum(axis=1)


class Memory:
    """Features by key, in memory, with a file behind them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.features = np.zeros((0, FEATURES), np.float32)
        self.rows: dict[int, int] = {}
        self.fast: nn.Module | None = None
        if path.exists():
            with np.load(path) as there:
                self.features = there["features"]
                self.rows = {int(key): row for row, key in enumerate(there["keys"])}

    def save(self) -> None:
        keys = np.array(list(self.rows), dtype=np.int64)
        np.savez(self.path, keys=keys, features=self.features)

    def __call__(self, network: EfficientNetLite0, images: Tensor) -> Tensor:
        if any(one.requires_grad for one in network.parameters()) and torch.is_grad_enabled():
            raise RuntimeError("only a frozen network's answers can be remembered")
        keys = [int(key) for key in keys_of(images)]
        new = [place for place, key in enumerate(keys) if key not in self.rows]
        if new:
            self.add([keys[place] for place in new], self.ask(network, images[new]).numpy())
        return torch.from_numpy(self.features[[self.rows[key] for key in keys]])

    def add(self, keys: list[int], features: np.ndarray) -> None:
        self.rows.update((key, len(self.features) + place) for place, key in enumerate(keys))
        self.features = np.concatenate([self.features, features])

    @torch.no_grad()
    def ask(self, network: EfficientNetLite0, images: Tensor) -> Tensor:
        """The network itself, with its norms folded into its convolutions."""
        if self.fast is None:
            self.fast = folded(network)
        parts = [self.fast(images[i : i + 64]).mean(dim=(2, 3)) for i in range(0, len(images), 64)]
        return torch.cat(parts)


def folded(network: EfficientNetLite0) -> nn.Module:
    from benchmarks.scenes import Folded, FoldedBlock

    blocks = [FoldedBlock(block) for block in network._blocks]
    stem, head = Folded(network._conv_stem, network._bn0, True), Folded(network._conv_head, network._bn1, True)
    return nn.Sequential(stem, *blocks, head).to(memory_format=torch.channels_last)


@contextmanager
def remembered(path: Path) -> Iterator[Memory]:
    """Every EfficientNet-lite0 answers from the memory at ``path``; there must be one set of weights only."""
    memory = Memory(path)
    plain = EfficientNetLite0.forward

    def look_up(network: EfficientNetLite0, images: Tensor) -> Tensor:
        return memory(network, images)

    EfficientNetLite0.forward = look_up  # type: ignore[method-assign]
    try:
        yield memory
    finally:
        EfficientNetLite0.forward = plain  # type: ignore[method-assign]
