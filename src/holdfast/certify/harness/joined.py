"""Two models' samples side by side: joined by identity, with what differs told or refused."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast.certify.harness.samples import Log, Sample
from holdfast.errors import UserError
from holdfast.files import write_atomic


@dataclass(frozen=True)
class Joined:
    """One table of two models, and where it comes from."""

    kind: str  # of the logs
    columns: dict[str, list[Any]]  # example_id, task, the group where there is one, and right or wrong or scores
    group: str | None  # the column of groups
    metrics: dict[str, str]  # by task
    missing: dict[str, str]  # tasks that only one model was evaluated on: which one lacks it
    warnings: tuple[str, ...]

    @property
    def table(self) -> pa.Table:
        """As :func:`holdfast.certify` takes it."""
        return pa.table(self.columns)

    @property
    def tasks(self) -> list[str]:
        """Names in alphabetical order."""
        return sorted(set(self.columns["task"]))

    def write(self, path: Path) -> None:
        """The table as CSV: the same logs give the same bytes."""

        def fill(temporary: Path) -> None:
            with temporary.open("w", newline="", encoding="utf-8") as file:
                rows = csv.writer(file, lineterminator="\n")
                rows.writerow(self.columns)
                rows.writerows(zip(*self.columns.values(), strict=True))

        write_atomic(path, fill)

    def source(self) -> dict[str, Any]:
        """What a report tells about the logs."""
        return {"logs": self.kind, "metrics": dict(sorted(self.metrics.items())), "warnings": list(self.warnings)}


def join(
    kind: str,
    old: Log,
    new: Log,
    paths: tuple[Path, Path],
    *,
    score_range: tuple[float, float] | None = None,
    tasks_may_differ: bool = False,
) -> Joined:
    """Pair the samples of two models; tasks and documents that only one of them has are refused."""
    for log, path in zip((old, new), paths, strict=True):
        if not log.samples:
            raise UserError(f"{path} holds no samples", expected=f"logs of {kind}")
    shared = old.tasks() & new.tasks()
    missing = dict.fromkeys(old.tasks() - shared, "the new model")
    missing |= dict.fromkeys(new.tasks() - shared, "the old model")
    if not shared or (missing and not tasks_may_differ):
        _refuse_tasks(old, new, paths)
    _check_same_documents(old, new, shared, paths)
    keys = sorted(key for key in old.samples if key[0] in shared)
    pairs = [(old.samples[key], new.samples[key]) for key in keys]
    metrics = _same_metrics(old, new, shared)
    columns, group = _columns(pairs, old.group, score_range)
    warnings = [*_prefixed(old.warnings, "old"), *_prefixed(new.warnings, "new"), *_prompts(pairs)]
    warnings += _mixed_kinds(pairs, columns)
    return Joined(kind, columns, group, metrics, missing, tuple(warnings))


def _columns(
    pairs: list[tuple[Sample, Sample]], group: str, score_range: tuple[float, float] | None
) -> tuple[dict[str, list[Any]], str | None]:
    columns: dict[str, list[Any]] = {
        "example_id": [sample.identity for sample, _ in pairs],
        "task": [sample.task for sample, _ in pairs],
    }
    named = [sample.group for sample, _ in pairs]
    # Groups of one sample each say nothing that the ids do not. A group may span tasks: those are then not independent.
    repeated = max(Counter(named).values()) > 1
    used = group if repeated and all(name is not None for name in named) else None
    if used is not None:
        columns[used] = named
    scores = [[pair[side].score for pair in pairs] for side in (0, 1)]
    if score_range is None and all(value in (0.0, 1.0) for values in scores for value in values):
        columns["old_correct"], columns["new_correct"] = ([int(value) for value in values] for values in scores)
    else:
        _check_range(pairs, score_range or (0.0, 1.0))
        columns["old_score"], columns["new_score"] = scores
    return columns, used


def _check_range(pairs: list[tuple[Sample, Sample]], allowed: tuple[float, float]) -> None:
    low, high = allowed
    for sample in (sample for pair in pairs for sample in pair):
        if not low <= sample.score <= high:
            raise UserError(
                f"the metric of {sample.task} leaves the range of scores",
                expected=f"scores from {low:g} to {high:g}",
                found=f"{sample.score:g}",
                do="choose another metric with --metric, or declare the range that it can have: --score-range LOW,HIGH",
            )


def _refuse_tasks(old: Log, new: Log, paths: tuple[Path, Path]) -> None:
    only = (sorted(old.tasks() - new.tasks()), sorted(new.tasks() - old.tasks()))
    found = "; ".join(
        f"only in {path}: {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        for names, path in zip(only, paths, strict=True)
        if names
    )
    raise UserError(
        "the two models were not evaluated on the same tasks",
        expected="the same tasks in both logs",
        found=found,
        do="evaluate both models on the same tasks, or name in a policy what may be missing: `holdfast gate`",
    )


def _check_same_documents(old: Log, new: Log, tasks: Iterable[str], paths: tuple[Path, Path]) -> None:
    """Refuse documents that only one model was asked about, with how many there are in which task."""
    names = set(tasks)
    first = Counter(task for task, identity in old.samples if task in names and (task, identity) not in new.samples)
    other = Counter(task for task, identity in new.samples if task in names and (task, identity) not in old.samples)
    both = [key for key in old.samples if key in new.samples]
    changed = Counter(key[0] for key in both if old.samples[key].document != new.samples[key].document)
    different = sorted({*first, *other, *changed})
    if not different:
        return
    shown = [
        f"{task}: {first[task]} only in the first, {other[task]} only in the second"
        + (f", {changed[task]} with another question or answer" if changed[task] else "")
        for task in different[:5]
    ]
    more = f"; and {len(different) - 5} more tasks" if len(different) > 5 else ""
    raise UserError(
        f"{paths[0]} and {paths[1]} are not about the same documents",
        expected="the same questions with the same answers, for both models",
        found="; ".join(shown) + more,
        do="evaluate both models with the same version of the data, the same split and the same limit",
    )


def _same_metrics(old: Log, new: Log, tasks: Iterable[str]) -> dict[str, str]:
    for task in sorted(tasks):
        if old.metrics.get(task) != new.metrics.get(task):
            raise UserError(
                f"the two logs score {task} by different metrics",
                found=f"{old.metrics.get(task)} and {new.metrics.get(task)}",
                do=f"name one that both have: --metric {task}=NAME",
            )
    return {task: old.metrics[task] for task in sorted(tasks) if task in old.metrics}


def _prompts(pairs: list[tuple[Sample, Sample]]) -> list[str]:
    """Where the models were shown different prompts, the change is that of model and prompt together."""
    different = Counter(old.task for old, new in pairs if old.prompt != new.prompt)
    return [
        f"{count} prompts of {task} differ between the two logs (chat template, few-shot examples or instruction): the "
        "verdict is about model and prompt together"
        for task, count in sorted(different.items())
    ]


def _mixed_kinds(pairs: list[tuple[Sample, Sample]], columns: dict[str, list[Any]]) -> list[str]:
    if "old_score" not in columns:
        return []
    tasks = {sample.task for sample, _ in pairs}
    graded = tasks - {sample.task for pair in pairs for sample in pair if sample.score not in (0.0, 1.0)}
    if not graded or graded == tasks:
        return []
    return [
        f"{', '.join(sorted(graded)[:5])}: right or wrong, and tested as scores because other tasks have scores; in a "
        "run of their own they take the exact test, which needs fewer samples"
    ]


def _prefixed(warnings: Iterable[str], model: str) -> list[str]:
    return [f"the {model} model's log: {warning}" for warning in warnings]
