"""How the forecast of a round looks on a terminal."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from holdfast.candidates.select import WithoutTraining
    from holdfast.certify.forecast import Flips, Forecast, TaskForecast

WIDTH = 80
LONGEST_NAME = 24
MOST_ROWS = 30  # more classes than this are cut to the least likely ones
MOST_LINES = 5  # of the plan that a round opens with


def print_forecast(found: Forecast) -> None:
    """A row a class, the chance, what it rests on, and what would raise it."""
    console = Console(highlight=False, emoji=False)
    console.width = min(console.width, WIDTH)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("class", overflow="ellipsis", no_wrap=True, max_width=LONGEST_NAME)
    for name in ("sealed", "margin", "0 lost", "1 lost", "2 lost", "chance"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = _shown(found)
    for task in shown:
        margin = "gain" if task.is_target else points(task.margin)
        provable = ["", "", ""] if task.is_target else [points(item) for item in task.provable]
        name = Text(f"{task.task} (target)" if task.is_target else task.task)
        table.add_row(name, str(task.images), margin, *provable, percent(task.chance))
    console.print(table)
    console.print(Text("\n".join(_summary(found, len(found.tasks) - len(shown)))))


def _shown(found: Forecast) -> list[TaskForecast]:
    if len(found.tasks) <= MOST_ROWS:
        return list(found.tasks)
    return sorted(found.tasks, key=lambda task: task.chance)[:MOST_ROWS]


def _summary(found: Forecast, left_out: int) -> list[str]:
    texts = [f"… and {left_out} classes that are more likely to pass"] if left_out else []
    flips = found.expected
    rest = f"protected classes {_flips(flips.protected)}"
    if any(task.is_target for task in found.tasks):
        rest += f", the target {_flips(flips.target)}"
    texts += [
        f"Margins in points: the round's, and the smallest that the sealed images prove if none, one or two of them "
        f"are lost and none is gained. Tested at level {found.level:g}.",
        f"Expected flips: {rest}.",
        *_left_out(found),
        f"Chance that the round passes: {percent(found.chance)}",
    ]
    if found.advice:
        texts.append("What would raise it:")
    lines = [line for text in texts for line in textwrap.wrap(text, WIDTH)]
    for item in found.advice:
        text = f"{percent(item.chance):>6}  {item.text}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent=" " * 8)
    return lines


def opening_lines(found: Forecast) -> list[str]:
    """The plan that a round opens with, in five lines at most."""
    protected = [task for task in found.tasks if not task.is_target]
    classes = f"{len(protected)} protected class{'' if len(protected) == 1 else 'es'}"
    weakest = found.weakest
    least = f"least likely: {weakest.task}, {weakest.images} sealed images, {percent(weakest.chance)}"
    if not weakest.is_target:
        least += f" at {points(weakest.margin)} points"
    texts = [f"plan: a chance of {percent(found.chance)} that {classes} pass{_gain(found)}", least, *_left_out(found)]
    end = ["class by class: holdfast plan ROUND.toml"] if found.advice else []
    lines = [line for text in texts for line in textwrap.wrap(text, WIDTH)]
    for item in found.advice:  # as many as have room, the best first
        more = textwrap.wrap(f"{percent(item.chance)} with: {item.text}", WIDTH, subsequent_indent="  ")
        if len(lines) + len(more) + len(end) > MOST_LINES:
            break
        lines += more
    return [*lines, *end]


def print_opening(found: Forecast) -> None:
    """The same, on the error stream: the output of a round is its result."""
    console = Console(stderr=True, highlight=False)
    for line in opening_lines(found):
        console.print(Text(line), soft_wrap=True)


def _gain(found: Forecast) -> str:
    return " and the target gains" if any(task.is_target for task in found.tasks) else ""


def _left_out(found: Forecast) -> list[str]:
    queried = f"{found.left_out} sealed image{'' if found.left_out == 1 else 's'}"
    return [f"{queried} queried before and not tested again."] if found.left_out else []


def _flips(flips: Flips) -> str:
    return f"{100 * flips.lost:g} % lost, {100 * flips.gained:g} % gained"


def points(value: float | None) -> str:
    """A margin in points."""
    return "none" if value is None else f"{100 * value:.3g}"


def percent(chance: float) -> str:
    """A chance; what is not certain is never shown as 0 or 100 %."""
    shown = round(100 * chance)
    if shown == 0:
        return "0 %" if chance == 0.0 else "<1 %"
    return ">99 %" if shown == 100 and chance < 1.0 else f"{shown} %"


def print_refit(found: WithoutTraining, *, decides: bool = False) -> None:
    """Before training: the best that can be done without and, where that ``decides``, whether training follows."""
    best = found.best
    chance = "" if best.chance is None else f", passes with a chance of {percent(best.chance)}"
    gain = f"{best.dev.target} {best.dev.target_gain * 100:+.1f} points on dev images"
    if decides:
        ends = "that is enough" if found.enough else "training goes on"
        parts = [f"{ends}: {found.why}"]
    else:
        parts = [f"training has little to add: {found.why}"] if found.enough else []
    parts.append("`--train` trains all the same" if decides and found.enough else "`--quick` stops here")
    text = "; ".join([f"without training ({best.name}): {gain}{chance}", *parts])
    print(*textwrap.wrap(text, WIDTH, break_on_hyphens=False), sep="\n", file=sys.stderr, flush=True)
