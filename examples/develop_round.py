"""A round from Python, on the digits that come with scikit-learn: make a base model, develop it, read the result.

python examples/develop_round.py [--out runs/digits] [--steps 400]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast import TuneConfig, develop, load_model, tune
from holdfast.config import RoundConfig, parse

ROLES = {"base": 0.2, "dev": 0.15, "sealed": 0.4, "test": 0.05}
DATA = {"source": {"kind": "digits"}, "roles": ROLES}


def main(out: Path, steps: int) -> None:
    """The base model has seen two eights; the round improves on eight and may not lose any other digit."""
    base = {
        "at_most": {"eight": 2},
        "template": "the digit {}",
        "data": DATA,
        "model": {"architecture": "tiny"},
        "train": {"steps": steps, "batch": 64, "images_per_task": 8, "learning_rate": 2e-3},
    }
    tuned = tune(parse(TuneConfig, base, "the base"), out / "base", out, quiet=True)
    print(f"base model: {tuned.accuracy['eight']:.0%} of the eights")
    round_ = {
        "task": {"target": "eight"},
        "data": DATA,
        "model": {"start": "base/model"},  # relative to the third argument of develop
        "train": {"steps": steps, "batch": 64, "learning_rate": 3e-4, "crop_scale": [0.8, 1.0]},
        "evaluate": {"every": max(1, steps // 4)},
        "certify": {"margin": 0.2, "ledger": "ledger"},
    }
    result = develop(parse(RoundConfig, round_, "the round"), out / "round", out, quiet=True)
    print("the old model is handed back" if result.kept_old else f"{result.chosen} is handed back")
    print(result.decision.reason)
    for name, task in result.dev.tasks.items():
        print(f"{name:<6} {task.old_accuracy:.0%} -> {task.new_accuracy:.0%}")
    model = load_model(result.folder.model)
    print(f"{result.folder.model}: {len(model.classes)} classes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"))
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    main(arguments.out, arguments.steps)
