"""Fingerprints, ledger, problems in the data and settings."""

from __future__ import annotations

import json

from holdfast.report.content import RunContent
from holdfast.report.html.markup import Markup, count, lines, tag
from holdfast.rounds.outcome import training_skipped


def record_section(content: RunContent) -> Markup:
    """Everything that identifies the run."""
    state = content.state
    facts = [
        ("holdfast", state.get("version")),
        ("method", (content.config.get("method") or {}).get("name")),
        ("training", training_skipped(content.result) or None),
        ("seed", content.config.get("seed")),
        ("parent model", state.get("parent")),
        ("data", state.get("data")),
        ("run", state.get("fingerprint")),
    ]
    counts = state.get("counts") or {}
    facts += [(f"images: {name.replace('_', ' ')}", f"{number:,}") for name, number in counts.items()]
    parts = [tag("dl", *((tag("dt", name), tag("dd", value)) for name, value in facts if value is not None))]
    if content.ledger:
        parts.append(tag("h3", "Ledger of the sealed set"))
        parts.append(tag("ol", *(tag("li", _entry(dict(item))) for item in content.ledger), class_="ledger"))
    for note in content.notes:
        parts.append(tag("p", f"The ledger could not be read: {note}", class_="note"))
    problems = state.get("problems") or []
    if problems:
        shown = [
            f"{problem.get('kind')}: {problem.get('where')} {problem.get('detail') or ''}" for problem in problems[:200]
        ]
        parts.append(
            tag(
                "details",
                tag("summary", f"{count(len(problems), 'problem')} found in the data and dealt with"),
                tag("ul", *(tag("li", item) for item in shown)),
            )
        )
    parts.append(tag("details", tag("summary", "The round as it was run"), tag("pre", lines(_settings(content)))))
    return tag("div", *parts)


def _settings(content: RunContent) -> list[str]:
    return json.dumps(content.config, indent=1, ensure_ascii=False).splitlines()


def _entry(entry: dict[str, object]) -> str:
    kind, when = entry.get("event"), f"{entry['time']}: " if "time" in entry else ""
    if kind in ("query", "look"):  # the second in ledgers of earlier versions
        tested = count(_whole(entry.get("candidates")), "candidate")
        return f"{when}query {entry.get('number')}, {tested}, level {entry.get('level'):g}"  # type: ignore[str-format]
    if kind == "result":
        which = f", {entry['which']} ships" if entry.get("which") else ""
        return f"{when}query {entry.get('number')} {'passed' if entry.get('passed') else 'did not pass'}{which}"
    budget = entry.get("budget")
    return f"{when}opened for {_budget(budget)}" if isinstance(budget, dict) else f"{when}opened"


def _budget(budget: dict[str, object]) -> str:
    """``1 query of 1 candidate and 1 pass, δ = 0.05``."""
    queries = count(_whole(budget.get("queries", budget.get("looks"))), "query", "queries")
    tested, passes = (_whole(budget.get(name)) for name in ("candidates", "passes"))
    return f"{queries} of {count(tested, 'candidate')} and {count(passes, 'pass', 'passes')}, δ = {budget.get('delta')}"


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 1
