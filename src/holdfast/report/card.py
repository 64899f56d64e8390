"""The update card: what a page says, for files and programs. JSON first, Markdown made of it."""

from __future__ import annotations

import re
from typing import Any

from holdfast._version import __version__
from holdfast.report.content import RunContent
from holdfast.report.html.markup import p_text, percent, points, visible
from holdfast.report.words import PROMISE_TEXT, verdict_text
from holdfast.rounds.outcome import training_skipped

FORMAT = "holdfast-update-card/1"
LIMITS = (
    "The promise is about images drawn as the sealed ones were: it says nothing about other distributions.",
    "It is about accuracy of each protected class as a whole, not about single images or parts of a class.",
    "It needs independent images; near copies of one scene count as one.",
)


def card_json(content: RunContent, name: str) -> dict[str, Any]:
    """Everything a gate or a registry needs to know about an update."""
    words = verdict_text(content)
    return {
        "format": FORMAT,
        "holdfast": __version__,
        "name": name,
        "verdict": content.verdict,
        "kept_old": content.kept_old,
        "shipped": None if content.kept_old else content.result["chosen"],
        "headline": words.headline,
        "claim": words.claim,
        "grounds": words.grounds,
        "promise": PROMISE_TEXT,
        "confidence": content.confidence,
        "margins": content.margins,
        "target": content.target,
        "protected": content.protected,
        "evidence": {
            "images": "sealed, retired" if content.evidence.role == "sealed" else "dev",
            "tasks": [
                {
                    "task": row.task,
                    "is_target": row.is_target,
                    "images": row.n,
                    "gained": row.gained,
                    "lost": row.lost,
                    "change": row.difference,
                    "lower_bound": row.bound,
                    "margin": row.margin,
                    "p_value": row.p,
                    "old_accuracy": row.old,
                    "new_accuracy": row.new,
                }
                for row in content.evidence.rows
            ],
        },
        "sealed": None if content.reported is None else content.reported.get("sealed"),
        "test": None
        if content.test is None
        else {"dev_safety": content.test.dev_safety, "target_gain": content.test.target_gain},
        "fingerprints": {key: content.state.get(key) for key in ("parent", "data", "fingerprint")},
        "method": (content.config.get("method") or {}).get("name"),
        "training": training_skipped(content.result) or None,
        "seed": content.config.get("seed"),
        "limits": list(LIMITS),
    }


def card_markdown(card: dict[str, Any]) -> str:
    """The card for people; names are escaped, so that a class cannot become markup."""
    head = ["class", "images", "old", "new", "change", "at least", "margin", "p"]
    lines = [
        f"# Update card: {escaped(card['name'])}",
        "",
        f"**{escaped(card['headline'])}**",
        "",
        escaped(card["claim"]),
        "",
        escaped(card["grounds"]),
        "",
        f"- verdict: {card['verdict'] or 'none'}; model: {'the old one is kept' if card['kept_old'] else 'new'}",
        f"- target: {escaped(card['target'])}; protected: {len(card['protected'])} classes",
        *([f"- training: {escaped(card['training'])}"] if card["training"] else []),
        f"- evidence below: {card['evidence']['images']} images",
        "",
        "| " + " | ".join(head) + " |",
        "| --- |" + " ---: |" * (len(head) - 1),
    ]
    for item in card["evidence"]["tasks"]:
        drop = " ▼" if item["change"] < 0 else ""
        name = escaped(item["task"]) + (" (target)" if item["is_target"] else "")
        cells = [
            name,
            str(item["images"]),
            percent(item["old_accuracy"]),
            percent(item["new_accuracy"]),
            points(item["change"]) + drop,
            points(item["lower_bound"]),
            f"{item['margin'] * 100:g}",
            p_text(item["p_value"]).replace("<", "&lt;"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## Promise", "", escaped(card["promise"]), "", "## Limits", ""]
    lines += [f"- {item}" for item in card["limits"]]
    lines += ["", "## Fingerprints", ""]
    lines += [f"- {key}: `{value}`" for key, value in card["fingerprints"].items() if value]
    return "\n".join([*lines, ""])


def escaped(value: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    flat = visible(" ".join(value.split()))
    return re.sub(r"([\\`*_{}\[\]()#+!|<>~&])", r"\\\1", flat).replace("\\<", "&lt;").replace("\\&", "&amp;")
