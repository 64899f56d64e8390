"""What a round is about, before any example is read: its classes, and what an example may serve as."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What an example may be used for. Fixed by content hash, disjoint, written down in the run folder."""

    BASE = "base"  # the old model was made with it
    TRAIN = "train"  # training: constraint sets of protected classes, target pairs of the target class
    DEV = "dev"  # all looking and choosing
    SEALED = "sealed"  # opened by a certificate, and by nothing else
    TEST = "test"  # scored once, after the choice


@dataclass(frozen=True)
class TaskSpec:
    """The typed task description of a round.

    ``prompts`` holds, for each class of the label space, the sentences whose mean feature is the class's.
    """

    target: str
    protected: tuple[str, ...]
    prompts: tuple[tuple[str, ...], ...]
    ignored: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """The label space; the target comes last."""
        return (*self.protected, self.target)

    @property
    def num_protected(self) -> int:
        """m, the number of protected tasks."""
        return len(self.protected)

    @property
    def target_index(self) -> int:
        """Class index of the target."""
        return len(self.protected)
