"""How a verdict, a plan and a certificate look on a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {"certified": "bold green", "regressed": "bold red", "undecided": "bold yellow"}
MARKS = {"certified": "✓", "regressed": "▼", "undecided": "?"}


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False))


def percent(value: float, digits: int = 2) -> str:
    """A signed change in points."""
    return f"{value * 100:+.{digits}f}"


def _p(value: float) -> str:
    return "<1e-6" if value < 1e-6 else f"{value:.2g}" if value < 0.001 else f"{value:.3f}"


def _verdict(value: str) -> Text:
    return Text(f"{MARKS[value]} {value}", style=STYLES[value])


def print_report(reported: Mapping[str, Any]) -> None:
    """The verdict first, then the table, then what is missing, then the promise in its words."""
    console = Console(highlight=False)
    console.print(Text("verdict: ") + _verdict(reported["verdict"]))
    console.print(Text(f"claim:   {reported['claim_tested']}"))
    sequential = reported["claim"] == "sequential"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("task", overflow="fold", min_width=8)
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
            *(_sequential_cells(row) if sequential else _cells(row)),
            _verdict(row["verdict"]),
        )
    console.print(table)
    if not sequential:
        _print_reading(console, reported, rows)
    console.print(Text(f"promise: {reported['promise']}", style="dim"))


def _cells(row: Mapping[str, Any]) -> tuple[str, str]:
    return _p(row["p_value"]), percent(row["simultaneous_lower_bound"])


def _sequential_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"{row['e_value']:.3g}", "" if row["passed_at"] is None else str(row["passed_at"])


def _print_reading(console: Console, reported: Mapping[str, Any], rows: list[Any]) -> None:
    """How to read the columns, and for undecided tasks what would decide them."""
    from holdfast.certify.report import advice  # scipy: not for whoever prints JSON

    devsafety, lemma = reported["devsafety"], reported["lemma_1"]
    console.print(
        Text(
            f"change, margin and bound in points. p: of this task alone, against a loss of the margin or more. bound: "
            f"lower bounds on the change that hold together (Bonferroni).\n"
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


def print_plan(plan: Mapping[str, Any]) -> None:
    """What was asked for, and the answer."""
    console = Console(highlight=False)
    claim = "lower bounds side by side" if plan["simultaneous"] else "all tasks retained"
    goal = f"{plan['power'] * 100:g} % chance that {plan['tasks']} tasks pass"
    console.print(Text(f"{goal} ({claim}), confidence {plan['confidence']:g}:"))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("task", "flips", "margin", "images needed", "with your images"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for item in plan["by_task"]:
        best = item.get("best_margin")
        have = (
            ""
            if "images" not in item
            else f"{item['images']} allow " + ("none" if best is None else f"{best * 100:g} %")
        )
        table.add_row(
            Text(item["task"]),
            f"{item['discordance'] * 100:.3g} %",
            "" if item["margin"] is None else f"{item['margin'] * 100:g} %",
            str(item.get("per_task", "")),
            have,
        )
    console.print(table)
