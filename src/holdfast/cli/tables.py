"""What commands print: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.verdicts import print_outcome, print_sealed
from holdfast.evaluate.metrics import Comparison
from holdfast.rounds.former import read_result_json
from holdfast.rounds.outcome import read_outcome
from holdfast.rounds.result import RoundResult, comparison_json


def print_accuracy(title: str, accuracy: Mapping[str, float]) -> None:
    """One row a class."""
    table = Table("class", "accuracy")
    for name, value in accuracy.items():
        table.add_row(Text(name), f"{value * 100:.1f} %")
    console = Console(highlight=False)
    console.print(Text(title), soft_wrap=True)  # a title of the table would be as narrow as that is
    console.print(table)


def change_text(change: float) -> Text:
    """A change of accuracy in points; drops stand out, with a mark for readers without colour."""
    style, mark = ("bold red", " ▼") if change < 0 else ("green", "") if change > 0 else ("dim", "")
    return Text(f"{change * 100:+.1f}{mark}", style=style)


def comparison_table(title: str, columns: Sequence[tuple[str, Comparison]]) -> Table:
    """Accuracy of the old model and of each new one, class by class, drops marked."""
    table = Table(title=title, title_justify="left")
    table.add_column("class")
    table.add_column("images", justify="right")
    table.add_column("old", justify="right")
    for name, _ in columns:
        table.add_column(name, justify="right")
        table.add_column("change", justify="right")
    first = columns[0][1]
    for task, change in first.tasks.items():
        row: list[Text | str] = [
            Text(f"{task} (target)" if task == first.target else task, style="bold" if task == first.target else ""),
            str(change.examples),
            f"{change.old_accuracy * 100:.1f} %",
        ]
        for _, compared in columns:
            here = compared.tasks[task]
            row += [f"{here.new_accuracy * 100:.1f} %", change_text(here.accuracy_change)]
        table.add_row(*row, end_section=task == list(first.tasks)[-2])
    return table


def print_round(result: RoundResult, *, as_json: bool, verbose: bool = False) -> None:
    """The end of a round: the verdict in a few lines; every class, and what a margin would buy, where asked for."""
    if as_json:
        scores = {"dev": result.dev, "test": result.test}
        reported = {role: comparison_json(item) if item else None for role, item in scores.items()}
        values = {"run": str(result.folder.root), **result.decision.to_json(), "training": result.training, **reported}
        print(json.dumps(values))
        return
    console = Console(highlight=False)
    print_outcome(console, read_outcome(result.folder))
    if verbose:
        _print_details(console, result)


def _print_details(console: Console, result: RoundResult) -> None:
    """Every class on dev and test images, on the sealed ones as far as they may be shown, and the frontier."""
    shown = "tested and not handed back" if result.decision.order else "not handed back"
    title = f"on dev images, the candidate that was {shown}" if result.kept_old else "on dev images"
    console.print(comparison_table(title, [("candidate" if result.kept_old else "new", result.dev)]))
    if result.test is not None and not result.kept_old:
        console.print(comparison_table("on test images, scored once", [("new", result.test)]))
    if result.decision.reported is not None and "sealed" in result.decision.reported:
        print_sealed(result.decision.reported)
    if result.kept_old:
        _print_frontier(console, result)


def _print_frontier(console: Console, result: RoundResult) -> None:
    """Which task is in the way, and what a margin would buy."""
    if result.blocked_by is None:
        return
    console.print(Text(f"{result.blocked_by} stands in the way of {result.dev.target}.", style="bold"))
    bought = read_result_json(result.folder.result).get("gain_by_margin") or []
    table = Table("accepted loss", f"gain of {result.dev.target}", title="what a margin would buy (dev images)")
    for item in bought:
        table.add_row(f"{item['margin'] * 100:g} points", f"{item['target_gain'] * 100:+.1f} points")
    console.print(table)
