"""A target that looks like a protected class: the right result is a refusal that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from holdfast.artifacts import RunFolder
from holdfast.candidates.select import confused_with
from holdfast.config import RoundConfig, TuneConfig, parse
from holdfast.files import read_json
from holdfast.rounds.develop import develop
from holdfast.rounds.outcome import read_outcome
from holdfast.rounds.tune import tune

TRAIN: dict[str, Any] = {"batch": 32, "images_per_task": 8, "warmup_steps": 5, "device": "cpu", "log_every": 50}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of handwritten digits, and a target of which every picture is a four, as one of them is."""
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    root = tmp_path_factory.mktemp("conflict")
    for name, digit, part in (("one", 1, None), ("six", 6, None), ("four", 4, 0), ("flag", 4, 1)):
        folder = root / "data" / name
        folder.mkdir(parents=True)
        chosen = np.flatnonzero(labels == digit)
        for place in chosen if part is None else chosen[part::2]:
            grey = np.round(values[place].reshape(8, 8) * (255 / 16)).astype(np.uint8)
            Image.fromarray(grey).resize((32, 32), Image.Resampling.BICUBIC).save(folder / f"{place}.png")
    source = {"kind": "folder", "path": str(root / "data")}
    roles = {"base": 0.3, "dev": 0.3, "sealed": 0.0, "test": 0.1}
    values_of_base = {
        "classes": ["one", "six", "four"],
        "template": "the sign {}",
        "objective": "cross_entropy",
        "data": {"source": source, "roles": roles, "leaks": "allow"},
        "model": {"architecture": "tiny"},
        "train": {**TRAIN, "steps": 120, "learning_rate": 2e-3},
        "evaluate": {"every": 120},
    }
    tune(parse(TuneConfig, values_of_base, "base"), root / "base", root, quiet=True)
    values_of_round = {
        "seed": 1,  # in some draws one of 21 dev images is gained by chance: without sealed images that may ship
        "task": {"target": "flag", "template": "the sign {}"},
        "data": {"source": source, "roles": roles, "leaks": "allow"},
        "model": {"start": "base/model"},
        "train": {**TRAIN, "steps": 80, "learning_rate": 1e-3},
        "evaluate": {"every": 40},
    }
    develop(parse(RoundConfig, values_of_round, "round"), root / "default", root, quiet=True)
    bold = {**values_of_round, "method": {"form": "published", "beta": 1.0, "replay": 1.0}}
    develop(parse(RoundConfig, bold, "round"), root / "bold", root, quiet=True)
    return root


@pytest.mark.parametrize("run", ["default", "bold"])
def test_the_old_model_is_handed_back_and_the_class_in_the_way_is_named(photographs: Path, run: str) -> None:
    result = read_json(RunFolder.open(photographs / run).result)
    assert result["kept_old"] is True
    assert result["chosen"] is None
    assert result["blocked_by"] == "four"
    deciding = read_outcome(RunFolder.open(photographs / run)).deciding
    assert deciding is not None
    assert deciding.task == "flag" if deciding.must_gain else deciding.beyond  # who kept its margin did not decide


def test_the_frontier_and_what_a_margin_would_buy_are_told(photographs: Path) -> None:
    result = read_json(RunFolder.open(photographs / "bold").result)
    bold = max(result["frontier"], key=lambda item: item["target_gain"])
    assert bold["target_gain"] > 0.1  # the target was learnt, at a price
    assert bold["dev_safety"] < -0.05
    assert bold["worst_task"] == "four"
    bought = {item["margin"]: item["target_gain"] for item in result["gain_by_margin"]}
    assert bought[0.0] < bold["target_gain"] / 2  # for free there is little to be had
    assert sorted(bought.values()) == list(bought.values())


def test_who_the_target_is_taken_for() -> None:
    labels = ["t"] * 5 + ["a"] * 5
    assert confused_with("t", labels, ["a", "a", "b", "t", "a", *"bbbbb"]) == "a"
    assert confused_with("t", labels, ["a", "b", "c", "t", "t", *"aaaaa"]) is None  # nobody has most of them
    assert confused_with("t", labels, ["t"] * 5 + ["a"] * 5) is None
