"""The report of ``holdfast certify`` as Markdown: for the summary of a CI job, or a comment on a pull request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.certify.report import advice, input_lines
from holdfast.report.card import escaped
from holdfast.report.html.markup import p_text, percent, points

MARKS = {"certified": "✅", "regressed": "❌", "undecided": "⚠️"}
HEADLINES = {
    "certified": "certified: no protected task lost more than its margin",
    "regressed": "regressed: a task lost more than its margin, and that is shown",
    "undecided": "undecided: the evidence does not suffice",
}


def certify_markdown(reported: Mapping[str, Any]) -> str:
    """Verdict, claim, a row for each task, what would decide the undecided ones, and the promise in its words.

    Of sealed images it shows what the terminal shows: the verdict alone, until their set is retired.
    """
    verdict = reported["verdict"]
    lines = [f"### {MARKS[verdict]} holdfast {HEADLINES[verdict]}", ""]
    sealed = reported.get("sealed")
    if sealed is None or (sealed["retired"] and "devsafety" in reported):
        lines += _evidence(reported)
    if sealed is not None:
        state = "it is retired" if sealed["retired"] else f"{sealed['queries_left']} left"
        outcome = "passed" if sealed["passed"] else "did not pass"
        lines += [f"Sealed set `{sealed['set'][7:19]}`: query {sealed['queries']} {outcome}; {state}.", ""]
    return "\n".join([*lines, f"**What is promised.** {escaped(reported['promise'])}", ""])


def _evidence(reported: Mapping[str, Any]) -> list[str]:
    """The claim, the table and the advice."""
    sequential = reported["claim"] == "sequential"
    evidence = ("e-value", "passed at image") if sequential else ("p", "change at least")
    head = ("task", "images", "positive flips", "negative flips", "change", "margin", *evidence)
    target = reported.get("target")
    rows = [*reported["tasks"], *([target] if target else [])]
    flips = reported.get("flips")
    head = (*head, "relative NFR") if flips else head
    lines = [
        f"**Claim**, at confidence {reported['confidence']:g}: {escaped(reported['claim_tested'])}",
        "",
        "| " + " | ".join((*head, "verdict")) + " |",
        "| --- |" + " ---: |" * (len(head) - 1) + " --- |",
    ]
    for row in rows:
        cells = (
            escaped(row["task"]) + (" (target)" if row is target else ""),
            f"{row['n']:,}",
            f"{row['gained']} ({percent(row['gained'] / row['n'], 2)})",
            f"{row['lost']} ({percent(row['lost'] / row['n'], 2)})",
            points(row["difference"], 2) + (" ▼" if row["difference"] < 0 else ""),
            f"{row['margin'] * 100:g}",
            *(_passage(row) if sequential else _test(row)),
            *((_relative(flips["tasks"][row["task"]]),) if flips else ()),
            f"{MARKS[row['verdict']]} {row['verdict']}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    bound = (
        ""
        if sequential
        else " p: corrected as the verdicts are. “Change at least”: lower bounds that hold together (Bonferroni)."
    )
    lines += ["", f"Changes and margins in points of accuracy.{bound}", "", *_flips(flips)]
    open_tasks = [] if sequential else [row for row in rows if row["verdict"] == "undecided"]
    lines += [f"- {escaped(row['task'])}: {escaped(advice(row))}" for row in open_tasks]
    noticed = [f"- {escaped(line)}" for line in input_lines(reported)]
    return [*lines, *noticed, ""] if open_tasks or noticed else lines


def _flips(flips: Mapping[str, Any] | None) -> list[str]:
    """The flip rates of all rows together."""
    if not flips:
        return []
    negative, positive = (percent(flips[f"{sign}_flip_rate"], 2) for sign in ("negative", "positive"))
    line = (
        f"All {flips['examples']:,} rows together: negative flip rate {negative}, positive flip rate {positive}, "
        f"relative NFR {_relative(flips)} (1: as many as by chance, were errors independent)."
    )
    return [line, ""]


def _relative(rates: Mapping[str, Any]) -> str:
    value = rates["relative_negative_flip_rate"]
    return "–" if value is None else f"{value:.3f}"


def _test(row: Mapping[str, Any]) -> tuple[str, str]:
    return p_text(row["p_adjusted"]).replace("<", "&lt;"), points(row["simultaneous_lower_bound"], 2)


def _passage(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"{row['e_value']:.3g}", "–" if row["passed_at"] is None else str(row["passed_at"])
