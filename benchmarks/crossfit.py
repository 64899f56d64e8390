"""What is won by refits that also learn from dev images, and are counted out of fold.

    python benchmarks/crossfit.py DATA/pacs-128.zip --prefix photo --sizes 60,100 --seeds 2
    python benchmarks/crossfit.py --table                 # from results/crossfit.json, with no run

For each class as the target, size and seed a round is cut as ``benchmarks/rounds.py`` does it (SIZE images a class, one
protected class with half of them, the rest kept aside) and shared out: 60 % sealed, 12 % dev, the rest to train on. The
old model is ``conse`` (zero-shot, it has seen none of them). Its refits are fitted, chosen by the rule and tested on
the sealed images in four ways:

    training      fitted on training images, chosen on dev images (``candidates.folds = 0``)
    counted       the same fit, chosen on dev images and on training images out of fold
    dev           fitted on both, chosen on dev images out of fold (an old model that has seen the training images)
    all           fitted on both, chosen on both out of fold (an old model that has not)

Features are computed once and kept beside the archive's name in --cache, so that a walk takes seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, machine
from benchmarks.rounds import classes_of
from holdfast.candidates.chance import SealedTest
from holdfast.candidates.crossfit import CrossFit, Folds, cross_fit
from holdfast.candidates.directions import target_direction
from holdfast.candidates.logit_bias import lowered_by, steady_direction
from holdfast.candidates.refit import Pictures, TargetRefit, entries_of
from holdfast.candidates.select import Candidate, rank_for_testing, with_chances
from holdfast.certify.exact.score_test import passes
from holdfast.config import CandidatesConfig
from holdfast.data.images import evaluation_view, open_image, to_rgb
from holdfast.data.prompts import fill
from holdfast.data.transforms import normalize_views, random_views
from holdfast.evaluate.metrics import Comparison, TaskChange
from holdfast.model.classifier import Classifier, class_matrices
from holdfast.model.conse import ConseTowers
from holdfast.runtime import derive_seed

RESULTS = Path(__file__).with_name("results") / "crossfit.json"
WAYS = ("training", "counted", "dev", "all")
FOLDS, VIEWS, LEVEL = 5, 2, 0.05
TEMPLATES = {"art_painting": "a painting of a {}", "cartoon": "a cartoon of a {}", "sketch": "a sketch of a {}"}
BIASES = sorted(CandidatesConfig().target_bias)


class Bed:
    """A model and what it sees in the pictures of an archive, in the evaluation view and in random ones."""

    def __init__(self, source: Path, prefix: str, most: int, cache: Path) -> None:
        found = classes_of(source, prefix)
        self.classes = sorted(found)
        names = {name: random.Random(name).sample(files, min(most, len(files))) for name, files in found.items()}
        self.labels = np.repeat(np.arange(len(self.classes)), [len(names[name]) for name in self.classes])
        towers = ConseTowers.load("conse-128", None, seed=0)
        template = TEMPLATES.get(prefix, "a photo of a {}")
        self.model = Classifier(
            towers, self.classes, [[fill(template, name.replace("_", " "))] for name in self.classes], 0.05
        ).eval()
        kept = cache / f"{source.stem}-{prefix or 'all'}-{most}.pt"
        if not kept.exists():
            cache.mkdir(parents=True, exist_ok=True)
            torch.save(self._see(source, [file for name in self.classes for file in names[name]]), kept)
        self.hidden: Tensor = torch.load(kept)  # [views, n, width]

    @torch.no_grad()
    def _see(self, source: Path, files: Sequence[str]) -> Tensor:
        preprocess = self.model.preprocess
        seen: list[Tensor] = []
        with zipfile.ZipFile(source) as archive:
            for start in range(0, len(files), 128):
                part = files[start : start + 128]
                pictures = (to_rgb(open_image(archive.read(file))) for file in part)
                decoded = [evaluation_view(item, preprocess.size, preprocess.interpolation) for item in pictures]
                pixels = torch.from_numpy(np.stack(decoded))
                chosen = [random_views(len(part), derive_seed("view", start, number)) for number in range(1, VIEWS)]
                views = [normalize_views(pixels, preprocess.mean, preprocess.std, view) for view in (None, *chosen)]
                seen.append(torch.stack([self.model.towers.image_hidden(view) for view in views]))
        return torch.cat(seen, dim=1)

    @torch.no_grad()
    def pictures(self, rows: np.ndarray) -> Pictures:
        """Every view of some rows."""
        hidden = self.hidden[:, rows].flatten(0, 1)
        labels = torch.from_numpy(np.tile(self.labels[rows], VIEWS))
        return Pictures(hidden, self.model.towers.project(hidden), labels, tuple(str(row) for row in rows) * VIEWS)

    @cached_property
    def in_layer(self) -> Tensor:
        """The direction of a bias that raises, by a thousand pictures of all classes."""
        pictures = self.pictures(np.linspace(0, len(self.labels) - 1, 1000).round().astype(np.int64))
        return steady_direction(entries_of(self.model, pictures.hidden[:1000], pictures.features[:1000]))

    @torch.no_grad()
    def predicted(self, refit: TargetRefit, steady: Tensor, rows: np.ndarray) -> list[np.ndarray]:
        """Classes by the refitted model, one array a bias."""
        models = lowered_by(refit.applied(self.model), refit.name, BIASES, steady, self.in_layer)
        return [logits.argmax(dim=1).numpy() for logits in logits_of(models, self.hidden[0, rows])]


def logits_of(models: Sequence[Classifier], hidden: Tensor) -> Iterator[Tensor]:
    """Of models that share all but the last layer, from what it sees."""
    for model, matrix in zip(models, class_matrices(models), strict=True):
        yield model.logits_of(model.finished(model.towers.project(hidden)), matrix)


def shared_out(bed: Bed, target: str, size: int, draw: random.Random) -> tuple[np.ndarray, ...]:
    """Rows of the pictures that train, choose, are sealed, and are kept aside."""
    small = draw.choice([name for name in bed.classes if name != target])
    shares: tuple[list[int], ...] = ([], [], [], [])
    for place, name in enumerate(bed.classes):
        own = [int(row) for row in np.flatnonzero(bed.labels == place)]
        order = draw.sample(own, len(own))
        count = min(size // 2 if name == small else size, len(own) * 3 // 4)
        sealed, dev = round(0.6 * count), max(2, round(0.12 * count))
        parts = order[sealed + dev : count], order[sealed : sealed + dev], order[:sealed], order[count:]
        for share, part in zip(shares, parts, strict=True):
            share.extend(part)
    return tuple(np.array(share) for share in shares)


def walk(bed: Bed, target: str, size: int, seed: int) -> dict[str, dict[str, Any]]:
    """One round in the four ways."""
    draw, row = random.Random(f"{seed} {size} {target}"), bed.classes.index(target)
    protected = [name for name in bed.classes if name != target]
    train, dev, sealed, rest = shared_out(bed, target, size, draw)
    both = np.concatenate([train, dev])
    counts = np.bincount(bed.labels[sealed], minlength=len(bed.classes))
    margins = {name: max(0.05, 6 / float(counts[bed.classes.index(name)])) for name in protected}
    images = {name: int(counts[bed.classes.index(name)]) for name in protected}
    test = SealedTest(images, margins, LEVEL, int(counts[row]))
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

    def fitted(rows: np.ndarray) -> tuple[Pictures, Folds, CrossFit]:
        fold_of: dict[str, int] = {}
        for place in range(len(bed.classes)):
            own = [item for item in rows if bed.labels[item] == place]
            fold_of |= {str(item): number % FOLDS for number, item in enumerate(draw.sample(own, len(own)))}
        folds, pictures = Folds(FOLDS, fold_of), bed.pictures(rows)
        return pictures, folds, cross_fit(bed.model, target, target_direction(bed.model, target), pictures, folds)

    def out_of_fold(folds: Folds, found: CrossFit, rows: np.ndarray) -> list[np.ndarray]:
        place, result = folds.of_ids(str(row) for row in rows), [np.zeros(len(rows), dtype=np.int64) for _ in BIASES]
        for fold, (fit, steady) in enumerate(found.folds):
            for whole, part in zip(result, bed.predicted(fit, steady, rows[place == fold]), strict=True):
                whole[place == fold] = part
        return result

    alone, alone_folds, on_training = fitted(train)
    together, folds, on_both = fitted(both)
    steady_alone = on_training.whole.steady_after(bed.model, alone)
    steady_both = on_both.whole.steady_after(bed.model, together)
    on_dev = bed.predicted(on_training.whole, steady_alone, dev)
    of_training, of_both = out_of_fold(alone_folds, on_training, train), out_of_fold(folds, on_both, both)
    counted = [np.concatenate(pair) for pair in zip(of_training, on_dev, strict=True)]
    ways = {
        "training": (on_training.whole, steady_alone, dev, on_dev),
        "counted": (on_training.whole, steady_alone, both, counted),
        "dev": (on_both.whole, steady_both, dev, [part[len(train) :] for part in of_both]),
        "all": (on_both.whole, steady_both, both, of_both),
    }
    lines: dict[str, dict[str, Any]] = {}
    for way, (refit, steady, rows, predictions) in ways.items():
        made = [
            Candidate("step-00000000", 0.0, compared(rows, new), bias)
            for bias, new in zip(BIASES, predictions, strict=True)
        ]
        order = rank_for_testing(with_chances(made, test), margins, least_chance=CandidatesConfig().least_chance)
        if not order:
            lines[way] = {"tested": False, "passed": False, "chance": 0.0, "gain": 0.0, "worst": 0.0}
            continue
        which = BIASES.index(order[0].bias)
        on_sealed = compared(sealed, bed.predicted(refit, steady, sealed)[which])
        kept = compared(rest, bed.predicted(refit, steady, rest)[which])
        passed = all(
            passes(change.gained, change.lost, change.examples, margins.get(name, 0.0), LEVEL)
            for name, change in on_sealed.tasks.items()
        )
        lines[way] = {
            "tested": True, "passed": passed, "chance": order[0].chance, "gain": kept.target_gain,
            "worst": kept.dev_safety,
        }  # fmt: skip
    return lines


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """Means over the rounds of each archive and size."""
    for result in results:
        print(f"{result['source']} {result['prefix']}: old model conse, {result['machine']}")
        print("size  way       rounds  tested  certified  chance told  gain shipped  worst class")
        for size in sorted({item["size"] for item in result["rounds"]}):
            for way in WAYS:
                lines = [item[way] for item in result["rounds"] if item["size"] == size]
                tested = [line for line in lines if line["tested"]]
                told = statistics.fmean(line["chance"] for line in tested) if tested else 0.0
                shipped = statistics.fmean(line["gain"] * line["passed"] for line in lines)
                worst = statistics.fmean(line["worst"] for line in tested) if tested else 0.0
                certified = sum(line["passed"] for line in lines)
                print(
                    f"{size:4}  {way:9}{len(lines):6}{len(tested):8}{certified:11}{told:13.2f}{100 * shipped:+14.1f}"
                    f"{100 * worst:+13.1f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What is won by refits that also learn from dev images, and are counted out of fold."
    )
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--target", default="", help="comma-separated; every class without it")
    parser.add_argument("--sizes", default="60,100")
    parser.add_argument("--seeds", type=int, default=2)
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
        rounds: list[dict[str, Any]] = []
        for target in given.target.split(",") if given.target else bed.classes:
            for size in map(int, given.sizes.split(",")):
                for seed in range(given.seeds):
                    rounds.append({"target": target, "size": size, "seed": seed, **walk(bed, target, size, seed)})
                    print(target, size, seed, {way: rounds[-1][way]["passed"] for way in WAYS}, file=sys.stderr)
        entry = {
            "source": given.source.stem, "prefix": given.prefix, "machine": machine(), "commit": commit(),
            "rounds": rounds,
        }  # fmt: skip
        known = [item for item in known if (item["source"], item["prefix"]) != (entry["source"], entry["prefix"])]
        known.append(entry)
        given.results.write_text(json.dumps(known, indent=1) + "\n")
    print_table(known)


if __name__ == "__main__":
    main()
