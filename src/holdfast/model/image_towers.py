"""An image classifier of timm or torchvision: its backbone as the image tower, and no text tower.

Its logits h(x) · W_c + b_c are those of a :class:`holdfast.model.classifier.Classifier` with a linear head:

    E1(x) = [h(x), 1]  (not normalised),     row c of the head = [W_c, b_c],     tau_0 = 1
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from holdfast.errors import UserError
from holdfast.model.towers import Preprocess, TwoTowers

LIBRARIES = ("timm", "torchvision")


class ImageTowers(TwoTowers):
    """E1 is what the classifier's last linear layer sees, followed by a 1 where that layer has a bias."""

    unit_features = False
    has_texts = False
    text_width = 1

    def __init__(
        self,
        library: str,
        architecture: str,
        arguments: dict[str, Any],
        classes: Sequence[str],
        preprocess: Preprocess,
        model: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.library, self.architecture, self.arguments = library, architecture, copy.deepcopy(arguments)
        self.source_classes = tuple(classes)  # in the order of the source's outputs
        self.preprocess = preprocess
        count = len(self.source_classes)
        self.model = create_model(library, architecture, arguments, count) if model is None else model
        self._head_path, head = find_head(self.model, count)
        self._has_bias = head.bias is not None  # pyright: ignore[reportUnnecessaryComparison]
        self.embed_dim = head.in_features + int(self._has_bias)
        self.model.set_submodule(self._head_path, nn.Identity())
        self.register_buffer("nothing", torch.zeros(self.text_width, self.embed_dim), persistent=False)
        self.eval()

    @classmethod
    def from_spec(cls, spec: dict[str, Any], assets: dict[str, bytes]) -> ImageTowers:
        """Rebuild from :meth:`spec`; weights are loaded afterwards."""
        del assets
        view = Preprocess.from_json(spec["preprocess"])
        with torch.random.fork_rng(devices=[]):
            return cls(spec["library"], spec["architecture"], spec["arguments"], spec["classes"], view)

    @property
    @override
    def records_steps(self) -> bool:
        """Convolutions and attention of fixed shape."""
        return True

    @override
    def image_features(self, images: Tensor) -> Tensor:
        hidden = self.model(images.contiguous(memory_format=torch.channels_last))  # convolutions are fastest so
        return torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1) if self._has_bias else hidden

    @override
    def text_backbone(self, tokens: Tensor) -> Tensor:
        return self.projection.new_zeros(len(tokens), self.text_width)

    @property
    @override
    def projection(self) -> Tensor:
        """There is no text to project: zeros, which say where the model lies and in which type it computes."""
        return self.get_buffer("nothing")

    @override
    def tokenize(self, texts: Sequence[str]) -> Tensor:
        return torch.zeros(len(texts), 1, dtype=torch.int64)

    @override
    def spec(self) -> dict[str, Any]:
        return {
            "kind": "image",
            "library": self.library,
            "architecture": self.architecture,
            "arguments": copy.deepcopy(self.arguments),
            "classes": list(self.source_classes),
            "preprocess": self.preprocess.to_json(),
        }

    @override
    def image_parameters(self) -> Iterable[nn.Parameter]:
        return list(self.model.parameters())

    @override
    def text_parameters(self) -> Iterable[nn.Parameter]:
        return []

    def head_state(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows of a linear head over E1 as the source's own parameters, by their names."""
        rows = rows.detach().cpu()
        if not self._has_bias:
            return {f"{self._head_path}.weight": rows.contiguous()}
        weight, bias = rows[:, :-1].contiguous(), rows[:, -1].contiguous()
        return {f"{self._head_path}.weight": weight, f"{self._head_path}.bias": bias}


def create_model(library: str, architecture: str, arguments: dict[str, Any], classes: int) -> nn.Module:
    """The library's own model with random weights; nothing is fetched."""
    if library == "timm":
        import timm

        return timm.create_model(architecture, pretrained=False, num_classes=classes, **arguments)
    if library == "torchvision":
        import torchvision

        return torchvision.models.get_model(architecture, weights=None, num_classes=classes, **arguments)
    raise UserError(f"unknown library {library!r}", expected=" or ".join(LIBRARIES))


def find_head(model: nn.Module, classes: int) -> tuple[str, nn.Linear]:
    """The last linear layer of a classifier, and its name; a classifier that ends in something else is refused."""
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    fitting = [(name, module) for name, module in linear if module.out_features == classes]
    if not fitting:
        raise UserError(
            "the classifier does not end in a linear layer over its classes",
            expected=f"a linear layer with {classes} outputs",
            found=f"{type(model).__name__}, whose last linear layer is {linear[-1][0]}" if linear else "none",
        )
    return fitting[-1]


def head_rows(head: nn.Linear) -> Tensor:
    """A linear layer as rows [W_c, b_c] over E1: [K, D]."""
    weight = head.weight.detach().float()
    bias = cast("Tensor | None", head.bias)
    return weight.clone() if bias is None else torch.cat([weight, bias.detach().float()[:, None]], dim=1)
