"""What a frozen EfficientNet-lite0 says of a picture, computed once and kept on disk: for studies on a CPU.

A round with ``model.freeze = "towers"`` asks the same network about the same pictures before training, at every look,
on the walk back and on test images. Inside :func:`remembered` a picture that was encoded beforehand is handed on as one
pixel whose colour is its place in the memory, and the network looks up what it said; a sentence encoder answers once
for the same tokens. Everything else, adapter and W included, runs as in the product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.data import assemble
from holdfast.data.catalogue import Catalogue
from holdfast.data.pixels import Gathered, gather
from holdfast.model.efficientnet import FEATURES, EfficientNetLite0
from holdfast.model.parts import PartTowers


class RowPixels:
    """Pictures of one pixel each whose colour is their row number."""

    def __init__(self, count: int, size: int = 1) -> None:
        self.count, self.size = count, size  # the size is what the pictures would have

    def __len__(self) -> int:
        return self.count

    def read(self, rows: np.ndarray) -> Tensor:
        rows = np.asarray(rows, dtype=np.int64)
        colours = np.stack([rows & 255, rows >> 8 & 255, rows >> 16], axis=1).astype(np.uint8)
        return torch.from_numpy(colours)[:, :, None, None]


def row_of(colours: Tensor) -> Tensor:
    """The row numbers of pictures of one pixel, [n, 3, 1, 1] between 0 and 255."""
    low, middle, high = colours[:, :, 0, 0].round().long().unbind(dim=1)
    return low + 256 * middle + 65536 * high


class Memory:
    """Features by the content hash of a picture, in memory, with a file behind them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.features = torch.zeros(0, FEATURES)
        self.rows: dict[str, int] = {}
        self.sentences: dict[bytes, Tensor] = {}
        if path.exists():
            with np.load(path) as there:
                self.features = torch.from_numpy(there["features"])
                self.rows = {str(one): row for row, one in enumerate(there["ids"])}

    def save(self) -> None:
        np.savez(self.path, ids=np.array(list(self.rows)), features=self.features.numpy())

    @torch.no_grad()
    def encode(self, catalogue: Catalogue, towers: PartTowers, chunk: int = 3000) -> None:
        """Ask the network about every picture of a catalogue that is not known yet."""
        network, view, began = folded(towers.image), towers.preprocess, time.perf_counter()
        places = {str(one): row for row, one in enumerate(catalogue.column("example_id")) if one not in self.rows}
        for start in range(0, len(places), chunk):
            ids = list(places)[start : start + chunk]
            found = gather(catalogue, np.array([places[one] for one in ids]), view.size, view.interpolation)
            if found.problems:
                raise ValueError(f"a picture cannot be read: {found.problems[0]}")
            parts = [
                network(view.normalise(found.pixels.read(found.rows[i : i + 64]))).mean(dim=(2, 3))
                for i in range(0, len(ids), 64)
            ]
            self.rows.update((one, len(self.features) + place) for place, one in enumerate(ids))
            self.features = torch.cat([self.features, *parts])
            self.save()
            print(f"{len(self.rows)} pictures after {time.perf_counter() - began:.0f} s", flush=True)

    def gather(self, catalogue: Catalogue, rows: np.ndarray, size: int, interpolation: str) -> Gathered:
        """In place of :func:`holdfast.data.pixels.gather`."""
        del interpolation
        ids = catalogue.column("example_id")
        known = np.array([self.rows[str(ids[int(row)])] for row in rows], dtype=np.int64)
        return Gathered(RowPixels(len(self.features), size), known, [])

    def look_up(self, network: EfficientNetLite0, images: Tensor) -> Tensor:
        """In place of the network: normalised pictures of one pixel -> [n, 1280]."""
        if torch.is_grad_enabled() and any(one.requires_grad for one in network.parameters()):
            raise RuntimeError("only a frozen network's answers can be remembered")
        return self.features[row_of(images * 128 + 127)]

    def sentence(self, towers: PartTowers, tokens: Tensor, ask: Callable[[PartTowers, Tensor], Tensor]) -> Tensor:
        """In place of the sentence encoder, which is frozen too."""
        key = tokens.cpu().numpy().tobytes()
        if key not in self.sentences:
            with torch.no_grad():
                self.sentences[key] = ask(towers, tokens)
        return self.sentences[key]


def folded(network: EfficientNetLite0) -> nn.Module:
    """The same network with its norms folded into its convolutions."""
    from benchmarks.scenes import Folded, FoldedBlock

    blocks = [FoldedBlock(block) for block in network._blocks]
    stem, head = Folded(network._conv_stem, network._bn0, True), Folded(network._conv_head, network._bn1, True)
    return nn.Sequential(stem, *blocks, head).to(memory_format=torch.channels_last)


@contextmanager
def remembered(memory: Memory) -> Iterator[None]:
    """Every network and sentence encoder answers from the memory; there must be one set of weights only."""
    plain = EfficientNetLite0.forward, PartTowers.text_backbone, assemble.gather

    def forward(network: EfficientNetLite0, images: Tensor) -> Tensor:
        return memory.look_up(network, images)

    def text_backbone(towers: PartTowers, tokens: Tensor) -> Tensor:
        return memory.sentence(towers, tokens, plain[1])

    EfficientNetLite0.forward, PartTowers.text_backbone = forward, text_backbone  # type: ignore[method-assign]
    assemble.gather = memory.gather  # type: ignore[assignment]
    try:
        yield
    finally:
        EfficientNetLite0.forward, PartTowers.text_backbone, assemble.gather = plain  # type: ignore[method-assign]
