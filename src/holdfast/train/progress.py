"""How far a run is: a bar with the time left on a terminal, plain lines where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class TerminalProgress:
    """A live bar that also shows the objective and the latest DevSafety and target gain."""

    def __init__(self, what: str, total: int, console: Console) -> None:
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
        )
        self._task = self._bar.add_task(what, total=total, state="")
        self._state: dict[str, str] = {}

    def __enter__(self) -> TerminalProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Move the bar."""
        self._state |= {name: f"{name} {value:.3f}" for name, value in values.items()}
        self._bar.update(self._task, completed=done, state="  ".join(self._state.values()))

    def evaluated(self, done: int, record: Mapping[str, Any]) -> None:
        """Show the latest evaluation on dev images."""
        self._state |= _headline(record)
        self._bar.update(self._task, completed=done, state="  ".join(self._state.values()))


class PlainProgress:
    """Lines on stderr, at most one in ten seconds and one an evaluation."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self._began = self._spoke = time.monotonic()
        self._first: int | None = None

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """A line now and then."""
        self._first = done if self._first is None else self._first
        if time.monotonic() - self._spoke >= 10:
            self._say(done, "  ".join(f"{name} {value:.3f}" for name, value in values.items()))

    def evaluated(self, done: int, record: Mapping[str, Any]) -> None:
        """A line an evaluation."""
        self._say(done, "  ".join(_headline(record).values()))

    def _say(self, done: int, text: str) -> None:
        self._spoke = time.monotonic()
        behind = done - (self._first or 0)
        left = f"  about {(self._spoke - self._began) / behind * (self.total - done):.0f} s left" if behind else ""
        print(f"{self.what}: step {done}/{self.total}  {text}{left}", file=sys.stderr, flush=True)


class NoProgress:
    """Says nothing: ranks other than the first, and quiet runs."""

    def __enter__(self) -> NoProgress:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Nothing."""

    def evaluated(self, done: int, record: Mapping[str, Any]) -> None:
        """Nothing."""


def _headline(record: Mapping[str, Any]) -> dict[str, str]:
    names = {"dev_safety": "DevSafety", "target_gain": "target gain"}
    return {
        name: f"{label} {record[name] * 100:+.1f} points"
        for name, label in names.items()
        if record.get(name) is not None
    }


def choose_progress(what: str, total: int, *, quiet: bool = False) -> TerminalProgress | PlainProgress | NoProgress:
    """A bar on a terminal, lines elsewhere, nothing when quiet."""
    if quiet:
        return NoProgress()
    console = Console(stderr=True)
    return TerminalProgress(what, total, console) if console.is_terminal else PlainProgress(what, total)
