"""What a path to a model looks like: found out from names and configurations, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from holdfast.errors import UserError
from holdfast.files import read_json

CHECKPOINTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
DESCRIPTION, OPENCLIP_DESCRIPTION, CONFIG = "model.json", "open_clip_config.json", "config.json"
MODULES = "modules.json"
_FAMILIES = {"clip": "CLIP", "siglip": "SigLIP"}  # of transformers, that holdfast reads
_ENCODERS = ("CLIPModel", "Transformer")  # modules of sentence-transformers that may hold both towers
WITHOUT_EFFECT = ("Normalize",)  # features are normalised anyway


class SourceKind(StrEnum):
    """Kinds of models that people have."""

    HOLDFAST = "holdfast"
    TRANSFORMERS = "transformers"
    SENTENCE_TRANSFORMERS = "sentence-transformers"
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
    hint: str = ""  # what to do with one that is not supported

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
    if (path / MODULES).is_file():
        return _of_modules(path)
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
        return UserError(message, found=f"{found.words}, which holdfast does not read", do=found.hint or otherwise.do)
    return UserError(message, found=found.words, do=f"make one of it: {import_command(found)}")


def sentence_modules(path: Path) -> list[tuple[str, str]]:
    """Class name and folder (relative) of each module of a sentence-transformers model, in order."""
    record: Any = read_json(path / MODULES)
    entries = record if isinstance(record, list) else []  # pyright: ignore[reportUnknownVariableType]
    modules: list[tuple[str, str]] = []
    for entry in entries:  # pyright: ignore[reportUnknownVariableType]
        kind, place = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        # An empty path is the folder itself; one that leads elsewhere is not followed.
        if not isinstance(kind, str) or not isinstance(place, str) or place in (".", "..") or "/" in place:
            raise UserError(f"{path / MODULES} describes no modules", expected="a list of tables with type and path")
        modules.append((kind.rpartition(".")[2], place))
    if not modules:
        raise UserError(f"{path / MODULES} describes no modules", expected="a list of tables with type and path")
    return modules


def _of_modules(path: Path) -> ModelSource:
    (first, place), *others = sentence_modules(path)
    inside = _of_config(path / place) if first in _ENCODERS and (path / place / CONFIG).is_file() else None
    if inside is None or inside.kind != SourceKind.TRANSFORMERS:
        return ModelSource(
            path,
            SourceKind.OTHER,
            "a sentence-transformers folder that encodes texts alone",
            hint="a model that is to be improved needs an image encoder: import a sentence-transformers folder of a "
            f"CLIP model, such as clip-ViT-B-32; a text tower made for it is given as --text {path}",
        )
    further = [name for name, _ in others if name not in WITHOUT_EFFECT]
    if further:
        words = f"a sentence-transformers folder of a CLIP model followed by {', '.join(further)}"
        return ModelSource(path, SourceKind.OTHER, words)
    family = inside.words.removeprefix("a transformers ").removesuffix(" folder")
    return ModelSource(path, SourceKind.SENTENCE_TRANSFORMERS, f"a sentence-transformers folder of a {family} model")


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
