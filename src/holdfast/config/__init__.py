"""Configuration: one small frozen model a stage, read from strict TOML.

Contradictions are found before anything is trained. Defaults live here, and a method's in its own file; a ROUND.toml
holds only the differences. A section is imported when it is first asked for: each takes about a millisecond to build,
and a plan needs four of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.config.base import Config, parse, read_toml
    from holdfast.config.claim import CandidatesConfig, CertifyConfig
    from holdfast.config.data import DataConfig, RolesConfig, SourceConfig, TaskConfig
    from holdfast.config.method import ContrastConfig, MethodConfig
    from holdfast.config.renamed import upgraded
    from holdfast.config.round import EvaluateConfig, ModelConfig, RoundConfig, TrainConfig, TuneConfig

_HOME = {
    "CandidatesConfig": "claim",
    "CertifyConfig": "claim",
    "Config": "base",
    "ContrastConfig": "method",
    "DataConfig": "data",
    "EvaluateConfig": "round",
    "MethodConfig": "method",
    "ModelConfig": "round",
    "RolesConfig": "data",
    "RoundConfig": "round",
    "SourceConfig": "data",
    "TaskConfig": "data",
    "TrainConfig": "round",
    "TuneConfig": "round",
    "parse": "base",
    "read_toml": "base",
    "upgraded": "renamed",
}

__all__ = [
    "CandidatesConfig",
    "CertifyConfig",
    "Config",
    "ContrastConfig",
    "DataConfig",
    "EvaluateConfig",
    "MethodConfig",
    "ModelConfig",
    "RolesConfig",
    "RoundConfig",
    "SourceConfig",
    "TaskConfig",
    "TrainConfig",
    "TuneConfig",
    "parse",
    "read_toml",
    "upgraded",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"holdfast.config.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
