"""``model.json``, read strictly: what a model folder says of itself is checked before anything is built from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from holdfast.config.base import Config, Many, NonNegative, Positive, PositiveFloat, parse
from holdfast.errors import UserError


class _Part(Config):
    """A later version may add keys; those that are known must be what they are."""

    model_config = ConfigDict(extra="ignore")


class HeadShape(_Part):
    """The factors of one round: for which classes, and of which rank."""

    classes: Many[str]
    rank: Positive


class Notes(_Part):
    """What the round that made the model noted down, as far as a later round reads it."""

    template: str | Annotated[Many[str], Field(min_length=1)] = "a photo of a {}"
    names: dict[str, str] = Field(default_factory=dict)


class Description(_Part):
    """Everything that loading a model relies on."""

    format: int
    classes: Many[str]
    prompts: Many[Many[str]]
    class_temperature: PositiveFloat
    linear: bool
    heads: Many[HeadShape]
    towers: dict[str, Any]
    fingerprint: str
    weights_bytes: NonNegative
    assets: Many[str] = ()
    parent: str | None = None
    extra: Notes = Notes()


def check_description(record: dict[str, Any], path: Path) -> None:
    """Refuse a description that lacks a key or holds something else under it."""
    try:
        description = parse(Description, record, str(path))
    except UserError as error:
        raise UserError(
            error.message, found=error.found, do="copy the model folder again from where it was made"
        ) from error
    for name in description.assets:
        if Path(name).name != name:
            raise UserError(f"{path}: an asset lies outside the model folder", found=repr(name))
