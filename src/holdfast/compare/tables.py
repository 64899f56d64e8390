"""Tables in the paper's layout, each as text, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.compare.choose import Cell
from holdfast.evaluate.metrics import Comparison

WIDE = 12  # more tasks than this, and they become the rows


@dataclass(frozen=True)
class Entry:
    """One field; ``bold`` marks a drop."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Table:
    """A title, a heading and groups of rows with a line between the groups."""

    title: str
    heading: tuple[str, ...]
    groups: tuple[tuple[tuple[Entry, ...], ...], ...]
    note: str = ""
    left: int = field(default=1)  # columns that stand at the left edge

    def text(self) -> str:
        """For a terminal; a drop has asterisks around it."""
        rows = [[_starred(item) for item in row] for group in self.groups for row in group]
        widths = [max(map(len, column)) for column in zip(self.heading, *rows, strict=True)]

        def line(fields: Sequence[str]) -> str:
            cells = [
                item.ljust(width) if place < self.left else item.rjust(width)
                for place, (item, width) in enumerate(zip(fields, widths, strict=True))
            ]
            return "  ".join(cells).rstrip()

        rule = "-" * len("  ".join("-" * width for width in widths))
        lines = [self.title, "", line(self.heading), rule]
        for group in self.groups:
            lines += [line([_starred(item) for item in row]) for row in group]
            lines.append(rule)
        return "\n".join([*lines, *([self.note] if self.note else []), ""])

    def csv(self) -> str:
        """For a program; one heading, no marks."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.heading)
        writer.writerows([item.text for item in row] for group in self.groups for row in group)
        return file.getvalue()

    def latex(self) -> str:
        """For a paper; needs booktabs."""
        columns = "l" * self.left + "c" * (len(self.heading) - self.left)
        bodies = [
            "\n".join(" & ".join(_latex_entry(item) for item in row) + r" \\" for row in group) for group in self.groups
        ]
        body = "\n\\midrule\n".join(bodies)
        head = " & ".join(_latex(item) for item in self.heading)
        note = f"\n% {self.note}" if self.note else ""
        return (
            f"\\begin{{table}}\n\\centering\n\\caption{{{_latex(self.title)}}}\n"
            f"\\resizebox{{\\linewidth}}{{!}}{{\\begin{{tabular}}{{{columns}}}\n\\toprule\n{head} \\\\\n\\midrule\n"
            f"{body}\n\\bottomrule\n\\end{{tabular}}}}\n\\end{{table}}{note}\n"
        )

    def html(self) -> str:
        """A page of its own."""
        head = "".join(f"<th>{html.escape(item)}</th>" for item in self.heading)
        groups = "".join(
            "<tbody>" + "".join("<tr>" + "".join(map(_html_entry, row)) + "</tr>" for row in group) + "</tbody>"
            for group in self.groups
        )
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        title = html.escape(self.title)
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f"<style>{_STYLE}</style></head><body><table><caption>{title}</caption><thead><tr>{head}</tr></thead>"
            f"{groups}</table>{note}</body></html>\n"
        )


_STYLE = (
    "body{font:15px/1.4 system-ui,sans-serif;margin:2em;color:#222;background:#fff}table{border-collapse:collapse}"
    "caption{text-align:left;font-weight:600;padding-bottom:.6em}th,td{padding:.2em .8em;text-align:right}"
    "th:first-child,td:first-child{text-align:left}tbody{border-top:1px solid #999}thead{border-top:2px solid #222}"
    "td b{color:#b00020}"
)


def _starred(entry: Entry) -> str:
    return f"*{entry.text}*" if entry.bold else entry.text


def _latex(text: str) -> str:
    for plain, special in (("\\", r"\textbackslash{}"), ("%", r"\%"), ("_", r"\_"), ("&", r"\&"), ("#", r"\#")):
        text = text.replace(plain, special)
    return text


def _latex_entry(entry: Entry) -> str:
    return rf"\textbf{{{_latex(entry.text)}}}" if entry.bold else _latex(entry.text)


def _html_entry(entry: Entry) -> str:
    text = html.escape(entry.text)
    return f"<td><b>{text}</b></td>" if entry.bold else f"<td>{text}</td>"


WRITERS: dict[str, Callable[[Table], str]] = {
    "txt": Table.text,
    "csv": Table.csv,
    "tex": Table.latex,
    "html": Table.html,
}


# -- the tables of a study --------------------------------------------------------------------------------------------


def main_table(
    title: str, target: str, rows: Sequence[str], columns: Sequence[str], cells: dict[tuple[str, str], Cell]
) -> Table:
    """Retention ratio // DevSafety(acc) mean (std), and target accuracy mean (std), per method and column."""
    base = [next((cell for (_, place), cell in cells.items() if place == column), None) for column in columns]
    groups = [
        (
            _line("Base", "Retention Ratio//DevSafety(acc)", ["100%//0.00(0.0000)" if item else "-" for item in base]),
            _line("", f"Target {target}", [f"{item.base_accuracy:.4f}(0.0000)" if item else "-" for item in base]),
        )
    ]
    for row in rows:
        here = [cells.get((row, column)) for column in columns]
        groups.append(
            (
                _line(row, "Retention Ratio//DevSafety(acc)", [_retention(item) for item in here]),
                _line("", f"Target {target}", [_accuracy(item) for item in here]),
            )
        )
    seeds = sorted({cell.seeds for cell in cells.values()})
    note = f"Test images, {' or '.join(map(str, seeds)) or 'no'} seeds; settings chosen on dev images."
    missing = sum(cell.missing for cell in cells.values())
    if missing:
        note += f" {missing} jobs failed or are missing; a setting all of whose seeds finished was preferred."
    return Table(title, ("Method", "Measures", *columns), tuple(groups), note, left=2)


def _line(first: str, second: str, rest: Sequence[str]) -> tuple[Entry, ...]:
    return tuple(Entry(item) for item in (first, second, *rest))


def _retention(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return f"{cell.retention_ratio * 100:.2f}%//{cell.dev_safety.mean:.4f}({cell.dev_safety.std:.4f})"


def _accuracy(cell: Cell | None) -> str:
    return "-" if cell is None else f"{cell.target_accuracy.mean:.4f}({cell.target_accuracy.std:.4f})"


def settings_table(
    title: str, rows: Sequence[str], columns: Sequence[str], cells: dict[tuple[str, str], Cell]
) -> Table:
    """Which setting was chosen where."""
    body = tuple(
        tuple(
            Entry(item)
            for item in (row, *(cells[row, c].setting or "-" if (row, c) in cells else "-" for c in columns))
        )
        for row in rows
    )
    return Table(
        title, ("Method", *columns), (body,), "Larger retention ratio first, larger target gain second, on dev."
    )


def task_table(title: str, scores: dict[str, list[Comparison]]) -> Table:
    """Accuracy of the old model and the change under each row, task by task, with an average; drops in bold."""
    first = next(iter(scores.values()))[0]
    tasks = [*(name for name in first.tasks if name != first.target), first.target]
    old = {
        name: float(np.mean([item.tasks[name].old_accuracy for item in next(iter(scores.values()))])) for name in tasks
    }
    lines: list[tuple[Entry, ...]] = []
    base = (*(Entry(f"{old[name]:.4f}") for name in tasks), Entry(f"{np.mean(list(old.values())):.4f}"))
    for row, compared in scores.items():
        changes = np.array([[item.tasks[name].accuracy_change for name in tasks] for item in compared])
        changes = np.concatenate([changes, changes.mean(axis=1, keepdims=True)], axis=1)
        entries = [
            Entry(f"{mean:+.4f}({std:.4f})", bold=mean < 0)
            for mean, std in zip(changes.mean(axis=0), changes.std(axis=0), strict=True)
        ]
        lines.append((Entry(row), *entries))
    heading = ("Method", *tasks[:-1], f"{tasks[-1]} (target)", "Average")
    note = "Change of test accuracy over seeds, mean(std); drops are marked."
    table = Table(title, heading, (((Entry("Base"), *base),), tuple(lines)), note)
    return table if len(tasks) <= WIDE else _turned(table)


def _turned(table: Table) -> Table:
    """Tasks as rows."""
    rows = [row for group in table.groups for row in group]
    body = tuple((Entry(name), *(row[place] for row in rows)) for place, name in enumerate(table.heading) if place > 0)
    return Table(table.title, ("Task", *(row[0].text for row in rows)), (body[:-2], body[-2:]), table.note)
