"""Flip rates, the field's own figures: on the sealed images once they are retired, and on dev images."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.evaluate.flips import FlipRates, overall
from holdfast.report.content import RunContent
from holdfast.report.html.markup import Markup, percent, tag
from holdfast.report.html.tables import data_table


def run_flips(content: RunContent) -> dict[str, dict[str, FlipRates]]:
    """By set of images (``sealed`` only where it is retired, ``dev``), flip rates of every class."""
    found = {"dev": {name: change.flips for name, change in content.dev.tasks.items()}}
    if content.evidence.role != "sealed":
        return found
    known = [row for row in content.evidence.rows if row.old is not None]  # predictions that are still at hand
    sealed = {row.task: FlipRates(row.n, round((row.old or 0.0) * row.n), row.gained, row.lost) for row in known}
    return {**({"sealed": sealed} if sealed else {}), **found}


def flips_part(content: RunContent) -> Markup:
    """All classes together in a line for each set of images, and every class in a table behind it."""
    sets = run_flips(content)
    lines = "; ".join(f"on {name} images {_line(overall(tasks.values()))}" for name, tasks in sets.items())
    note = tag(
        "p",
        f"Flip rates, all classes together: {lines}. Relative NFR: 1 is as many negative flips as two models with "
        "independent errors have, 0 is none.",
        class_="note after",
    )
    return tag("div", note, tag("details", tag("summary", "Flip rates of every class"), _table(sets)))


def _line(rates: FlipRates) -> str:
    return f"NFR {percent(rates.negative, 2)}, PFR {percent(rates.positive, 2)}, relative NFR {relative(rates)}"


def relative(rates: FlipRates) -> str:
    """The relative NFR, where it is defined."""
    return "–" if rates.relative is None else f"{rates.relative:.3f}"


def _table(sets: Mapping[str, Mapping[str, FlipRates]]) -> Markup:
    heads = [f"{figure}, {name}" for name in sets for figure in ("NFR", "PFR", "relative NFR")]
    classes = list(dict.fromkeys(task for tasks in sets.values() for task in tasks))
    rows: list[list[tuple[Markup | str, object]]] = []
    for task in classes:
        cells: list[tuple[Markup | str, object]] = [(task, task)]
        for tasks in sets.values():
            rates = tasks.get(task)
            if rates is None:
                cells += [("–", None)] * 3
                continue
            cells += [(percent(value, 2), value) for value in (rates.negative, rates.positive)]
            cells.append((relative(rates), rates.relative))
        rows.append(cells)
    return data_table("flip-table", ["class", *heads], ["text", *["number"] * len(heads)], rows)
