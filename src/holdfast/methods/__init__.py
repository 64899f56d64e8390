"""Methods: one file each, one contract (:mod:`holdfast.methods.base`), a literal dict to choose from."""

from __future__ import annotations

from typing import Any

from holdfast.methods.base import Method
from holdfast.methods.finetune import Finetune
from holdfast.methods.holdfast import Holdfast
from holdfast.model.classifier import Classifier

METHODS: dict[str, type[Any]] = {
    "holdfast": Holdfast,
    "finetune": Finetune,
}


def build_method(model: Classifier, config: Any, steps: int) -> Method:
    """The method that ``config.name`` names, over a model that will be trained."""
    return METHODS[config.name](model, config, steps)
