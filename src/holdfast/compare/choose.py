"""The choice of a setting for every row and column, on dev images, and what the chosen ones scored on test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.candidates.select import choose_setting
from holdfast.compare.grid import Job, setting_text
from holdfast.compare.records import JobFolder, JobRecord, read_comparison
from holdfast.evaluate.metrics import Comparison, retention_ratio


@dataclass(frozen=True)
class Choice:
    """The setting taken for one row and column, and its jobs, one a seed."""

    row: str
    column: str
    setting: tuple[tuple[str, Any], ...]
    jobs: tuple[Job, ...]
    tried: int  # settings it was chosen among
    missing: int  # jobs of the row and column that failed or have not finished

    @property
    def setting_text(self) -> str:
        """The setting for people."""
        return setting_text(self.setting)


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds (over n, as the paper's tables have it)."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of some values."""
        array = np.array(list(values), dtype=np.float64)
        return cls(float(array.mean()), float(array.std()))


@dataclass(frozen=True)
class Cell:
    """What the tables say of one row and column."""

    seeds: int
    retention_ratio: float
    dev_safety: Spread
    target_accuracy: Spread
    target_gain: Spread
    negative_flip_rate: Spread  # over the examples of all tasks
    positive_flip_rate: Spread
    relative_negative_flip_rate: Spread | None  # None where a seed's is not defined
    base_accuracy: float
    setting: str
    missing: int

    @classmethod
    def of(cls, choice: Choice, compared: list[Comparison]) -> Cell:
        """From the comparisons of the seeds."""
        targets = [item.tasks[item.target] for item in compared]
        flips = [item.flips for item in compared]
        relative = [rates.relative for rates in flips if rates.relative is not None]
        return cls(
            len(compared),
            retention_ratio([item.dev_safety for item in compared]),
            Spread.of(item.dev_safety for item in compared),
            Spread.of(target.new_accuracy for target in targets),
            Spread.of(item.target_gain for item in compared),
            Spread.of(rates.negative for rates in flips),
            Spread.of(rates.positive for rates in flips),
            Spread.of(relative) if len(relative) == len(flips) else None,
            float(np.mean([target.old_accuracy for target in targets])),
            choice.setting_text,
            choice.missing,
        )


def read_records(jobs: Iterable[Job]) -> list[JobRecord]:
    """The records of jobs, in their order."""
    return [JobFolder(job.folder).read() for job in jobs]


def choose(jobs: list[Job], records: list[JobRecord]) -> list[Choice]:
    """Larger retention ratio first, larger mean target gain second, on dev images, per row and column.

    Settings of which every seed finished are preferred: a ratio over fewer seeds is another quantity.
    """
    places: dict[tuple[str, str], dict[tuple[tuple[str, Any], ...], list[int]]] = defaultdict(dict)
    for number, job in enumerate(jobs):
        places[job.row, job.column].setdefault(_hashable(job.setting), []).append(number)
    choices: list[Choice] = []
    for (row, column), settings in places.items():
        finished = {
            setting: [n for n in numbers if records[n].status == "done"] for setting, numbers in settings.items()
        }
        most = max(len(numbers) for numbers in finished.values())
        if most == 0:
            continue
        candidates = [numbers for numbers in finished.values() if len(numbers) == most]
        scores = [[records[n].dev for n in numbers] for numbers in candidates]
        best = choose_setting(
            [[compared.dev_safety for compared in of if compared is not None] for of in scores],
            [[compared.target_gain for compared in of if compared is not None] for of in scores],
        )
        chosen = tuple(jobs[n] for n in candidates[best])
        missing = sum(len(numbers) - len(finished[setting]) for setting, numbers in settings.items())
        choices.append(Choice(row, column, chosen[0].setting, chosen, len(candidates), missing))
    return choices


def _hashable(setting: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    return tuple((key, repr(value)) for key, value in setting)


def scored(choice: Choice) -> list[Comparison]:
    """Test figures of the choice's seeds, those that were scored."""
    folders = [JobFolder(job.folder) for job in choice.jobs]
    return [read_comparison(folder.test) for folder in folders if folder.test.exists()]


def scores_by_place(choices: Iterable[Choice]) -> dict[tuple[str, str], list[Comparison]]:
    """Test figures by row and column, of the choices that were scored."""
    found = {(choice.row, choice.column): scored(choice) for choice in choices}
    return {place: compared for place, compared in found.items() if compared}


def cells(choices: Iterable[Choice], scores: dict[tuple[str, str], list[Comparison]]) -> dict[tuple[str, str], Cell]:
    """The tables' cells, from test figures."""
    by_place = {(choice.row, choice.column): choice for choice in choices}
    return {place: Cell.of(by_place[place], compared) for place, compared in scores.items()}


def best_seed(choice: Choice) -> Job:
    """The one model that a next round would start from: safe on dev images if any is, with the largest gain."""
    scores = [JobFolder(job.folder).read().dev for job in choice.jobs]
    known = [(job, score) for job, score in zip(choice.jobs, scores, strict=True) if score is not None]
    return max(known, key=lambda item: (item[1].dev_safety >= 0, item[1].target_gain, item[1].dev_safety))[0]
