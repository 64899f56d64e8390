"""The page about a project: the accuracy of every class over its rounds, the tree, and every round's verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.certify.ledger import Ledger
from holdfast.report.card import escaped
from holdfast.report.html.document import Section
from holdfast.report.html.markup import Markup, change_mark, count, percent, tag
from holdfast.report.html.tables import data_table
from holdfast.report.sections import figures
from holdfast.report.sections.banner import banner
from holdfast.report.words import VerdictText
from holdfast.rounds.project import FIRST, Project, ProjectRound

MANY = 10


@dataclass(frozen=True)
class ProjectContent:
    """What a project's record says."""

    project: Project
    rounds: Sequence[ProjectRound]
    unfinished: Sequence[str]
    accuracy: Mapping[str, Sequence[float | None]]  # class -> first model, then after each round

    @property
    def names(self) -> list[str]:
        """The first model and the rounds."""
        return [FIRST, *(item.name for item in self.rounds)]

    def change(self, name: str) -> float | None:
        """What the rounds that led to the last model changed on a class, added up: each on images of its own."""
        by_name = {item.name: item for item in self.rounds}
        changes: list[float] = []
        place = self.rounds[-1].name if self.rounds else FIRST
        while place in by_name:
            found = by_name[place].change(name)
            changes += [] if found is None else [found]
            place = by_name[place].parent
        return sum(changes) if changes else None


def read_project(root: Path) -> ProjectContent:
    """Read the record of a project."""
    project = Project.open(root)
    rounds = project.history()
    return ProjectContent(project, rounds, project.unfinished(), project.accuracy())


def project_banner(content: ProjectContent) -> Markup:
    """Where the project stands, in a sentence."""
    shipped = [item for item in content.rounds if not item.kept_old]
    if not shipped:
        headline = "No round has changed the first model yet."
    else:
        certified = sum(item.verdict == "certified" for item in shipped)
        targets = ", ".join(dict.fromkeys(item.target for item in shipped))
        all_of = f"{certified} of them" if certified < len(shipped) or certified == 1 else "all of them"
        headline = f"{count(len(shipped), 'round')} changed the model, {all_of} certified. Targets: {targets}."
    dropped = [name for name in content.accuracy if (content.change(name) or 0.0) < -1e-9]
    claim = (
        f"Below the first model: {len(dropped)} of {count(len(content.accuracy), 'class', 'classes')}, "
        f"{', '.join(dropped[:12])}."
        if dropped
        else f"None of the {len(content.accuracy)} classes is below the first model."
    )
    grounds = (
        "Each round measures its old and its new model on test (or dev) images of its own, and its change is added to "
        "those before it. Certificates are with their rounds."
    )
    kind = "certified" if shipped and all(item.verdict == "certified" for item in shipped) else "open"
    return banner(VerdictText(kind, "Project", headline, claim if content.accuracy else "", grounds), promise=False)


def project_sections(content: ProjectContent) -> list[Section]:
    """Accuracy over rounds, the rounds, the ledger."""
    made = [
        Section("accuracy", "Classes", "Accuracy of every class over rounds", _accuracy(content)),
        Section("rounds", "Rounds", "Rounds", _rounds(content)),
        Section("ledger", "Ledger", "Sealed sets", _ledger(content)),
    ]
    return [item for item in made if item.body]


def _accuracy(content: ProjectContent) -> Markup:
    if not content.rounds:
        return Markup("")
    names = sorted(content.accuracy, key=lambda name: (content.change(name) or 0.0, name))
    telling = names
    if len(names) > MANY:  # the worst, the best, and the targets
        targets = [item.target for item in content.rounds if item.target in content.accuracy]
        telling = list(dict.fromkeys([*names[:4], *targets, *names[-2:]]))[:MANY]
    chart = tag("figure", figures.over_rounds(content.names, content.accuracy, telling), class_="wide")
    rows: list[list[tuple[Markup | str, object]]] = []
    for name in names:
        values = content.accuracy[name]
        cells: list[tuple[Markup | str, object]] = [
            (name, name),
            (change_mark(content.change(name)), content.change(name)),
        ]
        changes = [None, *(item.change(name) for item in content.rounds)]
        for value, change in zip(values, changes, strict=False):
            dropped = change is not None and change < 0
            shown = tag(
                "span", f"{'▼ ' if dropped else ''}{percent(value)}", class_="change drop" if dropped else "change"
            )
            cells.append((shown, value))
        rows.append(cells)
    heads = ["class", "since first", *content.names]
    kinds = ["text", *["number"] * (len(heads) - 1)]
    table = data_table("accuracy-table", heads, kinds, rows, search="Find a class" if len(rows) > 12 else None)
    key = figures.legend(telling, others=[name for name in names if name not in telling])
    note = (
        "Along a line the images change as well: each round has its own. ▼ marks a class that lost in that round, on "
        "the same images. Since first: the changes of the rounds, added up."
    )
    return tag("div", chart, key, tag("h3", "In figures"), tag("p", note, class_="note"), table)


def _rounds(content: ProjectContent) -> Markup:
    rows: list[list[tuple[Markup | str, object]]] = []
    for item in content.rounds:
        entry = item.entry
        change = item.accuracy[item.target] - entry["accuracy"]["old"][item.target]
        worst = min(
            ((item.accuracy[name] - entry["accuracy"]["old"][name], name) for name in entry["protected"]),
            default=(0.0, "–"),
        )
        verdict = item.verdict or "no certificate"
        also = "also against the first model" if entry.get("against_first") and item.verdict == "certified" else ""
        rows.append(
            [
                (item.name, item.name),
                (item.parent, item.parent),
                (item.target, item.target),
                (change_mark(change), change),
                (change_mark(worst[0]), worst[0]),
                (worst[1], worst[1]),
                (tag("span", verdict, class_=f"word {verdict.replace(' ', '-')}"), verdict),
                ("old model kept" if item.kept_old else str(entry["chosen"]), entry["chosen"] or ""),
                (also, also),
                (str(entry["time"]), entry["time"]),
            ]
        )
    heads = ["round", "parent", "target", "gain", "worst", "which", "verdict", "handed back", "", "finished"]
    kinds = ["text", "text", "text", "number", "number", "text", "text", "text", "text", "text"]
    note = [tag("p", f"{name} is not finished.", class_="note") for name in content.unfinished]
    return tag("div", *note, data_table("round-table", heads, kinds, rows)) if rows or note else Markup("")


def _ledger(content: ProjectContent) -> Markup:
    folder = content.project.ledger
    found = sorted(folder.glob("*.jsonl")) if folder.exists() else []
    rows: list[list[tuple[Markup | str, object]]] = []
    for path in found:
        standing = Ledger(folder).standing(f"sha256:{path.stem}")
        if standing is not None:
            left = standing.queries_left
            state = "retired" if standing.retired else "sealed"
            rows.append(
                [
                    (path.stem[:12], path.stem),
                    (str(standing.queries), standing.queries),
                    (str(standing.passes), standing.passes),
                    (str(left), left),
                    (state, state),
                ]
            )
    heads, kinds = ["set", "queries", "passes", "queries left", "state"], ["text", "number", "number", "number", "text"]
    return data_table("ledger-table", heads, kinds, rows) if rows else Markup("")


def project_card(content: ProjectContent, name: str) -> dict[str, Any]:
    """The project for programs."""
    return {
        "format": "holdfast-project-card/1",
        "name": name,
        "accuracy": {key: list(value) for key, value in content.accuracy.items()},
        "rounds": [
            {key: item.entry.get(key) for key in ("round", "parent", "target", "verdict", "kept_old", "model", "time")}
            for item in content.rounds
        ],
    }


def project_markdown(card: Mapping[str, Any]) -> str:
    """The project for people."""
    names = [FIRST, *(str(item["round"]) for item in card["rounds"])]
    lines = [f"# Project: {escaped(str(card['name']))}", "", "| class | " + " | ".join(map(escaped, names)) + " |"]
    lines.append("| --- |" + " ---: |" * len(names))
    lines += [
        f"| {escaped(key)} | {' | '.join(percent(share) for share in value)} |"
        for key, value in card["accuracy"].items()
    ]
    lines += ["", "| round | parent | target | verdict |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {escaped(str(item['round']))} | {escaped(str(item['parent']))} | {escaped(str(item['target']))} | "
        f"{item['verdict'] or 'none'}{' (old model kept)' if item['kept_old'] else ''} |"
        for item in card["rounds"]
    ]
    return "\n".join([*lines, ""])
