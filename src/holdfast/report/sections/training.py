"""How training went: the trajectory, and every constraint over time."""

from __future__ import annotations

from holdfast.report.content import RunContent
from holdfast.report.html.markup import Markup, tag
from holdfast.report.sections import figures
from holdfast.report.words import blocked_text
from holdfast.rounds.outcome import training_skipped


def training_section(content: RunContent) -> Markup:
    """The trajectory and the constraints; empty where nothing was logged."""
    skipped = training_skipped(content.result)
    said = f"Training was {skipped}." if skipped else "" if content.trained else "Nothing was trained."
    parts: list[Markup] = [tag("p", said, class_="lead")] if said else []
    blocked = blocked_text(content)
    if blocked:
        parts.append(tag("p", blocked, class_="lead"))
    charts: list[Markup] = []
    if content.checkpoints or content.candidates:
        dots = "Dots: checkpoints, from light (early) to dark (late). " if content.trained else ""
        caption = (
            f"Gain of the target against the worst protected class, on dev images. {dots}Diamonds: candidates; the "
            "shipped one is filled. Cross: the old model. Up and right is better; left of the line a protected class "
            "lost accuracy."
        )
        title = "Trajectory" if content.trained else "Target and worst protected class"
        charts.append(tag("figure", tag("figcaption", title), figures.trajectory(content), tag("p", caption)))
    shown = {
        "h": ("Constraint h", "h", "How far each class's loss has risen above the old model's, in sampled images; "
              "above 0 the constraint is violated."),
        "u": ("Moving average u", "u", "The running estimate of h that the penalty acts on."),
        "weight": ("Effective weight", "β [u]₊", "How strongly each class pulls the update back; 0 while its "
                   "constraint holds."),
    }  # fmt: skip
    telling = figures.telling_tasks(content.series) if content.series else []
    rest = max((len(sery.tasks) for sery in content.series.values()), default=0) - len(telling)
    for name, (title, axis, caption) in shown.items():
        if name in content.series:
            chart = figures.over_time(content.series[name], telling, axis, f"{title} of every protected class")
            charts.append(tag("figure", tag("figcaption", title), chart, tag("p", caption)))
    key = figures.legend(telling, rest) if content.series else None
    return tag("div", *parts, tag("div", *charts, class_="charts"), key) if charts else Markup("")
