"""What ``holdfast init`` writes: shares and margins with which the sealed images can prove the claim."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.certify.claims import delta_of
from holdfast.certify.forecast import GOAL, ExpectedFlips, chance_of, margin_for
from holdfast.config import RolesConfig
from holdfast.config.data import ClassShares
from holdfast.data.catalogue import Catalogue
from holdfast.data.init_round import ChosenPlan
from holdfast.data.roles import assign, count_roles
from holdfast.data.task import Role
from holdfast.errors import UserError


@dataclass(frozen=True)
class Level:
    """Shares of a class; the rest is trained on."""

    sealed: float
    dev: float
    test: float = 0.0


# What is tried for each class, the fewest sealed images first. Test images repeat what sealed ones have proven, so they
# go first; dev images choose among candidates, and a few of every class together are enough for that.
LEVELS = (Level(0.2, 0.2, 0.2), Level(0.3, 0.2), Level(0.4, 0.15), Level(0.5, 0.15), Level(0.6, 0.12))
# The target learns from what is not sealed, and seals more than this level only where its gain could not be shown.
# Protected classes only have to be kept.
MOST_OF_TARGET = 3
# Where the sealed images show the target's gain with a smaller chance than this, it is not claimed.
LEAST_CHANCE = 0.6
UNCLAIMED = 1  # the level of a target whose gain is not claimed
# Classes with shares of their own; where more need them, all classes get the same, but for those that these would leave
# without enough images.
MOST_NAMED = 8
# Where chance draws a class fewer dev images than LEAST asks for, the same level is tried with this share of them: the
# next lower level would seal far fewer images, and a margin rests on those.
MORE_DEV = 0.2
# The fewest images of a class to choose on, to train on and to prove with.
LEAST = {Role.DEV: 2, Role.TRAIN: 2, Role.SEALED: 2}
# Margins are written in steps of half a point.
MARGIN_STEP = 0.005
LARGEST_MARGIN = 0.95


def choose_shares(
    catalogue: Catalogue,
    target: str | None,
    *,
    proposed: str,
    margin: float,
    confidence: float,
    roles: RolesConfig | None = None,
) -> ChosenPlan:
    """For each class the smallest sealed share that proves the wished margin; else the largest, and a larger margin.

    Images are counted as they will be drawn, by their content. Without a ``target``, the ``proposed`` one is planned
    with, and one margin for all classes is chosen, whatever class the user names. With ``roles`` the shares are given,
    and margins alone are chosen.
    """
    aimed, expected = target or proposed, ExpectedFlips()
    level, each = delta_of(confidence), GOAL ** (1.0 / len(catalogue.classes))
    given = roles is not None
    roles = roles or _smallest_shares(catalogue, aimed, margin, level, each, expected)
    drawn = _drawn(catalogue, roles)
    if not given:
        _check_drawn(drawn, roles)
    counts = {name: drawn[name][Role.SEALED] for name in catalogue.classes}
    margins = {name: _margin(count, margin, level, each, expected) for name, count in counts.items() if name != aimed}
    if target is None:
        margins = dict.fromkeys(margins, max(margins.values()))
    same = set(margins.values())
    own = same.pop() if len(same) == 1 else margins
    gain = chance_of(counts[aimed], 0.0, expected.target, level)
    reasons = _reasons(roles, margins, margin, counts, given)
    if gain < LEAST_CHANCE:
        points = 100 * (expected.target.gained - expected.target.lost)
        reasons["gain"] = (
            f"That the target gains is not claimed: {counts[aimed]} sealed images would show {points:g} points with a "
            f"chance of {100 * gain:.0f} %.",
        )
    return ChosenPlan(roles, own, confidence, reasons, target_gain=gain >= LEAST_CHANCE)


def _smallest_shares(
    catalogue: Catalogue, target: str, margin: float, level: float, each: float, expected: ExpectedFlips
) -> RolesConfig:
    """What every class needs in order to pass with the chance ``each``."""
    drawn = [_drawn_at(catalogue, item) for item in LEVELS]

    def place(name: str, most: int) -> int:
        counts = [found[name].counts for found in drawn]
        return _place(counts, [chance(name, tried) >= each for tried in levels], most)

    def chance(name: str, tried: int) -> float:
        flips, claimed = (expected.target, 0.0) if name == target else (expected.protected, margin)
        return chance_of(drawn[tried][name].counts[Role.SEALED], claimed, flips, level)

    levels = range(len(LEVELS))
    places = {name: place(name, MOST_OF_TARGET if name == target else levels[-1]) for name in catalogue.classes}
    if chance(target, places[target]) < LEAST_CHANCE:
        more = place(target, levels[-1])
        places[target] = more if chance(target, more) >= LEAST_CHANCE else place(target, UNCLAIMED)
    return _roles(catalogue, places, {name: drawn[tried][name].level for name, tried in places.items()}, target)


@dataclass(frozen=True)
class _Drawn:
    """What a class draws at a level."""

    level: Level
    counts: dict[Role, int]


def _drawn_at(catalogue: Catalogue, level: Level) -> dict[str, _Drawn]:
    """What each class draws at a level, with more dev images where it draws too few."""
    found = {name: _Drawn(level, counts) for name, counts in _drawn(catalogue, _shares(level)).items()}
    few = [name for name, drawn in found.items() if drawn.counts[Role.DEV] < LEAST[Role.DEV]]
    if not few or level.dev >= MORE_DEV:
        return found
    more = replace(level, dev=MORE_DEV)
    again = _drawn(catalogue, _shares(more))
    return {**found, **{name: _Drawn(more, again[name]) for name in few if _usable(again[name])}}


def _shares(level: Level) -> RolesConfig:
    return RolesConfig(sealed=level.sealed, dev=level.dev, test=level.test)


def _usable(counts: Mapping[Role, int]) -> bool:
    return all(counts[role] >= least for role, least in LEAST.items())


def _drawn(catalogue: Catalogue, roles: RolesConfig) -> dict[str, dict[Role, int]]:
    """Class -> role -> images."""
    found = count_roles(assign(catalogue, catalogue.classes, roles))
    return {name: {role: found.get(name, {}).get(role.value, 0) for role in Role} for name in catalogue.classes}


def _check_drawn(drawn: Mapping[str, Mapping[Role, int]], roles: RolesConfig) -> None:
    """A class with an image in every role that is in use, or no round can be written for it."""
    used = [Role.TRAIN, Role.DEV, Role.SEALED, *([Role.TEST] if roles.test else [])]
    for name, counts in drawn.items():
        if not all(counts[role] for role in used):
            raise UserError(
                f"the class {name!r} has too few images to train, to choose and to judge with",
                expected="dozens of images of every class; the smallest margins need hundreds",
                found=", ".join(f"{count} for {role.value}" for role, count in counts.items() if count),
                do="add images, or move its folder out of the way",
            )


def _place(drawn: Sequence[Mapping[Role, int]], reached: Sequence[bool], most: int) -> int:
    """Which of LEVELS a class needs: the first that is enough, else the first that seals most.

    Shares are drawn by content, and a small draw may leave a role empty: then another level serves.
    """
    usable = [place for place in range(most + 1) if _usable(drawn[place])] or [0]
    enough = [place for place in usable if reached[place]]
    return enough[0] if enough else max(usable, key=lambda place: (drawn[place][Role.SEALED], -place))


def _roles(catalogue: Catalogue, places: Mapping[str, int], levels: Mapping[str, Level], target: str) -> RolesConfig:
    """The level that most classes need, and shares of their own for the others."""
    protected = [place for name, place in places.items() if name != target]
    counted = Counter(protected)
    general = LEVELS[max(counted, key=lambda place: (counted[place], place))]
    others = {name: level for name, level in levels.items() if level != general}
    if len(others.keys() - {target}) > MOST_NAMED:  # too many to name: all seal what the smallest needs
        general, short = _for_all(catalogue, LEVELS[max(protected)], target)
        others = {name: levels[name] for name in (*short, target) if levels[name] != general}
    named = {name: ClassShares(sealed=level.sealed, dev=level.dev) for name, level in others.items()}
    test = LEVELS[0].test if max(places.values()) == 0 else 0.0
    return RolesConfig(sealed=general.sealed, dev=general.dev, test=test, by_class=named)


def _for_all(catalogue: Catalogue, level: Level, target: str) -> tuple[Level, list[str]]:
    """A level for all classes, with more dev images where that suits more of them; protected ones that draw too few."""
    found: list[tuple[Level, list[str]]] = []
    for tried in dict.fromkeys((level, replace(level, dev=MORE_DEV))):
        drawn = _drawn(catalogue, _shares(tried))
        found.append((tried, [name for name in drawn if name != target and not _usable(drawn[name])]))
    return min(found, key=lambda item: len(item[1]))


def _margin(count: int, wished: float, level: float, each: float, expected: ExpectedFlips) -> float:
    """The wished margin where the images prove it with a fair chance, else the smallest that they do."""
    if chance_of(count, wished, expected.protected, level) >= each:
        return wished
    found = margin_for(count, expected.protected, level, each)
    if found is None:
        return max(wished, LARGEST_MARGIN)
    return max(wished, round(math.ceil(round(found / MARGIN_STEP, 6)) * MARGIN_STEP, 6))


def _reasons(
    roles: RolesConfig, margins: Mapping[str, float], wished: float, counts: Mapping[str, int], given: bool
) -> dict[str, tuple[str, ...]]:
    """Why, for the sections of the file."""
    raised = [name for name, margin in margins.items() if margin > wished]
    if given:
        shares = ["The shares that the old model was tuned with: no image that it was trained on is sealed."]
    elif raised:
        shares = ["Classes with few images seal most of them: that number decides what can be proven."]
    else:
        shares = ["The smallest shares with which every protected class can prove its margin."]
    if roles.test == 0.0:
        shares.append("No test images: sealed ones tell the same.")
    if not raised:
        return {"roles": tuple(shares), "margin": ()}
    few = min(raised, key=lambda name: (counts[name], name))
    why = (
        f"{100 * wished:g} points were aimed at (--margin). {few} has {counts[few]} sealed images: they prove "
        f"{100 * margins[few]:g} points with a fair chance."
    )
    return {"roles": tuple(shares), "margin": (why,)}
