"""What a round is about: the classes, the examples that serve it, and the batches drawn from them.

These are the contracts between ``data`` and everything to its right. The label space of a round is
``(*protected, target)``: class index k < m is protected task k, class index m is the target. Classes left alone take
no part.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from holdfast.data.task import TaskSpec
from holdfast.errors import UserError

if TYPE_CHECKING:  # listing, checking and retrieving data need no torch
    import torch
    from torch import Tensor


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

    @property
    def key(self) -> Hashable:
        """Which pictures these are, in their order, with which classes."""
        return self.pixels.size, self.ids, self.labels.tobytes()

    def images(self, positions: np.ndarray | slice = slice(None)) -> Tensor:
        """uint8 pictures at the given positions of this set."""
        return self.pixels.read(self.rows[positions])

    def at(self, positions: np.ndarray) -> LabelledSet:
        """The examples at some positions."""
        ids = tuple(self.ids[place] for place in positions)
        return LabelledSet(self.pixels, self.rows[positions], self.labels[positions], ids)

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
    constraint_views: View | None = None  # [n · V] how steps see constraint images; None: the evaluation view alone

    @property
    def views_each(self) -> int:
        """V, the views of a constraint image; view v of image i is row i · V + v."""
        return 1 if self.constraint_views is None else len(self.constraint_views.box) // len(self.constraint)


@dataclass(frozen=True)
class View:
    """The crop of each picture: a box in [0, 1], an angle and a mirror flag. One view can go through two models."""

    box: Tensor  # [n, 4] float32: left, top, width, height
    flip: Tensor  # [n] bool
    angle: Tensor | None = None  # [n] float32, in radians: the crop is turned by it; None: no crop is

    def __getitem__(self, item: Tensor | slice) -> View:
        return View(self.box[item], self.flip[item], None if self.angle is None else self.angle[item])


@dataclass(frozen=True)
class Draw:
    """The positions that make up one step, drawn for all ranks together; each rank takes its share of them.

    Target pairs and negatives are in random order: the first of them are a random sample of the step's.
    """

    target: np.ndarray  # [B] positions in RoundData.target, no repeats
    negatives: np.ndarray  # [N] positions in RoundData.negatives, no repeats
    tasks: np.ndarray  # [|B_c|] protected tasks, no repeats
    protected: np.ndarray  # [|B_c| * |B_k|] positions in RoundData.constraint, grouped by task
    view_seed: int  # seeds the random views of this step


@dataclass(frozen=True)
class TextRows:
    """Where the tokens of n texts [n, L] stand in rows [R, W]."""

    source: Tensor  # [R, W] place in the flattened tokens; 0 where a row is empty
    text: Tensor  # [R, W] which text a place belongs to; -1: none
    position: Tensor  # [R, W] position within that text
    end: Tensor  # [n] place of each text's end in the flattened rows

    def map(self, function: Callable[[Tensor], Tensor]) -> TextRows:
        """The same plan with a function applied to each tensor (moving it to a device)."""
        return TextRows(*(function(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True)
class Kept:
    """Features of a frozen tower, or of all of it but its last layer, computed once: of a set, or of a batch's rows.

    ``tower`` names what made them (:mod:`holdfast.train.feature_cache`). A model that carries the name has the same
    frozen part, and goes on from these features in place of computing them again.
    """

    features: Tensor  # [n, width]
    tower: str

    def rows(self, positions: Tensor) -> Kept:
        """Those at the given positions."""
        return Kept(self.features[positions], self.tower)

    def first(self, count: int) -> Kept:
        """The first of them, as a view."""
        return Kept(self.features[:count], self.tower)


@dataclass(frozen=True)
class KeptImages:
    """E1 of the evaluation views of a round's pictures, or what the last layer sees of them: [n, width] each."""

    target: Kept
    negatives: Kept
    protected: Kept


@dataclass(frozen=True)
class KeptTexts:
    """Ē2 of a round's texts, [n, text_width] each."""

    target: Kept
    negatives: Kept
    prompts: Kept


@dataclass(frozen=True)
class Images:
    """Pictures of a batch, for a model to encode: ``model.image_features(batch.target_images)``.

    They are normalised pixels or, where the image tower (or all of it but its last layer) is frozen and every step sees
    the evaluation view, features that were computed once. A method that asks a model for features need not know which.
    """

    read: Tensor | None  # [n, 3, S, S] float and normalised, on the training device
    kept: Kept | None = None  # in place of pixels

    def __len__(self) -> int:
        values = self.read if self.kept is None else self.kept.features
        return 0 if values is None else len(values)

    def first(self, count: int) -> Images:
        """The first of them, as a view."""
        return Images(None if self.read is None else self.read[:count], self.kept and self.kept.first(count))

    @property
    def pixels(self) -> Tensor:
        """Normalised pixels, [n, 3, S, S]; an error where they were not read."""
        if self.read is None:
            raise UserError(
                "a step asks for pixels that were not read",
                expected="features, by model.image_features(batch.target_images), of the round's new or old model",
                found="a frozen image tower and no random views: its features were computed once, in place of pixels",
                do="ask one of those models for features, or set `reads_pixels = True` in the method",
            )
        return self.read


@dataclass(frozen=True)
class Texts:
    """Texts of a batch, for a model to encode: ``model.text_features(batch.target_texts)``."""

    tokens: Tensor  # [n, L]
    kept: Kept | None = None  # features of a frozen text tower, which spare computing them


@dataclass(frozen=True)
class Batch:
    """One step's share of a rank, on the training device. Pictures and texts are encoded by asking a model."""

    target_images: Images  # [B]
    target_texts: Texts  # [B]
    target_index: Tensor  # [B] positions in D, for the moving averages
    negative_images: Images  # [N]
    negative_texts: Texts  # [N]
    negative_index: Tensor  # [N]
    protected_images: Images  # [P]
    protected_task: Tensor  # [P] task id = class index
    protected_index: Tensor  # [P] positions in the constraint set
    tasks: Tensor  # [|B_c|] tasks sampled in this step, on all ranks together
    target_total: int  # B over all ranks
    negative_total: int
    protected_total: int
    text_rows: TextRows | None = None  # how target, negative and prompt tokens share rows, where the towers can
    prompts: Kept | None = None  # features of all class prompts under a frozen text tower
    target_images_again: Images | None = None  # [B] through a second random view, for methods that take two
    protected_images_again: Images | None = None  # [P]
    protected_view: Tensor | None = None  # [P] rows of RoundData.constraint_views; None: the evaluation view

    @property
    def protected_row(self) -> Tensor:
        """[P] where something is found that was computed for each view of each constraint image."""
        return self.protected_index if self.protected_view is None else self.protected_view

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return _moved(self, device)


def _moved(values: Any, device: torch.device) -> Any:
    """The same with every tensor in it on a device."""
    from torch import Tensor

    if isinstance(values, Tensor):
        return values.to(device, non_blocking=True)
    if is_dataclass(values) and not isinstance(values, type):
        return replace(values, **{field.name: _moved(getattr(values, field.name), device) for field in fields(values)})
    return values


def label_index(classes: Sequence[str]) -> dict[str, int]:
    """Class name -> index in the label space."""
    return {name: index for index, name in enumerate(classes)}
