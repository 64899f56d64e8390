"""The demo: a small base model that hardly knows one digit, developed by plain fine-tuning and by holdfast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.config import RoundConfig, TuneConfig, parse
from holdfast.data.assemble import labelled
from holdfast.data.task import Role
from holdfast.evaluate.metrics import Comparison, compare
from holdfast.evaluate.predict import predict
from holdfast.model.folder import load_model
from holdfast.rounds.checkpoints import checkpoint_name
from holdfast.rounds.develop import develop
from holdfast.rounds.result import RoundResult
from holdfast.rounds.tune import tune
from holdfast.runtime import choose_device

TARGET, TEMPLATE, FEW = "eight", "the digit {}", 2
ROLES = {"base": 0.2, "dev": 0.2, "sealed": 0.0, "test": 0.3}
DATA: dict[str, Any] = {"source": {"kind": "digits"}, "roles": ROLES}
STEPS = 400
VIEWS: dict[str, Any] = {"crop_scale": [0.8, 1.0], "log_every": 50, "checkpoint_every": 1000}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"name": "finetune"},
    "holdfast": {
        "name": "holdfast",
        "replay": 1.0,
        "target_share": 0.0,
        "target_logit_margin": 0.0,
        "distill_weight": 0.0,
        "label_boost": 0.0,
        "head_lr_multiplier": 1.0,
        "research": {"views": "paired", "dual_rate": 2.0},
    },
}


@dataclass(frozen=True)
class DemoResult:
    """The end of training of both methods on test images, and what holdfast would hand back."""

    plain: Comparison
    holdfast: Comparison
    round: RoundResult


def demo(out: Path, seed: int = 0, *, device: str = "auto", quiet: bool = False) -> DemoResult:
    """Tune the base, develop it twice from the same model with the same data and steps, and score both on test."""
    base = parse(
        TuneConfig,
        {
            "seed": seed,
            "at_most": {TARGET: FEW},
            "template": TEMPLATE,
            "data": DATA,
            "model": {"architecture": "tiny"},
            "train": {
                **VIEWS,
                "steps": STEPS,
                "batch": 64,
                "images_per_task": 8,
                "learning_rate": 2e-3,
                "device": device,
            },
            "evaluate": {"every": STEPS},
        },
        "the demo's base",
    )
    tune(base, out / "base", out, quiet=quiet)
    rounds = {
        name: develop(_round(method, seed, device), out / name, out, quiet=quiet) for name, method in METHODS.items()
    }
    return DemoResult(_end(out, "plain"), _end(out, "holdfast"), rounds["holdfast"])


def _round(method: dict[str, Any], seed: int, device: str) -> RoundConfig:
    values = {
        "seed": seed,
        "task": {"target": TARGET},
        "data": DATA,
        "model": {"start": "base/model"},
        "method": method,
        "train": {
            **VIEWS,
            "steps": STEPS,
            "batch": 64,
            "images_per_task": 10,
            "learning_rate": 3e-4,
            "warmup_steps": 20,
            "device": device,
        },
        "evaluate": {"every": STEPS // 4},
    }
    return parse(RoundConfig, values, "the demo's round")


def _end(out: Path, name: str) -> Comparison:
    """Where training ended, against the base model, on test images."""
    new = load_model(out / name / "candidates" / checkpoint_name(STEPS))
    old = load_model(out / "base" / "model").with_classes(new.classes, new.prompts)
    config = _round(METHODS[name], 0, "cpu")
    view = new.preprocess
    examples = labelled(
        config.data.sources,
        new.classes,
        size=view.size,
        interpolation=view.interpolation,
        root=out,
        roles=[Role.TEST],
        roles_config=config.data.roles,
    )
    device = choose_device("cpu")
    tables = [predict(model, examples, new.classes, device=device) for model in (old, new)]
    return compare(tables[0], tables[1], TARGET, [item for item in new.classes if item != TARGET])
