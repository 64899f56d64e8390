"""holdfast: improve a model on one weak class without losing any class it already serves, and prove it.

The public API. Everything is imported when it is first asked for, so that ``import holdfast`` is instant, and that
``certify`` and ``plan`` need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast._version import __version__

if TYPE_CHECKING:
    from holdfast.certify.api import certify, plan
    from holdfast.model.classifier import Classifier
    from holdfast.model.folder import load_model, save_model
    from holdfast.objective.contrastive import GlobalContrastive
    from holdfast.objective.retention import Retention, RetentionPenalty
    from holdfast.rounds.develop import develop
    from holdfast.rounds.result import RoundResult
    from holdfast.rounds.tune import TuneResult, tune

_HOME = {
    "Classifier": "holdfast.model.classifier",
    "GlobalContrastive": "holdfast.objective.contrastive",
    "Retention": "holdfast.objective.retention",
    "RetentionPenalty": "holdfast.objective.retention",
    "RoundResult": "holdfast.rounds.result",
    "TuneResult": "holdfast.rounds.tune",
    "certify": "holdfast.certify.api",
    "develop": "holdfast.rounds.develop",
    "load_model": "holdfast.model.folder",
    "plan": "holdfast.certify.api",
    "save_model": "holdfast.model.folder",
    "tune": "holdfast.rounds.tune",
}

__all__ = [
    "Classifier",
    "GlobalContrastive",
    "Retention",
    "RetentionPenalty",
    "RoundResult",
    "TuneResult",
    "__version__",
    "certify",
    "develop",
    "load_model",
    "plan",
    "save_model",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
