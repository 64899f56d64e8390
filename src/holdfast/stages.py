"""A line on stderr for every stage that may take longer than two seconds; silent unless a command asks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_shown: ContextVar[set[str] | None] = ContextVar("stages that were shown; None where none are", default=None)


@contextmanager
def stages_shown(*, quiet: bool = False, verbose: bool = False) -> Generator[None]:
    """Show stages where stderr is a terminal, or with ``verbose``; never with ``quiet``, nor of ranks but the first."""
    first = int(os.environ.get("RANK", "0")) == 0
    token = _shown.set(set() if first and not quiet and (verbose or sys.stderr.isatty()) else None)
    try:
        yield
    finally:
        _shown.reset(token)


def stage(text: str) -> None:
    """Say what begins now; once in a command, since what is begun again was done before and is found there."""
    shown = _shown.get()
    if shown is not None and text not in shown:
        shown.add(text)
        print(f"{text} …", file=sys.stderr, flush=True)
