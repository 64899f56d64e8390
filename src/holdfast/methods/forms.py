"""Forms of a method: this project's default, the paper's text, and the code that its authors released.

Besides its loss a form says what is trained and handed to the certificate. Both published forms hand over the best
checkpoint as it was trained: no interpolation, no refit, no target bias. ``authors`` also does what the released code
does and the paper does not say (docs/explanation/paper.md): the gradient of the protected tasks' term is multiplied by
tau_0, negatives have a head of their own, constraint images are seen through random views under the new model alone,
pictures are turned and mirrored, and the learning rate warms up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from holdfast.config.method import ContrastConfig
from holdfast.data.round import Batch, Texts
from holdfast.methods.base import Encoded, EncodeTexts, Method, encode
from holdfast.model.classifier import Classifier, full_precision, unit

if TYPE_CHECKING:
    from holdfast.config.round import CandidatesConfig, TrainConfig

Form = Literal["default", "published", "authors"]
NEGATIVES = "(negatives)"  # the head of the negatives' captions, beside those of the classes

# The checkpoint as it was trained, and nothing made from it.
_AS_TRAINED: dict[str, Any] = {
    "checkpoints": ("best",),
    "interpolation": (1.0,),
    "refit_target": False,
    "target_bias": (0.0,),
}
_WARMUP, _AUTHORS_STEPS = 500, 24_000  # of the authors' runs on BDD100K
_ROTATION = 15.0


class FormConfig(ContrastConfig):
    """Settings of a method that has the paper's form and its authors' beside the default."""

    form: Form = "default"

    @property
    def is_authors(self) -> bool:
        """Whether this is the authors' code, not the paper's text."""
        return self.form == "authors"

    def section_defaults(self, train: TrainConfig) -> dict[str, dict[str, Any]]:
        """What a form says besides [method]. A shorter run than the authors' warms up for the same share of it."""
        if self.form == "default":
            return {}
        if not self.is_authors:
            return {"candidates": _AS_TRAINED, "train": {"constraint_views": 1}}
        warmup = min(_WARMUP, train.steps * _WARMUP // _AUTHORS_STEPS)
        return {
            "candidates": _AS_TRAINED,
            "train": {"warmup_steps": warmup, "flip": True, "rotation": _ROTATION, "constraint_views": 1},
        }

    def check_candidates(self, candidates: CandidatesConfig) -> None:
        """What is made from a checkpoint is no part of either published form."""
        if self.form == "default":
            return
        for key, value in _AS_TRAINED.items():
            if getattr(candidates, key) != value:
                shown = str(list(value) if isinstance(value, tuple) else value).lower()
                raise ValueError(
                    f'method.form = "{self.form}" tests the checkpoint as it was trained, with candidates.{key} = '
                    f"{shown}: leave out candidates.{key}, or the form"
                )

    def retention_scale(self, class_temperature: float) -> float:
        """tau_0 in the authors' code: beta and alpha of the paper's grids are in its units."""
        return class_temperature if self.is_authors else 1.0

    def contrast_set(self, negatives: int) -> float:
        """Negatives of a pair's contrast set, of which the pair itself is one more; the authors leave the pair out."""
        return math.inf if self.is_authors else negatives


class FormMethod(Method):
    """A method that has forms. In the authors' code the negatives' captions have a head of their own."""

    def __init__(self, model: Classifier, form: FormConfig) -> None:
        super().__init__(model)
        self.form = form
        self._encode_negatives: EncodeTexts | None = None  # None: plain W, as without heads

    def begin_heads(self, rank: int, seed: int) -> None:
        """A head for every class; in the authors' code also one for the negatives, new in every round."""
        if not self.form.is_authors:
            super().begin_heads(rank, seed)
            return
        heads, projection = self.model.heads, self.model.towers.projection
        heads.begin_round((*self.model.classes, NEGATIVES), rank, seed)
        heads.to(device=projection.device, dtype=projection.dtype)
        self._encode_negatives = negatives_under_their_head

    def encode(self, batch: Batch) -> Encoded:
        """Features of a batch."""
        return encode(self.model, batch, self._encode_negatives)


def negatives_under_their_head(model: Classifier, negatives: Texts) -> Tensor:
    """E2 of the negatives' captions under this round's head of their own: [N, D]."""
    kept, towers, added = negatives.kept, model.towers, model.heads.rounds[-1]
    if kept is not None and kept.tower == towers.kept_texts:
        backbone = kept.features
    else:
        backbone = towers.text_backbone(negatives.tokens)
    with torch.autocast(backbone.device.type, enabled=False):
        backbone = full_precision(backbone)
        projected = backbone @ towers.projection
        if towers.projection_bias is not None:
            projected = projected + towers.projection_bias
        (row,) = added.rows_of([NEGATIVES])
        return unit(projected + added.change_of_one(backbone, row))
