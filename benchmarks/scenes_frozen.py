"""The scene study's cheap column: both towers frozen, heads trained on features computed once, on a CPU.

    python benchmarks/scenes.py prepare --data DATA --out FOLDER           # once
    python benchmarks/scenes_frozen.py run FOLDER --features features.npy --out benchmarks/results/scenes-frozen.json
    python benchmarks/scenes_frozen.py singular FOLDER --features features.npy --out benchmarks/results/singular.json

The towers stay as `prepare` aligned them on Flickr8k's captions. The base model is these towers with task heads tuned
on the base images of every class but the target; a round adds heads of its own. Splits, walk, rules of choice and the
format of a run are those of benchmarks/scenes.py. ``singular`` prints the smallest singular value of the constraints'
gradients at the start of a round, with task heads and without.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import scenes
from benchmarks.machine import commit, machine
from benchmarks.remembered import RowPixels, row_of
from benchmarks.scenes import CHOSEN_AT, CHOSEN_ON, CLASSES, DIM, SEEDS, SIZES, TARGETS, WIDTH, Job, Packed, prompt
from holdfast.config import TrainConfig
from holdfast.data.loader import ViewSettings
from holdfast.data.round import LabelledSet, PairSet, RoundData, TaskSpec
from holdfast.evaluate.diagnostics import class_loss, gradient_grams, smallest_singular_value
from holdfast.methods import build_method
from holdfast.methods.cross_entropy import CrossEntropyConfig
from holdfast.model.classifier import Classifier
from holdfast.model.towers import Preprocess
from holdfast.runtime import Runtime, derive_seed
from holdfast.train.loop import TrainSpec, train


class FrozenTowers(scenes.TableTexts):
    """Tables in place of both towers. There is nothing in them to train."""

    def __init__(self, texts: Sequence[str], table: Tensor, weight: Tensor, features: Tensor) -> None:
        super().__init__()
        self.preprocess = Preprocess(1, (0.0,) * 3, (1.0,) * 3)
        self.embed_dim, self.text_width = DIM, WIDTH
        self.rows = {text: row for row, text in enumerate(texts)}
        self.below = nn.Identity()
        self.register_buffer("weight", weight)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("features", features, persistent=False)
        self.eval()

    def lower(self, images: Tensor) -> Tensor:
        return images

    def image_features(self, images: Tensor) -> Tensor:
        return self.features[row_of(images * 255)]

    def spec(self) -> dict[str, Any]:
        return {"kind": "tables"}

    def image_parameters(self) -> Iterable[nn.Parameter]:
        return []

    def text_parameters(self) -> Iterable[nn.Parameter]:
        return []


@torch.no_grad()
def features_of(packed: Packed, path: Path) -> Tensor:
    """E1 of the evaluation view of every picture, before normalisation; computed once."""
    if not path.exists():
        towers, began, parts = scenes.towers_of(packed), time.perf_counter(), []
        for i in range(0, len(packed.pixels), 64):
            images = packed.pixels.read(np.arange(i, min(i + 64, len(packed.pixels))))
            parts.append(towers.image_features(towers.preprocess.normalise(images)))
            if i % 3200 == 0:
                print(f"{i} pictures after {time.perf_counter() - began:.0f} s", flush=True)
        np.save(path, torch.cat(parts).numpy())
    return torch.from_numpy(np.load(path))


def frozen_towers(packed: Packed, features: Tensor) -> FrozenTowers:
    aligned = packed.aligned
    return FrozenTowers(packed.texts, aligned["table"].float(), aligned["towers"]["weight"].float(), features)


def tune_heads(packed: Packed, towers: FrozenTowers, without: str, steps: int = 300) -> Classifier:
    """The old model: heads tuned on base images of the other classes by cross-entropy."""
    others = tuple(name for name in CLASSES if name != without)
    examples = scenes._set(packed, "base", others)
    last = len(others) - 1
    own, rest = examples.of_class(last), np.flatnonzero(examples.labels != last)

    def pairs(positions: np.ndarray) -> PairSet:
        texts = tuple(prompt(others[label]) for label in examples.labels[positions])
        return PairSet(packed.pixels, examples.rows[positions], texts, tuple(examples.ids[p] for p in positions))

    constraint = LabelledSet(
        packed.pixels, examples.rows[rest], examples.labels[rest], tuple(examples.ids[p] for p in rest)
    )
    data = RoundData(
        tasks=TaskSpec(others[-1], others[:-1], tuple((prompt(name),) for name in others)),
        target=pairs(own),
        negatives=pairs(rest),
        constraint=constraint,
        dev=examples,
        open_test=lambda: examples,
        open_sealed=lambda: examples,
    )
    model = Classifier(towers, others, data.tasks.prompts, 0.05)
    model.begin_round(32, derive_seed(0, "base heads"))
    rates = {"learning_rate": 1e-3, "weight_decay": 0.05, "warmup_steps": 20}
    sizes = {"steps": steps, "batch": 33, "target_share": 32 / 33, "images_per_task": 32, "log_every": 100}
    config = TrainConfig(**rates, **sizes, precision="float32", device="cpu")
    method = build_method(model, CrossEntropyConfig(heads=True), steps)
    method.prepare(model, data)
    views = ViewSettings(True, "paired", (0.7, 1.0), True)  # a picture of one pixel looks the same from everywhere
    train(method, data, TrainSpec(config, views, 0, "base", steps), Runtime(torch.device("cpu")))
    return model.requires_grad_(False)


METHODS: dict[str, dict[str, Any]] = {
    "holdfast": {**scenes.DEFAULT, "views": "clean"},
    "published": scenes.PUBLISHED,
    "finetune": {"name": "finetune"},
    "rm": {"name": "rm"},
    "gem": {"name": "gem"},
    "der": {"name": "der"},
}  # FLYP, WCCL and Co2L train towers: here they have nothing to train
RATES = (3e-3, 1e-3, 3e-4)


def train_settings(rate: float) -> dict[str, Any]:
    return {"learning_rate": rate, "precision": "float32", "speed": "compiled"}


def choose_rates(results: list[dict[str, Any]]) -> dict[str, float]:
    """A method's rate: on dev images, at the end of training, the one with the best worst change, then target gain."""
    chosen = {}
    for name in dict.fromkeys(one["name"] for one in results):
        ranked = []
        for rate in RATES:
            runs = [one for one in results if one["name"] == name and one["train"]["learning_rate"] == rate]
            ends = [(scenes.end_of(one)["dev"], one["target"]) for one in runs if "error" not in one]
            worst = [min((v[1] - v[2]) / v[0] for key, v in dev.items() if key != target) for dev, target in ends]
            gain = [(dev[target][1] - dev[target][2]) / dev[target][0] for dev, target in ends]
            ranked.append((sum(one >= 0 for one in worst), sum(worst) + 0.5 * sum(gain), rate))
        chosen[name] = max(ranked)[2]
    return chosen


def run(folder: Path, features: Path, out: Path, seconds: float, names: Sequence[str], add: bool) -> None:
    """All runs of the named methods; with ``add`` they are written beside those that ``out`` holds."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    packed = scenes.load(folder)
    towers = frozen_towers(packed, features_of(packed, features))
    packed = replace(packed, pixels=RowPixels(len(packed.pixels)))
    bases = {target: tune_heads(packed, towers, target) for target in TARGETS}
    print(f"bases after {time.perf_counter() - began:.0f} s", flush=True)
    methods = {name: METHODS[name] for name in names}
    tried = [
        work(packed, bases, Job(name, target, CHOSEN_AT, 0, method, train_settings(rate)), ("dev",))
        for name, method in methods.items()
        for rate in RATES
        for target in CHOSEN_ON
    ]
    chosen = choose_rates(tried)
    print(f"rates after {time.perf_counter() - began:.0f} s: {chosen}", flush=True)
    jobs = [
        Job(name, target, size, seed, method, train_settings(chosen[name]))
        for seed in SEEDS
        for size in SIZES
        for target in TARGETS
        for name, method in methods.items()
        if name != "finetune" or size == SIZES[0]  # it sees no constraint images: one run serves every size
    ]
    results: list[dict[str, Any]] = []
    there = json.loads(out.read_text()) if add else {"settings": {}, "choice_of_rates": [], "runs": []}
    chosen, tried = {**there["settings"], **chosen}, [*there["choice_of_rates"], *tried]
    commits = {**there.get("commits", {}), **dict.fromkeys(methods, commit())}  # a method's runs may come later
    head = {"machine": machine(), "commits": commits, "torch": torch.__version__, "settings": chosen, "rates": RATES}
    for job in jobs:
        results.append(work(packed, bases, job, ("dev", "test", "sealed")))
        late = time.perf_counter() - began > seconds
        if len(results) % 12 == 0 or len(results) == len(jobs) or late:
            print(f"{len(results)}/{len(jobs)} after {time.perf_counter() - began:.0f} s", flush=True)
            out.write_text(json.dumps({**head, "choice_of_rates": tried, "runs": [*there["runs"], *results]}))
        if late:
            return


def work(packed: Packed, bases: dict[str, Classifier], job: Job, judges: tuple[str, ...]) -> dict[str, Any]:
    try:
        return scenes.run(packed, bases[job.target], job, torch.device("cpu"), judges)[0]
    except Exception as error:  # a failed run is reported beside the others
        traceback.print_exc()
        return {"name": job.name, "target": job.target, "size": job.size, "seed": job.seed, "error": repr(error)[:500]}


def singular(folder: Path, features: Path, target: str, images: int, out: Path) -> None:
    """Smallest singular value of the constraints' gradients at the start of a round, all of the image tower's upper
    stages, adapter and W trained, with a round's new heads and without."""
    torch.set_num_threads(1)
    packed = scenes.load(folder)
    tables = frozen_towers(packed, features_of(packed, features))
    base = tune_heads(replace(packed, pixels=RowPixels(len(packed.pixels))), tables, target)
    data = scenes.round_data(packed, target, images, 0)
    spec = data.tasks
    model = Classifier(scenes.towers_of(packed), spec.classes, spec.prompts, 0.05, base.heads.shared())
    model.requires_grad_(False)
    shared = [one.requires_grad_(True) for one in (*model.towers.image_parameters(), model.towers.weight)]
    added = model.begin_round(32, derive_seed(0, "heads"))
    losses = [class_loss(model, data.constraint, k) for k in range(spec.num_protected)]
    found = gradient_grams(losses, {"shared": shared, "heads": [added.U, added.V]})
    lengths = {name: np.sqrt(np.diag(found.gram(name))).round(5).tolist() for name in ("shared", "heads")}
    result = {
        **machine(),
        "commit": commit(),
        "target": target,
        "tasks": list(spec.protected),
        "images_per_task": images,
        "losses": found.values.round(5).tolist(),
        "gradient_lengths": lengths,
        "smallest_singular_value": smallest_singular_value(found.gram()),
        "smallest_singular_value_without_heads": smallest_singular_value(found.gram("shared")),
        "smallest_singular_value_of_heads_alone": smallest_singular_value(found.gram("heads")),
    }
    out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "singular"))
    parser.add_argument("folder", type=Path, help="what benchmarks/scenes.py prepare wrote")
    parser.add_argument("--features", type=Path, required=True, help="file for the frozen tower's features")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after so long")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--add", action="store_true", help="keep the runs that are in the results already")
    parser.add_argument("--target", default="forest")
    parser.add_argument("--images", type=int, default=50, help="constraint images a task, for `singular`")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(
            arguments.folder,
            arguments.features,
            arguments.out,
            arguments.seconds,
            arguments.methods,
            arguments.add,
        )
    else:
        singular(arguments.folder, arguments.features, arguments.target, arguments.images, arguments.out)


if __name__ == "__main__":
    main()
