"""Accuracy of every class over rounds, where a study starts from what another one chose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.compare.choose import Choice, best_seed
from holdfast.compare.records import JobFolder, read_comparison
from holdfast.compare.tables import Entry, Table
from holdfast.evaluate.metrics import Comparison

Place = tuple[str, str]  # row and column


@dataclass(frozen=True)
class Stage:
    """The test accuracy of every class before the first round, or after one."""

    name: str  # "base", or the round's target
    accuracy: dict[str, float]


History = dict[Place, list[Stage]]


def continued(choices: Iterable[Choice], earlier: History) -> History:
    """What each place has come to with this study's round: through the model that a next round starts from."""
    found: History = {}
    for choice in choices:
        path = JobFolder(best_seed(choice).folder).test
        if path.exists():
            place = choice.row, choice.column
            found[place] = _with_round(earlier.get(place, []), [read_comparison(path)])
    return found


def with_this_round(earlier: History, scores: Mapping[Place, Sequence[Comparison]]) -> History:
    """The rounds before, and this study's as the mean over its seeds."""
    return {place: _with_round(earlier[place], compared) for place, compared in scores.items() if place in earlier}


def _with_round(stages: Sequence[Stage], compared: Sequence[Comparison]) -> list[Stage]:
    tasks = compared[0].tasks
    before = [*stages] or [Stage("base", {name: task.old_accuracy for name, task in tasks.items()})]
    mean = {name: float(np.mean([item.tasks[name].new_accuracy for item in compared])) for name in tasks}
    return [*before, Stage(compared[0].target, mean)]


def classes_of(stages: Sequence[Stage]) -> list[str]:
    """The classes of all rounds, in the order in which they first occur."""
    return list(dict.fromkeys(name for stage in stages for name in stage.accuracy))


def rounds_table(title: str, history: History) -> Table:
    """One line a round; what a round made worse is marked."""
    names = list(dict.fromkeys(name for stages in history.values() for name in classes_of(stages)))
    groups: list[tuple[tuple[Entry, ...], ...]] = []
    for (row, column), stages in history.items():
        lines: list[tuple[Entry, ...]] = []
        for number, stage in enumerate(stages):
            last = stages[number - 1].accuracy if number else {}
            entries = [
                Entry(f"{stage.accuracy[name]:.4f}", bold=stage.accuracy[name] < last.get(name, 0.0))
                if name in stage.accuracy
                else Entry("-")
                for name in names
            ]
            lines.append((Entry(row), Entry(column), Entry(stage.name), *entries))
        groups.append(tuple(lines))
    note = "Test accuracy; the last round is the mean over its seeds, those before it the model that was gone on with."
    return Table(title, ("Method", "Column", "Round", *names), tuple(groups), note, left=3)
