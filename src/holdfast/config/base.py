"""Strict TOML into frozen models: an unknown key is an error that names the nearest known one."""

from __future__ import annotations

import tomllib
import typing
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from holdfast.errors import UserError, nearest

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[int, Field(ge=1)] | Fraction  # a whole number from 1 is a count, a number from 0.0 to 1.0 a fraction
MovingAverage = Annotated[float, Field(gt=0, le=1)]


class Config(BaseModel):
    """Frozen, strict base of every section."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, use_attribute_docstrings=True)


Section = TypeVar("Section", bound=Config)


def read_toml(path: Path) -> dict[str, Any]:
    """Parse TOML; a missing or malformed file is a :class:`UserError`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist", do="write one with `holdfast init`") from error
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a TOML file", found=str(error)) from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML", found=str(error)) from error


def parse(model: type[Section], values: dict[str, Any], where: str) -> Section:
    """Validate ``values`` as ``model``; the first fault becomes a :class:`UserError` that names key and remedy."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _explain(model, error, where) from None


def _explain(model: type[Config], error: ValidationError, where: str) -> UserError:
    faults = error.errors()
    # An unknown key explains other faults (a required key that was misspelt), so it comes first.
    fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    section, location = _walk(model, [str(part) for part in fault["loc"]])
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        known = section.model_fields if section is not None else {}
        return UserError(f"{where}: unknown key {key!r}", do=nearest(location[-1], known))
    if fault["type"] == "missing":
        return UserError(f"{where}: the key {key!r} is missing", do=_describe(section, location))
    message = fault["msg"].removeprefix("Value error, ")
    found = "" if fault["type"] == "value_error" else repr(fault["input"])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return UserError(f"{where}: {key + ': ' if key else ''}{message}{more}", found=found)


def _walk(model: type[Config], location: list[str]) -> tuple[type[Config] | None, list[str]]:
    """The section that a fault lies in, and its key path without the tags that pydantic adds for unions."""
    section: type[Config] | None = model
    path: list[str] = []
    for place, name in enumerate(location):
        last = place == len(location) - 1
        if name.isdigit():
            path.append(name)
        elif section is not None and name in section.model_fields:
            path.append(name)
            section = section if last else _config_in(section.model_fields[name].annotation, location[place + 1])
        elif last:
            path.append(name)
    return section, path


def _config_in(annotation: Any, tag: str) -> type[Config] | None:
    """The section inside an annotation; of a union, the one that ``tag`` (a method's name, a class) stands for."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    found = [_config_in(argument, tag) for argument in typing.get_args(annotation)]
    sections = [one for one in found if one is not None]
    for section in sections:
        if section.__name__ == tag or tag in typing.get_args(section.model_fields.get("name", _NO_FIELD).annotation):
            return section
    return sections[0] if sections else None


_NO_FIELD = FieldInfo(annotation=None)


def _describe(section: type[Config] | None, location: list[str]) -> str:
    if section is None or location[-1] not in section.model_fields:
        return "add it"
    return f"add it: {section.model_fields[location[-1]].description or 'it has no default'}"
