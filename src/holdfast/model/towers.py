"""The two-tower protocol: what holdfast asks of a model, and nothing more.

OpenCLIP is one adapter (:mod:`holdfast.model.openclip_towers`), transformers' CLIP and SigLIP another
(:mod:`holdfast.model.transformers_towers`), towers put together from other parts a third (:mod:`holdfast.model.parts`,
:mod:`holdfast.model.conse`).
An image classifier has no texts (:mod:`holdfast.model.image_towers`).
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from holdfast.config.round import Freeze
from holdfast.data.images import interpolation_filter
from holdfast.data.round import LabelledSet, PairSet, TextRows, View
from holdfast.data.transforms import normalize_views
from holdfast.errors import UserError

_LARGEST_SIDE = 16384  # pixels


@dataclass(frozen=True)
class Preprocess:
    """The evaluation view: shorter side resized to ``size``, centre crop, scaled to [0, 1], normalised.

    ``interpolation`` is a filter, or a filter and another framing (:func:`holdfast.data.images.evaluation_view`).
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"  # or "bilinear"; "bilinear:256" crops a larger picture, "bicubic:squash" none

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 pictures [n, 3, S, S] -> float32, (x / 255 - mean) / std, on the device they are on."""
        return normalize_views(pixels, self.mean, self.std)

    def batches(
        self,
        examples: LabelledSet | PairSet,
        like: Tensor,
        *,
        positions: np.ndarray | None = None,
        batch: int = 256,
        view: View | None = None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Normalised pixels of a set, or of some of its positions, on the device and in the type of ``like``.

        Whoever encodes a whole set goes through this. A ``view`` has one entry a position.
        """
        count = len(examples) if positions is None else len(positions)
        for start in range(0, count, batch):
            part = slice(start, start + batch)
            pixels = examples.images(part if positions is None else positions[part])
            through = None if view is None else view[part]
            pixels = pixels.to(like.device, non_blocking=True)
            yield part, normalize_views(pixels, self.mean, self.std, through, like.dtype)

    def to_json(self) -> dict[str, Any]:
        """JSON that :meth:`from_json` reads back."""
        return {
            "size": self.size,
            "mean": list(self.mean),
            "std": list(self.std),
            "interpolation": self.interpolation,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Preprocess:
        """The inverse of :meth:`to_json`; values that describe no view are refused."""
        size, interpolation = value["size"], value["interpolation"]
        mean, std = tuple(value["mean"]), tuple(value["std"])
        sane = len(mean) == len(std) == 3 and all(math.isfinite(item) for item in (*mean, *std)) and min(std) > 0
        if type(size) is not int or not 0 < size <= _LARGEST_SIDE or not sane:
            raise UserError(
                "the model's preprocessing makes no picture",
                expected="a size in pixels, and mean and std (above 0) of three channels",
                found=f"size {size!r}, mean {mean}, std {std}"[:200],
            )
        interpolation_filter(str(interpolation))
        return cls(size, mean, std, interpolation)


class TwoTowers(nn.Module, ABC):
    """An image tower E1 and a text tower E2 = W · Ē2(u, t) (method section 5)."""

    preprocess: Preprocess
    embed_dim: int  # D
    text_width: int  # width of the text backbone's features
    unit_features: ClassVar[bool] = True  # whether image features are L2-normalised before they are compared
    has_texts: ClassVar[bool] = True  # False for an image classifier: a linear head stands in for the text tower
    # Names under which features of a tower that is frozen are kept (holdfast.train.feature_cache). Copies carry them
    # too.
    kept_images: str | None = None
    kept_hidden: str | None = None  # of an image tower whose last layer alone is trained: what that layer sees
    kept_texts: str | None = None

    @property
    def has_fast_path(self) -> bool:
        """Whether :mod:`holdfast.kernels.fast` computes both towers, where it is switched on."""
        return False

    @property
    def records_steps(self) -> bool:
        """Whether a step over these towers can be recorded as a CUDA graph: nothing in them waits for the device."""
        return self.has_fast_path

    @abstractmethod
    def image_features(self, images: Tensor) -> Tensor:
        """E1 before normalisation: [n, 3, S, S] normalised pixels -> [n, D]."""

    @abstractmethod
    def text_backbone(self, tokens: Tensor) -> Tensor:
        """Ē2: [n, L] tokens -> [n, text_width], before the projection."""

    @property
    @abstractmethod
    def projection(self) -> Tensor:
        """W, laid out for ``backbone @ projection``: [text_width, D]. A parameter of the towers."""

    @property
    def projection_bias(self) -> Tensor | None:
        """What is added after W, [D]; most towers have none."""
        return None

    @property
    def image_projection(self) -> Tensor | None:
        """The last layer of the image tower, laid out for ``hidden @ projection``: [width, D], a view of the parameter.

        None where the tower does not end in a linear map, or keeps it out of reach.
        """
        return None

    @property
    def image_projection_bias(self) -> Tensor | None:
        """What is added after the last layer, [D]; most towers have none."""
        return None

    def image_hidden(self, images: Tensor) -> Tensor:
        """What the last layer sees: [n, 3, S, S] -> [n, width]; asked for only where there is an image_projection."""
        raise NotImplementedError

    def project(self, hidden: Tensor) -> Tensor:
        """The last layer: E1 of :meth:`image_hidden`, before normalisation."""
        projection, bias = self.image_projection, self.image_projection_bias
        assert projection is not None
        return functional.linear(hidden, projection.T.to(hidden), None if bias is None else bias.to(hidden))

    @abstractmethod
    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Texts -> int64 tokens [n, L]; L is the same for every call."""

    def shorten(self, tokens: Tensor) -> Tensor:
        """The tokens without columns that change no feature, [n, L] -> [n, L']; cheap on the CPU only."""
        return tokens

    def lengths(self, tokens: Tensor) -> Tensor | None:
        """Tokens of each text up to its end, [n]; None where texts cannot share rows."""
        del tokens
        return None

    def text_backbone_in_rows(self, tokens: Tensor, rows: TextRows | None) -> Tensor:
        """Ē2 of the same texts, computed in shared rows where the towers can."""
        del rows
        return self.text_backbone(tokens)

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """JSON that :func:`holdfast.model.openclip.build_towers` rebuilds the architecture from (no weights)."""

    @abstractmethod
    def image_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters of the image tower."""

    @abstractmethod
    def text_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters of the text tower, W included."""

    def image_projection_parameters(self) -> list[nn.Parameter]:
        """The last layer of the image tower and its bias: the parameters behind :attr:`image_projection`."""
        last = (self.image_projection, self.image_projection_bias)
        places = {tensor.data_ptr() for tensor in last if tensor is not None}  # views of parameters, or parameters
        return [parameter for parameter in self.image_parameters() if parameter.data_ptr() in places]

    def projection_parameters(self) -> list[nn.Parameter]:
        """W and its bias, as far as they are weights."""
        return [item for item in (self.projection, self.projection_bias) if isinstance(item, nn.Parameter)]

    def image_backbone_parameters(self) -> list[nn.Parameter]:
        """Parameters of the image tower below its last layer: all of them, where it does not end in a linear map."""
        return _without(self.image_parameters(), self.image_projection_parameters())

    def text_backbone_parameters(self) -> list[nn.Parameter]:
        """Parameters of the text tower below W."""
        return _without(self.text_parameters(), self.projection_parameters())

    def left_to_train(self, freeze: Freeze, *, linear: bool = False) -> list[nn.Parameter]:
        """What ``[model] freeze`` leaves to train in the towers; a ``linear`` head takes the text tower's place."""
        if freeze == "backbones":
            if self.image_projection is None and not linear:
                raise UserError(
                    '[model] freeze = "backbones" leaves nothing to train in this image tower',
                    expected="an image tower that ends in a linear layer (OpenCLIP's own vision transformers, CLIP of "
                    "transformers, parts, conse), or a classifier with a linear head",
                    found=f"{type(self).__name__} with an image tower whose last layer is another, or out of reach",
                    do='set [model] freeze to "image", "towers" or "nothing"',
                )
            image, text = self.image_projection_parameters(), self.projection_parameters()
        else:
            image = [] if freeze in ("image", "towers") else list(self.image_parameters())
            text = [] if freeze in ("text", "towers") else list(self.text_parameters())
        return image if linear else [*image, *text]

    def assets(self) -> dict[str, bytes]:
        """Files that a model folder must hold besides weights and spec, by name (a tokenizer's vocabulary)."""
        return {}

    def freeze(self, *, image: bool = False, text: bool = False) -> Self:
        """Take a whole tower out of training. Heads are not the towers' and stay as they are."""
        for frozen, parameters in ((image, self.image_parameters()), (text, self.text_parameters())):
            if frozen:
                for parameter in parameters:
                    parameter.requires_grad_(False)
        return self

    def freeze_backbones(self) -> Self:
        """Take everything but the last layer of each tower out of training; a tower that has none rests as a whole."""
        for parameter in (*self.image_backbone_parameters(), *self.text_backbone_parameters()):
            parameter.requires_grad_(False)
        return self

    def checkpoint_activations(self, enable: bool = True) -> None:
        """Trade time for memory: recompute activations in the backward pass."""
        if enable:
            raise UserError(f"{type(self).__name__} cannot recompute activations", do="leave the option off")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies share the tokenizer: nothing changes it, and making another takes longer than copying the weights."""
        tokenizer = self.__dict__.get("_tokenizer")
        memo[id(tokenizer)] = tokenizer
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def train(self, mode: bool = True) -> Self:
        """Towers never leave eval mode, whatever ``mode`` says.

        BatchNorm statistics that move, or dropout, would break three promises at once: the new model equals the old
        one at the start, all ranks hold the same model, and the walk from old to new is a straight line.
        """
        del mode
        return super().train(False)


class ProjectedTowers(TwoTowers):
    """Towers whose text side ends in a linear layer of their own, taken out of the model that they are made of."""

    weight: nn.Parameter | Tensor  # W
    bias: nn.Parameter | None

    @property
    @override
    def projection(self) -> Tensor:
        return self.weight

    @property
    @override
    def projection_bias(self) -> Tensor | None:
        return self.bias


def _without(parameters: Iterable[nn.Parameter], left_out: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    out = {id(parameter) for parameter in left_out}
    return [parameter for parameter in parameters if id(parameter) not in out]
