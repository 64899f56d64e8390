"""Configuration: one small frozen model a stage, read from strict TOML.

Contradictions are found before anything is trained. Defaults live here, and a method's in its own file; a ROUND.toml
holds only the differences.
"""

from holdfast.config.base import Config, parse, read_toml
from holdfast.config.data import DataConfig, RolesConfig, SourceConfig, TaskConfig
from holdfast.config.method import ContrastConfig, MethodConfig
from holdfast.config.renamed import upgraded
from holdfast.config.round import (
    CandidatesConfig,
    CertifyConfig,
    EvaluateConfig,
    ModelConfig,
    RoundConfig,
    TrainConfig,
    TuneConfig,
)

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
