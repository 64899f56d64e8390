"""Strict TOML into frozen models: an unknown key is an error that names the nearest known one."""

from __future__ import annotations

import itertools
import os
import re
import reprlib
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError
from pydantic.fields import FieldInfo

from holdfast.config.renamed import hint, upgraded
from holdfast.errors import UserError, nearest
from holdfast.files import read_regular

_MAX_TOML = 8 << 20  # bytes; a round has some hundred, a file of prompts some hundred thousand
_DEEPEST = 32  # tables and arrays inside each other; a study has seven
# A dotted key nests as deeply as it is long, in time that grows with the square of that.
_LONG_KEY = re.compile(
    rf"""(?:^|[\[{{,])[ \t]*(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{_DEEPEST}}}""", re.MULTILINE
)
_MOST_SHOWN = 200  # characters of a faulty name or value
_OF_ANOTHER_KIND = ("int_type", "int_from_float", "float_type", "string_type", "bool_type", "none_required")

LARGEST = 2**53  # whole numbers up to here have a float of their own
Positive = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e30)]  # a float32 ends at 3e38
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e30)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Share = Positive | Fraction  # a whole number from 1 is a count, a number from 0.0 to 1.0 a fraction
MovingAverage = PositiveFraction
Item = TypeVar("Item")
# TOML and JSON have arrays and strings where a section has tuples and paths; their content is read as strictly as ever.
Many = Annotated[tuple[Item, ...], Strict(False)]
Two = Annotated[tuple[Item, Item], Strict(False)]
FilePath = Annotated[Path, Strict(False)]


class Config(BaseModel):
    """Frozen, strict base of every section: a number is no string and no bool, and it is finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def meaning(cls, key: str) -> str:
        """What the docstring under a setting says.

        Read when it is asked for: pydantic's own ``use_attribute_docstrings`` parses the source of every section at
        import, a tenth of a second of each start of the command line.
        """
        import ast
        import inspect
        import textwrap

        for owner in cls.__mro__:
            if key not in inspect.get_annotations(owner):
                continue
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
            statements = typing.cast(ast.ClassDef, body).body
            for statement, after in itertools.pairwise(statements):
                target = statement.target if isinstance(statement, ast.AnnAssign) else None
                if isinstance(target, ast.Name) and target.id == key and isinstance(after, ast.Expr):
                    return inspect.cleandoc(str(typing.cast(ast.Constant, after.value).value))
            return ""
        return ""

    @classmethod
    def section_of(cls, key: str, value: Any, root: Path) -> type[Config] | None:
        """The section that a key's value is read as, where the annotation alone does not say it."""
        return None


Section = TypeVar("Section", bound=Config)


def read_toml(path: Path) -> dict[str, Any]:
    """Parse TOML; a missing or malformed file is a :class:`UserError`."""
    if os.path.isdir(path):
        raise UserError(
            f"{path} is a folder",
            expected="a TOML file, such as ROUND.toml",
            do="name the file; for a folder of images `holdfast init` writes one",
        )
    try:
        text = read_regular(path, _MAX_TOML).decode("utf-8")
        if _LONG_KEY.search(text):
            raise RecursionError
        values = tomllib.loads(text)
        _check_depth(values)
        return values
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist", do="write one with `holdfast init`") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read", found=error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a TOML file", found=str(error)) from error
    except RecursionError as error:
        raise UserError(f"{path} is not valid TOML", found="it is nested too deeply") from error
    except ValueError as error:  # malformed, or a number or date that Python cannot hold
        raise UserError(f"{path} is not valid TOML", found=str(error)[:_MOST_SHOWN]) from error


def _check_depth(values: dict[str, Any]) -> None:
    """Refuse what the parser takes and whoever walks down later would not."""
    level: list[Any] = [values]
    for _ in range(_DEEPEST):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise RecursionError


def parse(model: type[Section], values: dict[str, Any], where: str, root: Path = Path()) -> Section:
    """Validate ``values`` as ``model``; the first fault becomes a :class:`UserError` that names key and remedy.

    ``root`` is where relative paths begin: a method may be a Python file, which is executed to know its settings.
    """
    if isinstance(values, dict):  # pyright: ignore[reportUnnecessaryIsInstance] — JSON that others wrote
        values, hints = upgraded(values)
        if where.endswith(".toml"):  # written by hand: whoever wrote it can change it
            hint(where, hints)
    try:
        return model.model_validate(values, context={"root": root, "where": where})
    except ValidationError as error:
        raise _explain(model, error, where, values, root) from None


def _explain(model: type[Config], error: ValidationError, where: str, values: Any, root: Path) -> UserError:
    faults = error.errors()
    # An unknown key explains other faults (a required key that was misspelt), so it comes first. Where a value may be
    # one of several kinds there is a fault for each: that of the kind it comes closest to says most.
    above = faults[0]["loc"][:-1]
    beside = (item for item in faults if item["loc"][: len(above)] == above)
    closest = max(beside, key=lambda item: (len(item["loc"]), item["type"] not in _OF_ANOTHER_KIND))
    fault = next((item for item in faults if item["type"] == "extra_forbidden"), closest)
    section, location = _walk(model, [_shortened(str(part)) for part in fault["loc"]], values, root)
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        known = section.model_fields if section is not None else {}
        return UserError(f"{where}: unknown key {key!r}", do=nearest(location[-1], known))
    if fault["type"] == "missing":
        return UserError(f"{where}: the key {key!r} is missing", do=_describe(section, location))
    message = fault["msg"].removeprefix("Value error, ")
    found = "" if fault["type"] == "value_error" else shown(fault["input"])
    others = {tuple(_walk(model, [str(part) for part in item["loc"]], values, root)[1]) for item in faults}
    elsewhere = sum(not _within(other, location) for other in others)  # not other kinds that this value is not of
    more = f" (and {elsewhere} more)" if elsewhere else ""
    if fault["type"] == "tuple_type":
        return UserError(f"{where}: {key} must be a list{more}", found=found, do="put it in square brackets")
    return UserError(f"{where}: {key + ': ' if key else ''}{message}{more}", found=found)


def _within(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether one of two keys lies in the other, or is it."""
    shared = min(len(first), len(second))
    return list(first[:shared]) == list(second[:shared])


def shown(value: Any) -> str:
    """A faulty value in a message: cut short, whatever it is."""
    try:
        return _shortened(reprlib.repr(value))
    except ValueError:  # a whole number with more digits than Python writes
        return "a number with thousands of digits"


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _walk(model: type[Config], location: list[str], values: Any, root: Path) -> tuple[type[Config] | None, list[str]]:
    """The section that a fault lies in, and its key path without the tags that pydantic adds for unions."""
    section: type[Config] | None = model
    path: list[str] = []
    rest = list(location)
    while rest:
        name = rest.pop(0)
        path.append(name)
        values = values.get(name) if isinstance(values, dict) else None
        if section is None or name not in section.model_fields or not rest:
            continue
        known = section.section_of(name, values, root)
        if known is not None:
            section = known
            continue
        annotation = section.model_fields[name].annotation
        tag = rest.pop(0) if _kinds(annotation) > 1 else rest[0]
        if rest:
            section = _config_in(annotation, tag)
    return section, path


def _kinds(annotation: Any) -> int:
    """Of how many kinds a value may be; none at all is no kind."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return sum(get_arg is not type(None) for get_arg in typing.get_args(annotation))
    return 1


def _config_in(annotation: Any, tag: str) -> type[Config] | None:
    """The section inside an annotation; of a union, the one that ``tag`` (a method's name, a class) stands for."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    found = [_config_in(argument, tag) for argument in typing.get_args(annotation)]
    sections = [item for item in found if item is not None]
    for section in sections:
        if section.__name__ == tag or tag in typing.get_args(section.model_fields.get("name", _NO_FIELD).annotation):
            return section
    return sections[0] if sections else None


_NO_FIELD = FieldInfo(annotation=None)


def _describe(section: type[Config] | None, location: list[str]) -> str:
    if section is None or location[-1] not in section.model_fields:
        return "add it"
    return f"add it: {section.meaning(location[-1]) or 'it has no default'}"
