"""A line on stderr for every stage that may take longer than two seconds; silent unless a command asks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_shown: ContextVar[bool] = ContextVar("stages are shown", default=False)


@contextmanager
def stages_shown(*, quiet: bool = False, verbose: bool = False) -> Generator[None]:
    """Show stages where stderr is a terminal, or with ``verbose``; never with ``quiet``, nor of ranks but the first."""
    first = int(os.environ.get("RANK", "0")) == 0
    token = _shown.set(first and not quiet and (verbose or sys.stderr.isatty()))
    try:
        yield
    finally:
        _shown.reset(token)


def stage(text: str) -> None:
    """Say what begins now."""
    if _shown.get():
        print(f"{text} …", file=sys.stderr, flush=True)
