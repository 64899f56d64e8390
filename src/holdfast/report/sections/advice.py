"""What a larger margin or more images would change."""

from __future__ import annotations

from holdfast.report.content import RunContent
from holdfast.report.evidence import TaskRow
from holdfast.report.html.markup import Markup, change_mark, tag
from holdfast.report.html.tables import data_table
from holdfast.report.sections import figures
from holdfast.report.sections.classes import task_name


def advice_section(content: RunContent) -> Markup:
    """What would decide the undecided classes."""
    parts: list[Markup] = []
    steps = content.result.get("gain_by_margin") or []
    if steps:
        parts.append(
            tag(
                "figure",
                tag("figcaption", "What a margin would buy"),
                figures.bought(steps, content.target),
                tag("p", "The largest gain of the target seen on dev images with no protected class below the margin."),
            )
        )
    evidence = content.evidence
    where = "sealed (retired)" if evidence.role == "sealed" else "dev"
    undecided = [row for row in evidence.rows if (row.p > evidence.level or row.verdict == "undecided")]
    if not undecided:
        parts.append(
            tag("p", f"Every claimed class has evidence enough on {where} images: none asks for more.", class_="note")
        )
        return tag("div", *parts, class_="charts")
    rows: list[list[tuple[Markup | str, object]]] = [
        [
            (task_name(row), row.task),
            (f"{row.n:,}", row.n),
            (change_mark(row.difference), row.difference),
            (f"about {row.needed:,}" if row.needed else "–", row.needed or 10**9),
            (_why(row), None),
        ]
        for row in undecided
    ]
    heads, kinds = ["class", "images now", "change", "images needed", ""], ["text", "number", "number", "number", None]
    return tag(
        "div",
        *parts,
        tag(
            "div",
            tag("h3", "More data"),
            tag("p", f"Judged by {where} images; for an 80 % chance that all classes pass.", class_="note"),
            data_table("planner", heads, kinds, rows, search="Find a class" if len(rows) > 12 else None),
        ),
        class_="charts",
    )


def _why(row: TaskRow) -> str:
    if row.needed:
        return "that many, at the rate of flips seen"
    if row.difference <= -row.margin and row.difference < 0:
        return "the loss seen reaches the margin: if it is real, no number helps"
    if row.margin == 0:
        return "proof of a gain is asked for; without one no number is enough"
    return "images enough; it passes alone, or nearly"
