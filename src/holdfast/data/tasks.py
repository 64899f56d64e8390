"""What a round is about: the classes, the examples that serve it, and the batches drawn from them.

These are the contracts between ``data`` and everything to its right. The label space of a round is
``(*protected, target)``: class index k < m is protected task k, class index m is the target. Classes left alone take
no part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.data.rows import TextRows


class Role(StrEnum):
    """What an example may be used for. Fixed by content hash, disjoint, written down in the run folder."""

    BASE = "base"  # the old model was made with it
    CONSTRAINT = "constraint"  # training: constraint sets of protected classes, target pairs of the target class
    DEV = "dev"  # all looking and choosing
    SEALED = "sealed"  # opened by a certificate, and by nothing else
    TEST = "test"  # scored once, after the choice


@dataclass(frozen=True)
class TaskSpec:
    """The typed task description of a round.

    ``prompts`` holds, for each class of the label space, the sentences whose mean feature is the class's.
    """

    target: str
    protected: tuple[str, ...]
    prompts: tuple[tuple[str, ...], ...]
    ignored: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """The label space; the target comes last."""
        return (*self.protected, self.target)

    @property
    def num_protected(self) -> int:
        """m, the number of protected tasks."""
        return len(self.protected)

    @property
    def target_index(self) -> int:
        """Class index of the target."""
        return len(self.protected)


class Pixels(Protocol):
    """Decoded evaluation views, all of one size: in memory, or in a packed store on disk."""

    @property
    def size(self) -> int:
        """Side of the square pictures, in pixels."""
        ...

    def __len__(self) -> int: ...

    def read(self, rows: np.ndarray) -> Tensor:
        """Pictures of the given rows: uint8, [n, 3, size, size]."""
        ...


@dataclass(frozen=True)
class LabelledSet:
    """Examples with a class. ``labels`` index into :attr:`TaskSpec.classes`."""

    pixels: Pixels
    rows: np.ndarray  # [n] int64, rows of `pixels`
    labels: np.ndarray  # [n] int64
    ids: tuple[str, ...]  # [n] content hashes

    def __len__(self) -> int:
        return len(self.rows)

    def images(self, positions: np.ndarray | slice = slice(None)) -> Tensor:
        """uint8 pictures at the given positions of this set."""
        return self.pixels.read(self.rows[positions])

    def of_class(self, label: int) -> np.ndarray:
        """Positions of the examples of one class."""
        return np.flatnonzero(self.labels == label)


@dataclass(frozen=True)
class PairSet:
    """Image-text pairs: the target's, or the negatives."""

    pixels: Pixels
    rows: np.ndarray  # [n] int64
    texts: tuple[str, ...]  # [n]
    ids: tuple[str, ...]  # [n]

    def __len__(self) -> int:
        return len(self.rows)

    def images(self, positions: np.ndarray | slice = slice(None)) -> Tensor:
        """uint8 pictures at the given positions of this set."""
        return self.pixels.read(self.rows[positions])


@dataclass(frozen=True)
class RoundData:
    """Everything a round may touch. Test and sealed images are behind a call, so that no stage reads them by chance."""

    tasks: TaskSpec
    target: PairSet  # D
    negatives: PairSet  # D_-
    constraint: LabelledSet  # D_1 … D_m, labels < m
    dev: LabelledSet
    open_test: Callable[[], LabelledSet]  # for the final score only
    open_sealed: Callable[[], LabelledSet]  # for a certificate only
    sealed_ids: tuple[str, ...] = ()  # content hashes; knowing them opens nothing


@dataclass(frozen=True)
class View:
    """Where to look at each picture: a crop box in [0, 1] and a mirror flag. One view can go through two models."""

    box: Tensor  # [n, 4] float32: left, top, width, height
    flip: Tensor  # [n] bool

    def __getitem__(self, item: Tensor | slice) -> View:
        return View(self.box[item], self.flip[item])


@dataclass(frozen=True)
class Draw:
    """The positions that make up one step, drawn for all ranks together; each rank takes its share of them."""

    target: np.ndarray  # [B] positions in RoundData.target, no repeats
    negatives: np.ndarray  # [N] positions in RoundData.negatives, no repeats
    tasks: np.ndarray  # [|B_c|] protected tasks, no repeats
    protected: np.ndarray  # [|B_c| * |B_k|] positions in RoundData.constraint, grouped by task
    view_seed: int  # seeds the random views of this step


@dataclass(frozen=True)
class CachedImages:
    """E1 of pictures under an image tower that is frozen, evaluation views: of whole sets, or of a batch's rows."""

    target: Tensor  # [n, D]
    negatives: Tensor
    protected: Tensor

    def rows(self, target: Tensor, negatives: Tensor, protected: Tensor) -> CachedImages:
        """Those at the given positions."""
        return CachedImages(self.target[target], self.negatives[negatives], self.protected[protected])


@dataclass(frozen=True)
class CachedTexts:
    """Ē2 of texts under a text tower that is frozen: of whole sets, or of a batch's rows."""

    target: Tensor  # [n, text_width]
    negatives: Tensor
    prompts: Tensor  # [P, text_width]; always all of them

    def rows(self, target: Tensor, negatives: Tensor) -> CachedTexts:
        """Those at the given positions."""
        return CachedTexts(self.target[target], self.negatives[negatives], self.prompts)


@dataclass(frozen=True)
class Batch:
    """One step's share of a rank. Images are float and normalised, on the training device."""

    target_images: Tensor  # [B, 3, S, S]
    target_tokens: Tensor  # [B, L]
    target_index: Tensor  # [B] positions in D, for the moving averages
    negative_images: Tensor  # [N, 3, S, S]
    negative_tokens: Tensor  # [N, L]
    negative_index: Tensor  # [N]
    protected_images: Tensor  # [P, 3, S, S]
    protected_old_images: Tensor | None  # another view for w_old; only in the reproduction of the authors' code
    protected_task: Tensor  # [P] task id = class index
    protected_index: Tensor  # [P] positions in the constraint set
    tasks: Tensor  # [|B_c|] tasks sampled in this step, on all ranks together
    target_total: int  # B over all ranks
    negative_total: int
    protected_total: int
    text_rows: TextRows | None = None  # how target, negative and prompt tokens share rows, where the towers can
    cached_images: CachedImages | None = None  # in place of pictures, which are then empty
    cached_texts: CachedTexts | None = None  # in place of tokens

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        moved = {
            field.name: getattr(self, field.name).to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


def label_index(classes: Sequence[str]) -> dict[str, int]:
    """Class name -> index in the label space."""
    return {name: index for index, name in enumerate(classes)}
