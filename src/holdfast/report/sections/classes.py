"""Every class, worst first."""

from __future__ import annotations

from holdfast.report.content import RunContent
from holdfast.report.evidence import TaskRow
from holdfast.report.html.markup import Markup, change_mark, p_text, percent, points, tag
from holdfast.report.html.tables import data_table
from holdfast.report.sections import figures
from holdfast.report.sections.flips import flips_part


def classes_section(content: RunContent) -> Markup:
    """A table whose bars are the figure; with very many tasks an overview above it."""
    evidence = content.evidence
    scale = figures.forest_scale(evidence.rows)
    named = {"sealed": "the sealed images, now retired", "dev": "dev images"}[evidence.role]
    together = f"bounds hold together with confidence {content.confidence * 100:g} %"
    if evidence.role == "dev":
        together += " for a model fixed beforehand; dev images also chose this one, so they describe and do not prove"
    tested = "corrected as the verdicts are" if evidence.role == "sealed" else "of this class alone"
    note = (
        f"On {named}. Dot: change in accuracy, in points. Whisker: down to its lower bound ({together}). Dashed: the "
        f"accepted loss, in points. p: {tested}, against a loss of the margin or more."
    )
    verdicts = any(row.verdict for row in evidence.rows)
    heads = ["class", *(["verdict"] if verdicts else []), "change", "", "at least", "margin", "p"]
    heads += ["lost", "gained", "old", "new", "images"]
    kinds = ["text", *(["text"] if verdicts else []), "number", None, *["number"] * 8]
    others = [("dev", content.dev)] if evidence.role == "sealed" else []
    others += [("test", content.test)] if content.test else []
    heads += [name for name, _ in others]
    kinds += ["number"] * len(others)
    rows: list[list[tuple[Markup | str, object]]] = []
    for row in evidence.rows:
        cells: list[tuple[Markup | str, object]] = [
            (task_name(row), row.task),
            *([(_verdict_mark(row.verdict), row.verdict or "")] if verdicts else []),
            (change_mark(row.difference), row.difference),
            (figures.forest_cell(row, scale), None),
            (points(row.bound) if row.bound > -1 else "–", row.bound),
            (f"{row.margin * 100:g}", row.margin),
            (p_text(row.p, evidence.level), row.p),
            (str(row.lost), row.lost),
            (str(row.gained), row.gained),
            (percent(row.old), row.old),
            (percent(row.new), row.new),
            (f"{row.n:,}", row.n),
        ]
        for _, compared in others:
            change = compared.tasks[row.task].accuracy_change if row.task in compared.tasks else None
            cells.append((change_mark(change), change))
        rows.append(cells)
    classes = ["target" if row.is_target else "beyond" if row.beyond else "" for row in evidence.rows]
    table = data_table("task-table", heads, kinds, rows, classes, search="Find a class")
    over = tag("figure", figures.overview(evidence), class_="wide") if len(evidence.rows) > figures.MATRIX else None
    return tag("div", tag("p", note, class_="note"), over, table, _target_note(content), flips_part(content))


def _target_note(content: RunContent) -> Markup | None:
    """The target, where it is no part of the claim that the table is about."""
    if content.evidence.target is not None:
        return None
    reported = [("dev", content.dev), *([("test", content.test)] if content.test else [])]
    parts: list[object] = [f"{content.target}, the target, is no part of this claim: "]
    for place, (name, compared) in enumerate(reported):
        parts += [", " if place else "", change_mark(compared.target_gain), f" on {name} images"]
    return tag("p", *parts, ".", class_="note after")


def task_name(row: TaskRow) -> Markup:
    """A class by its name; the target is marked."""
    return tag("span", row.task, tag("em", "target", class_="tag") if row.is_target else None, class_="task-name")


def _verdict_mark(verdict: str | None) -> Markup:
    marks = {"certified": "✓ ", "regressed": "▼ ", "undecided": "? "}
    return tag("span", f"{marks.get(verdict or '', '')}{verdict or '–'}", class_=f"word {verdict or 'none'}")
