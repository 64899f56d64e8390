"""What jobs of one process have in common, made once: the sources they read, the old model and what it predicts.

Only inside :func:`sharing`, which `holdfast compare` opens for the jobs of a study. Elsewhere :func:`once` makes what
it is asked for every time: whoever calls twice from Python may have changed a file in between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar, cast

Value = TypeVar("Value")

LIMIT = 2 << 30  # bytes of those values that have a size; beyond it those that were used longest ago go


class _Shared:
    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self.values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.lock = Lock()

    def get(self, key: Hashable) -> tuple[Any, int] | None:
        with self.lock:
            found = self.values.get(key)
            if found is not None:
                self.values.move_to_end(key)
            return found

    def put(self, key: Hashable, value: object, size: int) -> None:
        with self.lock:
            if key in self.values or size > self.limit:
                return
            self.values[key] = value, size
            self.total += size
            while self.total > self.limit:
                oldest = next(name for name, (_, taken) in self.values.items() if taken)
                self.total -= self.values.pop(oldest)[1]


_active: list[_Shared] = []


@contextmanager
def sharing(limit: int = LIMIT) -> Generator[None]:
    """Inside the block :func:`once` remembers. A block inside another one shares with it."""
    _active.append(_active[-1] if _active else _Shared(limit))
    try:
        yield
    finally:
        _active.pop()


def is_sharing() -> bool:
    """Whether anything is remembered."""
    return bool(_active)


def once(key: Hashable, make: Callable[[], Value], size: Callable[[Value], int] | None = None) -> Value:
    """``make()``, or what it returned for the same key before. Nobody may change it.

    ``key`` says all that the value depends on. ``size`` gives its bytes where there may be many of a kind.
    """
    if not _active:
        return make()
    shared = _active[-1]
    found = shared.get(key)
    if found is not None:
        return cast(Value, found[0])
    value = make()
    shared.put(key, value, 0 if size is None else size(value))
    return value
