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


def tiny_alone(found: dict[str, Any]) -> str:
    """Candidates at λ = 0: the target's head fitted anew, held back by so much; they depend on no seed."""
    rows = []
    for one in found["summary"]:
        dev, test = one["dev"], one["test"]
        cells = [
            f"{one['held']:g}",
            str(dev["lost"]),
            points(dev["target_gain"]),
            str(test["lost"]),
            str(test["gained"]),
        ]
        rows.append([*cells, points(test["worst"]), points(test["target_gain"])])
    head = ["held back by", "lost, dev", "target, dev", "tasks that lost, test", "that gained", "worst task", "target"]
    return "Tiny-ImageNet, the target's head alone:\n\n" + table(head, rows)


def change(counts: Sequence[float]) -> float:
    return (counts[1] - counts[2]) / counts[0]


def at(run: Run, spot: tuple[float, float], judge: str) -> tuple[float, float]:
    """Worst change of a protected class, and the target's, at a λ and with the target held back by so much."""
    seen = next(one[judge] for one in run["walk"] if (one["lambda"], one["held"]) == spot)
    return worst_and_target(run, seen)


def worst_and_target(run: Run, seen: dict[str, Sequence[float]]) -> tuple[float, float]:
    return min(change(v) for name, v in seen.items() if name != run["target"]), change(seen[run["target"]])


def scene_end(run: Run) -> Run:
    """What training found, its target as trained; runs of before had no other model at λ = 1."""
    return run.get("end") or next(one for one in run["walk"] if one["lambda"] == 1 and not one["held"])


def scenes(found: dict[str, Any]) -> str:
    rows = []
    for name, title in NAMES.items():
        for size in sorted({one["size"] for one in found["runs"]}):
            mine = [one for one in found["runs"] if (one["name"], one["size"]) == (name, size) and "error" not in one]
            if not mine:
                continue
            ends = [worst_and_target(one, scene_end(one)["test"]) for one in mine]
            shipped = [at(one, tuple(one["certified"]), "test") for one in mine if one["certified"]]
            rows.append(
                [
                    title,
                    str(size),
                    points(mean(one[0] for one in ends)),
                    points(mean(one[1] for one in ends)),
                    f"{sum(one[0] >= 0 for one in ends)} of {len(ends)}",
                    f"{len(shipped)} of {len(mine)}",
                    f"{sum(one[0] >= 0 for one in shipped)} of {len(shipped)}",
                    f"{points(mean(o[0] for o in shipped))} / {points(mean(o[1] for o in shipped))}" if shipped else "",
                ]
            )
    head = ["method", "images a task", "end of training: worst", "target", "kept every class"]
    head += ["certified", "of those, kept every class", "worst / target"]
    return "Scenes, frozen towers, test images:\n\n" + table(head, rows)


def main() -> None:
    folder = Path(sys.argv[1])
    shown = {"tiny-imagenet": tiny, "tiny-imagenet-default": tiny, "tiny-imagenet-alone": tiny_alone}
    for name, show in {**shown, "scenes-frozen": scenes}.items():
        path = folder / f"{name}.json"
        if path.exists():
            print(show(json.loads(path.read_text())), end="\n\n")


if __name__ == "__main__":
    main()
