"""Candidates with a refitted target and a target bias: in the list, in files, and as the model handed back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from holdfast.artifacts import RunFolder, read_predictions
from holdfast.config import RoundConfig, TuneConfig, parse
from holdfast.evaluate.predict import predict
from holdfast.files import read_json
from holdfast.model.folder import load_model
from holdfast.rounds.develop import develop, resume_config
from holdfast.rounds.prepare import prepare_round
from holdfast.rounds.tune import tune
from holdfast.runtime import started

TRAIN: dict[str, Any] = {"batch": 32, "images_per_task": 8, "warmup_steps": 5, "device": "cpu", "log_every": 50}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same round with biases of nothing and of six, with a bias alone, and at λ = 0."""
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    root = tmp_path_factory.mktemp("bias")
    for name, digit in (("one", 1), ("six", 6), ("four", 4)):
        folder = root / "data" / name
        folder.mkdir(parents=True)
        for place in np.flatnonzero(labels == digit):
            grey = np.round(values[place].reshape(8, 8) * (255 / 16)).astype(np.uint8)
            Image.fromarray(grey).resize((32, 32), Image.Resampling.BICUBIC).save(folder / f"{place}.png")
    data = {
        "source": {"kind": "folder", "path": str(root / "data")},
        "roles": {"base": 0.3, "dev": 0.3, "sealed": 0.0, "test": 0.1},
        "leaks": "allow",
    }
    base = {
        "classes": ["one", "six"],
        "template": "the sign {}",
        "objective": "cross_entropy",
        "data": data,
        "model": {"architecture": "tiny"},
        "train": {**TRAIN, "steps": 80, "learning_rate": 2e-3},
        "evaluate": {"every": 80},
    }
    tune(parse(TuneConfig, base, "base"), root / "base", root, quiet=True)
    for name, interpolation, target_bias, freeze in (
        ("both", [0.5, 1.0], [0.0, 6.0], "nothing"),
        ("biased", [0.0, 0.25, 1.0], [0.5], "nothing"),
        ("raised", [0.0, 1.0], [-3.0, 0.0], "nothing"),
        ("alone", [0.0], [0.0], "nothing"),
        ("frozen", [0.0], [0.0], "towers"),
    ):
        values_of_round = {
            "task": {"target": "four", "template": "the sign {}"},
            "data": data,
            "model": {"start": "base/model", "freeze": freeze},
            "train": {**TRAIN, "steps": 40, "learning_rate": 1e-3},
            "evaluate": {"every": 40},
            # Without folds: what is stored of a candidate is then what the model itself says.
            "candidates": {"interpolation": interpolation, "target_bias": target_bias, "folds": 0},
        }
        develop(parse(RoundConfig, values_of_round, "round"), root / name, root, quiet=True)
    return root


def test_every_lambda_has_a_candidate_for_every_amount(runs: Path) -> None:
    run = RunFolder.open(runs / "both")
    listed = read_json(run.result)["candidates"]
    candidates = [candidate for candidate in listed if not candidate["step"].startswith("last-layer")]
    assert len(listed) - len(candidates) == 2 * 4  # two more ends of the interpolation, which need no training
    spots = [(candidate["variant"], candidate["lambda"], candidate["bias"]) for candidate in candidates]
    grid = [(0.5, 0.0), (0.5, 6.0), (1.0, 0.0), (1.0, 6.0)]
    assert spots == [("", *spot) for spot in grid] + [
        ("as-trained", 1.0, 0.0),
        ("as-trained", 1.0, 6.0),
        *(("last-layer", *spot) for spot in grid),
    ]
    names = [candidate["name"] for candidate in candidates]
    trained = "step-00000040-as-trained@1"
    assert names[2:6] == ["step-00000040@1", "step-00000040@1-bias6", trained, f"{trained}-bias6"]
    assert names[6:8] == ["step-00000040-last-layer@0.5", "step-00000040-last-layer@0.5-bias6"]
    named = {
        candidate["bias"]: read_predictions(run.predictions(candidate["name"], "dev"))["prediction"]
        .to_pylist()
        .count("four")
        for candidate in candidates
        if candidate["lambda"] == 1 and not candidate["variant"]
    }
    assert named[6.0] < named[0.0]  # a logit of six: most of the pictures that it was named for are given up


def test_a_checkpoint_as_it_was_trained_says_what_it_said_when_it_was_evaluated(runs: Path) -> None:
    run = RunFolder.open(runs / "both")
    as_trained = read_predictions(run.predictions("step-00000040-as-trained@1", "dev"))
    assert as_trained.equals(read_predictions(run.predictions("step-00000040", "dev")))
    assert not as_trained.equals(read_predictions(run.predictions("step-00000040@1", "dev")))  # its target is refitted


def test_a_bias_below_zero_names_the_target_more_often(runs: Path) -> None:
    run = RunFolder.open(runs / "raised")
    for name in ("refit", "step-00000040@1"):
        before, after = (
            read_predictions(run.predictions(each, "dev"))["prediction"].to_pylist()
            for each in (name, f"{name}-bias-3")
        )
        assert after.count("four") > before.count("four")
        moved = [new for old, new in zip(before, after, strict=True) if old != new]
        assert set(moved) == {"four"}  # a picture is lost to the target and to nothing else


def test_what_is_handed_back_says_what_the_candidate_said(runs: Path) -> None:
    run = RunFolder.open(runs / "biased")
    result = read_json(run.result)
    assert result["chosen"] is not None
    assert result["chosen"].endswith("-bias0.5")
    config, root = resume_config(run.root)
    with started("cpu") as runtime:
        data = prepare_round(config, root, runtime).assembled.data
        again = predict(load_model(run.model), data.dev, data.tasks.classes)
    assert again.equals(read_predictions(run.predictions(result["chosen"], "dev")))


@pytest.mark.parametrize("name", ["alone", "frozen"])
def test_where_only_the_target_is_new_nothing_else_changes(runs: Path, name: str) -> None:
    """Every picture is called what it was called before, or the target; and the target gains."""
    run = RunFolder.open(runs / name)
    result = read_json(run.result)
    assert [candidate["name"] for candidate in result["candidates"]] == ["refit"]
    old, new = (read_predictions(run.predictions(name, "dev")) for name in ("old", "refit"))
    pairs = list(zip(old["prediction"].to_pylist(), new["prediction"].to_pylist(), strict=True))
    assert all(after in (before, "four") for before, after in pairs if before != "four")
    assert result["dev"]["target_gain"] > (0.1 if name == "alone" else 0)
    before, after = load_model(runs / "base" / "model"), load_model(run.model)
    moved = [
        key for key, value in after.towers.state_dict().items() if not value.equal(before.towers.state_dict()[key])
    ]
    assert moved == (["model.visual.proj"] if name == "alone" else [])
