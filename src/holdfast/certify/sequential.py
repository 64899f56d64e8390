"""A verdict by e-processes, for one fixed pair of models and data that keep arriving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.certify.claims import Verdict, delta_of
from holdfast.certify.eprocess import first_passage
from holdfast.certify.tables import Paired

SEQUENTIAL_PROMISE = (
    "P(some Δ_k <= -ε_k and the verdict is ever `certified`) <= δ, however often and whenever the verdict is read, for "
    "one pair of models fixed before the first image. Needs: images of a task that arrive independently of each other, "
    "in their order of arrival, none left out. It says nothing about other distributions."
)


def sequential_report(
    paired: Paired, margins: Mapping[str, float], confidence: float, target: str | None = None
) -> dict[str, Any]:
    """The state of every task's e-process after all rows, taken in their order.

    ``certified``: every task has reached 1/δ at some image (intersection-union). ``regressed``: for some task the
    process of the other direction has reached m/δ. One task is marked `certified` at 1/δ when all are, else at m/δ.
    """
    hypotheses = {**dict(sorted(margins.items())), **({target: 0.0} if target else {})}
    delta = delta_of(confidence)
    counts, m = paired.counts(), len(hypotheses)
    found = {task: first_passage(paired.changes(task), margin, delta) for task, margin in hypotheses.items()}
    everything = all(reached is not None for reached, _ in found.values())
    tasks: list[dict[str, Any]] = []
    for task, (reached, process) in found.items():
        of_task, margin = counts[task], hypotheses[task]
        other = first_passage((-change for change in paired.changes(task)), -margin, delta / m)[0]
        verdict = Verdict.UNDECIDED
        if other is not None:
            verdict = Verdict.REGRESSED
        elif everything or process.passes(delta / m):
            verdict = Verdict.CERTIFIED
        tasks.append(
            {
                "task": task,
                "n": of_task.n,
                "gained": of_task.gained,
                "lost": of_task.lost,
                "difference": of_task.difference,
                "margin": margin,
                "e_value": process.value,
                "largest_e_value": process.largest,
                "passed_at": reached,
                "verdict": str(verdict),
            }
        )
    verdicts = {item["verdict"] for item in tasks}
    overall = "regressed" if "regressed" in verdicts else "certified" if everything else "undecided"
    also = f"; and the accuracy on the target {target} rose" if target else ""
    return {
        "verdict": overall,
        "confidence": confidence,
        "level": delta,
        "claim": "sequential",
        "claim_tested": f"on {task_words(len(margins))} the new model loses less accuracy than its margin{also} "
        f"[e-processes, each to reach {1 / delta:g}; false at any time with probability at most {delta:g}]",
        "promise": SEQUENTIAL_PROMISE,
        "tasks": [item for item in tasks if item["task"] != target],
        "target": next((item for item in tasks if item["task"] == target), None),
    }


def task_words(number: int) -> str:
    """``the one protected task`` or ``every one of the 5 protected tasks``."""
    return "the one protected task" if number == 1 else f"every one of the {number} protected tasks"
