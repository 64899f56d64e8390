"""What a round hands back, in memory and in ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.artifacts import RunFolder
from holdfast.candidates.select import Candidate, described, frontier, gain_by_margin
from holdfast.data.seen import Seen
from holdfast.data.task import TaskSpec
from holdfast.evaluate.metrics import Comparison, TaskChange
from holdfast.files import read_json
from holdfast.rounds.decide import Decision
from holdfast.rounds.former import read_result_json


@dataclass(frozen=True)
class RoundResult:
    """What a round hands back; also in ``result.json``."""

    folder: RunFolder
    decision: Decision
    candidates: list[Candidate]
    test: Comparison | None
    blocked_by: str | None  # the protected task that stood in the target's way, where one did
    training: Mapping[str, Any] | None = None  # see :func:`training_decision`

    @property
    def kept_old(self) -> bool:
        """Whether the old model is handed back."""
        return self.decision.shipped is None

    @property
    def chosen(self) -> str | None:
        """Name of the candidate that is handed back."""
        return self.decision.shipped.name if self.decision.shipped else None

    @property
    def dev(self) -> Comparison:
        """What dev images say of the candidate that is handed back, or else of the one that was tested."""
        return described_candidate(self.decision, self.candidates).dev


def described_candidate(decision: Decision, candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that ships, or that was tested and rejected; see :func:`holdfast.candidates.select.described`."""
    by_name = {candidate.name: candidate for candidate in candidates}
    gains = {name: candidate.expected_gain for name, candidate in by_name.items()}
    name = described(decision.shipped.name if decision.shipped else None, decision.order, gains)
    # An order written by an earlier version may call its candidates by other names.
    return by_name[name] if name in by_name else max(candidates, key=lambda candidate: candidate.dev.target_gain)


def read_result(folder: RunFolder) -> RoundResult:
    """The result of a finished run, from its files."""
    values = read_result_json(folder.result)
    target = str(values["target"])
    candidates = [candidate_from_json(entry, target) for entry in values["candidates"]]
    shipped = next((candidate for candidate in candidates if candidate.name == values["chosen"]), None)
    order = tuple(values.get("order", ()))
    return RoundResult(
        folder,
        Decision(shipped, values["verdict"], values["reason"], order, values["certificate"]),
        candidates,
        comparison_from_json(values["test"], target) if values["test"] else None,
        values["blocked_by"],
        values.get("training"),
    )


def result_json(
    decision: Decision,
    candidates: Sequence[Candidate],
    points: Sequence[tuple[str, Comparison]],
    tasks: TaskSpec,
    test: Comparison | None,
    *,
    start_seen: Seen,
    training: Mapping[str, Any] | None,
    blocked_by: str | None,
) -> dict[str, Any]:
    """``result.json``; ``points`` are evaluations and candidates by name, on dev images."""
    return {
        **decision.to_json(),
        "target": tasks.target,
        "protected": list(tasks.protected),
        "start_seen": start_seen.describe(),
        "training": training,
        "candidates": [candidate_json(candidate) for candidate in candidates],
        "dev": comparison_json(described_candidate(decision, candidates).dev),
        "test": comparison_json(test) if test else None,
        "frontier": frontier(points),
        "gain_by_margin": gain_by_margin(points),
        "blocked_by": blocked_by,
    }


def training_decision(folder: RunFolder) -> Mapping[str, Any] | None:
    """Whether training was ``skipped``, beside which ``candidate`` and ``why``; None where that was not to decide."""
    return read_json(folder.state).get("training")


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """A candidate as it stands in ``result.json`` and ``candidates.json``."""
    return {
        "name": candidate.name,
        "step": candidate.step,
        "lambda": candidate.lam,
        "bias": candidate.bias,
        "variant": candidate.variant,
        "chance": candidate.chance,
        "expected_gain": None if candidate.chance is None else candidate.expected_gain,
        "dev": comparison_json(candidate.dev),
    }


def candidate_from_json(values: Mapping[str, Any], target: str) -> Candidate:
    """The inverse of :func:`candidate_json`."""
    dev = comparison_from_json(values["dev"], target)
    bias, chance = values.get("bias", 0.0), values.get("chance")
    made = Candidate(values["step"], values["lambda"], dev, bias, chance, values.get("variant", ""))
    return made if made.name == values["name"] else replace(made, recorded=values["name"])


def comparison_json(compared: Comparison) -> dict[str, Any]:
    """A comparison as it stands in ``result.json``."""
    return {
        "dev_safety": compared.dev_safety,
        "dev_safety_loss": compared.dev_safety_loss,
        "target_gain": compared.target_gain,
        "worst_task": compared.worst_task,
        "tasks": {
            name: {
                "examples": change.examples,
                "old_accuracy": change.old_accuracy,
                "new_accuracy": change.new_accuracy,
                "gained": change.gained,
                "lost": change.lost,
                "old_loss": change.old_loss,
                "new_loss": change.new_loss,
            }
            for name, change in compared.tasks.items()
        },
    }


def comparison_from_json(values: Mapping[str, Any], target: str) -> Comparison:
    """The inverse of :func:`comparison_json`."""
    return Comparison(target, {name: _change(change) for name, change in values["tasks"].items()})


def _change(values: Mapping[str, Any]) -> TaskChange:
    examples = int(values["examples"])
    return TaskChange(
        examples,
        round(values["old_accuracy"] * examples),
        round(values["new_accuracy"] * examples),
        int(values["gained"]),
        int(values["lost"]),
        float(values["old_loss"]),
        float(values["new_loss"]),
    )
