"""What ``holdfast init`` writes: shares and margins with which the sealed images can prove the claim."""

from __future__ import annotations

import math
from collections.abc import Mapping

from holdfast.certify.claims import delta_of
from holdfast.certify.forecast import GOAL, ExpectedFlips, Forecast, forecast, margin_for
from holdfast.data.init_round import ChosenPlan

# Shares of sealed, dev and test images that are tried, the fewest sealed ones first.
SHARES = ((0.2, 0.2, 0.2), (0.25, 0.2, 0.2), (0.3, 0.2, 0.15), (0.35, 0.2, 0.15), (0.4, 0.15, 0.15), (0.45, 0.15, 0.15))


def choose_shares(
    images: Mapping[str, int], target: str | None, *, proposed: str, margin: float, confidence: float
) -> ChosenPlan:
    """The smallest sealed share with which the wished margin can be proven; else the largest, and larger margins.

    ``images`` are those that are shared out, by class. Without a ``target``, the ``proposed`` one is planned with, and
    one margin for all classes is chosen, whatever class the user names.
    """
    level, aimed = delta_of(confidence), target or proposed
    protected = [name for name in images if name != aimed]
    wished = dict.fromkeys(protected, margin)
    for sealed, dev, test in SHARES:
        found = forecast(_sealed(images, sealed), wished, level, target=aimed)
        if found.chance >= GOAL:
            reason = f"the smallest share with which {100 * margin:g} points can be proven of every protected class"
            return ChosenPlan(dev, sealed, test, margin, confidence, found.chance, (reason,))
    sealed, dev, test = SHARES[-1]
    counts = _sealed(images, sealed)
    each = GOAL ** (1.0 / len(images))
    flips = ExpectedFlips().protected
    own = {name: margin_for(counts[name], flips, level, each) for name in protected}
    margins = {name: max(margin, 0.95 if found is None else found) for name, found in own.items()}
    if target is None:
        margins = dict.fromkeys(protected, max(margins.values()))
    found = forecast(counts, margins, level, target=aimed)
    one_margin = next(iter(margins.values())) if len(set(margins.values())) == 1 else margins
    return ChosenPlan(dev, sealed, test, one_margin, confidence, found.chance, _reasons(found, margin, each))


def _sealed(images: Mapping[str, int], share: float) -> dict[str, int]:
    """Sealed images to count on: a share is drawn by content, and two standard deviations fewer may come out."""
    return {
        name: max(0, math.floor(count * share - 2.0 * math.sqrt(count * share * (1.0 - share))))
        for name, count in images.items()
    }


def _reasons(found: Forecast, margin: float, each: float) -> tuple[str, ...]:
    """What cannot be proven, and what was written instead."""
    raised = [task.task for task in found.tasks if not task.is_target and task.margin > margin]
    reasons = (
        [f"the largest share: these classes have too few images to prove {100 * margin:g} points"] if raised else []
    )
    if raised:
        reasons.append(f"{', '.join(raised)}: the margin is the smallest that can be proven, with a fair chance")
    target = found.tasks[-1]
    if target.is_target and target.chance < each and found.chance < GOAL:
        reasons.append(
            f"CANNOT BE PROVEN RELIABLY: that the target {target.task} gained, with {target.images} sealed images or "
            f"so (a chance of {target.chance:.0%} for a gain of 15 points); add images, or set [certify] target_gain "
            "= false"
        )
    return tuple(reasons)
