"""What is told about a result: the JSON object of ``certify --json``, with the planner's advice for undecided tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from holdfast.certify.claims import EXACT, PROMISE, UNIT_PROMISE, Claim, Result, TaskResult, Verdict
from holdfast.certify.corrections import lemma_one_allowance
from holdfast.certify.exact.power import (
    MOST_IMAGES,
    Truth,
    estimated_discordance,
    formula_images,
    per_task_power,
    sufficient_images,
    two_digits_up,
)
from holdfast.certify.grouped import BETTING, UnitCounts
from holdfast.certify.unit_power import Resampled, formula_units, sufficient_units

# Above this many units of a betting test nothing is advised: simulating them would take longer than the test.
MOST_ADVISED = 20_000
# The chance that all tasks pass, which the advice aims at.
ADVICE_POWER = 0.8
# Above this many images the advice is the formula's: the exact search moves it by about 2 % there.
EXACT_ADVICE = 5_000


def report(
    result: Result, *, confidence: float, complexity: float = 0.0, rate: float = 0.5, advise: bool = True
) -> dict[str, Any]:
    """The result as one JSON object, the promise in its words included."""
    hypotheses = len(result.hypotheses)
    units = result.tasks[0].counts.described()
    return {
        "verdict": str(result.verdict),
        "confidence": confidence,
        "claim": str(result.claim),
        "claim_tested": result.wording(),
        "promise": UNIT_PROMISE if units else PROMISE,
        "unit": units.get("unit", "image"),
        "test": BETTING if units else EXACT,
        "level": result.delta,
        "tasks": [_task(task, result, hypotheses, advise) for task in result.tasks],
        "target": _task(result.target, result, hypotheses, advise) if result.target else None,
        "devsafety": result.devsafety,
        "lemma_1": _lemma(result, complexity, rate),
        "undecided": [
            hypothese.counts.task for hypothese in result.hypotheses if hypothese.verdict is Verdict.UNDECIDED
        ],
        "regressed": [
            hypothese.counts.task for hypothese in result.hypotheses if hypothese.verdict is Verdict.REGRESSED
        ],
    }


def _task(task: TaskResult, result: Result, hypotheses: int, advise: bool) -> dict[str, Any]:
    needed = None
    if advise and task.verdict is Verdict.UNDECIDED:
        alone = result.claim in (Claim.ALL, Claim.DEVSAFETY)
        needed = needed_images(task, result.delta if alone else result.delta / hypotheses, hypotheses)
    return {**task.as_json(), "needed": needed}


def needed_images(task: TaskResult, level: float, hypotheses: int) -> int | None:
    """Images that would do for an undecided task, with D estimated from this data; None where no number is known to.

    At Δ = 0 first. Where the task has that many images already, it is the loss seen here that stands in the way: then
    at that loss, if it lies within the margin.
    """
    counts, power = task.counts, per_task_power(ADVICE_POWER, hypotheses)
    if isinstance(counts, UnitCounts):
        return _needed_units(counts, task.margin, level, power)
    seen = estimated_discordance(counts.gained, counts.lost, counts.n)
    for difference in (0.0, counts.difference):
        # Rounded away from luck, so that similar tasks share one search.
        rounded = math.floor(difference * 1000 + 1e-9) / 1000
        discordance = min(1.0, max(two_digits_up(seen), abs(rounded)))
        if rounded + task.margin <= 0.0:
            continue
        needed = _sufficient(task.margin, discordance, rounded, level, power)
        if needed is not None and needed > counts.n:
            return needed
    return None


def _needed_units(counts: UnitCounts, margin: float, level: float, power: float) -> int | None:
    """Groups (or rows) such as these that would do, at a change of 0."""
    population = Resampled(counts.sample)
    if margin <= 0.0 or formula_units(population, margin, level, power) > MOST_ADVISED:
        return None
    needed = sufficient_units(population, margin, level, power)
    return needed if needed is not None and needed > counts.independent else None


def advice(row: Mapping[str, Any]) -> str:
    """What would decide an undecided task."""
    if row["needed"] is not None:
        have = f"{row['units']} {row['unit']}s" if "units" in row else f"{row['n']} images"
        enough = f"about {row['needed']} would, for an 80 % chance that all tasks pass"
        if row["difference"] < 0 and row["difference"] <= -row["margin"]:
            return f"{have} do not decide it, and the loss seen reaches the margin; if the true change is 0, {enough}"
        return f"{have} do not decide it; {enough}"
    if row["difference"] <= -row["margin"]:
        return "the loss seen reaches the margin, without proof that the true one does; if it is real no number helps"
    if row["margin"] == 0.0:
        return "a margin of 0 asks for proof of a gain; without one no number of images is enough"
    return "it has images enough for its margin and passes alone, or nearly; other tasks stand in the way"


def input_lines(reported: Mapping[str, Any]) -> list[str]:
    """What was left out of the claim, what was stated in place of ids, and what looks wrong about the table."""
    told_beside = set((reported.get("gate") or {}).get("tiers", ()))  # advisory tasks have lines of their own
    left_out = [row for row in reported.get("left_out") or [] if row["task"] not in told_beside]
    noticed = reported.get("input") or {}
    lines = [*source_lines(reported), *(f"warning: {warning}" for warning in noticed.get("warnings", []))]
    if left_out:
        shown = ", ".join(f"{row['task']} ({row['n']}, {row['difference'] * 100:+.2f} points)" for row in left_out[:10])
        more = f" and {len(left_out) - 10} more" if len(left_out) > 10 else ""
        lines.append(f"left out of the claim (images, change in accuracy): {shown}{more}")
    if noticed.get("distinct_rows"):
        lines.append("without example ids: it was stated that each row is another image")
    return [*lines, *gate_lines(reported)]


def source_lines(reported: Mapping[str, Any]) -> list[str]:
    """Which logs were read, by which metrics, and what differs between them."""
    source = reported.get("source")
    if source is None:
        return []
    by_metric: dict[str, list[str]] = {}
    for task, metric in source["metrics"].items():
        by_metric.setdefault(metric, []).append(task)
    scored = "; ".join(
        f"{metric} ({', '.join(tasks[:5])}{f' and {len(tasks) - 5} more' if len(tasks) > 5 else ''})"
        for metric, tasks in by_metric.items()
    )
    return [f"read from logs of {source['logs']}: {scored}", *(f"warning: {item}" for item in source["warnings"])]


def gate_lines(reported: Mapping[str, Any]) -> list[str]:
    """The tiers of a policy, what it requires and lacks, and the advisory tasks."""
    gate = reported.get("gate")
    if gate is None:
        return []
    tiers = {tier: [name for name, own in gate["tiers"].items() if own == tier] for tier in ("critical", "supporting")}
    lines = [f"{tier}: {', '.join(names)}" for tier, names in tiers.items() if names]
    lines += [f"missing, and required: {name} ({why})" for name, why in gate["missing"].items()]
    if gate["not_measured"]:
        lines.append(f"not measured, as the policy allows: {', '.join(gate['not_measured'])}")
    lines += [
        f"advisory: {row['task']}: {row['verdict']}, {row['difference'] * 100:+.2f} points on {row['n']} rows (margin "
        f"{row['margin'] * 100:g})"
        for row in gate["advisory"]
    ]
    return [*lines, gate["correction"]]


@lru_cache(maxsize=4096)
def _sufficient(margin: float, discordance: float, difference: float, level: float, power: float) -> int | None:
    truth = Truth(discordance, difference)
    estimate = formula_images(margin, truth, level, power)
    if estimate > MOST_IMAGES:
        return None
    return estimate if estimate > EXACT_ADVICE else sufficient_images(margin, truth, level, power)


def _lemma(result: Result, complexity: float, rate: float) -> dict[str, Any]:
    """Lemma 1 of the paper on the 0-1 loss, beside the exact bounds: Δ_k >= d̂_k - allowance for all k at once."""
    m = len(result.tasks)
    allowances = [
        lemma_one_allowance(task.counts.independent, m, result.delta, complexity, rate) for task in result.tasks
    ]
    bounds = [max(-1.0, item.counts.difference - extra) for item, extra in zip(result.tasks, allowances, strict=True)]
    return {
        "lower_bound": min(bounds),
        "tasks": {item.counts.task: bound for item, bound in zip(result.tasks, bounds, strict=True)},
        "C": complexity,
        "alpha": rate,
        "formula": "d - 4C/n^alpha - 2 sqrt(ln(2m/delta)/(2n)); C = 0 is the most favourable constant there can be",
    }
