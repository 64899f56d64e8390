"""What is fixed before looking: margins, confidence, the claim, and what the rows of a table are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from holdfast.certify.claims import Claim, delta_of
from holdfast.certify.exact.score_test import LARGEST_LEVEL, SMALLEST_LEVEL, usable
from holdfast.errors import UserError, nearest


@dataclass(frozen=True)
class Layout:
    """What rows are beside right and wrong: fixed before the test, and part of the claim."""

    group: str | None = None  # column that names what a row was drawn with
    weight: str | None = None  # column of weights
    score_range: tuple[float, float] | None = None  # of old_score and new_score, where declared
    largest_unit: float | None = None  # no group (or row, where weighted) weighs more
    largest_units: dict[str, float] = field(default_factory=dict[str, float])  # by task; larger ones are left out
    equal_groups: bool = False  # every group counts the same

    def __post_init__(self) -> None:
        if self.score_range is not None:
            low, high = self.score_range
            if not (np.isfinite([low, high]).all() and low < high):
                raise UserError(f"the range {low:g},{high:g} of scores is not usable", expected="LOW,HIGH such as 0,1")
        if self.largest_unit is not None and not (np.isfinite(self.largest_unit) and self.largest_unit > 0):
            raise UserError(f"a largest unit of {self.largest_unit:g} is not usable", expected="a number above 0")
        if self.largest_unit is not None and self.group is None and self.weight is None:
            raise UserError("--largest-unit without --group or --weight", do="leave it out: rows count alike")
        if self.equal_groups and self.group is None:
            raise UserError("--equal-groups without groups", do="name the column of groups with --group")
        if self.equal_groups and self.largest_unit is not None:
            raise UserError("--equal-groups and --largest-unit at once", do="leave one of them out")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Layout:
        """A layout as a certificate holds it."""
        known = dict(value)
        declared = known.pop("score_range", None)
        if set(known) - {item.name for item in fields(cls)} or (declared is not None and len(declared) != 2):
            raise UserError("the certificate names groups or scores that this version does not know")
        return cls(score_range=None if declared is None else (declared[0], declared[1]), **known)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that it reads beside the answers."""
        return tuple(name for name in (self.group, self.weight) if name is not None)

    def scored(self, names: Collection[str], scores: Sequence[str], answers: Sequence[str]) -> bool:
        """Whether a table is read by its scores: a range is declared, or it has scores and no other answers."""
        return self.score_range is not None or (set(scores) <= set(names) and not set(answers) & set(names))


PLAIN = Layout()


def layout_of(options: Mapping[str, Any]) -> Layout:
    """The layout among options of :func:`holdfast.certify`."""
    return Layout(**{item.name: options[item.name] for item in fields(Layout) if item.name in options})


@dataclass(frozen=True)
class Settings:
    """Everything that is fixed before looking."""

    margins: dict[str, float]  # by task, after pooling
    confidence: float = 0.95
    claim: Claim = Claim.ALL
    target: str | None = None
    groups: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    labels: list[str] = field(default_factory=list[str])
    level: float | None = None  # under a ledger: the level of the query, in place of 1 - confidence
    distinct_rows: bool = False  # stated by the user, for predictions without example ids: each row is another image
    layout: Layout = PLAIN  # groups, weights and scores

    def __post_init__(self) -> None:
        check_confidence(self.confidence)
        if self.level is not None and not usable(self.level):
            raise UserError(
                f"a level of {self.level:.3g} is not usable",
                expected=f"from {SMALLEST_LEVEL:g}, the finest that the exact test resolves, to {LARGEST_LEVEL:g}",
                do="ask for less confidence, or for fewer queries of the same images",
            )

    @property
    def delta(self) -> float:
        """Level of the test."""
        return delta_of(self.confidence) if self.level is None else self.level

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Settings:
        """Settings as a certificate holds them."""
        known = dict(value)
        layout = Layout.from_json(known.pop("layout", None) or {})
        return cls(claim=Claim(known.pop("claim")), layout=layout, **known)


def check_confidence(confidence: float) -> float:
    """A confidence that a test can be made at."""
    delta_of(confidence)
    return confidence


def check_margin(margin: float, name: str) -> float:
    """A margin in [0, 1)."""
    if not 0.0 <= margin < 1.0:
        raise UserError(
            f"the margin {margin:g}{f' of {name}' if name else ''} is not usable",
            expected="a loss of accuracy in [0, 1), such as 0.02",
            do="write 2 % as 0.02",
        )
    return margin


def margins_for(tasks: Sequence[str], default: float | None, single: Mapping[str, float]) -> dict[str, float]:
    """One margin a task: its own, or the default."""
    unknown = sorted(set(single).difference(tasks))
    if unknown:
        raise UserError(
            f"a margin is given for {unknown[0]!r}, which has no images here",
            expected="a protected task, or a pooled group",
            do=nearest(unknown[0], tasks),
        )
    missing = [task for task in tasks if task not in single]
    if missing and default is None:
        raise UserError(
            f"no margin is given for {', '.join(missing[:5])}",
            expected="a margin for every task, fixed before looking",
            do="give one for all with --margin 0.02, or one each with --margin NAME=0.05",
        )
    return {task: check_margin(single.get(task, default if default is not None else 0.0), task) for task in tasks}
