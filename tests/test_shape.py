"""Shapes: what fits passes, and what does not is named with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.shape import Each, Filled, Maybe, below_one, between, check_shape, count, flag, number, one_of, text

SHAPE = {
    "name": text,
    "size": count,
    "share": between(0, 1),
    "margin": below_one,
    "kind": one_of("old", "new"),
    "on": flag,
    "tasks": Filled([{"task": text, "n": number}]),
    "by_class": Each(number),
    "note": Maybe(text),
}
RIGHT: dict[str, Any] = {
    "name": "a",
    "size": 3,
    "share": 1,
    "margin": 0,
    "kind": "new",
    "on": False,
    "tasks": [{"task": "a", "n": 1.5, "more": None}],
    "by_class": {"a": 1, "b": -2.5},
}


def test_what_fits_passes() -> None:
    check_shape(RIGHT, SHAPE, Path("x.json"))
    check_shape({**RIGHT, "note": None, "unknown": [1]}, SHAPE, Path("x.json"))
    check_shape({**RIGHT, "note": "seen"}, SHAPE, Path("x.json"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "name is not what it must be"),
        ({"name": "\ud800"}, "name is not"),
        ({"size": True}, "size is not"),
        ({"size": -1}, "size is not"),
        ({"size": 1.0}, "size is not"),
        ({"size": 10**30}, "size is not"),
        ({"share": float("nan")}, "share is not"),
        ({"share": 10**400}, "share is not"),
        ({"share": "1"}, "share is not"),
        ({"margin": 1.0}, "margin is not"),
        ({"kind": []}, "kind is not"),
        ({"on": 1}, "on is not"),
        ({"tasks": []}, "tasks is not"),
        ({"tasks": [{"task": "a"}]}, "tasks.0.n is missing"),
        ({"by_class": {"a": 1, "b": None}}, "by_class.b is not"),
        ({"by_class": []}, "by_class is not"),
        ({"note": 3}, "note is not"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"x\.json") as caught:
        check_shape({**RIGHT, **change}, SHAPE, Path("x.json"))
    assert message in caught.value.message


def test_what_is_missing_or_altogether_something_else_is_named() -> None:
    for name in RIGHT:
        with pytest.raises(UserError, match=f"x.json: {name} is missing"):
            check_shape({key: value for key, value in RIGHT.items() if key != name}, SHAPE, Path("x.json"))
    for value in (None, 3, "x", [RIGHT]):
        with pytest.raises(UserError, match="the whole is not what it must be"):
            check_shape(value, SHAPE, Path("x.json"))
    with pytest.raises(UserError, match=r"deep\.0\.n is not") as caught:
        check_shape({"deep": [{"n": "x" * 10_000}]}, {"deep": [{"n": number}]}, Path("x.json"))
    assert len(caught.value.text()) < 300
