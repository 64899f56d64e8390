"""Points at which a process can be killed: before and after every call that changes what is on disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

WRITES = (
    "replace", "rename", "fsync", "fdatasync", "pwrite", "unlink", "remove", "mkdir", "rmdir", "ftruncate",
)  # fmt: skip


class Points:
    """Counts the points that a process passes, from :meth:`start` on, and kills it with SIGKILL at one of them."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.passed, self.kill_at, self.counting = 0, kill_at, True

    def install(self) -> Points:
        """Patch the ``os`` module of this process, which pathlib, shutil and tempfile use, too."""
        for name in WRITES:
            setattr(os, name, self._around(getattr(os, name)))
        return self

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._pass()
            result = function(*arguments, **named)
            self._pass()
            return result

        return call

    def _pass(self) -> None:
        if self.counting:
            self.passed += 1
            if self.passed == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
