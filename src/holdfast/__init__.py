"""holdfast: improve a model on one weak class without losing any class it already serves, and prove it.

The public API. Everything is imported when it is first asked for, so that ``import holdfast`` is instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast._version import __version__

if TYPE_CHECKING:
    from holdfast.certify.plans import PlanResult, plan
    from holdfast.certify.predictions import CertifyResult, certify
    from holdfast.config.method import MethodConfig
    from holdfast.config.round import RoundConfig, TuneConfig
    from holdfast.methods.base import Method, StepOutput
    from holdfast.methods.registry import register
    from holdfast.model.classifier import Classifier
    from holdfast.model.folder import load_model, save_model
    from holdfast.objective.contrastive import GlobalContrastive
    from holdfast.objective.retention import Retention, RetentionPenalty
    from holdfast.rounds.develop import develop
    from holdfast.rounds.result import RoundResult
    from holdfast.rounds.round import Round
    from holdfast.rounds.tune import TuneResult, tune

_HOME = {
    "CertifyResult": "holdfast.certify.predictions",
    "Classifier": "holdfast.model.classifier",
    "GlobalContrastive": "holdfast.objective.contrastive",
    "Method": "holdfast.methods.base",
    "MethodConfig": "holdfast.config.method",
    "PlanResult": "holdfast.certify.plans",
    "Retention": "holdfast.objective.retention",
    "RetentionPenalty": "holdfast.objective.retention",
    "Round": "holdfast.rounds.round",
    "RoundConfig": "holdfast.config.round",
    "RoundResult": "holdfast.rounds.result",
    "StepOutput": "holdfast.methods.base",
    "TuneConfig": "holdfast.config.round",
    "TuneResult": "holdfast.rounds.tune",
    "certify": "holdfast.certify.predictions",
    "develop": "holdfast.rounds.develop",
    "load_model": "holdfast.model.folder",
    "plan": "holdfast.certify.plans",
    "register": "holdfast.methods.registry",
    "save_model": "holdfast.model.folder",
    "tune": "holdfast.rounds.tune",
}

__all__ = [
    "CertifyResult",
    "Classifier",
    "GlobalContrastive",
    "Method",
    "MethodConfig",
    "PlanResult",
    "Retention",
    "RetentionPenalty",
    "Round",
    "RoundConfig",
    "RoundResult",
    "StepOutput",
    "TuneConfig",
    "TuneResult",
    "__version__",
    "certify",
    "develop",
    "load_model",
    "plan",
    "register",
    "save_model",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
