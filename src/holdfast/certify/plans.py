"""``holdfast.plan``: images for margins, and margins for images, task by task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from holdfast.certify.claims import delta_of
from holdfast.certify.exact.power import (
    LEFT_OUT,
    MOST_IMAGES,
    Truth,
    about_images,
    best_margin,
    estimated_discordance,
    images_needed,
    per_task_power,
)
from holdfast.certify.exact.score_test import SMALLEST_LEVEL, usable
from holdfast.certify.predictions import Predictions, evidence
from holdfast.certify.settings import Layout, check_confidence, check_margin
from holdfast.certify.unit_plans import dev_populations, plan_units, stated_population
from holdfast.errors import UserError, nearest

LARGEST_POWER = 1.0 - 1e-6  # of one task
# Up to so many searches are for the smallest n. Beyond, flips are rounded up by at most 2 %, so that similar tasks
# share a search, and n is found in steps of 2 %: the flips were estimated, and are not known that well.
EXACT_SEARCHES = 12
FLIP_STEP = math.log(1.02)
PRECISION = 0.05


@dataclass(frozen=True)
class PlanResult:
    """What :func:`plan` found."""

    images_needed: int | None  # images a task, for the margins asked for; None where none were
    best_margin: float | None  # smallest margin that the given images allow; None where no images were given, or none
    tasks: dict[str, dict[str, Any]]  # the same for each kind of task
    report: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """What ``holdfast plan --json`` prints."""
        return self.report


def plan(
    old: Predictions | None = None,
    new: Predictions | None = None,
    *,
    discordance: float | None = None,
    margin: float | None = None,
    margins: Mapping[str, float] | None = None,
    images: int | None = None,
    tasks: int | None = None,
    power: float = 0.8,
    confidence: float = 0.95,
    difference: float = 0.0,
    simultaneous: bool = False,
    target: str | None = None,
    group_size: int | None = None,
    icc: float | None = None,
    score_deviation: float | None = None,
    group: str | None = None,
    weight: str | None = None,
    score_range: tuple[float, float] | None = None,
    largest_unit: float | None = None,
    equal_groups: bool = False,
) -> PlanResult:
    """How many images a certificate needs, or how small a margin given ``images`` allow; by exact power.

    What decides is how often the two models differ in correctness. Give it as ``discordance``, or give predictions on
    dev images (``old`` and ``new`` as for :func:`holdfast.certify`, ``target`` left out) to estimate it for each task.
    ``power`` is the chance that all ``tasks`` pass, ``difference`` the true change of accuracy that is planned for,
    ``simultaneous`` plans for bounds that hold side by side. For predictions of many tasks, with more than 12 different
    rates of flips, the numbers of images are good to 5 % (``precision`` in the report).

    For groups: ``group_size`` images each, two of one group correlated by ``icc`` (0: independent, 1: all the same);
    or predictions with the options ``group, weight, score_range, largest_unit, equal_groups`` of
    :func:`holdfast.certify`, whose groups are drawn from. For scores: ``score_deviation``, the standard deviation of
    their change as a share of the range. Power is simulated then, and the answer exact to about 2 %.
    """
    check_confidence(confidence)
    check_share("power", power)
    layout = Layout(group, weight, score_range, largest_unit, equal_groups=equal_groups)
    populations, paired = None, None if old is None else evidence(old, new, layout=layout)[0]
    if paired is None and (group_size is not None or icc is not None or score_deviation is not None):
        stated = stated_population(group_size, icc, discordance, score_deviation, difference)
        populations = {"each": (stated, stated.weight)}
    elif paired is not None and paired.measured is not None:
        populations = dev_populations(paired, difference, target)
    if populations is not None:
        reported = plan_units(
            populations,
            tasks or len(populations),
            unit="group" if group_size is not None or group is not None else "row",
            default=margin,
            single=margins or {},
            confidence=confidence,
            power=power,
            difference=difference,
            images=images,
            simultaneous=simultaneous,
        )
        return _result(reported)
    if paired is not None:
        counts = {name: item for name, item in paired.counts().items() if name != target}
        flips = {name: estimated_discordance(item.gained, item.lost, item.n) for name, item in counts.items()}
    elif discordance is None:
        raise UserError("how often do the models differ?", do="give --discordance 0.02, or dev --predictions FILE")
    else:
        check_share("discordance", discordance, ends=True)
        flips = {"each": discordance}
    reported = plan_report(
        flips,
        tasks or len(flips),
        default=margin,
        single=margins or {},
        confidence=confidence,
        power=power,
        difference=difference,
        images=images,
        simultaneous=simultaneous,
    )
    return _result(reported)


def _result(reported: dict[str, Any]) -> PlanResult:
    by_task = {str(item["task"]): item for item in reported["by_task"]}
    return PlanResult(reported.get("per_task"), reported.get("best_margin"), by_task, reported)


def check_share(name: str, value: float, *, ends: bool = False) -> None:
    """A number in (0, 1), or in [0, 1] with ``ends``."""
    if not (0.0 < value < 1.0 or (ends and value in (0.0, 1.0))):
        raise UserError(f"the {name} {value:g} is not usable", expected="a number between 0 and 1")


def _check_numbers(number: int, power: float, difference: float, images: int | None) -> None:
    """What the search over exact powers can deal with."""
    if not abs(difference) <= 1.0:
        raise UserError(f"the difference {difference:g} is not usable", expected="a change of accuracy in [-1, 1]")
    if number > MOST_IMAGES:
        raise UserError(f"{number:,} tasks", expected=f"at most {MOST_IMAGES:,}")
    if images is not None and images > MOST_IMAGES:
        raise UserError(f"{images:,} images a task", expected=f"at most {MOST_IMAGES:,}")
    if per_task_power(power, number) > LARGEST_POWER:
        raise UserError(
            f"a chance of {power:.10g} that {number:,} tasks pass is not usable",
            expected=f"at most {LARGEST_POWER:g} for each task: power is known to {LEFT_OUT:g}",
            do="plan for a smaller --power",
        )


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
    _check_numbers(number, power, difference, images)
    unknown = [name for name in single if name not in flips]
    if unknown:
        raise UserError(f"a margin is given for {unknown[0]!r}, which is no task here", do=nearest(unknown[0], flips))
    margins = {name: single.get(name, default) for name in flips}
    if images is None and None in margins.values():
        raise UserError("nothing to plan", do="give --margin 0.02, or --images 300 for the best margin they allow")
    level = delta_of(confidence) / (number if simultaneous else 1)
    if not usable(level):
        raise UserError(
            f"bounds side by side for {number:,} tasks need a level of {level:.3g} each",
            expected=f"at least {SMALLEST_LEVEL:g}, the finest that the exact test resolves",
            do="plan for less --confidence, or for fewer tasks",
        )
    each = per_task_power(power, number)
    many = len({(flip, margins[name]) for name, flip in flips.items()}) > EXACT_SEARCHES
    search = Search(level, each, images, many)
    by_task = [_task(name, flip, margins[name], difference, search) for name, flip in flips.items()]
    return {
        "tasks": number,
        "power": power,
        "confidence": confidence,
        "level": level,
        "simultaneous": simultaneous,
        "difference": difference,
        "precision": PRECISION if many else 0.0,
        **_worst(by_task),
        "by_task": by_task,
    }


class Search:
    """Searches over exact powers at one level and power, each made once."""

    def __init__(self, level: float, power: float, images: int | None, many: bool) -> None:
        self.images, self._many = images, many
        find = about_images if many else images_needed
        self._needed = cache(lambda margin, truth: find(margin, truth, level, power))
        self._margin = cache(lambda truth: best_margin(images or 0, truth, level, power))

    def needed(self, margin: float, truth: Truth) -> int:
        """Images that a margin takes."""
        return self._needed(margin, self._rounded(truth))

    def best_margin(self, truth: Truth) -> float | None:
        """The smallest margin that the images allow."""
        return self._margin(self._rounded(truth))

    def _rounded(self, truth: Truth) -> Truth:
        if not self._many or truth.discordance <= 0.0:
            return truth
        steps = math.ceil(math.log(truth.discordance) / FLIP_STEP - 1e-9)
        return Truth(min(1.0, max(truth.discordance, math.exp(steps * FLIP_STEP))), truth.difference)


def _task(name: str, flip: float, margin: float | None, difference: float, search: Search) -> dict[str, Any]:
    if abs(difference) > flip:
        raise UserError(
            f"a change of {difference:g} while {flip:g} of the images flip ({name})",
            expected="a change no larger than the share of images that flip",
        )
    truth = Truth(flip, difference)
    row: dict[str, Any] = {"task": name, "discordance": flip, "margin": margin}
    if margin is not None:
        check_margin(margin, name)
        if margin + difference <= 0.0:
            raise UserError(
                f"no number of images shows a change above {-margin:g} when the true change is {difference:g}",
                expected="margin + difference above 0",
                do="accept a margin, or plan for a gain with --difference",
            )
        try:
            row["per_task"] = search.needed(margin, truth)
        except OverflowError as error:
            raise UserError(
                f"a margin of {margin:g} takes more than {MOST_IMAGES:,} images ({name})",
                expected="a plan that somebody can carry out",
                do="accept a larger margin, or plan for a larger --difference",
            ) from error
    if search.images is not None:
        row |= {"images": search.images, "best_margin": search.best_margin(truth)}
    return row


def _worst(by_task: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The answer for all tasks together: as many images, and as large a margin, as the worst of them needs."""
    reported: dict[str, Any] = {}
    if all("per_task" in item for item in by_task):
        reported["per_task"] = max(item["per_task"] for item in by_task)
    if all("images" in item for item in by_task):
        best = [item["best_margin"] for item in by_task]
        reported |= {"images": by_task[0]["images"], "best_margin": None if None in best else max(best)}
    return reported
