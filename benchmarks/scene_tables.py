"""Tables and the figure of the scene study, from the runs that `benchmarks/scenes.py` left.

    python benchmarks/scene_tables.py [--results benchmarks/results] [--figure docs/figures/scenes.png]

Candidates have their target's logit fitted anew, and held back or not; `end of training` is what training found,
untouched. Changes are in points (hundredths of accuracy). `worst` is the change of the protected class that lost most,
by run and then averaged over runs; `target` is the change of the target. A run hands back a new model or the old one;
means are over runs that handed back a new one, and the others are counted on their own. `certified` counts runs whose
new model passes on the sealed images: no protected class below a margin of 3 points, target better, level 5 %.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from holdfast.certify.exact.score_test import p_value, passes

Run = dict[str, Any]
Spot = tuple[float, float]  # λ, and by how much the target is held back
Rule = Callable[[Run], Spot | None]

TARGETS, SIZES, WALK = ("forest", "sea", "buildings"), (100, 300, 1000), (0.0, 0.25, 0.5, 0.75, 1.0)
MARGIN, LEVEL = 0.03, 0.05
END: Spot = (1.0, -1.0)  # what training found, its target as trained


# -- what a run did ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a run handed back, on a set of images; ``worst`` and ``target`` are None where it is the old model."""

    worst: float | None
    target: float | None

    @property
    def new(self) -> bool:
        return self.worst is not None

    @property
    def kept(self) -> bool:
        """A new model that lost on no protected class."""
        return self.worst is not None and self.worst >= 0


def end(run: Run) -> Spot:
    """What training found at the best look: the paper's rule, for methods without a certificate."""
    del run
    return END


def half_way(run: Run) -> Spot:
    """λ = 0.5: of plain fine-tuning, as trained, this is WiSE-FT."""
    del run
    return 0.5, 0.0


def certified(run: Run) -> Spot | None:
    """The candidate that was certified on sealed images; None hands back the old model."""
    return None if run["certified"] is None else tuple(run["certified"])


def spoken(spot: Spot | None) -> str:
    """How a candidate is called in a table."""
    if spot is None:
        return "old model"
    return f"λ = {spot[0]:g}" + (f", held {spot[1]:g}" if spot[1] else "")


def change(counts: Sequence[float]) -> float:
    """(gained - lost) / images."""
    return (counts[1] - counts[2]) / counts[0]


def there(run: Run, spot: Spot | float, judge: str) -> dict[str, list[float]]:
    """Counts of each class at a candidate; a λ alone is one that does not hold back."""
    wanted = spot if isinstance(spot, tuple) else (spot, 0.0)
    if wanted == END:
        if "end" in run:
            return run["end"][judge]
        wanted = (1.0, 0.0)  # runs of before had no other model there
    return next(one[judge] for one in run["walk"] if (one["lambda"], one.get("held", 0.0)) == wanted)


def point(run: Run, spot: Spot | float, judge: str) -> tuple[float, float]:
    """(worst, target) at a candidate."""
    return _point(run, there(run, spot, judge))


def _point(run: Run, seen: dict[str, list[float]]) -> tuple[float, float]:
    return min(change(seen[name]) for name in seen if name != run["target"]), change(seen[run["target"]])


def outcome(run: Run, rule: Rule, judge: str = "test") -> Outcome:
    spot = rule(run)
    return Outcome(None, None) if spot is None else Outcome(*point(run, spot, judge))


def would_pass(run: Run, spot: Spot | float) -> bool:
    """Whether a candidate passes on the sealed images, asked or not. Only what was asked in order is certified."""
    sealed = there(run, spot, "sealed")
    margins = {name: 0.0 if name == run["target"] else MARGIN for name in sealed}
    counts = {name: [int(one) for one in sealed[name][:3]] for name in sealed}
    return all(passes(gained, lost, n, margins[name], LEVEL) for name, (n, gained, lost) in counts.items())


@dataclass(frozen=True)
class Summary:
    """Runs of one method, target and size."""

    runs: int
    new: int
    kept: int
    certified: int  # new models that pass on the sealed images at the margin
    worst: float | None  # means over runs that handed back a new model
    target: float | None

    @property
    def old(self) -> int:
        return self.runs - self.new


def summarise(runs: Sequence[Run], rule: Rule, judge: str = "test") -> Summary:
    every = [outcome(run, rule, judge) for run in runs]
    given = [(run, rule(run)) for run in runs]
    return Summary(
        runs=len(every),
        new=sum(one.new for one in every),
        kept=sum(one.kept for one in every),
        certified=sum(lam is not None and would_pass(run, lam) for run, lam in given),
        worst=mean(one.worst for one in every),
        target=mean(one.target for one in every),
    )


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None of none."""
    given = [one for one in values if one is not None]
    return fmean(given) if given else None


ROWS: dict[str, tuple[str, Rule]] = {  # row -> the runs it is taken from, and what they hand back
    "**holdfast**": ("holdfast", certified),
    "holdfast, paired views": ("paired", certified),
    "RM, chosen and certified as holdfast is": ("rm", certified),
    "WCCL, chosen and certified so": ("wccl", certified),
    "published form, chosen and certified so": ("published", certified),
    "holdfast, end of training": ("holdfast", end),
    "published form": ("published", end),
    "mismatched views": ("mismatched", end),
    "plain fine-tuning": ("finetune", end),
    "WiSE-FT (fine-tuning, λ = 0.5)": ("wise", half_way),
    "FLYP": ("flyp", end),
    "WCCL": ("wccl", end),
    "GEM": ("gem", end),
    "Co2L": ("co2l", end),
    "DER": ("der", end),
    "RM": ("rm", end),
}


def load(folder: Path) -> dict[str, list[Run]]:
    """Finished runs of each study; a run that stopped with an error is left out.

    To the main study's runs are added those with paired views, and the fine-tuning of before, whose candidates were as
    trained: WiSE-FT is among them.
    """
    found = {}
    for path in sorted(folder.glob("scenes-*.json"), key=lambda path: path.stem):
        runs = json.loads(path.read_text())["runs"]
        found[path.stem.removeprefix("scenes-")] = [run for run in runs if "error" not in run]
    main = found.get("main", [])
    main += [{**run, "name": "paired"} for run in found.get("paired", [])]
    main += [{**run, "name": "wise"} for run in found.get("as-trained", []) if run["name"] == "finetune"]
    # Fine-tuning sees no constraint images: one run serves every size.
    main += [{**run, "size": size} for run in main if run["name"] in ("finetune", "wise") for size in SIZES[1:]]
    return {
        name: sorted(runs, key=lambda run: (run["name"], run["target"], run["seed"])) for name, runs in found.items()
    }


def pick(runs: Iterable[Run], **wanted: Any) -> list[Run]:
    return [run for run in runs if all(run[key] == value for key, value in wanted.items())]


# -- writing ----------------------------------------------------------------------------------------------------------


def points(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.1f}"


def pair(worst: float | None, target: float | None) -> str:
    return f"{points(worst)} / {points(target)}"


def both(found: Sequence[tuple[float, float]]) -> str:
    """Mean worst / mean target."""
    return pair(mean(one[0] for one in found), mean(one[1] for one in found))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# -- tables -----------------------------------------------------------------------------------------------------------


def main_table(runs: Sequence[Run], target: str) -> str:
    """Per size: kept / new models (+ old handed back), mean worst / target, certified at the margin, seeds."""
    head = ["test images"]
    for size in SIZES:
        head += [f"{size}: kept all", "worst / target", "certified"]
    rows = []
    for row, (name, rule) in ROWS.items():
        cells = [row]
        for size in SIZES:
            one = summarise(pick(runs, name=name, target=target, size=size), rule)
            old = f" (+{one.old} old)" if one.old else ""
            kept = f"{one.kept}/{one.new}{old}" if one.runs else "–"
            cells += [kept, pair(one.worst, one.target), f"{one.certified}/{one.runs}" if one.runs else "–"]
        rows.append(cells)
    return table(head, rows)


def condensed(runs: Sequence[Run], sizes: Sequence[int] = (100, 1000)) -> str:
    """One row a method: means of the targets' means (starred where a target has no new model); counts over all runs."""
    head = ["test images"]
    for size in sizes:
        head += [f"{size} images: worst / target", "kept every class", "certified"]
    rows = []
    for row, (name, rule) in ROWS.items():
        cells = [row]
        for size in sizes:
            each = [summarise(pick(runs, name=name, target=target, size=size), rule) for target in TARGETS]
            lacking = "\\*" if any(not one.new for one in each) else ""
            cells += [
                pair(mean(one.worst for one in each), mean(one.target for one in each)) + lacking,
                f"{sum(one.kept for one in each)} of {sum(one.new for one in each)}",
                f"{sum(one.certified for one in each)} of {sum(one.runs for one in each)}",
            ]
        rows.append(cells)
    return table(head, rows)


def overall(runs: Sequence[Run]) -> str:
    """Every row over all targets and sizes: kept, new, old, and certified models that lost more than the margin."""
    rows = []
    for row, (name, rule) in ROWS.items():
        every = [outcome(run, rule) for run in pick(runs, name=name)]
        new = [one.worst for one in every if one.worst is not None]
        beyond = sum(worst < -MARGIN for worst in new)
        spread = f"{points(max(new))} to {points(min(new))}" if new else "–"
        rows.append([row, f"{sum(w >= 0 for w in new)} of {len(new)}", str(len(every) - len(new)), spread, f"{beyond}"])
    runs = [run for run in runs if run["name"] not in ("paired", "wise")]
    every = [one.worst for one in (outcome(run, certified) for run in runs) if one.worst is not None]
    last = ["any method, chosen and certified so", f"{sum(w >= 0 for w in every)} of {len(every)}"]
    last += [str(len(runs) - len(every)), f"{points(max(every))} to {points(min(every))}"]
    rows.append([*last, str(sum(worst < -MARGIN for worst in every))])
    return table(["all sizes and targets", "kept every class", "old model", "worst, range", "below -3 points"], rows)


def shares(runs: Sequence[Run]) -> str:
    """Target gain as a share of plain fine-tuning's with the same seeds; the old model counts as no gain."""
    rows = []
    for row in list(ROWS)[:5]:
        name, rule = ROWS[row]
        for target in TARGETS:
            plain = {run["seed"]: point(run, END, "test")[1] for run in pick(runs, name="finetune", target=target)}
            cells = [row, target]
            for size in SIZES:
                here = [run for run in pick(runs, name=name, target=target, size=size) if run["seed"] in plain]
                gains = [(outcome(run, rule).target, plain[run["seed"]]) for run in here]
                every = sum(gain or 0.0 for gain, _ in gains) / sum(most for _, most in gains)
                new = [one for one in gains if one[0] is not None]
                share = f"{sum(g or 0 for g, _ in new) / sum(m for _, m in new):.0%}" if new else "–"
                cells += [f"{every:.0%} ({share})"]
            rows.append(cells)
    return table(["all runs (runs with a new model)", "target", *map(str, SIZES)], rows)


FRONTIER = {"holdfast": "holdfast", "rm": "RM", "published": "published"}
LABELS = {
    **FRONTIER,
    "paired": "holdfast, paired views",
    "mismatched": "mismatched views",
    "finetune": "plain fine-tuning",
    "flyp": "FLYP",
    "wccl": "WCCL",
    "gem": "GEM",
    "co2l": "Co2L",
    "der": "DER",
}


def frontier(runs: Sequence[Run], judge: str) -> str:
    """Mean worst / target at each λ, by target and size, and over the three targets."""
    rows = []
    for size in SIZES:
        for target in (*TARGETS, "mean"):
            for name, label in FRONTIER.items():
                wanted = TARGETS if target == "mean" else (target,)
                cells = [str(size), target, label]
                for lam in WALK:
                    each = [
                        [point(run, lam, judge) for run in pick(runs, name=name, target=one, size=size)]
                        for one in wanted
                    ]
                    means = [(fmean(p[0] for p in found), fmean(p[1] for p in found)) for found in each]
                    cells.append(both(means))
                rows.append(cells)
    return table(["images", "target", f"{judge} images", *(f"λ = {one:g}" for one in WALK)], rows)


def candidates(runs: Sequence[Run], judge: str = "test") -> str:
    """Every candidate of three methods: mean of the targets' means, and runs that kept every class."""
    rows = []
    for size in SIZES:
        for name in ("holdfast", "rm", "wccl"):
            found = pick(runs, name=name, size=size)
            for held in (0.0, 1.0):
                cells = [str(size), LABELS[name] + (f", held {held:g}" if held else "")]
                for lam in WALK:
                    every = [point(run, (lam, held), judge) for run in found]
                    kept = sum(worst >= 0 for worst, _ in every)
                    cells.append(f"{both(every)} ({kept} of {len(every)})")
                rows.append(cells)
    return table(["images", f"{judge} images (kept all)", *(f"λ = {one:g}" for one in WALK)], rows)


def conflict(runs: Sequence[Run]) -> str:
    rows = []
    for run in pick(runs, name="conflict"):
        given = spoken(certified(run))
        ends = []
        for spot in ((0.0, 0.0), END):
            seen = there(run, spot, "test")
            worst = min((name for name in seen if name != run["target"]), key=lambda name: change(seen[name]))
            ends.append(f"{pair(*point(run, spot, 'test'))} ({worst})")
        first = tuple(run["order"][0])
        tried = f"{spoken(first)}: {pair(*point(run, first, 'sealed'))}"
        rows.append([str(run["seed"]), given, str(run["blocked_by"]), *ends, tried, _passing(run)])
    head = ["seed", "handed back", "blocked by", "λ = 0", "end of training", "tried (sealed)", "would have passed"]
    return table(head, rows)


def _passing(run: Run) -> str:
    """How many candidates pass, and the one among them that gains most, on dev images."""
    spots = [(one["lambda"], one.get("held", 0.0)) for one in run["walk"]]
    found = [spot for spot in spots if would_pass(run, spot)]
    best = max(found, key=lambda spot: point(run, spot, "dev")[1], default=None)
    return "none" if best is None else f"{len(found)} of {len(spots)}, most: {spoken(best)}"


def refused(runs: Sequence[Run]) -> str:
    """Runs of holdfast and RM that handed back the old model, and what would have passed had it come first."""
    rows = [
        [
            FRONTIER[run["name"]],
            run["target"],
            str(run["size"]),
            str(run["seed"]),
            spoken(tuple(run["order"][0])),
            _passing(run),
        ]
        for run in runs
        if run["name"] in ("holdfast", "rm") and run["certified"] is None
    ]
    return table(["old model handed back", "target", "images", "seed", "tried first", "would have passed"], rows)


def walked_back(runs: Sequence[Run], seed: int = 0) -> str:
    """Every method with the same walk-back and certificate, on the seed that all of them have."""
    names = ("holdfast", "rm", "published", "mismatched", "finetune", "flyp", "wccl", "gem", "co2l", "der")
    rows = []
    for name in names:
        cells = [LABELS[name]]
        for size in (100, 1000):
            ends = []
            for target in TARGETS:
                found = pick(runs, name=name, target=target, size=size, seed=seed)
                given = [outcome(run, certified) for run in found]
                cells += [pair(one.worst, one.target) if one.new else "old" for one in given] or ["no run"]
                ends += [(one.worst, one.target) for one in given if one.worst is not None and one.target is not None]
            cells.append(both(ends) if len(ends) == len(TARGETS) else "–")
        rows.append(cells)
    head = [f"{size}: {target}" for size in (100, 1000) for target in (*TARGETS, "mean")]
    return table(["certified model, seed 0, test images", *head], rows)


def first_to_last(run: Run) -> dict[str, float]:
    """Change of each class over both rounds, on test images: counts of right answers, last model less first model."""
    shipped = certified(run)
    last = there(run, shipped, "test") if shipped is not None else None
    result = {}
    for name, before in run["first"]["old"]["test"].items():
        n = there(run, 1.0, "test")[name][0]
        after = round(run["old"]["test"][name] * n) + (int(last[name][1] - last[name][2]) if last else 0)
        result[name] = (after - round(before * n)) / n
    return result


def two_rounds(runs: Sequence[Run]) -> str:
    found = pick(runs, name="second round")
    classes = found[0]["classes"]
    rows, sums = [], {name: [] for name in classes}
    for run in found:
        shipped = [certified(one) for one in (run["first"], run)]
        over = first_to_last(run)
        for name in classes:
            sums[name].append(over[name])
        rows.append(
            [str(run["seed"]), *map(spoken, shipped)]
            + [points(over[name]) for name in classes]
            + [
                pair(*point(one, spot, "test")) if spot else "–"
                for one, spot in zip((run["first"], run), shipped, strict=True)
            ]
        )
    rows.append(["mean", "", "", *(points(fmean(sums[name])) for name in classes), "", ""])
    return table(["seed", "first round", "second", *classes, "first: worst / target", "second: worst / target"], rows)


def ablations(more: Sequence[Run], main: Sequence[Run]) -> str:
    rows = []
    names = ["holdfast", "holdfast, no heads", "holdfast, 100 external pairs", "published", "published, no heads"]
    for name in [*names, "published, 100 external pairs", "published, rising beta"]:
        cells = [name]
        for target in ("forest", "sea"):
            found = [run for run in pick([*main, *more], name=name, target=target, size=100) if run["seed"] in (0, 1)]
            cells += [both([point(run, spot, "test") for run in found]) for spot in (END, (1.0, 0.0), (0.5, 0.0))]
        rows.append(cells)
    whats = ("end of training", "target fitted", "half way, target fitted")
    head = [f"{target}, {what}" for target in ("forest", "sea") for what in whats]
    return table(["two seeds, test images", *head], rows)


def per_class(runs: Sequence[Run], lam: float = 1.0) -> str:
    """At λ = 1 with the target fitted anew: what training does to protected classes."""
    names = ("buildings", "forest", "glacier", "mountain", "sea", "street")
    rows = []
    for target in TARGETS:
        for size in SIZES:
            for name in ("holdfast", "rm", "wccl"):
                seen = [there(run, lam, "test") for run in pick(runs, name=name, target=target, size=size)]
                means = {one: fmean(change(here[one]) for here in seen) for one in names}
                average = fmean(means.values())
                label = [f"**{points(means[one])}**" if one == target else points(means[one]) for one in names]
                rows.append([target, str(size), LABELS[name], *label, points(average)])
    return table(["target", "images", "test images", *names, "Average"], rows)


def against_rm(runs: Sequence[Run]) -> str:
    """Holdfast and RM, both walked back and certified: means of the targets' means, on dev and on test images."""
    rows = []
    for judge in ("dev", "test"):
        for name in ("holdfast", "rm"):
            cells = [judge, FRONTIER[name]]
            for size in SIZES:
                here = [pick(runs, name=name, target=target, size=size) for target in TARGETS]
                shipped = [summarise(one, certified, judge) for one in here]
                cells.append(pair(mean(one.worst for one in shipped), mean(one.target for one in shipped)))
                cells.append(f"{sum(one.kept for one in shipped)}/{sum(one.new for one in shipped)}")
            rows.append(cells)
    head = [what for size in SIZES for what in (f"{size}: worst / target", "kept all")]
    return table(["images", "certified model", *head], rows)


def settings(runs: Sequence[Run]) -> str:
    rows = []
    tried = {"wccl": "alpha", "der": "alpha", "rm": "alpha", "published": "beta"}
    for name in sorted({run["name"] for run in runs}):
        found = pick(runs, name=name)
        key = tried.get(name.split()[0])
        weight = f", {key} {found[0]['method'][key]:g}" if key else ""
        rate = found[0]["train"].get("learning_rate", 1e-4)
        ends = [both([point(run, 1.0, "dev")]) for target in ("forest", "sea") for run in pick(found, target=target)]
        rows.append([f"{LABELS[name.split()[0]]}{weight}, rate {rate:g}", *ends])
    return table(["dev images, 300 a task, λ = 1", "forest", "sea"], rows)


def research(runs: Sequence[Run]) -> str:
    """Lists of variants on spare images. Lists one, two and five walk back from the last step, the others from the
    best look. Classes with fewer than 300 spare images are left out: one image of them weighs too much."""
    rows = []
    for name, size in sorted({(run["name"], run["size"]) for run in runs}, key=lambda one: (one[1], one[0])):
        mine = pick(runs, name=name, size=size)
        cells = [name, str(size), str(len({run["seed"] for run in mine}))]
        for target in ("forest", "sea"):
            found = [_large(_ends(run)) for run in pick(mine, target=target)]
            cells += [both([point(run, lam, "spare") for run in found]) for lam in (0.5, 1.0)]
        rows.append(cells)
    head = [f"{target}, λ = {lam}" for target in ("forest", "sea") for lam in (0.5, 1)]
    return table(["spare images", "images a task", "seeds", *head], rows)


def views(runs: Sequence[Run]) -> str:
    """List six: dev and spare images together, target held back by 1: worst change, and mean of protected classes."""
    rows = []
    for name in dict.fromkeys(run["name"] for run in runs):
        for size in SIZES:
            cells = [name, str(size)]
            for lam in WALK:
                found = [_together(run, (lam, 1.0)) for run in pick(runs, name=name, size=size)]
                worst, middle = fmean(min(one) for one in found), fmean(fmean(one) for one in found)
                cells.append(f"{points(worst)} ({points(middle)})")
            rows.append(cells)
        mine = pick(runs, name=name)
        moved = fmean(min(_together(run, (lam, 1.0))) for run in mine for lam in WALK[1:])
        rows.append([name, f"all, λ > 0: {100 * moved:+.2f}", *[""] * len(WALK)])
    return table(["variant", "images a task", *(f"λ = {one:g}" for one in WALK)], rows)


def rules(runs: Sequence[Run]) -> str:
    """What rules of choice on dev images come to on spare ones. The first row is the rule of before: target as trained,
    half of the largest gain, the boldest candidate that lost nothing on dev images; the others take the strongest
    evidence among candidates that gain so much of what a new target alone gains, with so much in favour of λ = 0."""
    shown = [("as trained, the boldest", [(run, _boldest(run)) for run in runs])]
    for worth in (1 / 2, 3 / 5, 2 / 3, 3 / 4):
        for moved in (0.0, 2.0, 4.0, 6.0, 8.0):
            label = f"{worth:.2f} of the gain, {moved:g} for λ = 0"
            shown.append((label, [(run, _strongest(run, worth, moved)) for run in runs]))
    rows = []
    for label, chosen in shown:
        ends = [(run["target"], *_point(run, one["spare"])) for run, one in chosen]
        kept = sum(worst >= 0 for _, worst, _ in ends)
        alone = sum(one["lambda"] == 0 for _, one in chosen)
        gains = [both([(w, g) for target, w, g in ends if target == wanted]) for wanted in ("forest", "sea")]
        rows.append([label, f"{kept} of {len(ends)}", *gains, f"{alone} of {len(ends)}"])
    return table(["rule", "kept every class", "forest", "sea", "λ = 0 chosen"], rows)


def _evidence(run: Run, one: Run) -> float:
    counts = [[int(v) for v in one["dev"][name][:3]] for name in one["dev"] if name != run["target"]]
    return sum(math.log(max(p_value(gained, lost, n, MARGIN), sys.float_info.min)) for n, gained, lost in counts)


def _strongest(run: Run, worth: float, moved: float) -> Run:
    gain = {id(one): change(one["dev"][run["target"]]) for one in run["walk"]}
    most = max(gain[id(one)] for one in run["walk"] if one["lambda"] == 0)
    fair = [one for one in run["walk"] if gain[id(one)] >= worth * most]
    return min(fair, key=lambda one: (_evidence(run, one) + moved * (one["lambda"] > 0), -gain[id(one)]))


def _boldest(run: Run) -> Run:
    gain = {id(one): change(one["dev"][run["target"]]) for one in run["as_trained"]}
    fair = [one for one in run["as_trained"] if gain[id(one)] >= max(gain.values()) / 2]
    first = min(fair, key=lambda one: (_evidence(run, one), -gain[id(one)]))
    safe = [one for one in run["as_trained"] if _point(run, one["dev"])[0] >= 0 and gain[id(one)] > gain[id(first)]]
    return max(safe, key=lambda one: gain[id(one)], default=first)


def _together(run: Run, spot: Spot) -> list[float]:
    """Changes of the protected classes on dev and spare images."""
    dev, spare = there(run, spot, "dev"), there(run, spot, "spare")
    names = [name for name in dev if name != run["target"]]
    return [change([a + b for a, b in zip(dev[name][:3], spare[name][:3], strict=True)]) for name in names]


def _large(run: Run, least: int = 300) -> Run:
    """The run without protected classes that have few spare images."""
    walk = [
        {**one, "spare": {k: v for k, v in one["spare"].items() if v[0] >= least or k == run["target"]}}
        for one in run["walk"]
    ]
    return {**run, "walk": walk}


def _ends(run: Run) -> Run:
    if "walk" in run:
        return run
    last = max(one["step"] for one in run["looks"])
    return {**run, "walk": [one for one in run["looks"] if one["step"] == last]}


# -- figure -----------------------------------------------------------------------------------------------------------

LINES = [  # name, held back, label, colour, marker, line: told apart in greyscale by marker and line
    ("holdfast", 0.0, "holdfast", "#0b3c5d", "o", "-"),
    ("holdfast", 1.0, "holdfast, held back by 1", "#5b93b8", "h", "-"),
    ("rm", 1.0, "RM, held back by 1", "#d95f02", "s", "--"),
    ("wccl", 1.0, "WCCL, held back by 1", "#4d8b31", "v", "--"),
    ("wise", 0.0, "fine-tuning, as trained (λ = 0.5: WiSE-FT)", "#000000", "x", "-."),
]
ENDS = {  # as trained, one mark a seed
    "published": "^",
    "rm": "s",
    "wccl": "v",
    "flyp": "P",
    "gem": "D",
    "co2l": "<",
    "der": ">",
    "mismatched": "*",
}


def draw(runs: Sequence[Run], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    sizes = (100, 1000)
    figure, axes = pyplot.subplots(len(sizes), len(TARGETS), figsize=(13, 8.6), sharey=True, sharex="col")
    for row, size in zip(axes, sizes, strict=True):
        for axis, target in zip(row, TARGETS, strict=True):
            _panel(axis, [run for run in runs if run["target"] == target and run["size"] == size])
            axis.set_title(f"target {target}, {size} images a task", fontsize=11)
            axis.set_xlabel("change of the target, points")
        row[0].set_ylabel("worst change of a protected class, points")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncols=5, frameon=False, fontsize=10, bbox_to_anchor=(0.5, 0.025))
    note = "Test images. Lines: λ = 0 to 1 (ringed), target fitted anew, means of seeds. Open: as trained, each seed."
    figure.text(0.5, 0.012, note, ha="center", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, runs: Sequence[Run]) -> None:
    axis.axhline(0, color="#444444", lw=0.8)
    for name, held, label, colour, marker, line in LINES:
        found = pick(runs, name=name)
        steps = WALK[1:] if name == "wise" else WALK
        x = [100 * fmean(point(run, (one, held), "test")[1] for run in found) for one in steps]
        y = [100 * fmean(point(run, (one, held), "test")[0] for run in found) for one in steps]
        axis.plot(x, y, line, color=colour, lw=1.5, label=label, marker=marker, ms=6)
        axis.plot(x[-1], y[-1], "o", color="none", markeredgecolor=colour, ms=13, mew=1.2)
    for name, marker in ENDS.items():
        ends = [point(run, END, "test") for run in pick(runs, name=name)]
        style = {"color": "none", "markerfacecolor": "white", "markeredgecolor": "#222222", "ms": 8, "marker": marker}
        axis.plot([100 * one[1] for one in ends], [100 * one[0] for one in ends], label=LABELS[name], **style)
    axis.plot([0], [0], "+", color="#000000", ms=11, mew=1.6)
    given = [point(run, spot, "test") for run in pick(runs, name="holdfast") if (spot := certified(run)) is not None]
    if given:
        x, y = (100 * fmean(one[place] for one in given) for place in (1, 0))
        axis.plot([x], [y], "*", color="#c1121f", ms=15, markeredgecolor="white", label="holdfast, handed back")
    axis.set_yscale("symlog", linthresh=1, linscale=0.8)
    ticks = (1, 0, -1, -3, -10, -30, -100)
    axis.set_yticks(ticks, [str(one).replace("-", "−") for one in ticks])
    axis.minorticks_off()
    axis.set_ylim(-150, 1.6)
    axis.grid(alpha=0.3)


# -- all of it --------------------------------------------------------------------------------------------------------


LISTS = ("research", "research-2", "research-3", "research-4", "research-5")


def page(found: dict[str, list[Run]]) -> str:
    main, more = found["main"], found["more"]
    parts = [
        ("Condensed: means over the three targets", condensed(main)),
        *((f"Target {target}", main_table(main, target)) for target in TARGETS),
        ("All runs of the main study", overall(main)),
        ("Share of plain fine-tuning's gain", shares(main)),
        ("Holdfast and RM, both with walk-back and certificate", against_rm(main)),
        ("Old model handed back", refused(main)),
        ("Every method walked back and certified", walked_back(main)),
        ("Candidates on test images, means over the targets", candidates(main)),
        ("Candidates on dev images, means over the targets", candidates(main, "dev")),
        ("Frontier on test images", frontier(main, "test")),
        ("Frontier on dev images", frontier(main, "dev")),
        ("Conflict: target glacier, 100 images a task", conflict(more)),
        ("Two rounds: forest, then sea; change of each class from the first model to the last", two_rounds(more)),
        ("Ablations, 100 images a task", ablations(more, main)),
        ("Per class at λ = 1, target fitted anew", per_class(main)),
        ("Choice of settings", settings(found["settings"])),
        *((f"Variants, {name}", research(runs)) for name, runs in found.items() if name in LISTS),
        ("Variants, research-6", views(found["research-6"])),
        ("Rules of choice, from dev to spare images, 100 and 300 images a task", rules(found["choice"])),
    ]
    return "\n\n".join(f"### {title}\n\n{body}" for title, body in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--figure", type=Path, help="also draw the figure into this file")
    arguments = parser.parse_args()
    found = load(arguments.results)
    print(page(found))
    if arguments.figure:
        draw(found["main"], arguments.figure)


if __name__ == "__main__":
    main()
