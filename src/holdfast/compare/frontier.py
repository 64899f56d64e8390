"""Gain against loss: what each method gains on test images when protected classes may lose so much on dev images.

A study with ``tolerances`` has for each job the model that gains most on dev images with no protected class below
-tolerance (:class:`holdfast.compare.records.FrontierPoint`); the old model where none gains. Settings are chosen as
everywhere (:func:`holdfast.compare.choose.choose`), a class counting as kept within the tolerance. Beside them stands
what ``develop`` hands back by its own rule, with its margin for a tolerance. Test images have no part in any choice.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from holdfast.compare.choose import choose
from holdfast.compare.grid import Job
from holdfast.compare.records import (
    FrontierPoint,
    JobFolder,
    JobRecord,
    Kind,
    Score,
    read_comparison,
    read_frontier,
)
from holdfast.compare.tables import Entry, Table
from holdfast.evaluate.metrics import Comparison

OLD = "old"  # what the old model is called among the points
LEVEL = 0.95  # of the intervals
_EXACT = 6  # seeds up to which every resample is taken: 6^6 = 46,656
_DRAWS = 20_000
_ROUNDING = 1e-9  # a loss of exactly the tolerance is within it


def best_within(pool: Mapping[str, Comparison], tolerance: float) -> str | None:
    """Which of the models gains most with no protected class below -tolerance, on dev images; None: none gains.

    Of equals the one whose worst class lost least, then the first.
    """
    within = [
        (compared.target_gain, compared.dev_safety, -place, name)
        for place, (name, compared) in enumerate(pool.items())
        if compared.dev_safety >= -tolerance - _ROUNDING and compared.target_gain > 0
    ]
    return max(within)[-1] if within else None


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and its bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class FrontierCell:
    """A row of a study at one column and tolerance, on test images; all in shares of accuracy."""

    kind: Kind
    row: str
    column: str
    tolerance: float
    setting: str
    seeds: int
    gain: Interval  # of the target
    worst: Interval  # change of the protected class that lost most
    lost: float  # protected classes below 0, mean over seeds
    kept: int  # seeds whose worst class is within the tolerance on test images, too
    old: int  # seeds in which nothing gained within the tolerance: the old model stands
    against_first: Interval | None  # gain less that of the study's first row, seed by seed; None: it is that row
    by_seed: tuple[tuple[int, float, float], ...] = ()  # seed, gain of the target, change of the worst protected class


def bootstrap(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Mean and percentile interval over resamples of the seeds: all of them where they are few, else 20,000 draws."""
    array = np.asarray(values, dtype=np.float64)
    count = len(array)
    if count <= _EXACT:
        places = np.array(list(product(range(count), repeat=count)))
    else:
        places = np.random.default_rng(0).integers(0, count, size=(_DRAWS, count))
    means = array[places].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return Interval(float(array.mean()), float(low), float(high))


def frontier_cells(jobs: list[Job], records: list[JobRecord]) -> list[FrontierCell]:
    """The frontier of every row and column, in the order of the study; other rows are set against the first.

    Of a study that is not finished, rows are compared on the seeds that all of them have, where there are any.
    """
    files = [JobFolder(job.folder).frontier for job in jobs]
    complete = _complete_seeds(jobs, records)
    points: list[dict[tuple[Kind, float], FrontierPoint]] = [
        {(point.kind, point.tolerance): point for point in (*read_frontier(file), *_decided(job, record))}
        if file.exists() and job.seed in (complete[job.column] or (job.seed,))
        else {}
        for job, record, file in zip(jobs, records, files, strict=True)
    ]
    places = dict.fromkeys(place for found in points for place in found)
    cells: list[FrontierCell] = []
    for kind, tolerance in places:
        cells += _at(kind, tolerance, jobs, records, [found.get((kind, tolerance)) for found in points])
    return cells


def _decided(job: Job, record: JobRecord) -> list[FrontierPoint]:
    """What ``develop`` hands back, in a study of what ships."""
    folder = JobFolder(job.folder)
    if job.result != "shipped" or not (folder.dev.exists() and folder.test.exists()):
        return []
    dev, test = read_comparison(folder.dev), read_comparison(folder.test)
    margins = job.config.certify.margins_of(name for name in dev.tasks if name != dev.target)
    return [FrontierPoint("decided", max(margins.values()), record.shipped or OLD, dev, test)]


def _complete_seeds(jobs: Sequence[Job], records: Sequence[JobRecord]) -> dict[str, set[int]]:
    """For each column the seeds of which every job is done."""
    found: dict[str, set[int]] = {}
    for job in jobs:
        found.setdefault(job.column, set()).add(job.seed)
    for job, record in zip(jobs, records, strict=True):
        if record.status != "done":
            found[job.column].discard(job.seed)
    return found


def _at(
    kind: Kind, tolerance: float, jobs: list[Job], records: list[JobRecord], points: Sequence[FrontierPoint | None]
) -> list[FrontierCell]:
    """The cells of one kind and tolerance, each with the setting that the rule of choice takes there."""
    scored = [
        replace(record, dev=_within(point.dev, tolerance)) if point is not None else replace(record, status="waiting")
        for record, point in zip(records, points, strict=True)
    ]
    by_folder = {job.folder: point for job, point in zip(jobs, points, strict=True) if point is not None}
    first: dict[str, dict[int, float]] = {}  # column -> seed -> gain of the first row
    cells: list[FrontierCell] = []
    for choice in choose(jobs, scored):
        seeds = {job.seed: by_folder[job.folder] for job in choice.jobs}
        gains = {seed: point.test.target_gain for seed, point in seeds.items()}
        reference = first.get(choice.column)
        if choice.row == jobs[0].row:
            first[choice.column] = gains
        shared = [] if reference is None else [gains[seed] - reference[seed] for seed in gains if seed in reference]
        tests = [point.test for point in seeds.values()]
        cells.append(
            FrontierCell(
                kind,
                choice.row,
                choice.column,
                tolerance,
                choice.setting_text,
                len(seeds),
                bootstrap(list(gains.values())),
                bootstrap([test.dev_safety for test in tests]),
                float(np.mean([_lost(test) for test in tests])),
                sum(test.dev_safety >= -tolerance - _ROUNDING for test in tests),
                sum(point.model == OLD for point in seeds.values()),
                bootstrap(shared) if shared else None,
                tuple((seed, point.test.target_gain, point.test.dev_safety) for seed, point in sorted(seeds.items())),
            )
        )
    return cells


def _within(dev: Comparison, tolerance: float) -> Score:
    """The figures that settings are chosen by: a class that lost no more than the tolerance counts as kept."""
    score = Score.of(dev)
    return replace(score, dev_safety=score.dev_safety + tolerance + _ROUNDING)


def _lost(compared: Comparison) -> int:
    return sum(task.accuracy_change < 0 for name, task in compared.tasks.items() if name != compared.target)


# -- as it is written -------------------------------------------------------------------------------------------------


def frontier_json(cells: Sequence[FrontierCell]) -> list[dict[str, Any]]:
    """One entry a cell."""
    return [asdict(cell) for cell in cells]


def cell_from_json(values: Mapping[str, Any]) -> FrontierCell:
    """The inverse of :func:`frontier_json`, for one cell."""
    given: dict[str, Any] = dict(values)
    for name in ("gain", "worst", "against_first"):
        given[name] = None if values[name] is None else Interval(**values[name])
    given["by_seed"] = tuple((int(seed), *rest) for seed, *rest in values.get("by_seed", ()))
    return FrontierCell(**given)


def allowed(tolerance: float) -> str:
    """A tolerance for people."""
    points = f"{100 * tolerance:g}"
    return "no class down" if tolerance == 0 else f"at most {points} point{'' if points == '1' else 's'}"


def chosen_by(cell: FrontierCell) -> str:
    """By what a model was chosen, for people."""
    if cell.kind == "decided":
        return f"develop's rule, margin {100 * cell.tolerance:g}"
    return allowed(cell.tolerance)


def frontier_table(title: str, cells: Sequence[FrontierCell]) -> Table:
    """One line a row of the study, one group a kind, column and tolerance."""
    groups: dict[tuple[str, str, float], list[tuple[Entry, ...]]] = {}
    for cell in cells:
        worst = Entry(f"{100 * cell.worst.mean:+.1f}", bold=cell.worst.mean < -cell.tolerance - _ROUNDING)
        fields = (
            cell.row,
            cell.kind,
            cell.column,
            chosen_by(cell),
            points(cell.gain),
            points(cell.against_first),
        )
        rest = (f"{cell.lost:.1f}", f"{cell.kept} of {cell.seeds}", str(cell.old), cell.setting or "-")
        line = (*map(Entry, fields), worst, *map(Entry, rest))
        groups.setdefault((cell.kind, cell.column, cell.tolerance), []).append(line)
    heading = (
        *("Method", "Result", "Images", "On dev images", "Gain", "Against the first row"),
        *("Worst class", "Classes down", "Kept", "Old model", "Setting"),
    )
    note = (
        "Points on test images, means over seeds with 95 % bootstrap intervals; models and settings were chosen on dev "
        "images. trained: a checkpoint as it is; shipped: interpolated, refitted, biased; decided: what develop hands "
        "back by its own rule. Kept: seeds whose worst class is within the tolerance on test images as well."
    )
    return Table(title, heading, tuple(tuple(lines) for lines in groups.values()), note, left=4)


def points(interval: Interval | None) -> str:
    """``+12.3 [+10.1, +14.0]``, in points."""
    if interval is None:
        return "-"
    return f"{100 * interval.mean:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"
