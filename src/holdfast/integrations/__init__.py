"""Retention constraints in other people's training loops: thin adapters over :class:`holdfast.RetentionPenalty`.

Nothing heavy is imported until a name is asked for: ``HoldfastTrainer`` imports transformers, ``HoldfastSFTTrainer``
TRL, ``RetentionModule`` and ``RetentionCallback`` Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.integrations.lightning import RetentionCallback, RetentionModule
    from holdfast.integrations.losses import evaluation_mode
    from holdfast.integrations.old_model import frozen_copy
    from holdfast.integrations.settings import RetentionSettings
    from holdfast.integrations.transformers import HoldfastTrainer, RetentionMixin
    from holdfast.integrations.trl import HoldfastSFTTrainer

_HOME = {
    "HoldfastSFTTrainer": "holdfast.integrations.trl",
    "HoldfastTrainer": "holdfast.integrations.transformers",
    "RetentionCallback": "holdfast.integrations.lightning",
    "RetentionMixin": "holdfast.integrations.transformers",
    "RetentionModule": "holdfast.integrations.lightning",
    "RetentionSettings": "holdfast.integrations.settings",
    "evaluation_mode": "holdfast.integrations.losses",
    "frozen_copy": "holdfast.integrations.old_model",
}

__all__ = [
    "HoldfastSFTTrainer",
    "HoldfastTrainer",
    "RetentionCallback",
    "RetentionMixin",
    "RetentionModule",
    "RetentionSettings",
    "evaluation_mode",
    "frozen_copy",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'holdfast.integrations' has no attribute {name!r}")
