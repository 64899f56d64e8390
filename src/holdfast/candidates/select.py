"""What the choice is made among: models between the old one and the new one, ordered on dev data; the frontier."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.certify.claims import Counts
from holdfast.certify.exact.score_test import p_value
from holdfast.evaluate.metrics import Comparison, retention_ratio

_MOVED = 6.0  # by how much log p of a candidate with other weights must be better than with a new target alone
_WORTH = 2 / 3  # share of the largest gain that a candidate must have
MARGINS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)


@dataclass(frozen=True)
class Candidate:
    """A model between the old one (λ = 0) and what training found at a step (λ = 1), and what dev images say of it."""

    step: str
    lam: float  # λ
    dev: Comparison
    bias: float = 0.0  # by how much the target's logit is lowered

    @property
    def name(self) -> str:
        """``step-00000400@0.5``, or ``step-00000400@0.5-bias1``."""
        return f"{self.step}@{self.lam:g}" + (f"-bias{self.bias:g}" if self.bias else "")


def counts_of(compared: Comparison, tasks: Iterable[str]) -> list[Counts]:
    """Flips of each task, as the certificate's test takes them."""
    return [
        Counts(task, compared.tasks[task].examples, compared.tasks[task].gained, compared.tasks[task].lost)
        for task in tasks
    ]


def evidence(candidate: Candidate, margins: Mapping[str, float], target: str | None) -> float:
    """The largest p-value over protected tasks (and Δ > 0 of the target): what the weakest task shows on dev images."""
    hypotheses = {**margins, **({target: 0.0} if target else {})}
    return max(
        p_value(counts.gained, counts.lost, counts.n, hypotheses[counts.task])
        for counts in counts_of(candidate.dev, hypotheses)
    )


def evidence_together(candidate: Candidate, margins: Mapping[str, float]) -> float:
    """Σ log p over protected tasks, the smaller the better: what they show together on dev images.

    The largest p-value is that of one task, and on a few hundred images it is mostly luck which; all tasks together
    tell candidates apart more surely.
    """
    found = (
        p_value(counts.gained, counts.lost, counts.n, margins[counts.task])
        for counts in counts_of(candidate.dev, margins)
    )
    return sum(math.log(max(p, sys.float_info.min)) for p in found)  # a p-value of thousands of images can round to 0


def _ranked(candidate: Candidate, margins: Mapping[str, float]) -> float:
    return evidence_together(candidate, margins) + (_MOVED if candidate.lam > 0 else 0.0)


def rank_for_testing(
    candidates: Sequence[Candidate], margins: Mapping[str, float], *, test_more_candidates: bool
) -> list[Candidate]:
    """The order of the fixed sequence, from dev data alone.

    First the candidate with the strongest evidence, all protected tasks together, among those that are
    :func:`worthwhile`: retention comes first, but not for nothing. Where the target alone is new (λ = 0) protected
    classes cannot be taken for one another more than before, so that such a candidate gives way only to much stronger
    evidence. With ``test_more_candidates`` there follow
    those that gain more and lost nothing on dev images, the next best first, so that the last one that passes is the
    one that gains most. (Of many candidates some seem safe on a few hundred images by chance: hence not by default.)
    """
    worthy = worthwhile(candidates)
    first = min(worthy, key=lambda candidate: (_ranked(candidate, margins), -candidate.dev.target_gain, candidate.name))
    if not test_more_candidates:
        return [first]
    more = [
        candidate
        for candidate in candidates
        if candidate.dev.target_gain > first.dev.target_gain and candidate.dev.safe
    ]
    return [first, *sorted(more, key=lambda candidate: (candidate.dev.target_gain, candidate.name))]


def choose_on_dev(candidates: Sequence[Candidate]) -> Candidate | None:
    """Without sealed images: of the candidates that lost nothing on dev, the safest worthwhile one; None keeps the old.

    Many seem safe on a few hundred images by chance, those that gained most above all: hence not the largest gain,
    and a new target alone (λ = 0) before all others.
    """
    fair = [candidate for candidate in candidates if candidate.dev.safe and candidate.dev.target_gain > 0]
    if not fair:
        return None

    def safety(candidate: Candidate) -> tuple[bool, float, float, float]:
        return candidate.lam == 0, candidate.dev.dev_safety, candidate.dev.dev_safety_loss, candidate.dev.target_gain

    return max(worthwhile(fair), key=safety)


def worthwhile(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that gain at least two thirds of the most that a new target alone gains; all where nothing is gained.

    Where a new target alone (λ = 0) gains less than half of the largest gain, that is the measure.
    """
    most = max(candidate.dev.target_gain for candidate in candidates)
    alone = max((candidate.dev.target_gain for candidate in candidates if candidate.lam == 0), default=0.0)
    most = alone if alone >= most / 2 else most
    return [candidate for candidate in candidates if most <= 0 or candidate.dev.target_gain >= _WORTH * most]


def described(chosen: str | None, order: Sequence[str], gains: Mapping[str, float]) -> str | None:
    """The candidate that every account of a round is about: the one that ships, or the first that was tested.

    Where none was tested, the one with the largest gain on dev images (``gains``); None where there is none at all.
    """
    if chosen is not None:
        return chosen
    if order:
        return order[0]
    return max(gains, key=gains.__getitem__, default=None)


def frontier(points: Iterable[tuple[str, Comparison]]) -> list[dict[str, Any]]:
    """Evaluations that no other beats on both counts: worst change of a protected task, and gain of the target."""
    ranked = sorted(points, key=lambda point: (-point[1].target_gain, -point[1].dev_safety))
    result: list[dict[str, Any]] = []
    best = float("-inf")
    for name, compared in ranked:
        if compared.dev_safety > best:
            best = compared.dev_safety
            result.append(
                {
                    "candidate": name,
                    "dev_safety": compared.dev_safety,
                    "target_gain": compared.target_gain,
                    "worst_task": compared.worst_task,
                }
            )
    return result


def gain_by_margin(points: Iterable[tuple[str, Comparison]]) -> list[dict[str, Any]]:
    """What a margin would buy: the largest target gain seen on dev with no protected task below -margin."""
    seen = list(points)
    result: list[dict[str, Any]] = []
    for margin in MARGINS:
        within = [(name, compared) for name, compared in seen if compared.dev_safety >= -margin]
        name, best = max(within, key=lambda item: item[1].target_gain, default=(None, None))
        gain = best.target_gain if best is not None else 0.0
        result.append({"margin": margin, "target_gain": max(0.0, gain), "candidate": name if gain > 0 else None})
    return result


def blocking_task(points: Iterable[tuple[str, Comparison]]) -> str | None:
    """The protected task that stands in the target's way: the worst one of the evaluations that gained most."""
    bold = [compared for _, compared in points if compared.target_gain > 0]
    if not bold:
        return None
    most = max(compared.target_gain for compared in bold)
    near = [compared for compared in bold if compared.target_gain >= 0.8 * most]
    gentlest = max(near, key=lambda compared: compared.dev_safety)
    return gentlest.worst_task if gentlest.dev_safety < 0 else None


def confused_with(target: str, labels: Sequence[str], predictions: Sequence[str]) -> str | None:
    """The class that most of the target's wrong images are taken for, where it is most of them.

    Where training could not gain anything at all, this is who stands in the way: to the model they look alike.
    """
    wrong = Counter(
        predicted for label, predicted in zip(labels, predictions, strict=True) if label == target != predicted
    )
    if not wrong:
        return None
    name, count = wrong.most_common(1)[0]
    return name if 2 * count > wrong.total() else None


def choose_checkpoint(dev_safeties: Sequence[float], target_gains: Sequence[float]) -> int:
    """Which of one run's checkpoints to hand back: retention first, target gain second; of equals, the earliest.

    Where no checkpoint is safe, the one whose worst task lost least.
    """
    if len(dev_safeties) != len(target_gains) or not dev_safeties:
        raise ValueError("each checkpoint has one DevSafety and one target gain, and there is at least one")

    def key(index: int) -> tuple[bool, float, float, int]:
        safety, gain = dev_safeties[index], target_gains[index]
        return (True, gain, safety, -index) if safety >= 0 else (False, safety, gain, -index)

    return max(range(len(dev_safeties)), key=key)


def choose_setting(dev_safeties: Sequence[Sequence[float]], target_gains: Sequence[Sequence[float]]) -> int:
    """Which hyper-parameter setting to take, each with its seeds: larger retention ratio first, larger mean
    dAcc(target) second, larger mean DevSafety third; of equals, the first.
    """
    if len(dev_safeties) != len(target_gains) or not dev_safeties:
        raise ValueError("each setting has the DevSafety and the target gain of its seeds, and there is at least one")
    keys = [
        (*setting_rank(retention_ratio(safeties), float(np.mean(gains)), float(np.mean(safeties))), -index)
        for index, (safeties, gains) in enumerate(zip(dev_safeties, target_gains, strict=True))
    ]
    return max(range(len(keys)), key=keys.__getitem__)


def setting_rank(ratio: float, gain: float, safety: float) -> tuple[float, float, float]:
    """By what settings, and rows of a table, are put in order, the largest first."""
    return ratio, gain, safety
