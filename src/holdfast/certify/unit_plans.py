"""Plans for groups and scores: how many groups a certificate by betting needs, or which margin those at hand allow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holdfast.certify.claims import delta_of
from holdfast.certify.exact.power import per_task_power
from holdfast.certify.grouped import UnitCounts
from holdfast.certify.settings import check_margin
from holdfast.certify.tables import Paired
from holdfast.certify.unit_power import (
    MOST_UNITS,
    Flips,
    Population,
    Resampled,
    Scores,
    best_unit_margin,
    units_needed,
)
from holdfast.errors import UserError

LARGEST_UNIT_POWER = 0.995  # of one task: simulation resolves no more


def stated_population(
    size: int | None, icc: float | None, discordance: float | None, deviation: float | None, difference: float
) -> Population:
    """The population that a plan without predictions is for."""
    if icc is not None and size is None:
        raise UserError("--icc without --group-size", do="say how many images a group has")
    number, correlation = size or 1, icc or 0.0
    if number < 1 or not 0.0 <= correlation <= 1.0:
        raise UserError(
            f"groups of {number} with a correlation of {correlation:g} are not usable",
            expected="a size from 1 on, and a correlation from 0 to 1",
        )
    if deviation is not None:
        if discordance is not None:
            raise UserError("--score-deviation and --discordance at once", do="scores have a deviation, flips a share")
        if not 0.0 < deviation <= 1.0:
            raise UserError(f"the deviation {deviation:g} is not usable", expected="a share of the range, in (0, 1]")
        return Scores(number, deviation, difference, correlation)
    if discordance is None:
        raise UserError("how often do the models differ?", do="give --discordance 0.02, or dev --predictions FILE")
    if not abs(difference) <= discordance <= 1.0:
        raise UserError(
            f"a change of {difference:g} while {discordance:g} of the images flip",
            expected="a change no larger than the share of images that flip",
        )
    return Flips(number, discordance, difference, correlation)


def dev_populations(paired: Paired, difference: float, target: str | None) -> dict[str, tuple[Population, float]]:
    """For each task the units of dev predictions, and the images that one of them has on average."""
    found: dict[str, tuple[Population, float]] = {}
    for name in paired.tasks():
        counts = paired.tested(name) if name != target else None
        if isinstance(counts, UnitCounts):
            found[name] = (Resampled(counts.sample, difference), counts.n / counts.independent)
    if not found:
        raise UserError("no task has groups or scores to plan for", do="leave --group out: images are independent")
    return found


def plan_units(
    populations: Mapping[str, tuple[Population, float]],
    number: int,
    *,
    unit: str,
    default: float | None,
    single: Mapping[str, float],
    confidence: float,
    power: float,
    difference: float,
    images: int | None,
    simultaneous: bool,
) -> dict[str, Any]:
    """The plan as one JSON object, like :func:`holdfast.certify.plans.plan_report`; power by simulation."""
    level = delta_of(confidence) / (number if simultaneous else 1)
    each = per_task_power(power, number)
    if each > LARGEST_UNIT_POWER:
        raise UserError(
            f"a chance of {power:g} that {number} tasks pass is not usable",
            expected=f"at most {LARGEST_UNIT_POWER:g} for each task: power of groups and scores is simulated",
            do="plan for a smaller --power",
        )
    unknown = sorted(set(single) - set(populations))
    if unknown:
        raise UserError(f"a margin is given for {unknown[0]!r}, which is no task here")
    by_task = [
        _row(name, population, per_unit, single.get(name, default), images, level, each, unit)
        for name, (population, per_unit) in populations.items()
    ]
    if images is None and any(row["margin"] is None for row in by_task):
        raise UserError("nothing to plan", do="give --margin 0.02, or --images 300 for the best margin they allow")
    worst = {
        name: max(row[name] for row in by_task) for name in ("per_task", "units") if all(name in row for row in by_task)
    }
    if images is not None:
        best = [row["best_margin"] for row in by_task]
        worst |= {"images": images, "best_margin": None if None in best else max(best)}
    return {
        "tasks": number,
        "power": power,
        "confidence": confidence,
        "level": level,
        "simultaneous": simultaneous,
        "difference": difference,
        "unit": unit,
        **worst,
        "by_task": by_task,
    }


def _row(
    name: str,
    population: Population,
    per_unit: float,
    margin: float | None,
    images: int | None,
    level: float,
    power: float,
    unit: str,
) -> dict[str, Any]:
    flips = population.discordance if isinstance(population, Flips) else None
    row: dict[str, Any] = {"task": name, "discordance": flips, "margin": margin, "unit": unit}
    if margin is not None:
        check_margin(margin, name)
        if margin + population.difference <= 0.0:
            raise UserError(
                f"no number of images shows a change above {-margin:g} when it is {population.difference:g}",
                expected="margin + difference above 0",
                do="accept a margin, or plan for a gain with --difference",
            )
        try:
            units = units_needed(population, margin, level, power)
        except OverflowError as error:
            raise UserError(
                f"a margin of {margin:g} takes more than {MOST_UNITS:,} {unit}s ({name})",
                expected="a plan that somebody can carry out",
                do="accept a larger margin",
            ) from error
        row |= {"units": units, "per_task": math.ceil(units * per_unit)}
    if images is not None:
        units = max(1, int(images / per_unit))
        if units > MOST_UNITS:
            raise UserError(f"{units:,} {unit}s a task", expected=f"at most {MOST_UNITS:,}")
        row |= {"images": images, "best_margin": best_unit_margin(population, units, level, power)}
    return row
