"""The page about a study: the tables and figures that ``holdfast compare`` left, and one picture of all methods."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.report.axes import Plot, bounds, dot
from holdfast.report.card import escaped
from holdfast.report.figures import legend
from holdfast.report.markup import Markup, count, percent, points, tag
from holdfast.report.sections import Section, banner, data_table
from holdfast.report.shapes import read_chosen, read_csv, read_jobs, read_study_config
from holdfast.report.words import VerdictText

TITLES = {
    "by-column": "Retention and target accuracy by column",
    "curves": "Through training",
    "trajectory": "Trajectories, light to dark",
    "tasks": "Change of every task",
    "weights": "Effective weights over time",
}
MOST_FIGURES = 4_000_000  # bytes of figures on a page


@dataclass(frozen=True)
class StudyContent:
    """What a study wrote."""

    root: Path
    config: Mapping[str, Any]
    chosen: Sequence[Mapping[str, Any]]
    jobs: Sequence[Mapping[str, str]]
    tables: Mapping[str, Sequence[Sequence[str]]]
    figures: Mapping[str, bytes]

    @property
    def target(self) -> str:
        """The class that every method was to improve."""
        return str(self.config["round"]["task"]["target"])

    @property
    def scored(self) -> list[Mapping[str, Any]]:
        """Rows and columns with a score on test images, best first; where none retained, the least loss."""
        found = [one for one in self.chosen if one.get("test")]
        return sorted(found, key=lambda one: _rank(one["test"]))


def _rank(told: Mapping[str, Any]) -> tuple[float, float, float]:
    retained, gain, worst = told["retention_ratio"], told["target_gain"][0], told["dev_safety"][0]
    return (-retained, -gain, -worst) if retained else (0.0, -worst, -gain)


def read_study(root: Path) -> StudyContent:
    """Read the folder of a study."""
    tables = {path.stem: read_csv(path) for path in sorted((root / "tables").glob("*.csv"))}
    figures = {path.stem: path.read_bytes() for path in sorted((root / "figures").glob("*.png")) if path.is_file()}
    config, chosen = read_study_config(root / "study.json"), read_chosen(root / "chosen.json")
    whole = {name: lines for name, lines in tables.items() if lines}
    return StudyContent(root, config, chosen, read_jobs(root / "jobs.csv"), whole, figures)


def study_banner(content: StudyContent) -> Markup:
    """What came out, in a sentence."""
    best = content.scored
    done = sum(one["status"] == "done" for one in content.jobs)
    failed = sum(one["status"] == "failed" for one in content.jobs)
    jobs = f"{count(len(content.jobs), 'job')}, {done} done" + (f", {failed} failed" if failed else "") + "."
    if not best:
        return banner(VerdictText("open", "Study", "No method was scored on test images yet.", jobs, ""), promise=False)
    first, told = best[0], best[0]["test"]
    headline = (
        f"{first['row']} keeps every class in {percent(told['retention_ratio'], 0)} of its seeds and changes "
        f"{content.target} by {points(told['target_gain'][0])} points."
    )
    if not told["retention_ratio"]:
        headline = (
            f"No method kept every class in any seed; {first['row']} lost least, "
            f"{points(told['dev_safety'][0])} points on its worst class."
        )
    claim = (
        f"Best of {count(len({one['row'] for one in best}), 'method')} by share of seeds without any loss, then by "
        f"gain of the target, on test images ({first['column']})."
    )
    return banner(
        VerdictText(
            "open", "Study", headline, claim, f"{jobs} Settings were chosen on dev images; test was scored once."
        ),
        promise=False,
    )


def study_sections(content: StudyContent) -> list[Section]:
    """Picture, tables, figures, jobs."""
    made = [Section("methods", "Methods", "Methods side by side", _methods(content))]
    names = ["results", *(name for name in content.tables if name.startswith("tasks")), "settings"]
    titles = {"results": "Results in the paper's layout", "settings": "Chosen settings"}
    for name in names:
        if name in content.tables:
            column = name.removeprefix("tasks").strip("-")
            title = titles.get(name, f"Change of every task{f', {column}' if column else ''}")
            short = {"results": "Results", "settings": "Settings"}.get(name, f"Tasks {column}".strip())
            made.append(Section(name, short, title, _csv_table(name, content.tables[name])))
    made.append(Section("figures", "Figures", "Figures", _figures(content)))
    made.append(Section("jobs", "Jobs", "Jobs", _jobs(content)))
    return [one for one in made if one.body]


def _methods(content: StudyContent) -> Markup:
    scored = content.scored
    if not scored:
        return Markup("")
    rows = list(dict.fromkeys(str(one["row"]) for one in content.chosen))
    xs = [one["test"]["dev_safety"][0] * 100 for one in scored]
    ys = [one["test"]["target_gain"][0] * 100 for one in scored]
    plot = Plot.of(
        bounds(xs, pad=0.1),
        bounds(ys, pad=0.1),
        label="target gain against the worst change, one dot a method and column",
        x_name="worst class, mean over seeds (points)",
        y_name="target gain (points)",
    )
    marks = [
        tag(
            "g",
            dot(
                plot.x(x),
                plot.y(y),
                f"series dot s{rows.index(str(one['row'])) % 10}",
                f"{one['row']}, {one['column']}: worst {points(x / 100)}, target {points(y / 100)}, retained in "
                f"{percent(one['test']['retention_ratio'], 0)} of seeds",
                5,
            ),
            class_="one",
            data_series=one["row"],
        )
        for one, x, y in zip(scored, xs, ys, strict=True)
    ]
    cells = [
        [
            (str(one["row"]), one["row"]),
            (str(one["column"]), one["column"]),
            (percent(one["test"]["retention_ratio"], 0), one["test"]["retention_ratio"]),
            (_signed(one["test"]["dev_safety"]), one["test"]["dev_safety"][0]),
            (_signed(one["test"]["target_gain"]), one["test"]["target_gain"][0]),
            (str(one["test"]["seeds"]), one["test"]["seeds"]),
        ]
        for one in scored
    ]
    heads = ["method", "column", "retained", "worst class", "target", "seeds"]
    kinds = ["text", "text", "number", "number", "number", "number"]
    chart = tag("figure", plot.draw(*marks, zero_x=True), legend(rows))
    return tag("div", chart, tag("div", data_table("methods-table", heads, kinds, cells)), class_="charts")


def _signed(value: Sequence[float]) -> Markup:
    mean, spread = value
    kind = "drop" if mean < 0 else "gain" if mean > 0 else "same"
    sign = "▼ " if mean < 0 else ""
    return tag("span", f"{sign}{points(mean)} ± {spread * 100:.1f}", class_=f"change {kind}")


def _csv_table(name: str, table: Sequence[Sequence[str]]) -> Markup:
    heads, *rows = table
    kinds: list[str | None] = ["text" if place == 0 else "number" for place in range(len(heads))]
    cells: list[list[tuple[Markup | str, object]]] = []
    for row in rows:
        line: list[tuple[Markup | str, object]] = []
        for place, one in enumerate(row):
            found = re.match(r"[+-]?\d+(\.\d+)?", one)
            drop = place > 0 and one.startswith("-") and found is not None
            shown = tag("span", "▼ ", one.replace("-", "−", 1), class_="change drop") if drop else one
            line.append((shown, float(found.group()) if found and place else one))
        cells.append(line)
    return data_table(f"table-{name}", heads, kinds, cells, search="Find a row" if len(cells) > 12 else None)


def _figures(content: StudyContent) -> Markup:
    shown: list[Markup] = []
    left = MOST_FIGURES
    for name, png in content.figures.items():
        if len(png) > left:
            shown.append(tag("p", f"{name}.png is too large for this page; it is in figures/.", class_="note"))
            continue
        left -= len(png)
        address = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        title = TITLES.get(name, name)
        picture = tag("div", tag("img", src=address, alt=title, loading="lazy"), class_="plate")
        shown.append(tag("figure", tag("figcaption", title), picture, class_="wide"))
    return tag("div", *shown, class_="charts") if shown else Markup("")


def _jobs(content: StudyContent) -> Markup:
    heads = ["job", "column", "setting", "seed", "status", "worst, dev", "target, dev", "seconds", "error"]
    kinds = ["text", "text", "text", "number", "text", "number", "number", "number", "text"]
    rows: list[list[tuple[Markup | str, object]]] = []
    for one in content.jobs:
        worst, gain = (_number(one[name]) for name in ("dev_safety", "target_gain"))
        status = tag("span", one["status"], class_="word regressed" if one["status"] == "failed" else "word")
        rows.append(
            [
                (one["row"], one["row"]),
                (one["column"], one["column"]),
                (one["setting"], one["setting"]),
                (one["seed"], one["seed"]),
                (status, one["status"]),
                ("–" if worst is None else points(worst), worst),
                ("–" if gain is None else points(gain), gain),
                (one["seconds"], one["seconds"]),
                (one["error"], one["error"]),
            ]
        )
    return data_table("job-table", heads, kinds, rows, search="Find a job") if rows else Markup("")


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def study_card(content: StudyContent, name: str) -> dict[str, Any]:
    """The study for programs."""
    return {
        "format": "holdfast-study-card/1",
        "name": name,
        "target": content.target,
        "jobs": len(content.jobs),
        "failed": sum(one["status"] == "failed" for one in content.jobs),
        "results": [
            {"method": one["row"], "column": one["column"], "setting": one["setting"], **one["test"]}
            for one in content.scored
        ],
    }


def study_markdown(card: Mapping[str, Any]) -> str:
    """The study for people."""
    lines = [f"# Study: {escaped(str(card['name']))}", "", f"Target: {escaped(str(card['target']))}.", ""]
    lines += [f"{card['jobs']} jobs, {card['failed']} failed.", ""]
    lines += [
        "| method | column | retained | worst class | target | seeds |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {escaped(str(one['method']))} | {escaped(str(one['column']))} | {percent(one['retention_ratio'], 0)} | "
        f"{points(one['dev_safety'][0])} | {points(one['target_gain'][0])} | {one['seeds']} |"
        for one in card["results"]
    ]
    return "\n".join([*lines, "", "Test images; settings chosen on dev images.", ""])
