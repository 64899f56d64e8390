"""Words of the command line as values, without pydantic.

Newer versions of typer convert every word by pydantic, and build a converter for every option that was not given: that
takes as long as numpy takes to import. Plain words are converted here, all others by typer, which also has the say on
what is wrong with one; and so is everything in versions that do without pydantic.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args, get_origin

from typer.core import TyperCommand, TyperGroup

_NUMBERS = {int: re.compile(r"[0-9]{1,15}"), float: re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?")}
_ASK_TYPER = object()


class PlainCommand(TyperCommand):
    """A command whose plain words are converted here."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its parameters, and the option ``--help``."""
        return _plainly(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """A group of commands, of whose own words the same holds."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its parameters, and the option ``--help``."""
        return _plainly(super().get_params(ctx))


def _plainly(parameters: Sequence[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "type_descriptor", None) is not None:  # a typer that uses pydantic
            parameter.process_value = partial(_process_value, parameter)
    return list(parameters)


def _process_value(parameter: Any, ctx: Any, value: Any) -> Any:
    """What ``Parameter.process_value`` returns."""
    found = _converted(parameter, value)
    if found is _ASK_TYPER:
        return type(parameter).process_value(parameter, ctx, value)
    return found if parameter.callback is None else parameter.callback(ctx, parameter, found)


def _converted(parameter: Any, value: object) -> Any:
    several = parameter.multiple or parameter.nargs == -1
    if value is None and not parameter.required:
        return () if several else None
    annotation, info = parameter.type_descriptor.annotation, parameter.type_descriptor.parameter_info
    if info.parser is not None:
        return _ASK_TYPER
    if several and value and isinstance(value, list | tuple) and get_origin(annotation) is list:
        words = [_plain(word, get_args(annotation)[0], info) for word in cast("list[object]", value)]
        return _ASK_TYPER if _ASK_TYPER in words else words
    return _ASK_TYPER if several else _plain(value, annotation, info)


def _plain(word: object, annotation: Any, info: Any) -> Any:
    """A word as a value of a type; a default is a value already."""
    if type(word) is annotation and annotation in (bool, int, float):
        return word
    if not isinstance(word, str):
        return _ASK_TYPER
    if annotation is str:
        return word
    if annotation is Path:
        checked = info.exists or info.resolve_path or info.writable or not (info.file_okay and info.dir_okay)
        unreadable = os.path.exists(word) and not os.access(word, os.R_OK)
        return _ASK_TYPER if checked or unreadable or info.path_type is not None else Path(word)
    if annotation in _NUMBERS and not info.clamp and _NUMBERS[annotation].fullmatch(word):
        number = annotation(word)
        if (info.min is None or info.min <= number) and (info.max is None or number <= info.max):
            return number
    return _ASK_TYPER
