"""What a path to a model looks like: found out from names and configurations, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from holdfast.artifacts import read_json
from holdfast.errors import UserError

CHECKPOINTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
DESCRIPTION, OPENCLIP_DESCRIPTION, CONFIG = "model.json", "open_clip_config.json", "config.json"
_FAMILIES = {"clip": "CLIP", "siglip": "SigLIP"}  # of transformers, that holdfast reads


class SourceKind(StrEnum):
    """Kinds of models that people have."""

    HOLDFAST = "holdfast"
    TRANSFORMERS = "transformers"
    TIMM = "timm"
    OPENCLIP = "openclip"
    CHECKPOINT = "checkpoint"  # a file of weights, which does not name its architecture
    OTHER = "other"  # known by its looks, and not supported


@dataclass(frozen=True)
class ModelSource:
    """A path, and what it looks like."""

    path: Path
    kind: SourceKind
    words: str  # "a transformers CLIP folder"

    @property
    def can_import(self) -> bool:
        """Whether `holdfast import` reads it."""
        return self.kind not in (SourceKind.HOLDFAST, SourceKind.OTHER)


def identify(path: Path) -> ModelSource | None:
    """What lies at a path, or None where it looks like no model at all."""
    if path.is_file():
        found = path.suffix in CHECKPOINTS
        return ModelSource(path, SourceKind.CHECKPOINT, "a checkpoint file") if found else None
    if (path / DESCRIPTION).is_file():
        return ModelSource(path, SourceKind.HOLDFAST, "a holdfast model folder")
    if (path / OPENCLIP_DESCRIPTION).is_file():
        return ModelSource(path, SourceKind.OPENCLIP, "an OpenCLIP folder")
    if (path / "modules.json").is_file():
        return ModelSource(path, SourceKind.OTHER, "a sentence-transformers folder")
    if (path / CONFIG).is_file():
        return _of_config(path)
    return None


def is_direct_source(path: Path) -> bool:
    """Whether a round can start from a path as it is: a folder of another library that says all about its model."""
    found = identify(path)
    return found is not None and found.can_import and found.kind != SourceKind.CHECKPOINT


def import_command(source: ModelSource) -> str:
    """The command that makes a model folder of a source."""
    more = " --architecture NAME" if source.kind == SourceKind.CHECKPOINT else ""
    return f"holdfast import {source.path} OUT{more}"


def not_a_model_folder(path: Path, message: str, *, otherwise: UserError) -> UserError:
    """The error for a path that should be a model folder: it names what is there, where that can be imported."""
    try:
        found = identify(path)
    except UserError:  # a configuration that cannot be read
        found = None
    if found is None or found.kind == SourceKind.HOLDFAST:
        return otherwise
    if not found.can_import:
        return UserError(message, found=f"{found.words}, which holdfast does not read", do=otherwise.do)
    return UserError(message, found=found.words, do=f"make one of it: {import_command(found)}")


def _of_config(path: Path) -> ModelSource | None:
    record: Any = read_json(path / CONFIG)
    if not isinstance(record, dict):
        return None
    family = record.get("model_type")  # pyright: ignore[reportUnknownMemberType]
    if family in _FAMILIES:
        return ModelSource(path, SourceKind.TRANSFORMERS, f"a transformers {_FAMILIES[str(family)]} folder")
    if isinstance(family, str):
        return ModelSource(path, SourceKind.OTHER, f"a transformers folder of type {family[:50]!r}")
    if isinstance(record.get("architecture"), str):  # pyright: ignore[reportUnknownMemberType]
        return ModelSource(path, SourceKind.TIMM, "a timm folder")
    return None
