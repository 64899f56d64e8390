"""The classifier: two towers, task heads and class prompts (or a linear head) over one label space."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.data.round import Images, Kept, TextRows, Texts
from holdfast.errors import UserError, nearest
from holdfast.model.copies import light_copy
from holdfast.model.heads import HeadRound, TaskHeads
from holdfast.model.prompt_features import prompt_backbone
from holdfast.model.prompts import class_means, tokenize_prompts
from holdfast.model.towers import Preprocess, TwoTowers


def full_precision(values: Tensor) -> Tensor:
    """bf16 and fp16 become float32; float32 and float64 stay what they are."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def unit(features: Tensor) -> Tensor:
    """L2-normalise in full precision."""
    return functional.normalize(full_precision(features), dim=-1)


def similarity(left: Tensor, right: Tensor) -> Tensor:
    """s_ij = left_i · right_j in full precision, under autocast too."""
    with torch.autocast(left.device.type, enabled=False):
        return full_precision(left) @ full_precision(right).T


def _rows(tokens: Sequence[Tensor]) -> Tensor:
    """Texts that were shortened to different lengths, one below the other: what is behind an end is never read."""
    length = max(token.shape[1] for token in tokens)
    return torch.cat([functional.pad(token, (0, length - token.shape[1])) for token in tokens])


def _tokens(texts: Tensor | Texts) -> Tensor:
    return texts.tokens if isinstance(texts, Texts) else texts


def _held(texts: Tensor | Texts) -> Kept | None:
    return texts.kept if isinstance(texts, Texts) else None


def _kept(values: Sequence[Kept | None], tower: str | None) -> tuple[Tensor, ...] | None:
    """Kept features, where all of them are there and the tower's own."""
    found = tuple(item.features for item in values if item is not None and item.tower == tower)
    return found if len(found) == len(values) else None


class Classifier(nn.Module):
    """s_c(x) / tau_0 over the classes of a label space.

    With prompts, s_c(x) = E1(x) · E2_c, where E2_c is the mean over the class's prompts of W_c Ē2(t), normalised.
    With ``linear`` set, its row c stands in for E2_c.
    """

    prompt_tokens: Tensor
    prompt_class: Tensor

    def __init__(
        self,
        towers: TwoTowers,
        classes: Sequence[str],
        prompts: Sequence[Sequence[str]],
        class_temperature: float,
        heads: TaskHeads | None = None,
    ) -> None:
        super().__init__()
        if not class_temperature > 0:
            raise UserError("the class temperature must be positive", found=str(class_temperature))
        self.towers = towers
        self.heads = heads if heads is not None else TaskHeads(towers.embed_dim, towers.text_width)
        self.classes = tuple(classes)
        self.prompts = tuple(tuple(group) for group in prompts)
        self.class_temperature = float(class_temperature)
        self.linear: nn.Parameter | None = None
        tokenized = tokenize_prompts(towers.tokenize, self.classes, self.prompts)
        self._single = tokenized.single
        self._rows: Tensor | None = None
        device = towers.projection.device
        self.register_buffer("prompt_tokens", towers.shorten(tokenized.tokens).to(device), persistent=False)
        self.register_buffer("prompt_class", tokenized.class_of.to(device), persistent=False)

    @property
    def preprocess(self) -> Preprocess:
        """The towers' evaluation view."""
        return self.towers.preprocess

    def image_features(self, images: Tensor | Images) -> Tensor:
        """E1: pictures of a batch, or normalised pixels [n, 3, S, S] -> [n, D]; L2-normalised, if towers say so."""
        if isinstance(images, Images):
            if images.kept is not None:
                return self.image_features_together(images)[0]
            images = images.pixels
        return self.finished(self.towers.image_features(images))

    def finished(self, features: Tensor) -> Tensor:
        """E1 as it is compared, of what the tower says: L2-normalised, if towers say so, in full precision."""
        return unit(features) if self.towers.unit_features else full_precision(features)

    def image_features_together(self, *images: Images) -> tuple[Tensor, ...]:
        """The same for several kinds of a batch's pictures, in one pass of the tower: [n, D] each."""
        held = [image.kept for image in images]
        kept = _kept(held, self.towers.kept_images)
        if kept is not None:
            return kept
        hidden = _kept(held, self.towers.kept_hidden)
        if hidden is not None:  # the last layer is each model's own
            features = self.finished(self.towers.project(torch.cat(hidden)))
        else:
            features = self.image_features(torch.cat([image.pixels for image in images]))
        return features.split([len(image) for image in images])

    def text_features(self, texts: Tensor | Texts, head: int | None = None) -> Tensor:
        """E2, L2-normalised: texts of a batch, or tokens [n, L] -> [n, D]; ``head`` is a class, None is plain W."""
        kept = _kept([_held(texts)], self.towers.kept_texts)
        return self._text_features(self.towers.text_backbone(_tokens(texts)) if kept is None else kept[0], head)

    def class_features(self, prompts: Kept | None = None) -> Tensor:
        """[K, D]: mean over a class's prompts of their features under its own head, normalised again.

        ``prompts`` are a batch's features of the class prompts, where they are kept.
        """
        kept = _kept([prompts], self.towers.kept_texts)
        backbone = prompt_backbone(self.towers, self.prompt_tokens) if kept is None else kept[0]
        return self.class_features_of(backbone)

    def text_features_together(
        self,
        captions: Tensor | Texts,
        head: int,
        plain: Tensor | Texts,
        rows: TextRows | None = None,
        prompts: Kept | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Captions under one class's head, other texts under plain W, and the class features, in one pass of the tower.

        The same values as two calls of :meth:`text_features` and one of :meth:`class_features`. ``rows`` says how the
        texts, in this order, may share rows; ``prompts`` are features of the class prompts, where they are kept.
        """
        of_captions, of_plain, of_prompts = self._backbones(captions, plain, rows, prompts)
        return (
            self._text_features(of_captions, head),
            self._text_features(of_plain, None),
            self.class_features_of(of_prompts),
        )

    def _backbones(
        self, captions: Tensor | Texts, plain: Tensor | Texts, rows: TextRows | None, prompts: Kept | None
    ) -> Sequence[Tensor]:
        """Ē2 of captions, other texts and class prompts: kept, or computed in one pass."""
        kept = _kept([_held(captions), _held(plain), prompts], self.towers.kept_texts)
        if kept is not None:
            return kept
        tokens = [_tokens(captions), _tokens(plain), self.prompt_tokens]
        backbone = self.towers.text_backbone_in_rows(_rows(tokens), rows)
        return backbone.split([len(token) for token in tokens])

    def _text_features(self, backbone: Tensor, head: int | None) -> Tensor:
        with torch.autocast(backbone.device.type, enabled=False):
            backbone = full_precision(backbone)
            projected = self._plain(backbone)
            if head is not None:
                change = self.heads.change_of_one(backbone, self.classes[head])
                projected = projected if change is None else projected + change
            return unit(projected)

    def class_features_of(self, backbone: Tensor) -> Tensor:
        """Class features from Ē2 of the class prompts, in the order of ``prompt_tokens``: [P, text_width] -> [K, D]."""
        with torch.autocast(backbone.device.type, enabled=False):
            backbone = full_precision(backbone)
            projected = self._plain(backbone)
            change = self.heads.change(backbone, self._head_rows(backbone.device))
            features = unit(projected if change is None else projected + change)
            return features if self._single else class_means(features, self.prompt_class, len(self.classes))

    def _head_rows(self, device: torch.device) -> Tensor:
        """Row of each prompt's class in each round's factors, [rounds, P]; computed anew when a round was added."""
        rows = self._rows
        if rows is None or rows.shape[0] != len(self.heads.rounds) or rows.device != device:
            with torch.inference_mode(False):  # the cached rows must serve training too
                rows = self._rows = self.heads.rows_of(self.classes).to(device)[:, self.prompt_class]
        return rows

    def _plain(self, backbone: Tensor) -> Tensor:
        # The change is added to this product, never to W itself: with U = 0 the sum is the old value bit for bit.
        projected = backbone @ self.towers.projection
        bias = self.towers.projection_bias
        return projected if bias is None else projected + bias

    def class_matrix(self, prompts: Kept | None = None) -> Tensor:
        """What images are compared with, [K, D]: the linear head where there is one, else the prompts' features."""
        return self.linear if self.linear is not None else self.class_features(prompts)

    def logits(self, images: Tensor | Images, class_matrix: Tensor | None = None) -> Tensor:
        """s_c(x) / tau_0: pictures as for :meth:`image_features` -> [n, K].

        ``class_matrix`` may be passed in where many batches share it.
        """
        matrix = self.class_matrix() if class_matrix is None else class_matrix
        return self.logits_of(self.image_features(images), matrix)

    def logits_of(self, features: Tensor, class_matrix: Tensor) -> Tensor:
        """The same of E1, [n, D] -> [n, K]."""
        return similarity(features, class_matrix) / self.class_temperature

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        return self.logits(images)

    def begin_round(self, rank: int, seed: int) -> HeadRound:
        """Append a head with U = 0 for every class of the label space; the logits do not change."""
        added = self.heads.begin_round(self.classes, rank, seed)
        projection = self.towers.projection
        self.heads.to(device=projection.device, dtype=projection.dtype)
        return added

    def use_linear(self) -> nn.Parameter:
        """Classify with a linear head from now on: the one there is, or one initialised from the prompts' features."""
        if self.linear is None:
            with torch.no_grad():
                self.linear = nn.Parameter(self.class_features().clone())
        return self.linear

    def class_index(self, name: str) -> int:
        """Index of a class in the label space."""
        try:
            return self.classes.index(name)
        except ValueError as error:
            message = f"the model has no class {name!r}"
            raise UserError(message, do=nearest(name, self.classes)) from error

    def with_classes(
        self, classes: Sequence[str], prompts: Sequence[Sequence[str]], class_temperature: float | None = None
    ) -> Classifier:
        """The same towers and heads, shared and not copied, over another label space."""
        temperature = self.class_temperature if class_temperature is None else class_temperature
        other = Classifier(self.towers, classes, prompts, temperature, self.heads.shared())
        if self.linear is not None:
            with torch.no_grad():
                other.linear = nn.Parameter(self.linear[self._linear_rows(classes)].clone())
        return other

    def _linear_rows(self, classes: Sequence[str]) -> list[int]:
        unknown = [name for name in classes if name not in self.classes]
        if unknown:
            raise UserError(
                f"the model's linear head has no row for {', '.join(unknown[:5])}",
                expected="classes that the model was trained on: without a text tower it cannot be given new ones",
                do=nearest(unknown[0], self.classes),
            )
        return [self.class_index(name) for name in classes]

    def copy(self) -> Classifier:
        """A deep copy that can be trained without touching this one."""
        return copy.deepcopy(self)

    def copy_sharing(self, shared: Iterable[tuple[Tensor, Tensor]]) -> Classifier:
        """A copy that nothing trains, which holds the memory of other tensors in place of some of this model's own.

        ``shared`` are pairs of this model's parameter or buffer and of a tensor with the same values, which may be
        itself. Whoever writes to such a tensor changes every model that holds it: for models that are only looked at.
        """
        pairs = list(shared)
        light = light_copy(self, {id(own): other for own, other in pairs})
        if light is not None:
            return light
        memo: dict[int, Any] = {}
        for own, other in pairs:
            memory = other.detach()
            memo[id(own)] = nn.Parameter(memory, requires_grad=False) if isinstance(own, nn.Parameter) else memory
        copied: Classifier = copy.deepcopy(self, memo)
        return copied.requires_grad_(False).eval()

    def copy_with_own_last_layer(self) -> Classifier:
        """A copy whose image tower's last layer may be written to; everything else is shared with this model."""
        own = {id(parameter) for parameter in self.towers.image_projection_parameters()}
        tensors = [*self.parameters(), *self.buffers()]
        return self.copy_sharing((tensor, tensor) for tensor in tensors if id(tensor) not in own)

    def frozen_copy(self) -> Classifier:
        """A deep copy that nothing trains: the old model w_old of a round."""
        frozen = self.copy().requires_grad_(False)
        return frozen.eval()


@torch.no_grad()
def class_matrices(models: Sequence[Classifier]) -> list[Tensor]:
    """Class matrices of models that share their text tower, prompts and label space: one pass of that tower."""
    first = models[0]
    if first.linear is not None or len(models) == 1:
        return [model.class_matrix() for model in models]
    backbone = prompt_backbone(first.towers, first.prompt_tokens)
    return [model.class_features_of(backbone) for model in models]
