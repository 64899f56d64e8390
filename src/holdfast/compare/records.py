"""What a job leaves behind: one small file that lists and tables are made of, and details for those who ask.

Nothing here imports torch, and nothing holds more than one job's details at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from holdfast.artifacts import RunFolder
from holdfast.evaluate.metrics import Comparison, TaskChange
from holdfast.files import canonical_json, read_json, read_jsonl, write_json, write_text
from holdfast.shape import Maybe, Shape, check_shape, count, number, one_of, text

Status = Literal["waiting", "begun", "done", "failed"]


@dataclass(frozen=True)
class Score:
    """A model against the old one, in the figures that choices and tables are made of."""

    dev_safety: float
    target_gain: float
    target_old: float
    target_new: float
    worst_task: str

    @classmethod
    def of(cls, compared: Comparison) -> Score:
        """The figures of a comparison."""
        target = compared.tasks[compared.target]
        return cls(
            compared.dev_safety,
            compared.target_gain,
            target.old_accuracy,
            target.new_accuracy,
            compared.worst_task,
        )


@dataclass(frozen=True)
class JobRecord:
    """State of a job."""

    status: Status
    step: int | None = None  # the chosen checkpoint
    dev: Score | None = None  # of that checkpoint
    seconds: float = 0.0  # of the last attempt, from beginning to end
    training_seconds: float = 0.0  # of those, in the training loop, evaluations and all
    error: str = ""
    verdict: str | None = None  # of what ships, where images are sealed
    shipped: str | None = None  # name of the candidate that ships; None: the old model, or a study of checkpoints


@dataclass(frozen=True)
class Curve:
    """The evaluations of one seed of one row: figures by step."""

    steps: np.ndarray  # [t]
    values: Mapping[str, np.ndarray]  # dev_safety, target_gain, train_safety, train_gain -> [t]


class JobFolder:
    """A job's folder: a run folder with the job's record beside."""

    def __init__(self, root: Path) -> None:
        self.root, self.run = root, RunFolder(root)

    @property
    def record_file(self) -> Path:
        """The record."""
        return self.root / "job.json"

    @property
    def traceback(self) -> Path:
        """Where a failure of ours came from."""
        return self.root / "error.txt"

    @property
    def dev(self) -> Path:
        """The chosen checkpoint on dev images, task by task."""
        return self.root / "dev.json"

    @property
    def test(self) -> Path:
        """The chosen checkpoint on test images, task by task; there only where the job's setting was chosen."""
        return self.root / "test.json"

    @property
    def frontier(self) -> Path:
        """What gains most within each tolerance, on dev and test images; there only where a study has tolerances."""
        return self.root / "frontier.json"

    def read(self) -> JobRecord:
        """The record; a job that has none waits."""
        if not self.record_file.exists():
            return JobRecord("waiting")
        values = read_json(self.record_file)
        check_shape(values, _RECORD, self.record_file)
        known = {name: values[name] for name in _RECORD if name != "dev" and values.get(name) is not None}
        dev = values.get("dev")
        return JobRecord(**known, dev=None if dev is None else Score(**{name: dev[name] for name in _SCORE}))

    def write(self, record: JobRecord) -> None:
        """Write the record in one step."""
        write_json(self.record_file, asdict(record))

    def evaluations(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(step, evaluation) of every evaluation, in order."""
        if self.run.metrics.exists():
            for record in read_jsonl(self.run.metrics):
                if "evaluation" in record:
                    yield record["step"], record["evaluation"]

    def logged(self, name: str) -> Iterator[tuple[int, dict[str, float | None]]]:
        """(step, value of every task) of a per-task quantity, for methods that log it."""
        if self.run.metrics.exists():
            for record in read_jsonl(self.run.metrics):
                if isinstance(record.get(name), dict):
                    yield record["step"], record[name]


_SCORE: dict[str, Shape] = {
    "dev_safety": number,
    "target_gain": number,
    "target_old": number,
    "target_new": number,
    "worst_task": text,
}
_RECORD: dict[str, Shape] = {
    "status": one_of("waiting", "begun", "done", "failed"),
    "step": Maybe(count),
    "dev": Maybe(_SCORE),
    "seconds": Maybe(number),
    "training_seconds": Maybe(number),
    "error": Maybe(text),
    "verdict": Maybe(text),
    "shipped": Maybe(text),
}
_COLUMNS = ("examples", "old_correct", "new_correct", "gained", "lost", "old_loss", "new_loss")


def write_comparison(path: Path, compared: Comparison) -> None:
    """A comparison, task by task: one list a quantity, which reads ten times as fast as one table a task."""
    write_text(path, canonical_json(_comparison_values(compared)) + "\n")


def read_comparison(path: Path) -> Comparison:
    """The inverse of :func:`write_comparison`."""
    return _comparison_of(read_json(path))


def _comparison_values(compared: Comparison) -> dict[str, Any]:
    columns = {name: [getattr(task, name) for task in compared.tasks.values()] for name in _COLUMNS}
    return {"target": compared.target, "tasks": list(compared.tasks), **columns}


def _comparison_of(values: Mapping[str, Any]) -> Comparison:
    rows = zip(*(values[name] for name in _COLUMNS), strict=True)
    return Comparison(
        values["target"], {name: TaskChange(*row) for name, row in zip(values["tasks"], rows, strict=True)}
    )


Kind = Literal["trained", "shipped", "decided"]


@dataclass(frozen=True)
class FrontierPoint:
    """What gains most on dev images within a tolerance, and what it scored on test images."""

    kind: Kind  # among the checkpoints as they were trained, or the candidates for shipping; or by develop's own rule
    tolerance: float  # of develop's own rule: the largest margin
    model: str  # name of the checkpoint or candidate; "old" where nothing gained within the tolerance
    dev: Comparison
    test: Comparison


def write_frontier(path: Path, points: Sequence[FrontierPoint]) -> None:
    """The points of a job."""
    values = [
        {"kind": point.kind, "tolerance": point.tolerance, "model": point.model}
        | {"dev": _comparison_values(point.dev), "test": _comparison_values(point.test)}
        for point in points
    ]
    write_text(path, canonical_json({"points": values}) + "\n")


def read_frontier(path: Path) -> list[FrontierPoint]:
    """The inverse of :func:`write_frontier`."""
    return [
        FrontierPoint(
            entry["kind"],
            entry["tolerance"],
            entry["model"],
            _comparison_of(entry["dev"]),
            _comparison_of(entry["test"]),
        )
        for entry in read_json(path)["points"]
    ]
