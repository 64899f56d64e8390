"""What a run folder says, read once and put in the form that the page is made of. No model, no torch.

Of sealed images nothing is read unless the run's own record, or the ledger, says that their set is retired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from holdfast.artifacts import RunFolder, resume_command
from holdfast.candidates.chance import predicted_gain
from holdfast.candidates.select import described
from holdfast.certify.certificate import read_certificate
from holdfast.certify.ledger import Ledger, default_ledger
from holdfast.certify.sealed_claim import ClaimedSettings, read_sealed_claim
from holdfast.errors import HoldfastError, UserError
from holdfast.evaluate.metrics import Comparison, TaskChange
from holdfast.report.evidence import Evidence, dev_evidence, sealed_evidence
from holdfast.report.shapes import (
    check_reported,
    read_metrics,
    read_run_config,
    read_run_result,
    read_run_state,
    read_shown_predictions,
)

Shown = Literal["sealed", "dev"]


@dataclass(frozen=True)
class Paired:
    """Both models on the same images, row by row."""

    role: Shown
    ids: np.ndarray  # [n]
    label: np.ndarray  # [n]
    old: np.ndarray  # [n] predicted class
    new: np.ndarray  # [n]
    old_score: np.ndarray  # [n]
    new_score: np.ndarray  # [n]

    @property
    def lost(self) -> np.ndarray:
        """Rows that were right and are wrong now."""
        return np.flatnonzero((self.old == self.label) & (self.new != self.label))

    @property
    def gained(self) -> np.ndarray:
        """Rows that were wrong and are right now."""
        return np.flatnonzero((self.old != self.label) & (self.new == self.label))


@dataclass(frozen=True)
class Candidate:
    """A model that could have been shipped, and what became of it."""

    name: str
    step: str
    lam: float
    bias: float
    dev: Comparison
    chance: float | None  # to pass the test, from dev images; None in runs of earlier versions
    expected_gain: float | None
    outcome: str  # shipped, passed, failed, not tested, set aside


@dataclass(frozen=True)
class Series:
    """A per-task quantity over training: values [t, m], averaged over stretches of steps."""

    steps: np.ndarray
    tasks: list[str]
    values: np.ndarray


@dataclass(frozen=True)
class RunContent:
    """Everything a page about a run shows."""

    folder: RunFolder
    config: Mapping[str, Any]
    settings: ClaimedSettings
    state: Mapping[str, Any]
    result: Mapping[str, Any]
    reported: Mapping[str, Any] | None  # what may be told of the sealed images
    retired: bool  # whether the sealed set may be shown in full
    ledger: Sequence[Mapping[str, Any]]
    evidence: Evidence
    dev: Comparison
    dev_name: str  # the candidate that the dev figures are about
    test: Comparison | None
    candidates: Sequence[Candidate]
    checkpoints: Sequence[tuple[int, float, float]]  # step, worst change, target gain, on dev images
    series: Mapping[str, Series]  # h, u, weight
    notes: list[str] = field(default_factory=list[str])

    @property
    def target(self) -> str:
        """The class that was to improve."""
        return str(self.result["target"])

    @property
    def protected(self) -> list[str]:
        """The classes that must not get worse."""
        return [str(item) for item in self.result["protected"]]

    @property
    def trained(self) -> bool:
        """Whether any step was made: fits of the last layer need none."""
        return any(step > 0 for step, _, _ in self.checkpoints)

    @property
    def kept_old(self) -> bool:
        """Whether the old model is handed back."""
        return bool(self.result["kept_old"]) and self.verdict != "certified"

    @property
    def verdict(self) -> str | None:
        """certified, undecided, or None where the sealed images were not queried."""
        reported = self.reported
        return str(reported["verdict"]) if reported is not None else self.result["verdict"]

    @property
    def margins(self) -> dict[str, float]:
        """The accepted loss of every protected task."""
        return self.settings.certify.margins_of(self.protected)

    @property
    def confidence(self) -> float:
        """1 - δ."""
        return self.settings.certify.confidence

    @property
    def target_claimed(self) -> bool:
        """Whether a gain of the target is part of the claim."""
        return self.settings.certify.target_gain

    @cached_property
    def pairs(self) -> list[Paired]:
        """Predictions that may be shown image by image: of a retired sealed set, and of dev images."""
        found: list[Paired] = []
        if self.retired:
            found += _pair(self.folder, "old", "new", "sealed")
        found += _pair(self.folder, "old", self.dev_name, "dev")
        return found


def read_run(path: Path) -> RunContent:
    """Read a finished run."""
    folder = RunFolder.open(path)
    if not folder.result.exists():
        raise UserError(
            f"the run {path} is not finished",
            expected="a run with result.json",
            do=f"go on with: {resume_command(path)}",
        )
    config, state = read_run_config(folder.config), read_run_state(folder.state)
    settings = ClaimedSettings.of(config, str(folder.config))
    result = read_run_result(folder.result)
    target, protected = str(result["target"]), [str(item) for item in result["protected"]]
    reported, retired, entries, notes = _sealed(folder, settings, state, result)
    metrics = read_metrics(folder.metrics)
    candidates = [_candidate(item, target, result, reported) for item in result["candidates"]]
    shown = _described(candidates, result)
    margins, confidence = settings.certify.margins_of(protected), settings.certify.confidence
    if reported is not None and retired and "devsafety" in reported:
        evidence = sealed_evidence(reported, _changes(_pair(folder, "old", "new", "sealed")))
    else:
        evidence = dev_evidence(shown.dev, margins, confidence, target)
    return RunContent(
        folder=folder,
        config=config,
        settings=settings,
        state=state,
        result=result,
        reported=reported,
        retired=retired,
        ledger=entries,
        evidence=evidence,
        dev=shown.dev,
        dev_name=shown.name,
        test=_comparison(result["test"], target) if result.get("test") else None,
        candidates=candidates,
        checkpoints=[
            (int(metric["step"]), float(metric["evaluation"]["dev_safety"]), float(metric["evaluation"]["target_gain"]))
            for metric in metrics
            if metric.get("evaluation") is not None
        ],
        series={
            name: found for name in ("h", "u", "weight") if (found := _series(metrics, name, protected)) is not None
        },
        notes=notes,
    )


def _described(candidates: Sequence[Candidate], result: Mapping[str, Any]) -> Candidate:
    """The candidate that the page is about: shipped, or tested and rejected."""
    by_name = {candidate.name: candidate for candidate in candidates}
    gains = {
        name: predicted_gain(candidate.dev) if candidate.expected_gain is None else candidate.expected_gain
        for name, candidate in by_name.items()
    }
    name = described(result["chosen"], list(result["order"]), gains)
    return by_name[name] if name in by_name else max(candidates, key=lambda candidate: candidate.dev.target_gain)


def _comparison(reported: Mapping[str, Any], target: str) -> Comparison:
    tasks: dict[str, TaskChange] = {}
    for name, item in reported["tasks"].items():
        n = int(item["examples"])
        right = (round(item["old_accuracy"] * n), round(item["new_accuracy"] * n))
        tasks[name] = TaskChange(n, *right, int(item["gained"]), int(item["lost"]), item["old_loss"], item["new_loss"])
    return Comparison(target, tasks)


def _candidate(
    record: Mapping[str, Any], target: str, result: Mapping[str, Any], reported: Mapping[str, Any] | None
) -> Candidate:
    outcome = _outcome(str(record["name"]), list(result["order"]), result["chosen"], reported)
    bias = float(record.get("bias", 0.0))  # runs of earlier versions have none
    dev, lam = _comparison(record["dev"], target), float(record["lambda"])
    chance, expected = record.get("chance"), record.get("expected_gain")
    return Candidate(str(record["name"]), str(record["step"]), lam, bias, dev, chance, expected, outcome)


def _outcome(name: str, order: list[str], chosen: str | None, reported: Mapping[str, Any] | None) -> str:
    """What the fixed sequence says of a candidate. A query of the sealed set tells no more than which one ships."""
    if reported is None or name not in order:
        return "shipped" if name == chosen else "set aside"
    place = order.index(name)
    last = order.index(chosen) if chosen in order else -1
    if place == last:
        return "shipped"
    if place < last:
        return "passed"
    return "did not pass" if place == last + 1 else "not tested"


def _sealed(
    folder: RunFolder, settings: ClaimedSettings, state: Mapping[str, Any], result: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, bool, Sequence[Mapping[str, Any]], list[str]]:
    """What may be told of the sealed images, whether their set is retired, and its record in the ledger."""
    reported: Mapping[str, Any] | None = result.get("certificate")
    entries: Sequence[Mapping[str, Any]] = []
    if folder.certificate.exists():  # also of a query that was made after the round
        certificate = read_certificate(folder.certificate)
        reported = certificate["report"]
        check_reported(reported, folder.certificate)
        entries = (certificate.get("ledger") or {}).get("entries", [])
    retired = bool(reported and reported.get("sealed", {}).get("retired"))
    none_sealed = (state.get("counts") or {}).get("sealed") == 0
    if none_sealed or not folder.roles.exists() or (retired and entries):
        return reported, retired, entries, []
    # The ledger may know of queries that this run does not: of the same images, by another round.
    chosen = settings.certify.ledger
    ledger = Ledger(folder.origin / chosen if chosen else default_ledger())
    try:
        fingerprint = read_sealed_claim(folder).fingerprint
        standing = ledger.standing(fingerprint)
        entries = entries or ledger.entries(fingerprint)
    except HoldfastError as error:
        return reported, retired, entries, [error.message]
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{folder.roles} cannot be read", found=str(error).splitlines()[0][:200]) from error
    return reported, retired or bool(standing and standing.retired), entries, []


def _pair(folder: RunFolder, old: str, new: str, role: Shown) -> list[Paired]:
    """The two tables of a role side by side; nothing where they are not there or do not fit."""
    paths = folder.predictions(old, role), folder.predictions(new, role)
    if not all(path.exists() for path in paths):
        return []
    before, after = (_sorted(read_shown_predictions(path)) for path in paths)
    ids = before["example_id"].to_numpy()
    if len(before) != len(after) or (ids != after["example_id"].to_numpy()).any():
        return []
    label = before["label"].to_numpy()
    columns = [table[name].to_numpy() for name in ("prediction", "score") for table in (before, after)]
    return [Paired(role, ids, label, columns[0], columns[1], columns[2], columns[3])]


def _sorted(table: pa.Table) -> pa.Table:
    return table.sort_by("example_id")


def _changes(pairs: Sequence[Paired]) -> dict[str, tuple[float, float]]:
    """Accuracy of the old and the new model by task."""
    result: dict[str, tuple[float, float]] = {}
    for pair in pairs:
        for name in np.unique(pair.label.astype(str)):
            here = pair.label == name
            result[str(name)] = (float((pair.old[here] == name).mean()), float((pair.new[here] == name).mean()))
    return result


def _series(metrics: Sequence[Mapping[str, Any]], name: str, tasks: list[str], pieces: int = 120) -> Series | None:
    """A per-task quantity over time. A task that a step did not visit has no value there and takes no part."""
    logged = [metric for metric in metrics if isinstance(metric.get(name), dict)]
    if not logged:
        return None
    values = np.array(
        [[np.nan if (value := item[name].get(task)) is None else value for task in tasks] for item in logged],
        dtype=np.float64,
    )
    steps = np.array([item["step"] for item in logged], dtype=np.float64)
    groups = np.array_split(np.arange(len(steps)), min(pieces, len(steps)))
    counts = np.array([np.isfinite(values[group]).sum(axis=0) for group in groups])
    sums = np.array([np.nansum(values[group], axis=0) for group in groups])
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return Series(np.array([steps[group].mean() for group in groups]), tasks, means)
