"""The tables of docs/studies.md, from the results of benchmarks/tiny_imagenet.py and benchmarks/scenes_frozen.py.

python benchmarks/study_tables.py benchmarks/results
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

Run = dict[str, Any]
NAMES = {
    "holdfast": "holdfast",
    "holdfast, many tasks": "holdfast, set for many tasks",
    "default": "holdfast, default since",
    "published": "published form",
    "rm": "RM",
    "gem": "GEM",
    "der": "DER",
    "finetune": "fine-tuning",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def points(value: float, digits: int = 1) -> str:
    return f"{100 * value:+.{digits}f}"


def span(values: Sequence[int]) -> str:
    """One number, or the least and the greatest."""
    return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def tested(run: Run) -> float:
    """lambda of the candidate that the sealed images were asked about first."""
    return float(run["order"][0].split("@")[1])


def tiny_rows(runs: Sequence[Run], *, end: bool, judge: str = "test") -> list[list[str]]:
    rows = []
    for name, title in NAMES.items():
        mine = [one for one in runs if one["name"] == name]
        if not mine:
            continue
        at = [1.0 if end else tested(one) for one in mine]
        seen = [next(s[judge] for s in one["summary"] if s["lambda"] == w) for one, w in zip(mine, at, strict=True)]
        rows.append(
            [
                title,
                str(len(mine)),
                span([one["lost"] for one in seen]),
                span([one["gained"] for one in seen]),
                points(mean(one["worst"] for one in seen)),
                points(mean(one["mean"] for one in seen), 2),
                points(mean(one["target_gain"] for one in seen)),
            ]
        )
    return rows


def tiny(found: dict[str, Any]) -> str:
    head = ["method", "runs", "tasks that lost", "that gained", "worst task", "mean of tasks", "target"]
    parts = []
    for title, end in (("the candidate that the certificate was asked about", False), ("the end of training", True)):
        parts.append(f"Tiny-ImageNet, test images, {title}:\n\n" + table(head, tiny_rows(found["runs"], end=end)))
    rows = []
    for name, title in NAMES.items():
        told = [one["certificate"] for one in found["runs"] if one["name"] == name and one["certificate"]]
        if told:
            rows.append(
                [
                    title,
                    ", ".join(sorted({one["verdict"] for one in told})),
                    span([one["undecided"] for one in told]),
                    span([len(one["regressed"]) for one in told]),
                    span([one["needed_median"] for one in told]),
                    span([one["needed_most"] for one in told]),
                ]
            )
    head = ["method", "verdict", "claims undecided, of 200", "regressed", "images needed, median claim", "most"]
    parts.append("Tiny-ImageNet, sealed images:\n\n" + table(head, rows))
    return "\n\n".join(parts)


def change(counts: Sequence[float]) -> float:
    return (counts[1] - counts[2]) / counts[0]


def at(run: Run, spot: tuple[float, float], judge: str) -> tuple[float, float]:
    """Worst change of a protected class, and the target's, at a λ and with the target held back by so much."""
    seen = next(one[judge] for one in run["walk"] if (one["lambda"], one["held"]) == spot)
    return min(change(v) for name, v in seen.items() if name != run["target"]), change(seen[run["target"]])


def scenes(found: dict[str, Any]) -> str:
    rows = []
    for name, title in NAMES.items():
        for size in sorted({one["size"] for one in found["runs"]}):
            mine = [one for one in found["runs"] if (one["name"], one["size"]) == (name, size) and "error" not in one]
            if not mine:
                continue
            ends = [at(one, (1.0, 0.0), "test") for one in mine]
            shipped = [at(one, tuple(one["certified"]), "test") for one in mine if one["certified"]]
            rows.append(
                [
                    title,
                    str(size),
                    points(mean(one[0] for one in ends)),
                    points(mean(one[1] for one in ends)),
                    f"{sum(one[0] >= 0 for one in ends)} of {len(ends)}",
                    f"{len(shipped)} of {len(mine)}",
                    f"{points(mean(o[0] for o in shipped))} / {points(mean(o[1] for o in shipped))}" if shipped else "",
                ]
            )
    head = ["method", "images a task", "worst class", "target", "kept every class", "certified", "what is then shipped"]
    return "Scenes, frozen towers, test images, end of training:\n\n" + table(head, rows)


def main() -> None:
    folder = Path(sys.argv[1])
    for name, show in (("tiny-imagenet", tiny), ("tiny-imagenet-default", tiny), ("scenes-frozen", scenes)):
        path = folder / f"{name}.json"
        if path.exists():
            print(show(json.loads(path.read_text())), end="\n\n")


if __name__ == "__main__":
    main()
