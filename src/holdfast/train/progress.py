"""How far a run is: a bar with the time left on a terminal, plain lines where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text


class _TwoLines(Progress):
    """A bar with the state of the run on a line of its own: beside the bar it would leave no room for it."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar and, as soon as there is one, the state."""
        yield from super().get_renderables()
        for task in self.tasks:
            if task.fields["state"]:
                yield Text(task.fields["state"])


class TerminalProgress:
    """A live bar; below it the objective and, of the latest evaluation, the worst protected class and the target."""

    def __init__(self, what: str, total: int, console: Console) -> None:
        self._bar = _TwoLines(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
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
        self._bar.update(self._task, completed=done, state="  ".join(filter(None, self._state.values())))

    def evaluated(self, done: int, record: Mapping[str, Any]) -> None:
        """Show the latest evaluation on dev images."""
        self._state["evaluation"] = _headline(record)
        self._bar.update(self._task, completed=done, state="  ".join(filter(None, self._state.values())))


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
        self._say(done, _headline(record))

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


def _headline(record: Mapping[str, Any]) -> str:
    """Changes of accuracy on dev images: of the worst protected class (DevSafety) and of the target."""
    names = {"dev_safety": "worst class", "target_gain": "target"}
    parts = [f"{label} {record[name] * 100:+.1f}" for name, label in names.items() if record.get(name) is not None]
    return f"{', '.join(parts)} points" if parts else ""


def choose_progress(what: str, total: int, *, quiet: bool = False) -> TerminalProgress | PlainProgress | NoProgress:
    """A bar on a terminal, lines elsewhere, nothing when quiet."""
    if quiet:
        return NoProgress()
    console = Console(stderr=True)
    return TerminalProgress(what, total, console) if console.is_terminal else PlainProgress(what, total)
