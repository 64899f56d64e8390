"""The page about a study: the tables and figures that ``holdfast compare`` left, and one picture of all methods."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.candidates.select import setting_rank
from holdfast.report.card import escaped
from holdfast.report.html.axes import Plot, bounds, dot
from holdfast.report.html.document import Section
from holdfast.report.html.markup import Markup, count, percent, points, tag
from holdfast.report.html.tables import data_table
from holdfast.report.sections.banner import banner
from holdfast.report.sections.figures import legend
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
        """Rows and columns with a score on test images, best first by the rule of choice."""
        found = [item for item in self.chosen if item.get("test")]
        return sorted(found, key=lambda item: _rank(item["test"]), reverse=True)


def _rank(reported: Mapping[str, Any]) -> tuple[float, float, float]:
    return setting_rank(reported["retention_ratio"], reported["target_gain"][0], reported["dev_safety"][0])


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
    done = sum(job["status"] == "done" for job in content.jobs)
    failed = sum(job["status"] == "failed" for job in content.jobs)
    jobs = f"{count(len(content.jobs), 'job')}, {done} done" + (f", {failed} failed" if failed else "") + "."
    if not best:
        return banner(VerdictText("open", "Study", "No method was scored on test images yet.", jobs, ""), promise=False)
    first, reported = best[0], best[0]["test"]
    headline = (
        f"{first['row']} keeps every class in {percent(reported['retention_ratio'], 0)} of its seeds and changes "
        f"{content.target} by {points(reported['target_gain'][0])} points."
    )
    methods = count(len({item["row"] for item in best}), "method")
    claim = (
        f"Best of {methods} by share of seeds without any loss, then by gain of the target, on test images "
        f"({first['column']})."
    )
    if not reported["retention_ratio"]:
        least = max(best, key=lambda item: (item["test"]["dev_safety"][0], item["test"]["target_gain"][0]))
        headline = (
            f"No method kept every class in any seed; {least['row']} lost least, "
            f"{points(least['test']['dev_safety'][0])} points on its worst class."
        )
        claim = (
            f"Of {methods}, on test images ({least['column']}). It changes {content.target} by "
            f"{points(least['test']['target_gain'][0])} points."
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
    return [item for item in made if item.body]


def _methods(content: StudyContent) -> Markup:
    scored = content.scored
    if not scored:
        return Markup("")
    rows = list(dict.fromkeys(str(item["row"]) for item in content.chosen))
    xs = [item["test"]["dev_safety"][0] * 100 for item in scored]
    ys = [item["test"]["target_gain"][0] * 100 for item in scored]
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
                f"series dot s{rows.index(str(item['row'])) % 10}",
                f"{item['row']}, {item['column']}: worst {points(x / 100)}, target {points(y / 100)}, retained in "
                f"{percent(item['test']['retention_ratio'], 0)} of seeds",
                5,
            ),
            class_="trace",
            data_series=item["row"],
        )
        for item, x, y in zip(scored, xs, ys, strict=True)
    ]
    cells = [
        [
            (str(item["row"]), item["row"]),
            (str(item["column"]), item["column"]),
            (percent(item["test"]["retention_ratio"], 0), item["test"]["retention_ratio"]),
            (_signed(item["test"]["dev_safety"]), item["test"]["dev_safety"][0]),
            (_signed(item["test"]["target_gain"]), item["test"]["target_gain"][0]),
            (str(item["test"]["seeds"]), item["test"]["seeds"]),
        ]
        for item in scored
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
        for place, text in enumerate(row):
            found = re.match(r"[+-]?\d+(\.\d+)?", text)
            drop = place > 0 and text.startswith("-") and found is not None
            shown = tag("span", "▼ ", text.replace("-", "−", 1), class_="change drop") if drop else text
            line.append((shown, float(found.group()) if found and place else text))
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
    for job in content.jobs:
        worst, gain = (_number(job[name]) for name in ("dev_safety", "target_gain"))
        status = tag("span", job["status"], class_="word regressed" if job["status"] == "failed" else "word")
        rows.append(
            [
                (job["row"], job["row"]),
                (job["column"], job["column"]),
                (job["setting"], job["setting"]),
                (job["seed"], job["seed"]),
                (status, job["status"]),
                ("–" if worst is None else points(worst), worst),
                ("–" if gain is None else points(gain), gain),
                (_seconds(job["seconds"]), job["seconds"]),
                (job["error"], job["error"]),
            ]
        )
    return data_table("job-table", heads, kinds, rows, search="Find a job") if rows else Markup("")


def _seconds(value: str) -> str:
    known = _number(value)
    return value if known is None else f"{known:,.1f}"


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
        "failed": sum(job["status"] == "failed" for job in content.jobs),
        "results": [
            {"method": item["row"], "column": item["column"], "setting": item["setting"], **item["test"]}
            for item in content.scored
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
        f"| {escaped(str(item['method']))} | {escaped(str(item['column']))} | {percent(item['retention_ratio'], 0)} | "
        f"{points(item['dev_safety'][0])} | {points(item['target_gain'][0])} | {item['seeds']} |"
        for item in card["results"]
    ]
    return "\n".join([*lines, "", "Test images; settings chosen on dev images.", ""])
