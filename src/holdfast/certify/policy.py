"""The policy of a gate: which tasks decide about a model, by which margins, and which of them may be missing.

| tier | the gate passes only if |
| --- | --- |
| ``critical``, ``supporting`` | the task is certified; the two differ in their margins |
| ``advisory`` | whatever happens to it: it is shown beside |

A required task that was not measured keeps the gate from passing. All tasks that gate are one claim: every one of them
is retained. That is an intersection-union test, each task at δ without a correction, and the gate lets a model through
that lost more than a margin with probability at most δ. Advisory tasks are corrected among themselves (Holm, Hommel).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from holdfast.certify.settings import Layout, check_confidence, check_margin
from holdfast.config.base import Config, Many, Positive, Two, parse, read_toml
from holdfast.errors import UserError
from holdfast.files import fingerprint_file

FORMAT = "holdfast-policy/1"
Tier = Literal["critical", "supporting", "advisory"]
GATING = ("critical", "supporting")


class TiersConfig(Config):
    """Margins of the tiers, for tasks without their own."""

    critical: float | None = None
    """Accepted loss, such as 0.01."""
    supporting: float | None = None
    """Accepted loss."""
    advisory: float | None = None
    """Loss above which an advisory task is marked; it never fails the gate."""


class TaskConfig(Config):
    """One task of a policy."""

    tier: Tier = "supporting"
    """critical, supporting or advisory."""
    margin: float | None = None
    """Accepted loss. Default: the tier's."""
    required: bool | None = None
    """Whether the gate needs it to be measured. Default: yes, but for advisory tasks."""
    pool: Many[str] = ()
    """Tasks that are claimed about as a whole, by name or pattern: `["mmlu_*"]`."""
    metric: str | None = None
    """Metric of the logs that scores it."""


class LayoutConfig(Config):
    """What rows are beside right and wrong, as the options of `certify` say it."""

    group: str | None = None
    """Column (or field of a document) that names what a row was drawn with."""
    weight: str | None = None
    """Column of weights."""
    score_range: Two[float] | None = None
    """Range of scores."""
    largest_unit: float | None = None
    """Most rows (or weight) that a group may have."""
    equal_groups: bool = False
    """Every group counts the same."""


class PolicyConfig(Config):
    """A policy file."""

    format: Literal["holdfast-policy/1"]
    confidence: float = 0.95
    """1 - δ."""
    query_budget: Positive | None = None
    """How often the same samples may be tested, each time at δ/R; charges the ledger."""
    unlisted: Literal["critical", "supporting", "advisory", "refuse"] = "supporting"
    """Tier of tasks that were measured and are not named here."""
    tiers: TiersConfig = TiersConfig()
    tasks: dict[str, TaskConfig] = Field(default_factory=dict[str, TaskConfig])
    layout: LayoutConfig = LayoutConfig()


@dataclass(frozen=True)
class Resolved:
    """A policy applied to the tasks that were measured."""

    tiers: dict[str, str]  # of every task or pool that was measured
    margins: dict[str, float]
    pools: dict[str, list[str]]
    missing: dict[str, str]  # required and not measured: why
    absent: tuple[str, ...]  # not measured, as the policy allows

    def names(self, *tiers: str) -> list[str]:
        """Tasks and pools of some tiers."""
        return sorted(name for name, tier in self.tiers.items() if tier in tiers)

    def claimed(self, *tiers: str) -> dict[str, Any]:
        """The tasks of some tiers as :func:`holdfast.certify` is asked about them."""
        names = self.names(*tiers)
        members = [member for name in names for member in self.pools.get(name, ())]
        return {
            "tasks": [*(name for name in names if name not in self.pools), *members],
            "pools": {name: self.pools[name] for name in names if name in self.pools},
            "margin": None,
            "margins": {name: self.margins[name] for name in names},
        }


@dataclass(frozen=True)
class Policy:
    """A policy as it stands in its file."""

    path: Path
    fingerprint: str
    values: PolicyConfig

    @property
    def metrics(self) -> dict[str, str]:
        """Metrics of the logs, by task."""
        return {name: task.metric for name, task in self.values.tasks.items() if task.metric is not None}

    @property
    def layout(self) -> dict[str, Any]:
        """Options of ``certify``."""
        return self.values.layout.model_dump()

    def resolve(self, measured: Sequence[str], one_sided: dict[str, str] | None = None) -> Resolved:
        """Tiers, margins and pools of the tasks that were measured; ``one_sided`` were measured on one model only."""
        named = {name for name, task in self.values.tasks.items() if not task.pool}
        free = [name for name in measured if name not in named]  # a task with an entry of its own is in no pool
        pools = {name: _members(task.pool, free) for name, task in self.values.tasks.items() if task.pool}
        _check_pools(pools, measured, self.path)
        members = {member for group in pools.values() for member in group}
        tiers: dict[str, str] = {}
        missing: dict[str, str] = {}
        absent: list[str] = []
        for name, task in self.values.tasks.items():
            lacking = [item for item in task.pool if not _members((item,), free)]
            if not lacking if task.pool else name in measured:
                tiers[name] = task.tier
            elif task.required if task.required is not None else task.tier in GATING:
                missing[name] = _why(name, task.pool, lacking, one_sided or {})
            else:
                absent.append(name)
        unlisted = sorted(set(measured) - set(tiers) - members - set(self.values.tasks))
        if unlisted and self.values.unlisted == "refuse":
            raise UserError(
                f"{self.path} does not name {', '.join(unlisted[:5])}",
                expected="a policy that names every task",
                do='add them, or say what they count as: unlisted = "advisory"',
            )
        tiers |= dict.fromkeys(unlisted, self.values.unlisted)
        margins = {name: self._margin(name, tier) for name, tier in tiers.items()}
        return Resolved(tiers, margins, {name: pools[name] for name in tiers if name in pools}, missing, tuple(absent))

    def _margin(self, name: str, tier: str) -> float:
        own = self.values.tasks[name].margin if name in self.values.tasks else None
        margin = own if own is not None else getattr(self.values.tiers, tier)
        if margin is None:
            raise UserError(
                f"{self.path} has no margin for {name} ({tier})",
                expected="a margin for every task, fixed beforehand",
                do=f"give one to the task, or to its tier: [tiers] {tier} = 0.02",
            )
        return check_margin(margin, name)


def read_policy(path: Path) -> Policy:
    """A policy file, checked."""
    if not path.exists():
        raise UserError(f"{path} does not exist", expected=f'a policy: a TOML file with format = "{FORMAT}"')
    values = parse(PolicyConfig, read_toml(path), str(path))
    check_confidence(values.confidence)
    for name, task in values.tasks.items():
        if task.margin is not None:
            check_margin(task.margin, name)
        if task.required and task.tier == "advisory":
            raise UserError(
                f"{path} requires {name}, which is advisory",
                expected="advisory tasks never fail the gate",
                do="make it supporting, or leave `required` out",
            )
    for tier, margin in values.tiers.model_dump().items():
        if margin is not None:
            check_margin(margin, f"the tier {tier}")
    Layout(**values.layout.model_dump())
    return Policy(path, fingerprint_file(path), values)


def _members(patterns: Sequence[str], measured: Sequence[str]) -> list[str]:
    return sorted(name for name in measured if any(fnmatchcase(name, pattern) for pattern in patterns))


def _check_pools(pools: dict[str, list[str]], measured: Sequence[str], path: Path) -> None:
    for name, group in pools.items():
        twice = sorted({member for other, rest in pools.items() if other != name for member in rest} & set(group))
        if twice:
            raise UserError(f"{path} has {twice[0]} in two pools", expected="each task in one of them")
        if name in measured:
            raise UserError(f"{path} calls a pool {name}, which is a task", expected="a name of its own")


def _why(name: str, pool: Sequence[str], lacking: Sequence[str], one_sided: dict[str, str]) -> str:
    if pool:
        return f"no results of {', '.join(lacking)}"
    return f"{one_sided[name]} has no results of it" if name in one_sided else "no results of it"
