"""Errors that reach a person, and the exit codes they carry.

Every error a user can cause is a :class:`UserError`: what was expected, what was found, what to do. The command line
prints it without a traceback. Anything else is our failure and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of the command line (documented in README)."""

    DONE = 0  # done; where a verdict is asked for: certified
    FAILED = 1  # our failure, or a failed job
    USER = 2  # the user's mistake
    FAULT = 3  # a fault was shown: regressed, leak, changed fingerprint
    UNDECIDED = 4  # undecided, or the old model was kept
    INTERRUPTED = 130  # SIGINT
    TERMINATED = 143  # SIGTERM


class HoldfastError(Exception):
    """Base of everything holdfast raises on purpose."""

    exit_code: Exit = Exit.FAILED

    def __init__(self, message: str, *, expected: str = "", found: str = "", do: str = "") -> None:
        self.message, self.expected, self.found, self.do = message, expected, found, do
        super().__init__(self.text())

    def text(self) -> str:
        """The whole message, one line a part."""
        parts = (("expected", self.expected), ("found", self.found), ("do", self.do))
        return "\n".join([self.message, *(f"  {name + ':':<10}{text}" for name, text in parts if text)])


class UserError(HoldfastError):
    """Bad input: nothing was lost, and the message says how to go on."""

    exit_code = Exit.USER


class FaultError(HoldfastError):
    """A fault was shown: a regression, a leak, a fingerprint that changed."""

    exit_code = Exit.FAULT


class UndecidedError(HoldfastError):
    """No verdict could be given, for a reason that the message names."""

    exit_code = Exit.UNDECIDED


class TrainingError(HoldfastError):
    """Training stopped: a loss that is not finite, a rank that died. The last good checkpoint is in place."""


class Interrupted(HoldfastError):  # noqa: N818 - an interruption is no error of anybody's
    """SIGINT or SIGTERM arrived; the step was finished and a checkpoint written."""

    def __init__(self, message: str, *, signal_number: int, do: str = "") -> None:
        super().__init__(message, do=do)
        self.exit_code = Exit.TERMINATED if signal_number == 15 else Exit.INTERRUPTED


def nearest(name: str, known: Iterable[str]) -> str:
    """``"did you mean 'beta'?"`` for a misspelt name, or the list of known names."""
    names = sorted(set(known))
    alike = [known_name for known_name in names if known_name.casefold() == name.casefold()]
    close = alike or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    shown = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    return f"known names: {shown}" if names else "nothing is known here"


class RenamedSetting(FutureWarning):
    """A setting was given under a former name."""
