"""The contract of a method: a module that turns a batch into losses. It never calls backward or step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.data.round import Batch, Kept, LabelledSet, RoundData, Texts, View
from holdfast.errors import UserError
from holdfast.model.classifier import Classifier, similarity
from holdfast.model.compute import on_side_stream
from holdfast.model.feature_store import encode_set
from holdfast.objective.estimators import commit_all
from holdfast.runtime import sum_over_ranks, sums_by, world_size


@dataclass(frozen=True)
class StepOutput:
    """What a step yields: terms to differentiate (their sum), and named values to log.

    ``parts`` is keyed by what a term is for (``target``, ``retention``); the loop measures each one's share of the
    gradient. ``task_losses`` [m] is for methods that want per-task gradients, which the loop computes.
    """

    parts: Mapping[str, Tensor]
    values: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # scalars, no gradient
    per_task: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # [m] each, no gradient
    task_losses: Tensor | None = None

    @property
    def surrogate(self) -> Tensor:
        """The scalar to call backward on."""
        return torch.stack(tuple(self.parts.values())).sum()


@dataclass(frozen=True)
class Phase:
    """A stretch of the run in which some parameters are trained. Most methods have one phase: everything, always."""

    name: str
    share: float  # of the run's steps
    parameters: tuple[nn.Parameter, ...] | None = None  # None: every parameter that requires a gradient


Total = Callable[[Tensor], Tensor]


def as_it_is(sums: Tensor) -> Tensor:
    """Nothing to add: this rank sees every entry."""
    return sums


class Method(nn.Module):
    """Base of all methods. Subclasses set up their state in :meth:`prepare` and write one :meth:`forward`."""

    uses_heads: bool = False  # whether the model gets task-dependent heads
    linear: ClassVar[bool] = False  # whether it classifies with a linear head, initialised from the prompts
    uses_negatives: ClassVar[bool] = True  # whether its steps encode the negatives
    needs_task_gradients: ClassVar[bool] = False  # whether the loop calls adjust_gradients
    graph_safe: ClassVar[bool] = False  # whether every step runs the same kernels: nothing is decided on the host
    reads_texts: ClassVar[bool] = False  # whether it cannot do without captions: an image classifier has none
    reads_pixels: ClassVar[bool] = False  # whether a step takes batch.target_images.pixels, not only models' features

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model
        self._old: list[Classifier] = []  # in a list: the frozen model is no part of this module's state

    @property
    def old(self) -> Classifier:
        """w_old, frozen."""
        return self._old[0]

    @property
    def prepared_with(self) -> tuple[Classifier, ...]:
        """w_old, once the method has been prepared."""
        return tuple(self._old)

    def begin_heads(self, rank: int, seed: int) -> None:
        """Add this round's task-dependent heads to the model; called once, before :meth:`prepare`."""
        self.model.begin_round(rank, seed)

    def prepare(self, old: Classifier, data: RoundData) -> None:
        """Remember the frozen old model; subclasses size their estimators to the data and cache old losses."""
        self.check()
        self._old[:] = [old]

    def check(self) -> None:
        """Refuse a method that this model cannot be trained by, before anything is computed."""
        self.check_trainable()
        if self.reads_texts and self.model.linear is not None:
            raise UserError(
                f"the method {type(self).__name__} contrasts images with captions, and this model has no text tower",
                do='choose method.name = "holdfast", "refit", "finetune" or "cross_entropy"',
            )

    def check_trainable(self) -> None:
        """Refuse a method that is left nothing to train, before anything is computed."""
        if not self.trainable():
            heads = " or [model] head_rank above 0" if self.uses_heads else ", or choose a method with heads"
            raise UserError(
                f"the method {type(self).__name__} has nothing to train: all its weights are frozen",
                expected="a tower, heads or a linear head that is trained (a method makes weights of its own in "
                "__init__)",
                do=f'set [model] freeze to "nothing", "backbones", "image" or "text"{heads}',
            )

    def forward(self, batch: Batch) -> StepOutput:
        """Losses of one step."""
        raise NotImplementedError

    def adjust_gradients(self, gradient: Tensor, task_gradients: Tensor, total: Total = as_it_is) -> Tensor:
        """A replacement for the flat gradient [p], given the tasks' gradients [m, p].

        Where weights are sharded, a rank sees its part of the p entries: what is summed over entries (an inner product)
        goes through ``total``, which adds the ranks' sums.
        """
        raise NotImplementedError

    def phases(self) -> tuple[Phase, ...]:
        """The phases of the run, in order; shares add up to 1."""
        return (Phase("train", 1.0),)

    def begin_phase(self, phase: int) -> None:
        """Called when a phase starts (and again when a run resumes in it)."""

    def commit(self, finite: Tensor) -> None:
        """Make the step's updates of moving averages, once the step has proved finite."""
        commit_all(self, finite)

    def trainable(self) -> list[nn.Parameter]:
        """Parameters that require a gradient."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class Encoded:
    """Features of a batch, L2-normalised."""

    target_images: Tensor  # [B, D]
    target_texts: Tensor  # [B, D] under the target's head
    negative_images: Tensor  # [N, D]
    negative_texts: Tensor  # [N, D] under plain W, or a head of their own
    protected_images: Tensor  # [P, D]
    classes: Tensor  # [K, D]

    @property
    def counts(self) -> list[int]:
        """B, N, P."""
        return [len(self.target_images), len(self.negative_images), len(self.protected_images)]


EncodeTexts = Callable[[Classifier, Texts], Tensor]


def encode(model: Classifier, batch: Batch, encode_negatives: EncodeTexts | None = None) -> Encoded:
    """All pictures of a step in one pass of the image tower, all texts in one pass of the text tower.

    ``encode_negatives`` encodes the negatives' captions, in a pass of its own, where they are not under plain W.
    """
    fast = model.towers.has_fast_path  # other towers were not tried on two streams
    texts = on_side_stream(batch.target_index.device, lambda: _texts(model, batch, encode_negatives), wanted=fast)
    target_images, negative_images, protected_images = model.image_features_together(
        batch.target_images, batch.negative_images, batch.protected_images
    )
    target_texts, negative_texts, classes = texts()
    return Encoded(target_images, target_texts, negative_images, negative_texts, protected_images, classes)


def _texts(model: Classifier, batch: Batch, encode_negatives: EncodeTexts | None) -> tuple[Tensor, Tensor, Tensor]:
    """Target texts, negative texts and classes."""
    target = len(model.classes) - 1  # the target comes last in the label space
    if model.linear is not None:  # its rows are the classes' features, and no text is read
        nothing = model.linear.new_zeros(0, model.towers.embed_dim)
        return nothing, nothing, model.linear
    if encode_negatives is None:
        return model.text_features_together(
            batch.target_texts, target, batch.negative_texts, batch.text_rows, batch.prompts
        )
    # The rows were planned for all texts together: without the negatives texts have rows of their own.
    of_target, _, classes = model.text_features_together(
        batch.target_texts, target, _no_texts(batch.negative_texts), None, batch.prompts
    )
    return of_target, encode_negatives(model, batch.negative_texts), classes


def _no_texts(texts: Texts) -> Texts:
    kept = texts.kept
    return Texts(texts.tokens[:0], None if kept is None else Kept(kept.features[:0], kept.tower))


def class_logits(features: Tensor, classes: Tensor, class_temperature: float) -> Tensor:
    """s_c(x)/tau_0: [n, D], [K, D] -> [n, K]."""
    return similarity(features, classes) / class_temperature


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """l(w, x, y), one value an example: [n]."""
    return F.cross_entropy(logits, labels, reduction="none")


def balanced_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the classes in the step (on all ranks) of their mean cross-entropy; this rank's share, for DDP."""
    losses = cross_entropy(logits, labels)
    zeros = losses.new_zeros(logits.shape[1])
    count = sum_over_ranks(zeros.index_add(0, labels, torch.ones_like(losses)))
    per_class = sums_by(labels, losses, logits.shape[1]) / count.clamp(min=1)
    return world_size() * per_class.sum() / (count > 0).sum()


def soft_error(logits: Tensor, labels: Tensor) -> Tensor:
    """1 - softmax(z)_y, a smooth stand-in for the 0-1 loss: [n]."""
    return 1 - logits.softmax(dim=1).gather(1, labels[:, None]).squeeze(1)


LOSSES = {"cross_entropy": cross_entropy, "soft_error": soft_error}


def clean_logits(model: Classifier, examples: LabelledSet, batch: int = 256) -> Tensor:
    """Logits of a model on the evaluation view of every example of a set: [n, K], on the model's device."""
    return _logits(model, examples, None, None, batch)


def constraint_logits(model: Classifier, data: RoundData, batch: int = 256) -> Tensor:
    """Logits of a model on every view that steps may have of every constraint image: [n · V, K]."""
    if data.constraint_views is None:
        return clean_logits(model, data.constraint, batch)
    rows = np.repeat(np.arange(len(data.constraint)), data.views_each)
    return _logits(model, data.constraint, rows, data.constraint_views, batch)


@torch.no_grad()
def _logits(
    model: Classifier, examples: LabelledSet, positions: np.ndarray | None, view: View | None, batch: int
) -> Tensor:
    weight, matrix = model.towers.projection, model.class_matrix()
    encoded = encode_set(model.towers, examples, weight, batch=batch, positions=positions, view=view)
    parts = [model.logits_of(model.finished(features), matrix) for _, features in encoded]
    return torch.cat(parts) if parts else matrix.new_zeros(0, len(model.classes))
