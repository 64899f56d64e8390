"""What is won where all logits of the last layer are fitted, beside the target's alone.

    python benchmarks/last_layer.py DATA/pacs-128.zip --prefix photo --sizes 60,100 --seeds 2
    python benchmarks/last_layer.py DATA/intel-scene-64.zip --prefix train --base 60 --sizes 60,100
    python benchmarks/last_layer.py --table               # from results/last_layer.json, with no run

Rounds are cut as ``benchmarks/crossfit.py`` does it (60 % of the images sealed, 12 % dev, the rest to train on). The
old model is ``conse`` (zero-shot) or, with ``--base N``, its last layer tuned on N other images of each protected class
and two of the target: a model in use with one weak class. Both ways are fitted on training and dev images and counted
out of fold:

    refit         the target's logit alone (method ``refit``)
    last layer    also interpolations towards a fit of all logits, as they are and with the target refitted on top
                  (method ``last_layer`` with ``candidates.last_layer_constraints = false``)
    constrained   the refit, and interpolations towards a fit of all logits with one constraint for each protected class
                  (method ``last_layer``)

Printed are what the rule of choice and the certificate make of either, and the frontier: the largest gain out of fold
with no protected class below -1, -2 or -5 points, judged on images kept aside.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.chances import drawn, former_target, with_former_chances
from benchmarks.crossfit import BIASES, FOLDS, LEVEL, VIEWS, Bed, logits_of, shared_out
from benchmarks.machine import commit, machine
from holdfast.candidates import select
from holdfast.candidates.chance import SealedTest
from holdfast.candidates.directions import target_direction
from holdfast.candidates.last_layer import LastLayerFit, fit_last_layer, generalisation_gaps
from holdfast.candidates.logit_bias import lowered_by, steady_direction
from holdfast.candidates.refit import Pictures, entries_of, refit_from_features
from holdfast.candidates.select import (
    LAST_LAYER,
    LAST_LAYER_CONSTRAINED,
    LAST_LAYER_REFIT,
    REFIT,
    Candidate,
    rank_for_testing,
    with_chances,
)
from holdfast.certify.exact.score_test import passes
from holdfast.compare.frontier import best_within
from holdfast.config import CandidatesConfig
from holdfast.evaluate.metrics import Comparison, TaskChange
from holdfast.model.classifier import Classifier

RESULTS = Path(__file__).with_name("results") / "last_layer.json"
WAYS = {
    "refit": (REFIT,),
    "last layer": (REFIT, LAST_LAYER, LAST_LAYER_REFIT),
    "constrained": (REFIT, LAST_LAYER_CONSTRAINED),
}
TOLERANCES = (0.01, 0.02, 0.05)
Key = tuple[str, float, float]  # which end, lambda, bias
LAMBDAS = [lam for lam in CandidatesConfig().interpolation if lam > 0]


@dataclass(frozen=True)
class Fits:
    """All fits of the same pictures, and the directions of their biases."""

    models: dict[tuple[str, float], tuple[Classifier, Tensor]]  # by the end and lambda: model, direction of its bias
    in_layer: Tensor  # direction of a bias that raises, in the last layer

    @classmethod
    def of(
        cls, bed: Bed, target: str, rows: np.ndarray, seen: np.ndarray, fit: LastLayerFit, constrained: LastLayerFit
    ) -> Fits:
        """Fitted on rows; biases are by how the changed models see all rows that the round may look at."""
        taught, looked_at = bed.pictures(rows), bed.pictures(seen)

        def refitted(model: Classifier, taught: Pictures, seen: Pictures) -> tuple[Classifier, Tensor]:
            refit = refit_from_features(model, target, target_direction(model, target), *taught.tensors)
            return refit.applied(model), refit.steady_after(model, seen)

        models = {(REFIT, 0.0): refitted(bed.model, taught, looked_at)}
        for lam in LAMBDAS:
            model, after = constrained.applied(bed.model, lam), constrained.seen_after(looked_at, lam)
            models[LAST_LAYER_CONSTRAINED, lam] = model, steady_direction(model.finished(after.features))
            model, after = fit.applied(bed.model, lam), fit.seen_after(looked_at, lam)
            models[LAST_LAYER, lam] = model, steady_direction(model.finished(after.features))
            models[LAST_LAYER_REFIT, lam] = refitted(model, fit.seen_after(taught, lam), after)
        return cls(models, steady_direction(entries_of(bed.model, looked_at.hidden, looked_at.features)))

    def predicted(self, bed: Bed, target: str, rows: np.ndarray) -> dict[Key, np.ndarray]:
        """Classes by every candidate."""
        found: dict[Key, np.ndarray] = {}
        with torch.no_grad():
            for (end, lam), (model, steady) in self.models.items():
                biased = lowered_by(model, target, BIASES, steady, self.in_layer)
                for bias, logits in zip(BIASES, logits_of(biased, bed.hidden[0, rows]), strict=True):
                    found[end, lam, bias] = logits.argmax(dim=1).numpy()
        return found


def fits_of(bed: Bed, target: str, rows: np.ndarray, fold: np.ndarray) -> list[Fits]:
    """The fits on all rows, and for each fold those that have not seen it."""
    parts = [rows, *(rows[fold != number] for number in range(FOLDS))]
    pictures = [bed.pictures(part) for part in parts]
    fits = [fit_last_layer(bed.model, target, part) for part in pictures]
    place = torch.from_numpy(np.tile(fold, VIEWS))
    gaps = generalisation_gaps(bed.model, fits[0], fits[1:], pictures[0], place)
    kept = [fit_last_layer(bed.model, target, part, gaps) for part in pictures]
    return [Fits.of(bed, target, part, rows, *pair) for part, *pair in zip(parts, fits, kept, strict=True)]


def tuned_base(bed: Bed, target: str, images: int, draw: random.Random) -> tuple[Classifier, set[int]]:
    """The model with its last layer tuned on images of protected classes and two of the target, and these images."""
    taught: list[int] = []
    for place, name in enumerate(bed.classes):
        own = [int(row) for row in np.flatnonzero(bed.labels == place)]
        taught += draw.sample(own, 2 if name == target else min(images, len(own) // 3))
    protected = next(name for name in bed.classes if name != target)
    fit = fit_last_layer(bed.model, protected, bed.pictures(np.array(taught)))
    return fit.applied(bed.model), set(taught)


def walk(bed: Bed, target: str, size: int, seed: int) -> dict[str, Any]:
    """One round: the ways beside each other."""
    draw, row = random.Random(f"{seed} {size} {target}"), bed.classes.index(target)
    protected = [name for name in bed.classes if name != target]
    train, dev, sealed, rest = shared_out(bed, target, size, draw)
    both = np.concatenate([train, dev])
    counts = np.bincount(bed.labels[sealed], minlength=len(bed.classes))
    images = {name: int(counts[bed.classes.index(name)]) for name in protected}
    margins = {name: max(0.05, 6 / count) for name, count in images.items()}
    with torch.no_grad():
        features = bed.model.finished(bed.model.towers.project(bed.hidden[0]))
        old = bed.model.logits_of(features, bed.model.class_matrix()).argmax(dim=1).numpy()

    def compared(rows: np.ndarray, new: np.ndarray) -> Comparison:
        tasks: dict[str, TaskChange] = {}
        for place, name in enumerate(bed.classes):
            own = bed.labels[rows] == place
            before, after = old[rows][own] == place, new[own] == place
            gained, lost = int((~before & after).sum()), int((before & ~after).sum())
            tasks[name] = TaskChange(int(own.sum()), int(before.sum()), int(after.sum()), gained, lost, 0.0, 0.0)
        return Comparison(target, tasks)

    fold = np.zeros(len(both), dtype=np.int64)
    for place in range(len(bed.classes)):
        own = [int(item) for item in np.flatnonzero(bed.labels[both] == place)]
        fold[draw.sample(own, len(own))] = np.arange(len(own)) % FOLDS
    counted: dict[Key, np.ndarray] = {}
    whole, *without = fits_of(bed, target, both, fold)
    for number, fits in enumerate(without):
        for key, part in fits.predicted(bed, target, both[fold == number]).items():
            counted.setdefault(key, np.zeros(len(both), dtype=np.int64))[fold == number] = part
    on_sealed, on_rest = (whole.predicted(bed, target, rows) for rows in (sealed, rest))
    made = {
        key: Candidate(key[0] if key[1] else "step-00000000", key[1], compared(both, new), key[2])
        for key, new in counted.items()
    }
    test = SealedTest(images, margins, LEVEL, int(counts[row]))
    right = old[rest] == bed.labels[rest]
    known = {name: float(right[bed.labels[rest] == place].mean()) for place, name in enumerate(bed.classes)}
    result: dict[str, Any] = {"target": target, "size": size, "seed": seed, "old": known}
    unseen = np.concatenate([sealed, rest])

    def decided(candidates: list[Candidate]) -> dict[str, Any]:
        """What the rule of choice and the certificate make of candidates with these chances."""
        order = rank_for_testing(candidates, margins, least_chance=CandidatesConfig().least_chance)
        if not order:
            return {"tested": False, "passed": False, "chance": 0.0, "gain": 0.0, "worst": 0.0}
        key = order[0].step if order[0].lam else REFIT, order[0].lam, order[0].bias
        tasks, kept = compared(sealed, on_sealed[key]).tasks, compared(rest, on_rest[key])
        passed = all(
            passes(change.gained, change.lost, change.examples, margins.get(name, 0.0), LEVEL)
            for name, change in tasks.items()
        )
        share = drawn(compared(unseen, np.concatenate([on_sealed[key], on_rest[key]])), test, margins)
        return {
            "tested": True, "passed": passed, "chance": order[0].chance, "drawn": share, "gain": kept.target_gain,
            "worst": kept.dev_safety, "name": order[0].name, "flips": flips(kept), "counted": flips(order[0].dev),
        }  # fmt: skip

    for way, ends in WAYS.items():
        pool = {key: item for key, item in made.items() if key[0] in ends}
        line = decided(with_chances(list(pool.values()), test))
        with mock.patch.object(select, "predicted_gain", lambda dev: former_target(dev).mean_change):
            line["before"] = decided(with_former_chances(list(pool.values()), test))
        names = {item.name: key for key, item in pool.items()}
        for tolerance in TOLERANCES:
            best = best_within({name: made[key].dev for name, key in names.items()}, tolerance)
            kept = compared(rest, on_rest[names[best]]) if best else None
            line[f"within {tolerance:g}"] = [kept.target_gain, kept.dev_safety] if kept else [0.0, 0.0]
        result[way] = line
    return result


def flips(compared: Comparison) -> list[int]:
    """Images of protected classes, gained and lost."""
    changes = compared.protected.values()
    return [sum(item.examples for item in changes), sum(item.gained for item in changes),
            sum(item.lost for item in changes)]  # fmt: skip


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """Means over the rounds of each archive, base and size."""
    for result in results:
        base = f"conse, last layer tuned on {result['base']} images a class" if result["base"] else "conse, zero-shot"
        print(f"{result['source']} {result['prefix']}; old model {base}; {result['machine']}")
        for size in sorted({item["size"] for item in result["rounds"]}):
            rounds = [item for item in result["rounds"] if item["size"] == size]
            known = [mean([value for name, value in item["old"].items() if name != item["target"]]) for item in rounds]
            targets = [item["old"][item["target"]] for item in rounds]
            print(f"{size} images, {len(rounds)} rounds, old accuracy {mean(known):.1%}, target {mean(targets):.1%}")
            print("  way         tested certified  told     gain   worst  within 1 point   within 2 points  within 5")
            for way in (way for way in WAYS if way in rounds[0]):
                lines = [item[way] for item in rounds]
                tested = [line for line in lines if line["tested"]]
                shipped = mean(line["gain"] * line["passed"] for line in lines)
                frontier = "  ".join(
                    f"{100 * mean(line[f'within {tolerance:g}'][0] for line in lines):+6.1f} /"
                    f"{100 * mean(line[f'within {tolerance:g}'][1] for line in lines):+5.1f}   "
                    for tolerance in TOLERANCES
                )
                print(
                    f"  {way:12}{len(tested):6}{sum(line['passed'] for line in lines):10}"
                    f"{mean(line['chance'] for line in tested):6.2f}{100 * shipped:+9.1f}"
                    f"{100 * mean(line['worst'] for line in tested):+8.1f}  {frontier}"
                )


def print_differences(results: Sequence[dict[str, Any]]) -> None:
    """The rounds in which a way chose differently from the refit alone, together."""
    rounds = [item for result in results for item in result["rounds"]]
    for way in (way for way in WAYS if way != "refit" and way in rounds[0]):
        apart = [item for item in rounds if item["refit"].get("name") != item[way].get("name")]
        print(f"refit and {way} chose differently in {len(apart)} of {len(rounds)} rounds:")
        for name in ("refit", way):
            lines = [item[name] for item in apart]
            shipped = mean(line["gain"] * line["passed"] for line in lines)
            print(f"  {name:11}{sum(line['passed'] for line in lines):4} certified{100 * shipped:+7.1f} points shipped")


def mean(values: Iterable[float]) -> float:
    """0 of nothing."""
    found = list(values)
    return statistics.fmean(found) if found else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What is won where all logits of the last layer are fitted, beside the target's alone."
    )
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("--prefix", default="")
    parser.add_argument(
        "--base", type=int, default=0, help="images of a protected class that the old model was tuned on"
    )
    parser.add_argument("--target", default="", help="comma-separated; without it every class known to less than 90 %%")
    parser.add_argument("--sizes", default="60,100")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--most", type=int, default=500, help="pictures of a class that are read")
    parser.add_argument("--cache", type=Path, default=Path(".cache/crossfit"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    known: list[dict[str, Any]] = json.loads(given.results.read_text()) if given.results.exists() else []
    if not given.table:
        if given.source is None:
            parser.error("an archive is needed, or --table")
        torch.set_num_threads(1)
        bed = Bed(given.source, given.prefix, given.most, given.cache)
        zero_shot, labels, hidden = bed.model, bed.labels, bed.hidden
        rounds: list[dict[str, Any]] = []
        for target in given.target.split(",") if given.target else bed.classes:
            for size in map(int, given.sizes.split(",")):
                for seed in range(given.seeds):
                    bed.model, bed.labels, bed.hidden = zero_shot, labels, hidden
                    if given.base:
                        model, taught = tuned_base(bed, target, given.base, random.Random(f"base {seed} {target}"))
                        left = np.array([row for row in range(len(labels)) if row not in taught])
                        bed.model, bed.labels, bed.hidden = model, labels[left], hidden[:, left]
                    line = walk(bed, target, size, seed)
                    if given.target or line["old"][target] < 0.9:
                        rounds.append(line)
                        print(target, size, seed, {way: line[way].get("name") for way in WAYS}, file=sys.stderr)
        entry = {
            "source": given.source.stem, "prefix": given.prefix, "base": given.base, "machine": machine(),
            "commit": commit(), "rounds": rounds,
        }  # fmt: skip
        same = ("source", "prefix", "base")
        known = [item for item in known if [item[key] for key in same] != [entry[key] for key in same]] + [entry]
        given.results.write_text(json.dumps(known).replace('{"target"', '\n{"target"') + "\n")  # one line a round
    print_table(known)
    print_differences(known)


if __name__ == "__main__":
    main()
