"""What a larger margin or more images would change."""

from __future__ import annotations

from holdfast.report.content import RunContent
from holdfast.report.evidence import TaskRow
from holdfast.report.html.markup import Markup, change_mark, points, tag
from holdfast.report.html.tables import data_table
from holdfast.report.sections import figures
from holdfast.report.sections.classes import task_name


def advice_section(content: RunContent) -> Markup:
    """What would decide the undecided classes, and what a larger margin would allow."""
    return tag("div", _more_images(content), _margins(content))


def _more_images(content: RunContent) -> Markup:
    """How many images each undecided class needs."""
    evidence = content.evidence
    where = "sealed (retired)" if evidence.role == "sealed" else "dev"
    undecided = [row for row in evidence.rows if (row.p > evidence.level or row.verdict == "undecided")]
    if not undecided:
        return tag("p", f"Every claimed class has enough {where} images: none needs more.", class_="note")
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
        tag("h3", "More images"),
        tag("p", f"On {where} images. Needed: for an 80 % chance that all classes pass.", class_="note"),
        data_table("planner", heads, kinds, rows, search="Find a class" if len(rows) > 12 else None),
    )


def _margins(content: RunContent) -> Markup | None:
    """The gain that each accepted loss would allow, in words and as a chart."""
    steps = content.result.get("gain_by_margin") or []
    if not steps:
        return None
    gains = [float(step["target_gain"]) for step in steps]
    if max(gains) - min(gains) < 0.0005 and max(gains) > 0:
        most = f"On dev images {content.target} gains {points(gains[0])} points at most"
        same = f"{most}, and no protected class loses for it: a larger margin would buy no more."
        return tag("div", tag("h3", "What a margin would buy"), tag("p", same, class_="note"))
    note = f"The largest gain of {content.target} on dev images where no protected class loses more than that."
    rows: list[list[tuple[Markup | str, object]]] = [
        [
            (f"{step['margin'] * 100:g} points", step["margin"]),
            (change_mark(step["target_gain"]), step["target_gain"]),
        ]
        for step in steps
    ]
    table = data_table("margins", ["accepted loss", f"gain of {content.target}"], [None, "number"], rows)
    return tag(
        "div",
        tag("h3", "What a margin would buy"),
        tag("p", note, class_="note"),
        tag("div", table, tag("figure", figures.gain_steps(steps, content.target)), class_="charts"),
    )


def _why(row: TaskRow) -> str:
    if row.needed:
        if row.beyond:
            return "if the true change is 0: the loss seen reaches the margin"
        return "at the rate of flips seen"
    if row.difference <= -row.margin and row.difference < 0:
        return "the loss seen reaches the margin: if it is real, no number of images helps"
    if row.margin == 0:
        return "the claim is a gain: without one, no number of images is enough"
    return "enough images: it passes by itself, or nearly"
