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
    p: float  # of H0: the loss reaches the margin
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
        return tuple(one for one in self.rows if not one.is_target)

    @property
    def target(self) -> TaskRow | None:
        """The target."""
        return next((one for one in self.rows if one.is_target), None)

    @property
    def worst(self) -> TaskRow:
        """The protected task that changed for the worst."""
        return self.protected[0]

    @property
    def dropped(self) -> int:
        """Protected tasks with fewer right answers than before."""
        return sum(one.difference < 0 for one in self.protected)


def sealed_evidence(told: Mapping[str, Any], accuracy: Mapping[str, tuple[float, float]]) -> Evidence:
    """From the report of a certificate whose set is retired."""
    rows = [_told_row(one, False, accuracy) for one in told["tasks"]]
    if isinstance(told.get("target"), Mapping):
        rows.append(_told_row(told["target"], True, accuracy))
    return Evidence("sealed", _worst_first(rows), float(told["level"]))


def _told_row(one: Mapping[str, Any], is_target: bool, accuracy: Mapping[str, tuple[float, float]]) -> TaskRow:
    old, new = accuracy.get(one["task"], (None, None))
    return TaskRow(
        one["task"],
        is_target,
        one["n"],
        one["gained"],
        one["lost"],
        one["difference"],
        one["margin"],
        one["simultaneous_lower_bound"],
        one["p_value"],
        old,
        new,
        one["verdict"],
        one.get("needed"),
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
    return tuple(sorted(rows, key=lambda one: (one.is_target, one.difference, one.bound, one.task)))
