"""The verdict in words that a release manager can sign."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.certify.claims import PROMISE
from holdfast.report.content import RunContent
from holdfast.report.html.markup import count, p_text, points

KINDS = {"certified": "certified", "undecided": "undecided", None: "open"}


@dataclass(frozen=True)
class VerdictText:
    """A headline, the claim, and the grounds."""

    kind: str  # certified, undecided, open
    label: str
    headline: str
    claim: str
    grounds: str


def verdict_text(content: RunContent) -> VerdictText:
    """What is said above everything else."""
    kind = KINDS[content.verdict]
    if kind == "certified":
        return VerdictText(kind, "Certified", _certified(content), claim_text(content), _proof(content))
    if kind == "undecided":
        return VerdictText(
            kind,
            "Undecided",
            f"Keep the old model: it is not proven that every protected class keeps its accuracy {_margin(content)}.",
            claim_text(content),
            f"{_sentence(content.result['reason'])} {_rejected(content)}{_dev_sentence(content)}",
        )
    if content.kept_old:
        headline = "Keep the old model: on dev images no candidate gained enough with every class within its margin."
    else:
        headline = (
            f"Not certified: {content.target} gained {points(content.dev.target_gain)} points on dev images and "
            f"every protected class kept its margin there, but nothing was proven on sealed images."
        )
    return VerdictText(kind, "No certificate", headline, claim_text(content), _sentence(content.result["reason"]))


def _certified(content: RunContent) -> str:
    classes = _classes(len(content.protected))
    target = f", and {content.target} got better" if content.target_claimed else ""
    return f"The new model may take the place of the old one: {classes} keeps its accuracy {_margin(content)}{target}."


def _classes(number: int) -> str:
    return "the one protected class" if number == 1 else f"each of the {number} protected classes"


def _margin(content: RunContent) -> str:
    margins = sorted(set(content.margins.values()))
    if len(margins) == 1:
        return "without any loss" if margins[0] == 0 else f"to within {margins[0] * 100:g} points"
    return f"to within its margin ({margins[0] * 100:g} to {margins[-1] * 100:g} points)"


def claim_text(content: RunContent) -> str:
    """The claim, with margin and confidence."""
    margins = sorted(set(content.margins.values()))
    loss = f"{margins[0] * 100:g} points of accuracy" if len(margins) == 1 else "its margin"
    target = f", and is more accurate on {content.target}" if content.target_claimed else ""
    wrong = (1 - content.confidence) * 100
    return (
        f"Claim: on {_classes(len(content.protected))} the new model loses less than {loss}{target}. "
        f"Confidence {content.confidence * 100:g} %: a model for which this is false passes the test at most "
        f"{wrong:.3g} times in 100."
    )


def _proof(content: RunContent) -> str:
    reported = content.reported or {}
    on_target = [reported["target"]] if isinstance(reported.get("target"), Mapping) else []
    images = sum(row["n"] for row in (*reported.get("tasks", ()), *on_target))
    name = content.result["chosen"] or "the shipped model"
    return (
        f"Proven for {name} on {count(images, 'sealed image')} that played no part in training or choosing, "
        f"{_queries(content)}."
    )


def _queries(content: RunContent) -> str:
    sealed = (content.reported or {}).get("sealed", {})
    number = int(sealed.get("queries") or sealed.get("looks", 1))
    state = "the set is retired and shown here in full" if content.retired else "the set is still sealed"
    return f"query {number} of the ledger; {state}"


def _rejected(content: RunContent) -> str:
    """Which candidate was tested, and the class that decided; of a set that is still sealed, no number."""
    if content.reported is None or not content.result["order"]:
        return ""
    deciding, level = content.evidence.deciding, content.evidence.level
    if content.evidence.role != "sealed":
        return f"Tested and rejected: {content.dev_name}. "
    asked = "it must gain" if deciding.is_target else f"margin {deciding.margin * 100:g} points"
    return (
        f"Tested and rejected: {content.dev_name}. {deciding.task} decided it: {points(deciding.difference)} points on "
        f"{count(deciding.n, 'sealed image')}, {asked}, p = {p_text(deciding.p, level)}; at most {level:.3g} passes. "
    )


def _dev_sentence(content: RunContent) -> str:
    worst = content.dev.worst_task
    change = content.dev.dev_safety
    return (
        f"On dev images {content.dev_name} gains {points(content.dev.target_gain)} points on {content.target}; the "
        f"worst protected class is {worst} with {points(change)} points."
    )


def _sentence(text: str) -> str:
    """A reason as it stands in the result, as one sentence."""
    flat = "; ".join(" ".join(part.split()) for part in text.strip().splitlines())
    return (flat[:1].upper() + flat[1:]).rstrip(".") + "."


def blocked_text(content: RunContent) -> str | None:
    """Which task stood in the target's way."""
    blocked = content.result.get("blocked_by")
    if not blocked:
        return None
    heaviest = _heaviest(content)
    more = f" In training {heaviest} held the update back most (largest mean weight)." if heaviest else ""
    return (
        f"{blocked} stands in the way of {content.target}: of the checkpoints and candidates that gained most, "
        f"even the one with the smallest loss costs it accuracy on dev images.{more}"
    )


def _heaviest(content: RunContent) -> str | None:
    series = content.series.get("weight")
    if series is None:
        return None
    import numpy as np

    means = np.nanmean(np.where(np.isfinite(series.values), series.values, 0.0), axis=0)
    return series.tasks[int(means.argmax())] if float(means.max()) > 0 else None


PROMISE_TEXT = PROMISE
