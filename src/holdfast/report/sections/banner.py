"""The verdict and the few figures that matter most, above everything else."""

from __future__ import annotations

from holdfast.report.content import RunContent
from holdfast.report.evidence import TaskRow
from holdfast.report.html.markup import Markup, change_mark, tag
from holdfast.report.words import PROMISE_TEXT, VerdictText, verdict_text


def banner(text: VerdictText, promise: bool = True) -> Markup:
    """The verdict, above everything else."""
    return tag(
        "section",
        tag("p", tag("span", text.label, class_="badge"), class_="kicker"),
        tag("h1", text.headline),
        tag("p", text.claim, class_="claim"),
        tag("p", text.grounds, class_="grounds"),
        tag("details", tag("summary", "The promise, word for word"), tag("p", PROMISE_TEXT)) if promise else None,
        class_=f"verdict {text.kind}",
    )


def run_banner(content: RunContent) -> Markup:
    """Verdict and the few figures that matter most."""
    evidence = content.evidence
    where = "sealed" if evidence.role == "sealed" else "dev"
    worst = evidence.worst
    target = evidence.target or next(
        TaskRow(
            name,
            True,
            counts.examples,
            counts.gained,
            counts.lost,
            counts.accuracy_change,
            0,
            -1,
            1,
            None,
            None,
            None,
            None,
        )
        for name, counts in content.dev.tasks.items()
        if name == content.target
    )
    target_where = where if evidence.target else "dev"
    figures_ = [
        _figure(change_mark(target.difference), f"{content.target}, the target", f"{target_where} images"),
        *_deciding_figure(content, where),
        _figure(change_mark(worst.difference), f"{worst.task}, the worst protected class", f"{where} images"),
        _figure(
            tag("span", f"{evidence.dropped} of {len(evidence.protected)}", class_="change"),
            "protected classes with fewer right answers",
            f"{where} images",
        ),
        _figure(
            tag("span", f"{sum(row.n for row in evidence.rows):,}", class_="change"), "images judged", f"{where} set"
        ),
    ]
    return tag("div", banner(verdict_text(content)), tag("div", *figures_, class_="figures"), class_="head")


def _deciding_figure(content: RunContent, where: str) -> list[Markup]:
    """The class that the verdict hung on, where it is another than the worst one and the target."""
    deciding = content.evidence.deciding
    if content.reported is None or deciding.is_target or deciding is content.evidence.worst:
        return []
    name = f"{deciding.task}, the class that decided"
    return [_figure(change_mark(deciding.difference), name, f"{deciding.n:,} {where} images")]


def _figure(value: Markup, name: str, note: str) -> Markup:
    return tag("div", tag("b", value), tag("span", name), tag("small", note), class_="figure")
