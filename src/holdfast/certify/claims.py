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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from multiprocessing import get_context
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
Outcome = tuple[int, int, int, float]  # n, gained, lost and the margin that it is tested at
Evidence = tuple[float, float, list[float]]  # p, p of the other direction (1 where it cannot matter), lower bounds
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
        target = f"; and the accuracy on the target {self.target.counts.task} rose" if self.target else ""
        sentence = {
            Claim.ALL: f"on {tasks}{pooled} the new model loses less accuracy than {loss}{target}",
            Claim.DEVSAFETY: f"the worst change in accuracy over {tasks}{pooled} is at least the smallest lower bound, "
            f"and each bound reaches minus {loss}{target}",
            Claim.EACH: f"on each task{pooled} marked `certified`, taken for itself, the new model loses less accuracy "
            f"than {loss}{target}",
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
    outcomes = [(item.n, item.gained, item.lost, margin) for item, margin in zip(everything, all_margins, strict=True)]
    distinct = list(dict.fromkeys(outcomes))  # tasks with the same outcome have the same evidence
    found_for = dict(
        zip(distinct, _mapped(partial(_evidence, levels=(alone, delta / m)), distinct, workers), strict=True)
    )
    evidence = [found_for[outcome] for outcome in outcomes]
    p = [item[0] for item in evidence]
    correct = hommel if disjoint else holm
    adjusted = _adjusted(p, claim, correct)
    regressed = correct([item[1] for item in evidence])
    results = [
        TaskResult(
            item,
            margin,
            p_value=found[0],
            p_adjusted=p_adjusted,
            p_regressed=p_regressed,
            lower_bound=found[2][0],
            simultaneous_lower_bound=found[2][1],
            verdict=_task_verdict(claim, delta, margin, p_adjusted, p_regressed, found[2][0]),
        )
        for item, margin, found, p_adjusted, p_regressed in zip(
            everything, all_margins, evidence, adjusted, regressed, strict=True
        )
    ]
    protected = tuple(results[: len(counts)])
    return Result(
        _overall(results), claim, delta, _correction(claim, m, disjoint), protected, results[-1] if target else None
    )


def _evidence(outcome: Outcome, levels: tuple[float, float]) -> Evidence:
    n, gained, lost, margin = outcome
    p = p_value(gained, lost, n, margin)
    # T <= 0 in this direction is T >= 0 in the other; above, the other p-value is beyond every level in use.
    other = 1.0 if (gained - lost) / n > -margin else p_value_regressed(gained, lost, n, margin)
    return p, other, lower_bounds(gained, lost, n, levels, extra=(margin,))


def _mapped(work: Callable[[Outcome], Evidence], outcomes: list[Outcome], workers: int) -> list[Evidence]:
    if workers < 2 or sum(outcome[0] for outcome in outcomes) < WORTH_A_PROCESS:
        return [work(outcome) for outcome in outcomes]
    # Large tasks first, so that no worker is left with one at the end.
    order = sorted(range(len(outcomes)), key=lambda index: -outcomes[index][0])
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
        found = list(executor.map(work, [outcomes[index] for index in order], chunksize=4))
    return [item for _, item in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def _adjusted(p: Sequence[float], claim: Claim, correct: Callable[[Sequence[float]], list[float]]) -> list[float]:
    if claim is Claim.BOUNDS:
        return bonferroni(p)
    if claim is Claim.EACH:
        return correct(p)
    # Intersection-union: if all pass alone, all are certified. Otherwise a list of those that pass is a claim about
    # particular tasks, and takes its correction.
    together = max(p)
    return [min(item, together) for item in correct(p)]


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
