"""How a verdict, a plan and a certificate look on a terminal."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from holdfast.rounds.outcome import Outcome

STYLES = {"certified": "bold green", "regressed": "bold red", "undecided": "bold yellow"}
MARKS = {"certified": "✓", "regressed": "▼", "undecided": "?"}
HEADLINES: dict[tuple[str | None, bool], str] = {  # by verdict, and whether the old model is handed back
    ("certified", False): "certified: the new model may take the place of the old one",
    ("certified", True): "certified, and yet the old model is handed back",
    ("undecided", False): "undecided: the new model is not proven to keep every class",
    ("undecided", True): "undecided: the old model is kept, the new one is not proven",
    (None, False): "not certified: the new model was chosen on dev images alone",
    (None, True): "the old model is kept: no candidate was good enough on dev images",
}
_LABEL = 13  # columns of the names before the values


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False))


def percent(value: float, digits: int = 2) -> str:
    """A signed change in points."""
    return f"{value * 100:+.{digits}f}"


def _p(value: float, level: float) -> str:
    """A p-value; one that is above the level never reads as if it were not."""
    if round(value, 3) <= level < value:
        return f">{level:.3g}"
    return "<1e-6" if value < 1e-6 else f"{value:.2g}" if value < 0.001 else f"{value:.3f}"


def _verdict(value: str) -> Text:
    return Text(f"{MARKS[value]} {value}", style=STYLES[value])


def print_outcome(console: Console, ended: Outcome) -> None:
    """The end of a round in at most ten lines of 80 columns: the verdict first, the next command last."""
    mark = f"{MARKS[ended.verdict]} " if ended.verdict in MARKS else ""
    style = STYLES.get(ended.verdict or "", "bold")
    headline = HEADLINES[ended.verdict, ended.kept_old]
    console.print(Text(f"{mark}{headline}", style=style), soft_wrap=True)
    for label, value in _outcome_lines(ended):
        _print_field(console, label, value)
    handed = f"{'the old model' if ended.kept_old else 'the new model'}, in {ended.run / 'model'}"
    # A path and a command are to be copied: never broken over lines.
    console.print(Text(f"{'handed back':<{_LABEL}}{handed}"), soft_wrap=True)
    console.print(Text(f"{'next':<{_LABEL}}{_next(ended)}"), soft_wrap=True)


def _print_field(console: Console, label: str, value: str) -> None:
    width = max(20, min(console.width, 80) - _LABEL)
    for place, line in enumerate(textwrap.wrap(value, width) or [""]):
        console.print(Text(f"{'' if place else label:<{_LABEL}}{line}"), soft_wrap=True)


def _outcome_lines(ended: Outcome) -> list[tuple[str, str]]:
    """Which candidate, which class decided, what the target gained, and how the sealed set stands."""
    lines: list[tuple[str, str]] = []
    if ended.candidate is not None:
        where = f"on {ended.sealed_images:,} sealed images" if ended.tested else "on dev images alone"
        label = "tested" if ended.tested else "chosen" if not ended.kept_old else "best seen"
        lines.append((label, f"{ended.candidate}, {where}"))
    if not ended.tested:
        lines.append(("because", ended.reason.splitlines()[0].rstrip(".")))
    if ended.deciding is not None:
        lines.append(("closest" if ended.verdict == "certified" else "decided by", ended.deciding.text()))
        tested = ended.deciding.test_text()
        if tested and ended.deciding.role == "sealed":
            lines.append(("", f"{tested}{_would_decide(ended) if ended.kept_old else ''}"))
        elif ended.tested:
            lines.append(("", "sealed images are not shown before their set is retired"))
    lines.append(("target", f"{ended.target}: {ended.target_gain * 100:+.1f} points on {ended.target_role} images"))
    if ended.training:
        lines.append(("training", ended.training))
    if ended.sealed is not None:
        left = "it is retired" if ended.sealed["retired"] else f"{ended.sealed['queries_left']} left"
        lines.append(("sealed set", f"query {ended.sealed.get('queries', 1)} is spent; {left}"))
    return lines


def _would_decide(ended: Outcome) -> str:
    """What stands between the class that decided and a pass."""
    decided = ended.deciding
    if decided is None:
        return ""
    if decided.beyond:  # more images would rather show the loss than rule it out
        return "; a gain is needed" if decided.must_gain else "; the loss seen reaches the margin"
    return f"; about {decided.needed:,} images would decide it" if decided.needed else ""


def _next(ended: Outcome) -> str:
    """The command to go on with."""
    run = shlex.quote(str(ended.run))
    if ended.test_left:
        return f"holdfast certify {run}"
    if ended.kept_old and not ended.tested:
        return f"holdfast diagnose {run}"
    return f"holdfast report {run}"


def print_report(reported: Mapping[str, Any]) -> None:
    """The verdict first, then the table, then what is missing, then the promise in its words."""
    console = Console(highlight=False)
    console.print(Text("verdict: ") + _verdict(reported["verdict"]))
    console.print(Text(f"claim:   {reported['claim_tested']}"))
    sequential = reported["claim"] == "sequential"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("task", overflow="fold", min_width=4)
    last = ("e-value", "passed at") if sequential else ("p", "bound")
    for name in ("n", "gained", "lost", "change", "margin", *last):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    rows = [*reported["tasks"], *([reported["target"]] if reported.get("target") else [])]
    for row in rows:
        is_target = reported.get("target") is row
        table.add_row(
            Text(f"{row['task']} (target)" if is_target else row["task"]),
            str(row["n"]),
            str(row["gained"]),
            str(row["lost"]),
            percent(row["difference"]),
            f"{row['margin'] * 100:g}",
            *(_sequential_cells(row) if sequential else _cells(row, reported["level"])),
            _verdict(row["verdict"]),
        )
    console.print(table)
    if not sequential:
        _print_reading(console, reported, rows)
    from holdfast.certify.report import input_lines  # scipy: not for whoever prints JSON

    for line in input_lines(reported):
        console.print(Text(line, style="yellow"))
    console.print(Text(f"promise: {reported['promise']}", style="dim"))


def _cells(row: Mapping[str, Any], level: float) -> tuple[str, str]:
    return _p(row["p_adjusted"], level), percent(row["simultaneous_lower_bound"])


def _sequential_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"{row['e_value']:.3g}", "" if row["passed_at"] is None else str(row["passed_at"])


def _print_reading(console: Console, reported: Mapping[str, Any], rows: list[Any]) -> None:
    """How to read the columns, and for undecided tasks what would decide them."""
    from holdfast.certify.report import advice  # scipy: not for whoever prints JSON

    devsafety, lemma = reported["devsafety"], reported["lemma_1"]
    console.print(
        Text(
            f"change, margin and bound in points. p: against a loss of the margin or more, corrected as the verdicts "
            f"are; at most {reported['level']:.3g} passes. bound: lower bounds on the change that hold together "
            f"(Bonferroni).\n"
            f"DevSafety: {percent(devsafety['observed'])} seen ({devsafety['worst_task']}), in the population at least "
            f"{percent(devsafety['lower_bound'])} ({devsafety['lower_bound_task']}); by the paper's Lemma 1 with C = "
            f"{lemma['C']:g}: {percent(lemma['lower_bound'])}."
        )
    )
    for row in rows:
        if row["verdict"] == "undecided":
            console.print(Text(f"{row['task']}: {advice(row)}", style="yellow"))


def print_sealed(reported: Mapping[str, Any]) -> None:
    """The single bit, or, of a retired set, everything."""
    console = Console(highlight=False)
    sealed = reported["sealed"]
    if sealed["retired"] and "devsafety" in reported:
        print_report(reported)
    else:
        console.print(Text("verdict: ") + _verdict(reported["verdict"]))
        console.print(Text(f"promise: {reported['promise']}", style="dim"))
    passed = "passed" if sealed["passed"] else "did not pass"
    left = (
        "it is retired"
        if sealed["retired"]
        else f"{sealed['queries_left']} left; nothing more is shown before the last"
    )
    console.print(Text(f"sealed set {sealed['set'][7:19]}: query {sealed['queries']} {passed}; {left}."))


def _images_needed(item: Mapping[str, Any]) -> str:
    if "units" not in item:
        return str(item.get("per_task", ""))
    return f"{item['per_task']} in {item['units']} groups" if item["unit"] == "group" else f"{item['units']} rows"


def print_plan(plan: Mapping[str, Any]) -> None:
    """What was asked for, and the answer."""
    console = Console(highlight=False)
    claim = "lower bounds side by side" if plan["simultaneous"] else "all tasks retained"
    goal = f"{plan['power'] * 100:g} % chance that {plan['tasks']} tasks pass"
    change = f", true change {percent(plan['difference'])} points" if plan["difference"] else ""
    console.print(Text(f"{goal} ({claim}), confidence {plan['confidence']:g}{change}:"))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    rows: list[tuple[str, ...]] = []
    for item in plan["by_task"]:
        best = item.get("best_margin")
        have = (
            ""
            if "images" not in item
            else f"{item['images']} allow " + ("none" if best is None else f"{best * 100:g} %")
        )
        flips = "" if item["discordance"] is None else f"{item['discordance'] * 100:.3g} %"
        margin = "" if item["margin"] is None else f"{item['margin'] * 100:g} %"
        rows.append((item["task"], flips, margin, _images_needed(item), have))
    heads = ("task", "flips", "margin", "images needed", "with your images")
    answered = [place for place in range(len(heads)) if any(row[place] for row in rows)]  # no column that says nothing
    for place in answered:
        table.add_column(heads[place], justify="left" if place == 0 else "right")
    for row in rows:
        table.add_row(*(Text(row[place]) for place in answered))
    console.print(table)
