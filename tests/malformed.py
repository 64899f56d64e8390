"""JSON values that were right once: every part of them taken out, or something else in its place."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.errors import HoldfastError

JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 1e308, 10**30, float("nan"), "", "x", "\ud800", [], ["x"], [1], [[]], [{}], {}, {"a": 1},
)  # fmt: skip
_GONE = object()


def malformed(value: Any, most: int, seed: int = 0) -> Iterator[tuple[str, Any]]:
    """(what was done, the value after it): ``most`` of all the ways there are, drawn by ``seed``."""
    ways = [(path, junk) for path in _paths(value) for junk in (_GONE, *JUNK) if path or junk is not _GONE]
    random.Random(seed).shuffle(ways)
    for path, junk in ways[:most]:
        done = "gone" if junk is _GONE else repr(junk)
        yield f"{'.'.join(map(str, path)) or 'all'}: {done}", _changed(value, path, junk)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _paths(inner, (*path, name))
    elif isinstance(value, list) and value:
        yield from _paths(value[0], (*path, 0))


def _changed(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    whole = copy.deepcopy(value)
    inner = whole
    for part in path[:-1]:
        inner = inner[part]
    if junk is _GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = junk
    return whole


def refusals(use: Callable[[Any], object], cases: Iterator[tuple[str, Any]], tried: Callable[..., None]) -> int:
    """How many of the cases ``use`` refuses in a short sentence; it may take one, and may not break on any."""
    refused = 0
    for done, wrong in cases:
        tried("bad inputs")
        try:
            use(wrong)
        except HoldfastError as error:
            refused += 1
            if len(error.text()) > 1000:
                raise AssertionError(f"{done}: no short sentence") from error
        except Exception as error:
            raise AssertionError(done) from error
    return refused
