"""Fast towers and plain ones end a real round with the same result: predictions, retention, choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.artifacts import read_predictions
from holdfast.config import RoundConfig, TuneConfig, parse
from holdfast.files import read_json
from holdfast.kernels import fast
from holdfast.rounds.develop import develop
from holdfast.rounds.result import RoundResult
from holdfast.rounds.tune import tune

STEPS = 60
ROLES = {"base": 0.2, "dev": 0.2, "sealed": 0.0, "test": 0.0}
DATA: dict[str, Any] = {"source": {"kind": "digits"}, "roles": ROLES}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of real digits that hardly knows the eight."""
    root = tmp_path_factory.mktemp("towers")
    settings = {"steps": 150, "batch": 32, "images_per_task": 6, "learning_rate": 2e-3, "crop_scale": [0.8, 1.0]}
    values = {
        "at_most": {"eight": 2},
        "template": "the digit {}",
        "data": DATA,
        "model": {"architecture": "tiny"},
        "train": {**settings, "device": "cpu", "log_every": 150, "checkpoint_every": 1000},
        "evaluate": {"every": 150},
    }
    tune(parse(TuneConfig, values, "the base"), root / "base", root, quiet=True)
    return root


def run(root: Path, towers: str, precision: str) -> tuple[RoundResult, pa.Table]:
    """A round, and what its last step says of the dev images."""
    values = {
        "task": {"target": "eight"},
        "data": {**DATA, "constraint_images": 40},
        "model": {"start": "base/model", "head_rank": 4},
        "method": {"views": "paired", "beta": 20.0, "replay": 1.0},
        "train": {
            "steps": STEPS,
            "batch": 16,
            "images_per_task": 3,
            "learning_rate": 1e-3,
            "device": "cpu",
            "speed": towers,
            "precision": precision,
            "log_every": 20,
        },
        "evaluate": {"every": STEPS // 2},
        "candidates": {"interpolation": [0.5, 1.0]},
    }
    out = root / f"{towers}-{precision}"
    result = develop(parse(RoundConfig, values, "a round"), out, root, quiet=True)
    return result, read_predictions(result.folder.predictions(f"step-{STEPS:08d}", "dev"))


def tables(root: Path, precision: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, pa.Table, pa.Table]:
    plain, of_plain = run(root, "plain", precision)
    asked = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        return image_features(*args, **options)

    image_features = fast.image_features
    monkeypatch.setattr(fast, "image_features", counted)
    quick, of_quick = run(root, "fast", precision)
    assert asked > STEPS  # the fast path is what was run
    assert of_plain["example_id"].equals(of_quick["example_id"])
    old = read_predictions(plain.folder.predictions("old", "dev"))
    moved = np.not_equal(column(old, "prediction"), column(of_plain, "prediction"))
    assert moved.mean() > 0.05  # a round that goes somewhere
    return read_json(plain.folder.result), read_json(quick.folder.result), of_plain, of_quick


def column(table: pa.Table, name: str) -> np.ndarray:
    return np.asarray(table[name].to_pylist())


def accuracies(table: pa.Table) -> dict[str, float]:
    right, task = column(table, "prediction") == column(table, "label"), column(table, "task")
    return {str(name): float(right[task == name].mean()) for name in np.unique(task)}


def test_in_float64_every_prediction_and_the_choice_are_the_same(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, quick, of_plain, of_quick = tables(base, "float64", monkeypatch)
    assert of_plain["prediction"].equals(of_quick["prediction"])
    np.testing.assert_allclose(column(of_quick, "loss"), column(of_plain, "loss"), rtol=1e-5, atol=1e-7)
    for name in ("chosen", "kept_old", "verdict", "blocked_by"):
        assert plain[name] == quick[name], name
    for candidate, other in zip(plain["candidates"], quick["candidates"], strict=True):
        assert (candidate["name"], candidate["dev"]["dev_safety"]) == (other["name"], other["dev"]["dev_safety"])
        assert candidate["dev"]["target_gain"] == other["dev"]["target_gain"]


@pytest.mark.parametrize(("precision", "agree", "apart"), [("float32", 0.97, 0.05), ("bf16", 0.9, 0.1)])
def test_in_lower_precision_they_differ_by_no_more_than_rounding_does(
    base: Path, monkeypatch: pytest.MonkeyPatch, precision: str, agree: float, apart: float
) -> None:
    """``agree``: least share of equal predictions; ``apart``: most that a class's accuracy may differ."""
    _, _, of_plain, of_quick = tables(base, precision, monkeypatch)
    same = (column(of_plain, "prediction") == column(of_quick, "prediction")).mean()
    between = {name: abs(value - accuracies(of_quick)[name]) for name, value in accuracies(of_plain).items()}
    assert same >= agree
    assert max(between.values()) <= apart, between
