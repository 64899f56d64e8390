"""Protected rows: which task each belongs to, and which of them a step takes.

What a step draws is a pure function of (seed, step), so that a checkpoint needs no more of the sampler than its seed.
Draws are made for all ranks together; each rank reads its share.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from holdfast.data.loader import Pool
from holdfast.errors import UserError, nearest
from holdfast.integrations.settings import RetentionSettings
from holdfast.runtime import derive_seed

_LABELS = ("label", "labels", "label_ids")  # a task column of such a name is an input of the model, too
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class ProtectedBatch:
    """This rank's protected rows of one optimizer step."""

    inputs: Any  # what the collator made of the rows
    tasks: Tensor  # [n]
    old_losses: Tensor | None  # [n], where a column holds them


class ProtectedRows:
    """A dataset with a task for each row, checked once, before training."""

    def __init__(self, dataset: Any, settings: RetentionSettings) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UserError(
                "the protected dataset must have a length and rows by number",
                found=type(dataset).__name__,
                do="give a map-style dataset; of an iterable one, take the rows that you protect into a list",
            )
        if len(dataset) == 0:
            raise UserError("the protected dataset is empty", do="give rows of each task that must not get worse")
        self.dataset, self.settings = dataset, settings
        self.names, self.tasks = _task_ids(column_of(dataset, settings.task_column, "task_column"), settings.tasks)
        self.old_losses: Tensor | None = None
        if settings.old_loss_column is not None:
            self.old_losses = _finite(column_of(dataset, settings.old_loss_column, "old_loss_column"))
        self.of_task = [np.flatnonzero(self.tasks == task) for task in range(len(self.names))]
        empty = [name for name, rows in zip(self.names, self.of_task, strict=True) if len(rows) == 0]
        if empty:
            raise UserError(
                f"task {empty[0]!r} has no protected rows"
                + (f", nor have {len(empty) - 1} others" if empty[1:] else ""),
                do="give rows of every task, or leave the task out of tasks",
            )

    @property
    def sizes(self) -> Tensor:
        """[m] rows of each task."""
        return torch.tensor([len(rows) for rows in self.of_task])

    def fingerprint(self) -> str:
        """Of the old losses in a column: a resumed run must compare with the same ones."""
        assert self.old_losses is not None
        return hashlib.sha256(self.old_losses.numpy().tobytes()).hexdigest()

    def steps(self, seed: int, start: int, rank: int, world: int) -> Iterator[list[int]]:
        """This rank's rows of step ``start`` and of every step behind it."""
        settings, m = self.settings, len(self.names)
        tasks = Pool(m, settings.tasks_per_step or m, seed, "protected tasks")
        rows = [
            Pool(len(positions), settings.rows_per_task, seed, "protected rows", task)
            for task, positions in enumerate(self.of_task)
        ]
        fewest = sum(sorted(pool.take for pool in rows)[: tasks.take])
        if fewest < world:
            raise UserError(
                f"a protected batch may have {fewest} rows, fewer than the {world} processes",
                do="raise rows_per_task or tasks_per_step",
            )
        step = start
        while True:
            drawn = [self.of_task[task][rows[task].draw(step)] for task in np.sort(tasks.draw(step))]
            yield np.concatenate(drawn)[rank::world].tolist()
            step += 1

    def batches(
        self, collate: Collate, seed: int, start: int, rank: int, world: int, workers: int = 0
    ) -> Iterator[ProtectedBatch]:
        """This rank's batches from step ``start`` on."""
        # A generator of its own: the loader draws a seed, and may not take it from the random numbers of the training.
        own = torch.Generator().manual_seed(derive_seed(seed, "protected loader", start))
        loader = DataLoader(
            cast("Dataset[Any]", _Numbered(self.dataset)),
            batch_sampler=_Steps(self, (seed, start, rank, world)),
            collate_fn=_Collator(collate, self),
            num_workers=workers,
            generator=own,
        )
        return iter(loader)


class _Numbered:
    """A dataset whose rows come with their numbers."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> tuple[int, Any]:
        return position, self.dataset[position]


class _Steps:
    """The rows of one step after another, as a loader asks for them."""

    def __init__(self, rows: ProtectedRows, place: tuple[int, int, int, int]) -> None:
        self.rows, self.place = rows, place

    def __iter__(self) -> Iterator[list[int]]:
        return self.rows.steps(*self.place)


class _Collator:
    """Rows with their numbers -> :class:`ProtectedBatch`. Columns of tasks and old losses do not reach the model."""

    def __init__(self, collate: Collate, rows: ProtectedRows) -> None:
        self.collate, self.tasks, self.old_losses = collate, torch.from_numpy(rows.tasks), rows.old_losses
        columns = (rows.settings.task_column, rows.settings.old_loss_column)
        self.columns = {column for column in columns if isinstance(column, str) and column not in _LABELS}

    def __call__(self, numbered: list[tuple[int, Any]]) -> ProtectedBatch:
        positions = torch.tensor([position for position, _ in numbered])
        rows = [self._inputs(row) for _, row in numbered]
        old = None if self.old_losses is None else self.old_losses[positions]
        return ProtectedBatch(self.collate(rows), self.tasks[positions], old)

    def _inputs(self, row: Any) -> Any:
        if not isinstance(row, Mapping):
            return row
        fields = cast("Mapping[str, Any]", row)
        return {name: value for name, value in fields.items() if name not in self.columns}


def column_of(dataset: Any, column: str | int, setting: str) -> list[Any]:
    """The values of a column: at once where the dataset has columns, else row by row."""
    known = getattr(dataset, "column_names", None)
    if isinstance(known, list):
        if column not in known:
            raise _no_column(column, setting, ", ".join(map(str, cast("list[object]", known))))
        return [_plain(value) for value in dataset[column]]
    values: list[Any] = []
    for position in range(len(dataset)):
        row = dataset[position]
        try:
            values.append(_plain(row[column]))
        except (KeyError, IndexError, TypeError) as error:
            names = (
                ", ".join(map(str, cast("Mapping[str, Any]", row))) if isinstance(row, Mapping) else type(row).__name__
            )
            raise _no_column(column, setting, names) from error
    return values


def _no_column(column: str | int, setting: str, found: str) -> UserError:
    return UserError(
        f"protected rows have no column {column!r}", found=found, do=f"add the column, or name another with {setting}"
    )


def _plain(value: Any) -> Any:
    """A number or a name, out of a tensor of one element or a scalar of numpy."""
    single = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, np.generic)
    return value.item() if single else value


def _task_ids(values: Sequence[Any], tasks: int | Sequence[str] | None) -> tuple[tuple[str, ...], np.ndarray]:
    """Names of the tasks, and the id [n] of each row's."""
    if isinstance(values[0], str):
        names = tuple(sorted({str(value) for value in values})) if tasks is None else tasks
        if isinstance(names, int):
            raise UserError(
                "the task column holds names", found=f"tasks = {names}", do="give tasks as a list of these names"
            )
        place = {name: task for task, name in enumerate(names)}
        for position, value in enumerate(values):
            if value not in place:
                raise UserError(f"protected row {position} is of unknown task {value!r}", do=nearest(str(value), place))
        return tuple(names), np.array([place[value] for value in values], dtype=np.int64)
    for position, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise UserError(
                f"protected row {position} has no integer as its task id", expected="0 … m-1", found=repr(value)
            )
    ids = np.array(values, dtype=np.int64)
    count = tasks if isinstance(tasks, int) else int(ids.max()) + 1 if tasks is None else len(tasks)
    outside = np.flatnonzero((ids < 0) | (ids >= count))
    if len(outside):
        row = int(outside[0])
        raise UserError(
            f"protected row {row} has a task id out of range", expected=f"0 … {count - 1}", found=str(ids[row])
        )
    names = tuple(str(task) for task in range(count)) if tasks is None or isinstance(tasks, int) else tuple(tasks)
    return names, ids


def _finite(values: Sequence[Any]) -> Tensor:
    """Old losses [n] as a tensor; each must be a number."""
    for position, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise UserError(
                f"protected row {position} has no finite number as its old loss",
                found=repr(value),
                do="compute the losses of the old model anew, one for each row",
            )
    return torch.tensor([float(value) for value in values])
