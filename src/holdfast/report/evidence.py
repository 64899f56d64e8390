"""The evidence on every task, worst first: from a retired sealed set in full, or else from dev images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from holdfast.certify.claims import Counts, TaskResult, Verdict, delta_of
from holdfast.certify.exact.score_test import lower_bounds, p_value
from holdfast.certify.report import needed_images
from holdfast.evaluate.metrics import Comparison


@dataclass(frozen=True)
class TaskRow:
    """One task on one set of images."""

    task: str
    is_target: bool
    n: int
    gained: int
    lost: int
    difference: float
    margin: float
    bound: float  # lower bound on the change; all of them hold together
    p: float  # of H0: the loss reaches the margin; where there is a verdict, corrected as the verdict is
    old: float | None
    new: float | None
    verdict: str | None  # of a certificate; dev images give none
    needed: int | None  # images that would decide it; None where it is decided, or where no number is known to

    @property
    def beyond(self) -> bool:
        """Whether the loss that was seen reaches the margin."""
        return self.difference <= -self.margin and self.difference < 0


@dataclass(frozen=True)
class Evidence:
    """Every task on one set of images: protected ones worst first, the target at the end."""

    role: Literal["sealed", "dev"]
    rows: tuple[TaskRow, ...]
    level: float

    @property
    def protected(self) -> tuple[TaskRow, ...]:
        """The protected tasks, worst first."""
        return tuple(row for row in self.rows if not row.is_target)

    @property
    def target(self) -> TaskRow | None:
        """The target."""
        return next((row for row in self.rows if row.is_target), None)

    @property
    def worst(self) -> TaskRow:
        """The protected task that changed for the worst."""
        return self.protected[0]

    @property
    def deciding(self) -> TaskRow:
        """The class that the verdict hangs on: the one with the largest p-value."""
        return max(self.rows, key=lambda row: (row.p, -row.difference))

    @property
    def dropped(self) -> int:
        """Protected tasks with fewer right answers than before."""
        return sum(item.difference < 0 for item in self.protected)


def sealed_evidence(reported: Mapping[str, Any], accuracy: Mapping[str, tuple[float, float]]) -> Evidence:
    """From the report of a certificate whose set is retired."""
    rows = [_reported_row(item, False, accuracy) for item in reported["tasks"]]
    if isinstance(reported.get("target"), Mapping):
        rows.append(_reported_row(reported["target"], True, accuracy))
    return Evidence("sealed", _worst_first(rows), float(reported["level"]))


def _reported_row(row: Mapping[str, Any], is_target: bool, accuracy: Mapping[str, tuple[float, float]]) -> TaskRow:
    old, new = accuracy.get(row["task"], (None, None))
    return TaskRow(
        row["task"],
        is_target,
        row["n"],
        row["gained"],
        row["lost"],
        row["difference"],
        row["margin"],
        row["simultaneous_lower_bound"],
        row["p_adjusted"],
        old,
        new,
        row["verdict"],
        row.get("needed"),
    )


def dev_evidence(dev: Comparison, margins: Mapping[str, float], confidence: float, target: str) -> Evidence:
    """What dev images say. They chose the model, so this is a description and no promise."""
    delta = delta_of(confidence)
    rows: list[TaskRow] = []
    for name, change in dev.tasks.items():
        margin = 0.0 if name == target else margins[name]
        n, gained, lost = change.examples, change.gained, change.lost
        p, bound = _tested(gained, lost, n, margin, delta / len(dev.tasks))
        rows.append(
            TaskRow(
                name,
                name == target,
                n,
                gained,
                lost,
                change.accuracy_change,
                margin,
                bound,
                p,
                change.old_accuracy,
                change.new_accuracy,
                None,
                None if p <= delta else _needed(Counts(name, n, gained, lost), margin, delta, len(dev.tasks)),
            )
        )
    return Evidence("dev", _worst_first(rows), delta)


@lru_cache(maxsize=8192)
def _tested(gained: int, lost: int, n: int, margin: float, level: float) -> tuple[float, float]:
    return p_value(gained, lost, n, margin), lower_bounds(gained, lost, n, (level,), extra=(margin,))[0]


def _needed(counts: Counts, margin: float, delta: float, hypotheses: int) -> int | None:
    undecided = TaskResult(counts, margin, 1.0, 1.0, 1.0, -1.0, -1.0, Verdict.UNDECIDED)
    return needed_images(undecided, delta, hypotheses)


def _worst_first(rows: list[TaskRow]) -> tuple[TaskRow, ...]:
    """Protected tasks by what was seen, of equals the weaker bound first; the target behind them."""
    return tuple(sorted(rows, key=lambda row: (row.is_target, row.difference, row.bound, row.task)))
