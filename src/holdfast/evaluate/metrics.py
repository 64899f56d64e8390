"""Measures of a model, and of a new model against an old one: pure functions of tables of predictions, no torch.

DevSafety(acc)  = min over k of acc_k(new) − acc_k(old)          safe when >= 0
DevSafety(loss) = min over k of L_k(old) − L_k(new)
dAcc(target)    = acc_target(new) − acc_target(old)
retention ratio = share of seeds with DevSafety(acc) >= 0        (method section 1)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from holdfast.errors import UserError, nearest
from holdfast.evaluate.flips import FlipRates, overall


@dataclass(frozen=True)
class TaskScore:
    """One model on one task."""

    examples: int
    correct: int
    loss: float  # mean cross-entropy

    @property
    def accuracy(self) -> float:
        """Share of examples that are right."""
        return self.correct / self.examples


@dataclass(frozen=True)
class TaskChange:
    """Two models on the same examples of one task."""

    examples: int
    old_correct: int
    new_correct: int
    gained: int  # wrong before, right now
    lost: int  # right before, wrong now
    old_loss: float
    new_loss: float

    @property
    def old_accuracy(self) -> float:
        """acc_k(old)."""
        return self.old_correct / self.examples

    @property
    def new_accuracy(self) -> float:
        """acc_k(new)."""
        return self.new_correct / self.examples

    @property
    def accuracy_change(self) -> float:
        """acc_k(new) − acc_k(old), from the flips: exactly 0 when as many were gained as lost."""
        return (self.gained - self.lost) / self.examples

    @property
    def loss_change(self) -> float:
        """h_k = L_k(new) − L_k(old)."""
        return self.new_loss - self.old_loss

    @property
    def flips(self) -> FlipRates:
        """Negative and positive flip rate."""
        return FlipRates(self.examples, self.old_correct, self.gained, self.lost)


@dataclass(frozen=True)
class Comparison:
    """A new model against the old one: what development gained, and what it cost the worst task."""

    target: str
    tasks: dict[str, TaskChange]  # protected tasks and the target

    @property
    def protected(self) -> dict[str, TaskChange]:
        """The protected tasks alone."""
        return {name: change for name, change in self.tasks.items() if name != self.target}

    @property
    def dev_safety(self) -> float:
        """DevSafety(acc): the worst protected task's change of accuracy."""
        return min(change.accuracy_change for change in self.protected.values())

    @property
    def dev_safety_loss(self) -> float:
        """DevSafety(loss): the worst protected task's decrease of the mean loss."""
        return min(-change.loss_change for change in self.protected.values())

    @property
    def worst_task(self) -> str:
        """The protected task that DevSafety(acc) is about; of equals, the one whose loss rose most."""
        return min(self.protected, key=lambda name: self._rank(self.tasks[name]))

    @staticmethod
    def _rank(change: TaskChange) -> tuple[float, float]:
        return change.accuracy_change, -change.loss_change

    @property
    def target_gain(self) -> float:
        """dAcc(target)."""
        return self.tasks[self.target].accuracy_change

    @property
    def flips(self) -> FlipRates:
        """Flip rates over the examples of all tasks, the target's included."""
        return overall(change.flips for change in self.tasks.values())

    @property
    def safe(self) -> bool:
        """Whether no protected task lost accuracy."""
        return self.dev_safety >= 0


@dataclass(frozen=True)
class Joined:
    """Two tables of predictions, row by row about the same example."""

    example_id: np.ndarray
    task: np.ndarray
    old_correct: np.ndarray  # bool
    new_correct: np.ndarray  # bool
    old_loss: np.ndarray
    new_loss: np.ndarray


def per_task(table: pa.Table) -> dict[str, TaskScore]:
    """Accuracy and mean loss of every task, in order of name."""
    task, correct, loss = _column(table, "task"), _correct(table), _column(table, "loss")
    names, index = np.unique(task.astype(str), return_inverse=True)
    counts = np.bincount(index, minlength=len(names))
    right = np.bincount(index, weights=correct, minlength=len(names))
    losses = np.bincount(index, weights=loss, minlength=len(names)) / np.maximum(counts, 1)
    return {
        str(name): TaskScore(int(count), int(hits), float(mean))
        for name, count, hits, mean in zip(names, counts, right, losses, strict=True)
    }


def per_task_accuracy(table: pa.Table) -> dict[str, float]:
    """acc_k of every task."""
    return {name: score.accuracy for name, score in per_task(table).items()}


def per_task_loss(table: pa.Table) -> dict[str, float]:
    """L_k of every task."""
    return {name: score.loss for name, score in per_task(table).items()}


def join(old: pa.Table, new: pa.Table) -> Joined:
    """Bring two tables together by example id; they must be about the same examples with the same labels."""
    old_ids, new_ids = _column(old, "example_id").astype(str), _column(new, "example_id").astype(str)
    old_order, new_order = np.argsort(old_ids, kind="stable"), np.argsort(new_ids, kind="stable")
    old_sorted, new_sorted = old_ids[old_order], new_ids[new_order]
    for which, ids in (("old", old_sorted), ("new", new_sorted)):
        if len(ids) > 1 and (ids[1:] == ids[:-1]).any():
            raise UserError(f"the {which} table names an example twice", found=str(ids[1:][ids[1:] == ids[:-1]][0]))
    if len(old_sorted) != len(new_sorted) or (old_sorted != new_sorted).any():
        both = len(np.intersect1d(old_sorted, new_sorted))
        raise UserError(
            "the two tables are about different examples",
            expected="the same example ids in both",
            found=f"{len(old_sorted)} old, {len(new_sorted)} new, {both} in both",
            do="predict with both models on the same split",
        )
    for name in ("label", "task"):
        differs = _column(old, name)[old_order] != _column(new, name)[new_order]
        if differs.any():
            raise UserError(f"the two tables give an example another {name}", found=str(old_sorted[differs][0]))
    return Joined(
        example_id=old_sorted,
        task=_column(old, "task")[old_order].astype(str),
        old_correct=_correct(old)[old_order],
        new_correct=_correct(new)[new_order],
        old_loss=_column(old, "loss")[old_order],
        new_loss=_column(new, "loss")[new_order],
    )


def changes(old: pa.Table, new: pa.Table) -> dict[str, TaskChange]:
    """What became of every task from the old model to the new one."""
    joined = join(old, new)
    names, index = np.unique(joined.task, return_inverse=True)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(index, weights=values, minlength=len(names))

    counts = np.bincount(index, minlength=len(names))
    before, now = total(joined.old_correct), total(joined.new_correct)
    gained = total(~joined.old_correct & joined.new_correct)
    lost = total(joined.old_correct & ~joined.new_correct)
    old_loss, new_loss = total(joined.old_loss) / counts, total(joined.new_loss) / counts
    return {
        str(name): TaskChange(
            int(counts[k]),
            int(before[k]),
            int(now[k]),
            int(gained[k]),
            int(lost[k]),
            float(old_loss[k]),
            float(new_loss[k]),
        )
        for k, name in enumerate(names)
    }


def compare(old: pa.Table, new: pa.Table, target: str, protected: Iterable[str] | None = None) -> Comparison:
    """A new model against the old one; every protected task must be in the tables (default: all but the target)."""
    found = changes(old, new)
    wanted = [name for name in found if name != target] if protected is None else list(protected)
    for name in (*wanted, target):
        if name not in found:
            raise UserError(f"the predictions hold no examples of {name!r}", do=nearest(name, found))
    if not wanted:
        raise UserError("there is no protected task in the predictions", expected="at least one besides the target")
    if target in wanted:
        raise UserError(f"the target {target!r} is listed as protected")
    return Comparison(target, {name: found[name] for name in (*wanted, target)})


def dev_safety_accuracy(old: pa.Table, new: pa.Table, protected: Iterable[str]) -> float:
    """DevSafety(acc) = min over k of [acc_k(new) − acc_k(old)]."""
    found = changes(old, new)
    return min(found[name].accuracy_change for name in protected)


def dev_safety_loss(old: pa.Table, new: pa.Table, protected: Iterable[str]) -> float:
    """DevSafety(loss) = min over k of [L_k(old) − L_k(new)]."""
    found = changes(old, new)
    return min(-found[name].loss_change for name in protected)


def target_gain(old: pa.Table, new: pa.Table, target: str) -> float:
    """dAcc(target) = acc_target(new) − acc_target(old)."""
    return changes(old, new)[target].accuracy_change


def retention_ratio(dev_safeties: Sequence[float]) -> float:
    """Share of seeds with DevSafety(acc) >= 0."""
    if not dev_safeties:
        raise ValueError("the retention ratio needs at least one seed")
    return sum(value >= 0 for value in dev_safeties) / len(dev_safeties)


def _column(table: pa.Table, name: str) -> np.ndarray:
    return table[name].to_numpy()


def _correct(table: pa.Table) -> np.ndarray:
    return np.asarray(_column(table, "label") == _column(table, "prediction"), dtype=bool)
