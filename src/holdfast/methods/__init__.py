"""Methods: one file each, one contract (:mod:`holdfast.methods.base`), a literal dict to choose from."""

from __future__ import annotations

from typing import Any

from holdfast.methods.base import Method
from holdfast.methods.co2l import Co2l
from holdfast.methods.cross_entropy import CrossEntropy
from holdfast.methods.der import Der
from holdfast.methods.finetune import Finetune
from holdfast.methods.flyp import Flyp
from holdfast.methods.gem import Gem
from holdfast.methods.holdfast import Holdfast
from holdfast.methods.rm import Rm
from holdfast.methods.wccl import Wccl
from holdfast.model.classifier import Classifier

METHODS: dict[str, type[Any]] = {
    "holdfast": Holdfast,
    "finetune": Finetune,
    "cross_entropy": CrossEntropy,
    "flyp": Flyp,
    "wccl": Wccl,
    "gem": Gem,
    "co2l": Co2l,
    "der": Der,
    "rm": Rm,
}


def build_method(model: Classifier, config: Any, steps: int) -> Method:
    """The method that ``config.name`` names, over a model that will be trained."""
    return METHODS[config.name](model, config, steps)
