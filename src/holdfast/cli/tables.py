"""What commands print: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.evaluate.metrics import Comparison
from holdfast.rounds.develop import RoundResult, comparison_json


def print_accuracy(title: str, accuracy: Mapping[str, float]) -> None:
    """One row a class."""
    table = Table("class", "accuracy", title=title, title_justify="left")
    for name, value in accuracy.items():
        table.add_row(Text(name), f"{value * 100:.1f} %")
    Console().print(table)


def change_text(change: float) -> Text:
    """A change of accuracy in points; drops stand out, with a mark for readers without colour."""
    style, mark = ("bold red", " ▼") if change < 0 else ("green", "") if change > 0 else ("dim", "")
    return Text(f"{change * 100:+.1f}{mark}", style=style)


def comparison_table(title: str, columns: Sequence[tuple[str, Comparison]]) -> Table:
    """Accuracy of the old model and of each new one, class by class, drops marked."""
    table = Table(title=title, title_justify="left")
    for name, justify in (("class", "left"), ("images", "right"), ("old", "right")):
        table.add_column(name, justify=justify)
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


def print_round(result: RoundResult, *, as_json: bool) -> None:
    """The end of a round: the table, and in a sentence what is handed back."""
    if as_json:
        scores = {"dev": result.dev, "test": result.test}
        print(
            json.dumps(
                {
                    "run": str(result.folder.root),
                    "kept_old": result.kept_old,
                    "chosen": result.chosen,
                    **{role: comparison_json(one) if one else None for role, one in scores.items()},
                }
            )
        )
        return
    console = Console()
    if result.test is not None:
        console.print(comparison_table("on test images, scored once", [("new", result.test)]))
    else:
        console.print(comparison_table("on dev images", [("new", result.dev)]))
    console.print(sentence(result), soft_wrap=True)


def sentence(result: RoundResult) -> Text:
    """What happened, in words."""
    where = f"model in {result.folder.model}"
    if result.kept_old:
        return Text(
            "The old model is handed back: no candidate kept every protected class on dev images. " + where,
            style="bold yellow",
        )
    gain = result.dev.target_gain * 100
    return Text(
        f"{result.chosen}: {result.dev.target} {gain:+.1f} points on dev images, no protected class lost there. {where}",
        style="bold green",
    )
