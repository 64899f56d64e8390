"""Before training: what a round's sealed images can prove, how likely it passes, and what would raise that chance.

A round passes if every protected class passes the exact test at its margin and, where it is claimed, the target's gain
is shown as well. The sealed images of different classes are independent draws given the models, so the chance of the
round is the product of the chances of its claims. Each is the exact power at the expected flips.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from holdfast.certify.exact.power import Truth, best_margin, exact_power, reaches, sufficient_images
from holdfast.certify.exact.score_test import impossible, passes
from holdfast.certify.sealed_claim import SealedClaim
from holdfast.errors import UserError

# Margins are searched in tenths of a point: finer ones are beyond what anybody would write down.
MARGIN_STEP = 0.001
# The chance that advice aims at.
GOAL = 0.9
# More is not advised, nor less than this left to train on.
LARGEST_SHARE, LEAST_TRAINED = 0.5, 0.15
# Negative flips for which the smallest provable margin is shown.
SHOWN_LOST = (0, 1, 2)


@dataclass(frozen=True)
class Flips:
    """Expected shares of images that change between right and wrong."""

    gained: float  # positive flips, p01
    lost: float  # negative flips, p10

    def __post_init__(self) -> None:
        if not (self.gained >= 0.0 and self.lost >= 0.0 and self.gained + self.lost <= 1.0):
            raise UserError(
                f"flips of {self.gained:g} gained and {self.lost:g} lost are not usable",
                expected="shares of all images: neither below 0, and together at most 1",
            )

    @property
    def truth(self) -> Truth:
        """The same as discordance and difference."""
        return Truth(self.gained + self.lost, self.gained - self.lost)


@dataclass(frozen=True)
class ExpectedFlips:
    """What a forecast assumes about the candidate that is tested.

    The defaults lie above what 66 rounds of the documented path on PACS paintings, cartoons and sketches showed,
    60 to 300 images a class (``benchmarks/rounds.py table --results benchmarks/results/rounds-prior.json``; only rounds
    that shipped a model are in it). There, a refit lost 0.3 to 0.5 % of the protected images, with a worst class of 1.0
    (bias of 1 or more) and 1.4 points; models with trained weights lost 1.1 to 2.2 %, hence ``moved``. A bias that
    halves the loss is a rule of thumb. Fits of the last layer gain on protected classes, too: ``fitted`` are the rates
    under which what they did to images kept aside was likeliest, in 81 rounds on these pictures
    (docs/appendix/last-layer.md).
    """

    protected: Flips = Flips(gained=0.001, lost=0.012)
    target: Flips = Flips(gained=0.25, lost=0.015)
    moved: Flips = Flips(gained=0.02, lost=0.04)  # added to ``protected`` for trained weights, times lambda
    fitted: Flips = Flips(gained=0.11, lost=0.035)  # the same for a fit of the last layer

    def at(self, lam: float, bias: float = 0.0, *, fitted: bool = False) -> Flips:
        """Flips of protected classes that are expected of a candidate at lambda; a bias of 1 halves what is lost.

        However far a target is raised, no more than half of a class is expected to be lost to it.
        """
        added = self.fitted if fitted else self.moved
        lost = min(0.5, (self.protected.lost + lam * added.lost) / 2.0 ** max(bias, -64.0))
        return Flips(self.protected.gained + lam * added.gained, lost)


@dataclass(frozen=True)
class TaskForecast:
    """One claim: a protected class at its margin, or the target's gain (margin 0)."""

    task: str
    images: int
    margin: float
    flips: Flips
    is_target: bool
    chance: float
    level: float

    @property
    def provable(self) -> tuple[float | None, ...]:
        """The smallest margins that the images prove with none, one and two negative flips and no positive one."""
        return tuple(smallest_margin(self.images, lost, self.level) for lost in SHOWN_LOST)

    def to_json(self) -> dict[str, Any]:
        """As ``holdfast plan ROUND.toml --json`` has it."""
        return {
            "task": self.task,
            "target": self.is_target,
            "images": self.images,
            "margin": self.margin,
            "provable": None if self.is_target else list(self.provable),
            "chance": self.chance,
        }


@dataclass(frozen=True)
class Advice:
    """A change of the round, and the chance that it would give."""

    kind: str  # images, share, margin or pool
    text: str
    chance: float
    values: Mapping[str, float] = field(default_factory=dict[str, float])  # by class: images to add, or the margin

    def to_json(self) -> dict[str, Any]:
        """As ``holdfast plan ROUND.toml --json`` has it."""
        return {"kind": self.kind, "text": self.text, "chance": self.chance, "values": dict(self.values)}


@dataclass(frozen=True)
class Stock:
    """What could be sealed: all images of every class, and the largest share of them that other roles leave."""

    images: Mapping[str, int]
    largest_share: float = LARGEST_SHARE
    share: float = 0.0  # that is sealed now


@dataclass(frozen=True)
class Forecast:
    """All claims of a round; protected classes first, the target last where its gain is claimed."""

    tasks: tuple[TaskForecast, ...]
    level: float
    expected: ExpectedFlips
    advice: tuple[Advice, ...] = ()
    left_out: int = 0  # sealed images that were queried before, and are not tested again

    @property
    def chance(self) -> float:
        """The chance that all claims pass together."""
        return math.prod(task.chance for task in self.tasks)

    @property
    def weakest(self) -> TaskForecast:
        """The claim that is least likely to pass."""
        return min(self.tasks, key=lambda task: (task.chance, task.images, task.task))

    def to_json(self) -> dict[str, Any]:
        """What ``holdfast plan ROUND.toml --json`` prints."""
        protected, target = self.expected.protected, self.expected.target
        return {
            "chance": self.chance,
            "level": self.level,
            "expected": {
                "protected": {"gained": protected.gained, "lost": protected.lost},
                "target": {"gained": target.gained, "lost": target.lost},
            },
            "classes": [task.to_json() for task in self.tasks],
            "left_out": self.left_out,
            "advice": [item.to_json() for item in self.advice],
        }


@lru_cache(maxsize=4096)
def smallest_margin(images: int, lost: int, level: float) -> float | None:
    """The smallest margin, in steps of 0.001, that ``images`` prove with ``lost`` negative flips and no positive one.

    Without positive flips p falls as the margin grows, so that bisection finds it. None where no margin is proven.
    """
    failing, passing = -1, round(1.0 / MARGIN_STEP) - 1
    if lost > images or not passes(0, lost, images, passing * MARGIN_STEP, level):
        return None
    first = [_of_binomial(images, lost, level) + offset for offset in (-1, 0)]  # it is one of two, mostly
    while passing - failing > 1:
        middle = (passing + failing) // 2
        if first:
            middle = min(max(first.pop(), failing + 1), passing - 1)
        if passes(0, lost, images, round(middle * MARGIN_STEP, 6), level):
            passing = middle
        else:
            failing = middle
    return round(passing * MARGIN_STEP, 6)


def _of_binomial(images: int, lost: int, level: float) -> int:
    """The smallest step with P(Bin(n, ε) <= lost) <= level: the p-value at p01 = 0, which its supremum is close to."""
    log_ways = [math.lgamma(images + 1) - math.lgamma(k + 1) - math.lgamma(images - k + 1) for k in range(lost + 1)]
    failing, passing = 0, round(1.0 / MARGIN_STEP)
    while passing - failing > 1:
        middle = (passing + failing) // 2
        gone, kept = math.log(middle * MARGIN_STEP), math.log1p(-middle * MARGIN_STEP)
        chance = sum(math.exp(ways + k * gone + (images - k) * kept) for k, ways in enumerate(log_ways))
        passing, failing = (middle, failing) if chance <= level else (passing, middle)
    return passing


@lru_cache(maxsize=4096)
def chance_of(images: int, margin: float, flips: Flips, level: float) -> float:
    """The chance that a class with so many sealed images passes at its margin."""
    if images < 1 or impossible(images, margin, level):
        return 0.0
    return exact_power(images, margin, flips.truth, level)


@lru_cache(maxsize=4096)
def margin_for(images: int, flips: Flips, level: float, chance: float) -> float | None:
    """The smallest margin, in steps of 0.001, at which a class passes with the wanted chance; None: no margin."""
    if images < 1:
        return None
    found = best_margin(images, flips.truth, level, chance)
    if found is None:
        return None
    step = math.ceil(round(found / MARGIN_STEP, 6))
    while step * MARGIN_STEP < 1.0:
        margin = round(step * MARGIN_STEP, 6)
        if reaches(images, margin, flips.truth, level, chance):
            return margin
        step += 1
    return None


@lru_cache(maxsize=4096)
def images_for(margin: float, flips: Flips, level: float, chance: float) -> int | None:
    """A number of sealed images (to within 2 %) with which a class passes with the wanted chance; None: no number."""
    try:
        return sufficient_images(margin, flips.truth, level, chance)
    except (OverflowError, ValueError):  # beyond what anybody has; or the expected loss is the margin already
        return None


def forecast(
    images: Mapping[str, int],
    margins: Mapping[str, float],
    level: float,
    *,
    target: str | None = None,
    expected: ExpectedFlips | None = None,
    stock: Stock | None = None,
    goal: float = GOAL,
) -> Forecast:
    """The forecast of a round whose protected classes are those of ``margins``; ``target`` where its gain is claimed.

    ``images`` are the sealed images of every class. Where the ``stock`` is known, advice says which share of it to
    seal. Advice aims at the chance ``goal``.
    """
    flips = expected or ExpectedFlips()
    tasks = [_task(name, images[name], margins[name], flips.protected, level) for name in sorted(margins)]
    if target is not None:
        tasks.append(_task(target, images[target], 0.0, flips.target, level, is_target=True))
    if not tasks:
        raise ValueError("a forecast needs at least one claim")
    plain = Forecast(tuple(tasks), level, flips)
    return replace(plain, advice=_advice(plain, goal, stock))


def forecast_claim(
    claim: SealedClaim,
    *,
    expected: ExpectedFlips | None = None,
    stock: Stock | None = None,
    goal: float = GOAL,
) -> Forecast:
    """The forecast of what a round claims about its sealed images."""
    settings = claim.settings
    found = forecast(
        claim.images,
        settings.margins,
        claim.budget.level,
        target=settings.target,
        expected=expected,
        stock=stock,
        goal=goal,
    )
    return replace(found, left_out=sum(claim.left_out.values()))


def _task(
    name: str, images: int, margin: float, flips: Flips, level: float, *, is_target: bool = False
) -> TaskForecast:
    return TaskForecast(name, images, margin, flips, is_target, chance_of(images, margin, flips, level), level)


def _advice(found: Forecast, goal: float, stock: Stock | None) -> tuple[Advice, ...]:
    """Changes that raise the chance, the best first; none where it is as large as wanted.

    A pooled claim says less than the others about every class, and comes last.
    """
    if found.chance >= goal:
        return ()
    each = goal ** (1.0 / len(found.tasks))
    weak = [task for task in found.tasks if task.chance < each]
    offered = (
        _more_images(found, weak, each),
        None if stock is None else _larger_share(found, weak, each, stock),
        _own_margins(found, weak, each),
        _pooled(found, weak),
    )
    better = [item for item in offered if item is not None and item.chance > found.chance]
    return tuple(sorted(better, key=lambda item: (item.kind == "pool", -item.chance)))


def _changed(found: Forecast, new: Sequence[TaskForecast]) -> float:
    """The chance of the round with some claims in place of those of the same name."""
    by_name = {task.task: task for task in new}
    return math.prod(by_name.get(task.task, task).chance for task in found.tasks)


def _more_images(found: Forecast, weak: Sequence[TaskForecast], each: float) -> Advice | None:
    more: dict[str, float] = {}
    new: list[TaskForecast] = []
    for task in weak:
        needed = images_for(task.margin, task.flips, found.level, each)
        if needed is not None and needed > task.images:
            more[task.task] = needed - task.images
            new.append(_task(task.task, needed, task.margin, task.flips, found.level, is_target=task.is_target))
    if not more:
        return None
    listed = _listed([f"{count:g} more of {name}" for name, count in more.items()])
    return Advice("images", f"seal {listed}", _changed(found, new), more)


def _larger_share(found: Forecast, weak: Sequence[TaskForecast], each: float, stock: Stock) -> Advice | None:
    """The share of every class that has to be sealed, or the largest that leaves images for the other roles."""
    share = 0.0
    for task in weak:
        needed = images_for(task.margin, task.flips, found.level, each)
        share = max(share, 1.0 if needed is None else needed / stock.images[task.task])
    share = min(math.ceil(share * 100) / 100, stock.largest_share)
    if share <= stock.share:
        return None
    new = [
        _task(
            task.task,
            max(task.images, int(share * stock.images[task.task])),
            task.margin,
            task.flips,
            found.level,
            is_target=task.is_target,
        )
        for task in found.tasks
    ]
    text = f"seal a larger share of the images there are: [data.roles] sealed = {share:g}"
    return Advice("share", text, _changed(found, new), {"sealed": share})


def _own_margins(found: Forecast, weak: Sequence[TaskForecast], each: float) -> Advice | None:
    margins: dict[str, float] = {}
    new: list[TaskForecast] = []
    for task in weak:
        margin = None if task.is_target else margin_for(task.images, task.flips, found.level, each)
        if margin is not None and margin > task.margin:
            margins[task.task] = margin
            new.append(_task(task.task, task.images, margin, task.flips, found.level))
    if not margins:
        return None
    listed = _listed([f"{100 * margin:g} points for {name}" for name, margin in margins.items()])
    return Advice("margin", f"accept a margin of {listed}", _changed(found, new), margins)


def _pooled(found: Forecast, weak: Sequence[TaskForecast]) -> Advice | None:
    members = [task for task in weak if not task.is_target]
    if len(members) < 2:
        return None
    margin = min(task.margin for task in members)
    together = _task("pool", sum(task.images for task in members), margin, members[0].flips, found.level)
    names = {task.task for task in members}
    chance = together.chance * math.prod(task.chance for task in found.tasks if task.task not in names)
    text = (
        f"claim {_listed([task.task for task in members])} together, not each of them, at {100 * margin:g} points "
        "(`holdfast certify --pool`, on predictions)"
    )
    return Advice("pool", text, chance, {task.task: margin for task in members})


def _listed(items: Sequence[str], most: int = 4) -> str:
    """``a, b and c``; a long list is cut."""
    if len(items) > most:
        return f"{', '.join(items[: most - 1])} and {len(items) - most + 1} more classes"
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
