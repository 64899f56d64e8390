"""What is claimed, which correction it needs, and the three verdicts.

| claim | correction |
| --- | --- |
| ``all``: every task Δ_k > -ε_k, ε_k fixed before | none: intersection-union, each at δ |
| ``devsafety``: population DevSafety >= min_k L_k | none |
| ``each``: these particular tasks are retained (others are not) | Hommel if tasks use disjoint images, Holm otherwise |
| ``bounds``: per-task bounds side by side, or ε chosen after looking | Bonferroni δ/m |

With a target, "and the target improved" (Δ_target > 0) is one more hypothesis of the intersection-union.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from holdfast.certify.corrections import bonferroni, holm, hommel
from holdfast.certify.exact.score_test import (
    LARGEST_LEVEL,
    SMALLEST_LEVEL,
    lower_bounds,
    p_value,
    p_value_regressed,
    usable,
)
from holdfast.errors import UserError

PROMISE = (
    "P(the shipped model is not w_old and some Δ_k <= -ε_k) <= δ, over the draw of the sealed images, given everything "
    "used in training and choosing. Needs: independent images for a task, n, ε, δ and the order of candidates fixed "
    "before looking. It is not P(bad | shipped), and it says nothing about other distributions."
)
# The same where groups are drawn: their images need not be independent.
UNIT_PROMISE = PROMISE.replace(
    "Needs: independent images for a task,",
    "Needs: groups (or rows) drawn independently from one population, none weighing more than the claim says, "
    "named without regard to outcomes,",
).replace("the draw of the sealed images", "the draw of the groups (or rows)")
EXACT = "exact paired score test"
# Work (sum of n over distinct outcomes) above which a second process pays for its start.
WORTH_A_PROCESS = 60_000


class Claim(StrEnum):
    """What is claimed if the verdict is ``certified``."""

    ALL = "all"
    DEVSAFETY = "devsafety"
    EACH = "each"
    BOUNDS = "bounds"


class Verdict(StrEnum):
    """Shown to hold, shown not to hold, or neither."""

    CERTIFIED = "certified"
    REGRESSED = "regressed"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Counts:
    """One task: n images, how many were gained (old wrong, new right) and lost (old right, new wrong)."""

    task: str
    n: int
    gained: int
    lost: int
    members: tuple[str, ...] = ()  # of a pooled group of tasks

    @property
    def difference(self) -> float:
        """d̂ = (b - c) / n."""
        return (self.gained - self.lost) / self.n

    @property
    def independent(self) -> int:
        """How many independent draws there are."""
        return self.n

    @property
    def measure(self) -> str:
        """What changes."""
        return "accuracy"

    def p_value(self, margin: float, level: float) -> float:
        """p-value of H0: Δ <= -margin, by the exact test; other tests need the ``level`` that it is compared with."""
        return p_value(self.gained, self.lost, self.n, margin)

    def p_value_regressed(self, margin: float, level: float) -> float:
        """p-value of H0: Δ >= -margin."""
        return p_value_regressed(self.gained, self.lost, self.n, margin)

    def lower_bounds(self, levels: Sequence[float], margin: float) -> list[float]:
        """Lower bounds on Δ, one for each level; the margin joins the grid."""
        return lower_bounds(self.gained, self.lost, self.n, levels, extra=(margin,))

    def outcome(self) -> tuple[Any, ...]:
        """What the evidence depends on: tasks with the same outcome are tested once."""
        return self.n, self.gained, self.lost

    def described(self) -> dict[str, Any]:
        """What a report tells beside the counts."""
        return {}

    def population(self) -> str:
        """What the claim is about where it is not single images, in words."""
        return ""


@dataclass(frozen=True)
class TaskResult:
    """Evidence about one task."""

    counts: Counts
    margin: float
    p_value: float  # of H0: Δ <= -ε, alone
    p_adjusted: float  # as the claim needs it; the verdict follows this one
    p_regressed: float  # of H0: Δ >= -ε, corrected over tasks
    lower_bound: float  # L_k at the level of the claim
    simultaneous_lower_bound: float  # at δ/m: these may be quoted side by side
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        """The task as it stands in the report of ``certify --json``; ``needed`` is added by the planner."""
        counts = self.counts
        return {
            "task": counts.task,
            "n": counts.n,
            "gained": counts.gained,
            "lost": counts.lost,
            "difference": counts.difference,
            "margin": self.margin,
            "p_value": self.p_value,
            "p_adjusted": self.p_adjusted,
            "p_regressed": self.p_regressed,
            "lower_bound": self.lower_bound,
            "simultaneous_lower_bound": self.simultaneous_lower_bound,
            "verdict": str(self.verdict),
            **({"members": list(counts.members)} if counts.members else {}),
            **counts.described(),
        }


@dataclass(frozen=True)
class Result:
    """The verdict on a claim, with the evidence on every task."""

    verdict: Verdict
    claim: Claim
    delta: float
    correction: str
    tasks: tuple[TaskResult, ...]
    target: TaskResult | None

    @property
    def hypotheses(self) -> tuple[TaskResult, ...]:
        """Protected tasks, and the target where its gain is claimed."""
        return (*self.tasks, self.target) if self.target else self.tasks

    @property
    def devsafety(self) -> dict[str, Any]:
        """min over protected tasks of d̂_k, and the bound min_k L_k on the population's."""
        worst = min(self.tasks, key=lambda task: task.counts.difference)
        weakest = min(self.tasks, key=lambda task: task.lower_bound)
        return {
            "observed": worst.counts.difference,
            "worst_task": worst.counts.task,
            "lower_bound": weakest.lower_bound,
            "lower_bound_task": weakest.counts.task,
            "level": self.delta,
        }

    def wording(self, *, in_points: bool = True) -> str:
        """The claim that was tested, in a sentence, with the correction that it took.

        Certificates of earlier versions have the margin as a fraction: ``in_points=False``.
        """
        m = len(self.tasks)
        tasks = "the one protected task" if m == 1 else f"every one of the {m} protected tasks"
        groups = [task.counts for task in self.tasks if task.counts.members]
        pooled = f" ({', '.join(g.task + ' pools ' + ' + '.join(g.members) for g in groups)})" if groups else ""
        margins = sorted({task.margin for task in self.tasks})
        single = f"{margins[0] * 100:g} points" if in_points else f"{margins[0]:g}"
        loss = single if len(margins) == 1 else "its margin"
        measure = self.tasks[0].counts.measure
        target = f"; and the {measure} on the target {self.target.counts.task} rose" if self.target else ""
        populations = sorted({task.counts.population() for task in self.hypotheses} - {""})
        pooled += f" ({'; '.join(populations)})" if populations else ""
        sentence = {
            Claim.ALL: f"on {tasks}{pooled} the new model loses less {measure} than {loss}{target}",
            Claim.DEVSAFETY: f"the worst change in {measure} over {tasks}{pooled} is at least the smallest lower "
            f"bound, and each bound reaches minus {loss}{target}",
            Claim.EACH: f"on each task{pooled} marked `certified`, taken for itself, the new model loses less "
            f"{measure} than {loss}{target}",
            Claim.BOUNDS: f"all lower bounds{pooled} hold together, and each reaches minus {loss}{target}",
        }[self.claim]
        return f"{sentence} [{self.correction}; false with probability at most {self.delta:g}]"


def delta_of(confidence: float) -> float:
    """δ = 1 - confidence, without the last digits of binary arithmetic (1 - 0.95 is 0.05); one that a test can have."""
    delta = round(1.0 - confidence, 12)
    if not usable(delta):
        raise UserError(
            f"the confidence {confidence:.15g} is not usable",
            expected=f"a number such as 0.95, from {1 - LARGEST_LEVEL:g} to {1 - SMALLEST_LEVEL:.15g}: the exact test "
            f"resolves no level below {SMALLEST_LEVEL:g}",
            do="write 95 % as 0.95",
        )
    return delta


def evaluate(
    counts: Sequence[Counts],
    margins: Mapping[str, float],
    delta: float,
    *,
    claim: Claim = Claim.ALL,
    target: Counts | None = None,
    disjoint: bool = False,
    workers: int = 1,
) -> Result:
    """Test the claim on the protected tasks (``margins[task]`` each) and, where given, the target (Δ > 0).

    ``disjoint``: no image serves two tasks, so that Hommel may take Holm's place. ``workers`` above 1 shares many tasks
    out over processes; a program that asks for it must be importable without side effects.
    """
    if not counts:
        raise ValueError("a claim needs at least one task")
    everything = [*counts, *([target] if target else [])]
    all_margins = [*(margins[count.task] for count in counts), *([0.0] if target else [])]
    m = len(everything)
    alone = delta / m if claim is Claim.BOUNDS else delta
    hypotheses = list(zip(everything, all_margins, strict=True))
    keys = [(item.outcome(), margin) for item, margin in hypotheses]
    distinct = dict(zip(keys, hypotheses, strict=True))  # tasks with the same outcome have the same evidence
    work = partial(_evidence, levels=(alone, delta / m))
    found_for = dict(zip(distinct, _mapped(work, list(distinct.values()), workers), strict=True))
    evidence = [found_for[key] for key in keys]
    correct = hommel if disjoint else holm
    adjusted = _adjusted([item.p for item in evidence], [item.p_listed for item in evidence], claim, correct)
    regressed = correct([item.p_other for item in evidence])
    results = [
        TaskResult(
            item,
            margin,
            p_value=found.p,
            p_adjusted=p_adjusted,
            p_regressed=p_regressed,
            lower_bound=found.bounds[0],
            simultaneous_lower_bound=found.bounds[1],
            verdict=_task_verdict(claim, delta, margin, p_adjusted, p_regressed, found.bounds[0]),
        )
        for item, margin, found, p_adjusted, p_regressed in zip(
            everything, all_margins, evidence, adjusted, regressed, strict=True
        )
    ]
    protected = tuple(results[: len(counts)])
    return Result(
        _overall(results), claim, delta, _correction(claim, m, disjoint), protected, results[-1] if target else None
    )


@dataclass(frozen=True)
class _Evidence:
    """What the images of one task show."""

    p: float  # compared with the level of the task alone
    p_listed: float  # for a list of particular tasks, at δ/m
    p_other: float  # of the other direction
    bounds: list[float]  # at both levels


def _evidence(hypothesis: tuple[Counts, float], levels: tuple[float, float]) -> _Evidence:
    """p-value, p-value of the other direction (1 where it cannot matter), lower bounds at both levels."""
    counts, margin = hypothesis
    p = counts.p_value(margin, levels[0])
    # A betting test collects evidence up to a level that it is told beforehand, so that a list has its own.
    listed = p if levels[0] == levels[1] else counts.p_value(margin, levels[1]) if counts.described() else p
    # T <= 0 in this direction is T >= 0 in the other; above, the other p-value is beyond every level in use.
    other = 1.0 if counts.difference > -margin else counts.p_value_regressed(margin, levels[1])
    return _Evidence(p, listed, other, counts.lower_bounds(levels, margin))


def _mapped(
    work: Callable[[tuple[Counts, float]], _Evidence], hypotheses: list[tuple[Counts, float]], workers: int
) -> list[_Evidence]:
    if workers < 2 or sum(item.n for item, _ in hypotheses) < WORTH_A_PROCESS:
        # The least gain first: where it passes, tasks of as many images and a larger one pass without a computation.
        order = sorted(range(len(hypotheses)), key=lambda index: hypotheses[index][0].difference)
        found = {index: work(hypotheses[index]) for index in order}
        return [found[index] for index in range(len(hypotheses))]
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # Large tasks first, so that no worker is left with one at the end.
    order = sorted(range(len(hypotheses)), key=lambda index: -hypotheses[index][0].n)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
        found = list(executor.map(work, [hypotheses[index] for index in order], chunksize=4))
    return [item for _, item in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def _adjusted(
    p: Sequence[float], listed: Sequence[float], claim: Claim, correct: Callable[[Sequence[float]], list[float]]
) -> list[float]:
    if claim is Claim.BOUNDS:
        return bonferroni(p)
    if claim is Claim.EACH:
        return correct(listed)
    # Intersection-union: if all pass alone, all are certified. Otherwise a list of those that pass is a claim about
    # particular tasks, and takes its correction.
    together = max(p)
    return [min(item, together) for item in correct(listed)]


def _task_verdict(
    claim: Claim, delta: float, margin: float, p_adjusted: float, p_regressed: float, bound: float
) -> Verdict:
    if p_regressed <= delta:
        return Verdict.REGRESSED
    if p_adjusted > delta:
        return Verdict.UNDECIDED
    if claim in (Claim.DEVSAFETY, Claim.BOUNDS) and bound < -margin:
        return Verdict.UNDECIDED  # the walk down the grid stopped at a larger margin
    return Verdict.CERTIFIED


def _overall(results: Sequence[TaskResult]) -> Verdict:
    verdicts = {result.verdict for result in results}
    if Verdict.REGRESSED in verdicts:
        return Verdict.REGRESSED
    return Verdict.CERTIFIED if verdicts == {Verdict.CERTIFIED} else Verdict.UNDECIDED


def _correction(claim: Claim, m: int, disjoint: bool) -> str:
    name = "Hommel, tasks with disjoint images" if disjoint else "Holm, whatever images tasks share"
    return {
        Claim.ALL: f"intersection-union: each of {m} at δ, no correction; single verdicts by {name}",
        Claim.DEVSAFETY: f"no correction for the smallest bound; single verdicts by {name}",
        Claim.EACH: name,
        Claim.BOUNDS: f"Bonferroni: each of {m} at δ/{m}",
    }[claim]
