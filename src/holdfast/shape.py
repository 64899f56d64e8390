"""Shapes of JSON that we wrote and read back: each part there and of its kind, or a sentence that names the part.

A shape is a test of one value, a dict (a table with at least these keys), a list of one shape (a list of such), or one
of :class:`Each`, :class:`Filled` and :class:`Maybe` around another shape.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from holdfast.errors import UserError

Test = Callable[[Any], bool]
Shape = Any  # Test | Mapping[str, Shape] | list[Shape] | Each | Filled | Maybe


@dataclass(frozen=True)
class Each:
    """A table with any keys, every value of this shape."""

    shape: Shape


@dataclass(frozen=True)
class Maybe:
    """This shape, or null; as a value of a table, the key may be missing, too."""

    shape: Shape


@dataclass(frozen=True)
class Filled:
    """This shape, a list or a table, and not empty."""

    shape: Shape


def check_shape(value: Any, shape: Shape, file: Path, where: str = "") -> None:
    """Refuse a value that is not of a shape, with a :class:`UserError` that names the part and the file."""
    if isinstance(shape, Maybe):
        if value is not None:
            check_shape(value, shape.shape, file, where)
    elif isinstance(shape, Filled):
        check_shape(value, shape.shape, file, where)
        if not value:
            raise _wrong(file, where, value)
    elif isinstance(shape, Each):
        for name, item in _of_type(value, dict, file, where).items():
            check_shape(item, shape.shape, file, _inside(where, str(name)))
    elif isinstance(shape, list):
        for place, item in enumerate(_of_type(value, list, file, where)):
            check_shape(item, cast("list[Shape]", shape)[0], file, _inside(where, str(place)))
    elif isinstance(shape, Mapping):
        _check_table(_of_type(value, dict, file, where), cast("Mapping[str, Shape]", shape), file, where)
    elif not shape(value):
        raise _wrong(file, where, value)


def _check_table(table: dict[str, Any], shape: Mapping[str, Shape], file: Path, where: str) -> None:
    for name, inner in shape.items():
        if name in table:
            check_shape(table[name], inner, file, _inside(where, name))
        elif not isinstance(inner, Maybe):
            raise UserError(f"{file}: {_inside(where, name)} is missing", do=_REMEDY)


def _of_type(value: Any, kind: type, file: Path, where: str) -> Any:
    if not isinstance(value, kind):
        raise _wrong(file, where, value)
    return value


def _wrong(file: Path, where: str, value: Any) -> UserError:
    return UserError(f"{file}: {where or 'the whole'} is not what it must be", found=_shown(value), do=_REMEDY)


def _shown(value: Any) -> str:
    try:
        return reprlib.repr(value)[:200]
    except ValueError:  # a whole number with more digits than Python writes
        return "a number with thousands of digits"


def _inside(where: str, name: str) -> str:
    name = name if len(name) <= 50 else f"{name[:50]}…"
    return f"{where}.{name}" if where else name


_REMEDY = "restore the file: it was damaged, or is none of ours"


def anything(value: Any) -> bool:
    """Whatever there is."""
    del value
    return True


def text(value: Any) -> bool:
    """A string that can be written: half of a surrogate pair cannot."""
    return isinstance(value, str) and not any("\ud800" <= item <= "\udfff" for item in value)


def flag(value: Any) -> bool:
    """True or false."""
    return isinstance(value, bool)


def number(value: Any) -> bool:
    """A finite number of ordinary size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def count(value: Any) -> bool:
    """A whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def between(least: float, most: float) -> Test:
    """A number in [least, most]."""
    return lambda value: number(value) and least <= value <= most


def below_one(value: Any) -> bool:
    """A number in [0, 1)."""
    return between(0.0, math.nextafter(1.0, 0.0))(value)


def one_of(*values: str) -> Test:
    """One of these words."""
    return lambda value: value in values
