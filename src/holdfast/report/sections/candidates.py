"""The candidates, the order in which they are tested, and the frontier."""

from __future__ import annotations

from holdfast.report.content import RunContent
from holdfast.report.html.markup import Markup, change_mark, percent, tag
from holdfast.report.html.tables import data_table


def candidates_section(content: RunContent) -> Markup:
    """Every candidate with its dev figures and what became of it."""
    order = {str(name): place for place, name in enumerate(content.result["order"])}
    rows: list[list[tuple[Markup | str, object]]] = []
    for candidate in sorted(
        content.candidates, key=lambda candidate: (order.get(candidate.name, len(order)), candidate.lam, candidate.bias)
    ):
        place = order.get(candidate.name)
        rows.append(
            [
                ("–" if place is None else str(place + 1), -1 if place is None else place),
                (candidate.name, candidate.name),
                (f"{candidate.lam:g}", candidate.lam),
                (f"{candidate.bias:g}", candidate.bias),
                (change_mark(candidate.dev.target_gain), candidate.dev.target_gain),
                (change_mark(candidate.dev.dev_safety), candidate.dev.dev_safety),
                (candidate.dev.worst_task, candidate.dev.worst_task),
                (percent(candidate.chance, 0), candidate.chance),
                (change_mark(_expected(candidate.expected_gain)), candidate.expected_gain),
                (
                    tag("span", candidate.outcome, class_=f"word {candidate.outcome.replace(' ', '-')}"),
                    candidate.outcome,
                ),
            ]
        )
    heads = ["order", "candidate", "λ", "logit bias", "target, dev", "worst class, dev", "which"]
    heads += ["chance", "expected gain"]
    kinds = ["number", "text", *["number"] * 4, "text", "number", "number", "text"]
    fitted = (
        "In candidates called last-layer the logits of all classes are fitted: near the old model, without training, "
        "or, where the name begins with a step, near that checkpoint. In all others the target's logit is refitted, "
        "but not in those called as-trained; at λ = 0 nothing else differs from the old model. In small rounds the "
        "fits also learn from dev images, and each image is counted by a fit that has not seen it. Candidates without "
        "training count training images in the same way, where the old model has not seen them. "
        if any(candidate.lam == 0 for candidate in content.candidates)
        else ""
    )
    settings = (
        "λ interpolates between the old model (0) and the trained or fitted one (1); where a checkpoint is fitted, "
        f"between that checkpoint and the fit. {fitted}The logit bias is subtracted "
        "from the target's logit, so that fewer images are assigned to it, and more where it is below 0. Chance: to "
        "pass the test, as dev images and the numbers of sealed images tell it. Expected gain: that chance times "
        "the gain expected on new images, which is smaller than the one on a few dev images; the largest is tested "
        "first."
    )
    tested = (
        "The sealed images were not queried."
        if content.reported is None
        else "The order was fixed on dev images. On the sealed images each is tested in turn, every class at the level "
        "of the query; the first that does not pass ends the test."
    )
    table = data_table("candidate-table", [*heads, "sealed test"], kinds, rows)
    return tag("div", tag("p", f"{settings} {tested}", class_="note"), table, _frontier(content))


def _expected(gain: float | None) -> float | None:
    """An expected gain as it is shown: one that rounds to nothing is no drop."""
    return None if gain is None else round(gain, 3) + 0.0


def _frontier(content: RunContent) -> Markup | None:
    frontier = content.result.get("frontier") or []
    if not frontier:
        return None
    rows: list[list[tuple[Markup | str, object]]] = [
        [
            (str(item["candidate"]), item["candidate"]),
            (change_mark(item["target_gain"]), item["target_gain"]),
            (change_mark(item["dev_safety"]), item["dev_safety"]),
            (str(item["worst_task"]), item["worst_task"]),
        ]
        for item in frontier
    ]
    table = data_table(
        "frontier", ["model", "target", "worst class", "which"], ["text", "number", "number", "text"], rows
    )
    return tag(
        "div", tag("h3", "Frontier: checkpoints and candidates that no other beats on both counts (dev images)"), table
    )
