"""What ``holdfast plan`` answers: images for margins, and margins for images, task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.certify.certificate import check_margin
from holdfast.certify.claims import delta_of
from holdfast.certify.planner import Truth, best_margin, images_needed, per_task_power
from holdfast.errors import UserError, nearest


def check_share(name: str, value: float, *, ends: bool = False) -> None:
    """A number in (0, 1), or in [0, 1] with ``ends``."""
    if not (0.0 < value < 1.0 or (ends and value in (0.0, 1.0))):
        raise UserError(f"the {name} {value:g} is not usable", expected="a number between 0 and 1")


def plan_report(
    flips: Mapping[str, float],
    number: int,
    *,
    default: float | None,
    single: Mapping[str, float],
    confidence: float,
    power: float,
    difference: float,
    images: int | None,
    simultaneous: bool,
) -> dict[str, Any]:
    """The plan as one JSON object.

    ``flips`` is the discordance of each kind of task, ``number`` how many tasks must pass together with ``power``.
    """
    unknown = [name for name in single if name not in flips]
    if unknown:
        raise UserError(
            f"a margin is given for {unknown[0]!r}, which is no task here", found=nearest(unknown[0], flips)
        )
    margins = {name: single.get(name, default) for name in flips}
    if images is None and None in margins.values():
        raise UserError("nothing to plan", do="give --margin 0.02, or --images 300 for the best margin they allow")
    level = delta_of(confidence) / (number if simultaneous else 1)
    each = per_task_power(power, number)
    by_task = [_task(name, flip, margins[name], difference, images, level, each) for name, flip in flips.items()]
    return {
        "tasks": number,
        "power": power,
        "confidence": confidence,
        "level": level,
        "simultaneous": simultaneous,
        "difference": difference,
        **_worst(by_task),
        "by_task": by_task,
    }


def _task(
    name: str, flip: float, margin: float | None, difference: float, images: int | None, level: float, power: float
) -> dict[str, Any]:
    if abs(difference) > flip:
        raise UserError(
            f"a change of {difference:g} while {flip:g} of the images flip ({name})",
            expected="a change no larger than the share of images that flip",
        )
    truth = Truth(flip, difference)
    one: dict[str, Any] = {"task": name, "discordance": flip, "margin": margin}
    if margin is not None:
        check_margin(margin, name)
        if margin + difference <= 0.0:
            raise UserError(
                f"no number of images shows a change above {-margin:g} when the true change is {difference:g}",
                expected="margin + difference above 0",
                do="accept a margin, or plan for a gain with --difference",
            )
        one["per_task"] = images_needed(margin, truth, level, power)
    if images is not None:
        one |= {"images": images, "best_margin": best_margin(images, truth, level, power)}
    return one


def _worst(by_task: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The answer for all tasks together: as many images, and as large a margin, as the worst of them needs."""
    told: dict[str, Any] = {}
    if all("per_task" in one for one in by_task):
        told["per_task"] = max(one["per_task"] for one in by_task)
    if all("images" in one for one in by_task):
        best = [one["best_margin"] for one in by_task]
        told |= {"images": by_task[0]["images"], "best_margin": None if None in best else max(best)}
    return told
