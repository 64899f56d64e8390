"""A round inside a project: its parent's model, what it protects, whom it answers to, a class that is added."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.artifacts import PREDICTIONS, read_predictions
from holdfast.config import RoundConfig, parse
from holdfast.data.round import LabelledSet
from holdfast.data.task import TaskSpec
from holdfast.evaluate.predict import predict_on_ranks
from holdfast.files import read_json
from holdfast.model.classifier import Classifier
from holdfast.model.folder import save_model
from holdfast.model.openclip import load_towers
from holdfast.rounds.next_round import develop_in, settle
from holdfast.rounds.project import FIRST, Project
from holdfast.rounds.reference import ReferenceModel, as_deployed_in, predict_reference
from holdfast.rounds.verify import verify_project
from holdfast.runtime import started
from tests.helpers import ArrayPixels
from tests.rounds.small import add_round, first_model


def config(**task: object) -> RoundConfig:
    values = {
        "task": {"target": "d", **task},
        "data": {"source": {"kind": "digits"}},
        "model": {"architecture": "tiny", "head_rank": 4},
    }
    return parse(RoundConfig, values, "test")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project.open(tmp_path / "project", create=True)
    first_model(made)
    return made


def test_a_later_round_protects_what_its_parent_knows_and_answers_to_the_first_model(project: Project) -> None:
    name = add_round(project, target="c")
    settled = settle(project, config(ignored=["b"]), name, Path())
    assert settled.model.start == Path("rounds") / name / "model"  # relative to the project, wherever that is
    assert settled.model.architecture is None
    assert settled.model.head_rank == 4
    assert settled.task.protected == ("a", "c")  # c was the target of the round before
    assert settled.certify.first == Path("first")
    assert settled.certify.ledger == Path("ledger")


def test_a_round_from_the_first_model_has_nothing_further_to_answer_to(project: Project) -> None:
    settled = settle(project, config(), FIRST, Path())
    assert settled.certify.first is None
    assert settled.task.protected == ("a", "b", "c")  # all that the first model knows, written out
    assert settle(project, config(protected=["a"]), add_round(project), Path()).task.protected == ("a",)


def test_an_old_model_is_judged_over_the_classes_it_had() -> None:
    towers = load_towers("tiny", None, seed=0)
    names = ("a", "b", "new")
    spec = TaskSpec("new", names[:2], tuple((f"a photo of {name}",) for name in names))
    start = Classifier(towers, names[:2], spec.prompts[:2], 0.05)
    used = as_deployed_in(start, spec, None)
    assert used is not None
    assert used.classes == ("a", "b")
    assert as_deployed_in(start.with_classes(names, spec.prompts), spec, None) is None
    random = np.random.default_rng(0)
    size = towers.preprocess.size
    pixels = ArrayPixels(random.integers(0, 255, (60, 3, size, size)).astype(np.uint8))
    examples = LabelledSet(pixels, np.arange(60), np.repeat([0, 1, 2], 20), tuple(map(str, range(60))))
    bound = start.with_classes(names, spec.prompts).frozen_copy()
    with started("cpu") as runtime, torch.no_grad():
        table = predict_reference(ReferenceModel(bound, used), examples, 16, runtime)
        over_all = predict_on_ranks(bound, examples, names, 16, runtime)
    assert table.schema == PREDICTIONS
    predictions = table["prediction"].to_pylist()
    assert "new" not in predictions
    # Among its own classes it says what it always said, and the loss stays the one over the round's classes.
    assert [
        item
        for item, other in zip(predictions, over_all["prediction"].to_pylist(), strict=True)
        if other not in (item, "new")
    ] == []
    assert table["loss"].equals(over_all["loss"])
    assert table["label"].to_pylist()[-1] == "new"


def test_a_class_is_added_in_a_project_from_images_to_record(tmp_path: Path) -> None:
    names = ("zero", "one", "three")
    start = Classifier(load_towers("tiny", None, seed=0), names, [(f"the digit {name}",) for name in names], 0.05)
    save_model(start, tmp_path / "base", extra={"template": "the digit {}"})
    values = {
        "task": {"target": "eight", "protected": list(names)},
        "data": {"source": {"kind": "digits"}, "constraint_images": 8, "leaks": "allow"},
        "model": {"start": "base", "head_rank": 4},
        "train": {"steps": 4, "batch": 8, "images_per_task": 2, "learning_rate": 1e-4},
        "evaluate": {"every": 4},
        "certify": {"margin": 0.5, "target_gain": False},
        "candidates": {"interpolation": [1.0]},
    }
    project = Project.open(tmp_path / "project", create=True)
    result = develop_in(project, parse(RoundConfig, values, "test"), tmp_path, title="Eight!", quiet=True)
    name = "0001-eight"
    assert result.folder.root == project.folder(name).root
    assert list(project.ledger.glob("*.jsonl"))
    old = read_predictions(result.folder.predictions("old", "dev"))
    assert "eight" not in set(old["prediction"].to_pylist())
    assert "eight" in set(old["label"].to_pylist())
    classes = read_json(project.model(name) / "model.json")["classes"]
    assert classes == list(names) + ([] if result.kept_old else ["eight"])
    assert verify_project(project.root).rounds == 1
    assert project.history()[0].entry["accuracy"]["old"]["eight"] == 0.0
