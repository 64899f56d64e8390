"""The rule of choice, in one place: which candidate is tested on the sealed images, or chosen on dev images alone.

The candidate with the largest expected gain is taken: the chance that it passes, given its dev images and the numbers
of sealed images (:mod:`holdfast.candidates.chance`), times the gain of the target that is to be expected. Two
conditions go before it:

1. A candidate *holds on dev* where no protected class lost more than its margin there and, unless its gain is not
   claimed (``certify.target_gain = false``), the target gained. One that does not hold is never taken while another
   does.
2. Where its chance is below ``candidates.least_chance`` nothing is tested: the old model is handed back, and the
   sealed set stays unspent.

In a round without sealed images dev images have the last word: there the target's gain on them has to pass the exact
test (:func:`choose_on_dev`).

Before training the same rule finds the best candidate that needs none, and :func:`weigh_training` says whether that one
is enough.

How a candidate was made enters by one thing: what is expected of its flips before its dev images are seen, by what
earlier rounds on other images have shown. The rule reads dev images alone, so that the certificate, which reads sealed
images alone, needs no correction for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from holdfast.candidates.chance import SealedTest, predicted_chance, predicted_gain
from holdfast.certify.exact.score_test import passes
from holdfast.evaluate.metrics import Comparison, retention_ratio

REFIT = "refit"  # what candidates are called whose target alone is new
LAST_LAYER = "last-layer"  # what the end is called where all logits were fitted in the last layer
LAST_LAYER_REFIT = "last-layer-refit"  # the same with the target refitted on top
LAST_LAYER_CONSTRAINED = "last-layer-constrained"  # the same fit with a constraint for every protected class
AS_TRAINED = "as-trained"  # marks a checkpoint whose target is not refitted
ON_CHECKPOINT = LAST_LAYER  # marks a checkpoint on top of which all logits were fitted in the last layer
UNTRAINED = (LAST_LAYER, LAST_LAYER_REFIT, LAST_LAYER_CONSTRAINED)
ENOUGH_CHANCE = 0.5  # to pass without training; where the best chance is smaller, training is worth its time
MARGINS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)


@dataclass(frozen=True)
class Candidate:
    """A model between the old one (λ = 0) and what training found at a step (λ = 1), and what dev images say of it."""

    step: str
    lam: float  # λ
    dev: Comparison
    bias: float = 0.0  # by how much the target's logit is lowered
    chance: float | None = None  # that it passes the test on the sealed images; None: not worked out
    variant: str = ""  # of a checkpoint: AS_TRAINED or ON_CHECKPOINT in place of a refit of the target
    recorded: str = ""  # its name in a run of an earlier version

    @property
    def is_trained(self) -> bool:
        """Whether it took training: a refit of the target and a fit of the last layer do not."""
        return self.lam > 0 and self.step not in UNTRAINED

    @property
    def name(self) -> str:
        """``step-00000400@0.5-bias1``; ``step-00000400-as-trained@1``, its target not refitted;
        ``step-00000400-last-layer@0.5``, half of the way from the checkpoint to the fit that starts there;
        ``last-layer@0.5``; ``refit-bias1`` where the target's logit alone is new."""
        step = f"{self.step}-{self.variant}" if self.variant else self.step
        made = f"{step}@{self.lam:g}" if self.lam > 0 else REFIT
        return self.recorded or made + (f"-bias{self.bias:g}" if self.bias else "")

    @property
    def expected_gain(self) -> float:
        """Chance times gain: what the candidate is worth before the sealed images are queried."""
        return (1.0 if self.chance is None else self.chance) * predicted_gain(self.dev)


def with_chances(candidates: Sequence[Candidate], test: SealedTest) -> list[Candidate]:
    """The candidates with the chance of each to pass a test."""

    def chance(candidate: Candidate) -> float:
        fitted = candidate.step in UNTRAINED
        lam = 1.0 if candidate.variant else candidate.lam  # of the way to trained weights
        return predicted_chance(candidate.dev, test, lam=lam, bias=candidate.bias, fitted=fitted)

    return [replace(candidate, chance=chance(candidate)) for candidate in candidates]


def holds_on_dev(candidate: Candidate, margins: Mapping[str, float], *, must_gain: bool = True) -> bool:
    """Whether no protected class lost more than its margin on dev images, and the target gained."""
    tasks = candidate.dev.tasks
    return (candidate.dev.target_gain > 0 or not must_gain) and all(
        tasks[name].lost - tasks[name].gained <= margin * tasks[name].examples + 1e-9
        for name, margin in margins.items()
    )


def best_candidate(
    candidates: Sequence[Candidate], margins: Mapping[str, float], *, must_gain: bool = True
) -> Candidate:
    """The candidate that the rule takes; ties go to the larger chance, then to the first name."""
    holding = [candidate for candidate in candidates if holds_on_dev(candidate, margins, must_gain=must_gain)]
    return min(
        holding or candidates,
        key=lambda candidate: (-candidate.expected_gain, -(candidate.chance or 0.0), candidate.name),
    )


@dataclass(frozen=True)
class WithoutTraining:
    """The best candidate that needs no training, whether it is enough, and why or why not."""

    best: Candidate
    enough: bool
    why: str


def weigh_training(
    best: Candidate, margins: Mapping[str, float], *, least_chance: float, gain_level: float | None = None
) -> WithoutTraining:
    """Whether a round can do without training, given the :func:`best_candidate` of those that need none.

    Enough is a candidate that holds on dev (the target gained, whether that is claimed or not), passes with a chance of
    at least one half and ``least_chance``, and leaves little to win: the target has reached the average accuracy of the
    protected classes under the old model. In a round without sealed images its gain must also be shown at
    ``gain_level``, or nothing could ship (:func:`choose_on_dev`).
    """
    least = max(ENOUGH_CHANCE, least_chance)
    dev, target = best.dev, best.dev.target
    reached = dev.tasks[target].new_accuracy
    others = float(np.mean([change.old_accuracy for change in dev.protected.values()]))
    levels = f"{target} reaches {100 * reached:.1f} %, protected classes have {100 * others:.1f} % on average"
    if dev.target_gain <= 0:
        return WithoutTraining(best, False, f"{target} gains nothing")
    if gain_level is not None and not gain_is_shown(dev, gain_level):
        return WithoutTraining(best, False, f"what {target} gains on dev images may be chance")
    if not holds_on_dev(best, margins):
        return WithoutTraining(best, False, "a protected class loses more than its margin on dev images")
    if best.chance is not None and best.chance < least:
        return WithoutTraining(best, False, f"the chance to pass is below {100 * least:g} %")
    return WithoutTraining(best, reached >= others, levels)


def rank_for_testing(
    candidates: Sequence[Candidate],
    margins: Mapping[str, float],
    *,
    least_chance: float,
    test_more_candidates: bool = False,
    must_gain: bool = True,
) -> list[Candidate]:
    """The order of the fixed sequence, from dev data alone; empty where nothing is worth a query.

    First the :func:`best_candidate`. With ``test_more_candidates`` there follow those that gain more on dev images and
    lost nothing there, the next best first, so that the last one that passes is the one that gains most. (Of many
    candidates some seem safe on a few hundred images by chance: hence not by default.)
    """
    first = best_candidate(candidates, margins, must_gain=must_gain)
    if (first.chance or 0.0) < least_chance or (must_gain and first.dev.target_gain <= 0):
        return []
    if not test_more_candidates:
        return [first]
    more = [
        candidate
        for candidate in candidates
        if candidate.dev.target_gain > first.dev.target_gain and candidate.dev.safe
    ]
    return [first, *sorted(more, key=lambda candidate: (candidate.dev.target_gain, candidate.name))]


def choose_on_dev(
    candidates: Sequence[Candidate], margins: Mapping[str, float], gain_level: float | None
) -> Candidate | None:
    """Where dev images decide: the best of the candidates that hold on dev; None keeps the old model.

    Where no sealed images will ever test it, the target's gain has to pass the exact test on dev images, at
    ``gain_level``: of hundreds of candidates some gain an image or two by chance.
    """
    holding = [
        candidate
        for candidate in candidates
        if holds_on_dev(candidate, margins) and (gain_level is None or gain_is_shown(candidate.dev, gain_level))
    ]
    return best_candidate(holding, margins) if holding else None


def gain_is_shown(dev: Comparison, level: float) -> bool:
    """Whether the target's gain on dev images passes the exact test."""
    target = dev.tasks[dev.target]
    return passes(target.gained, target.lost, target.examples, 0.0, level)


def described(chosen: str | None, order: Sequence[str], gains: Mapping[str, float]) -> str | None:
    """The candidate that every account of a round is about: the one that ships, or the first that was tested.

    Where none was tested, the one with the largest (expected) gain; None where there is none at all.
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
