from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from holdfast.artifacts import PREDICTIONS, read_predictions
from holdfast.cli import app
from holdfast.data.round import LabelledSet
from holdfast.errors import TrainingError, UserError
from holdfast.evaluate.metrics import per_task_accuracy
from holdfast.evaluate.predict import predict
from holdfast.model.classifier import Classifier
from holdfast.model.folder import save_model, start_model

CLASSES = ("zero", "one", "two")


class RandomPixels:
    size = 32

    def __init__(self, count: int) -> None:
        self.values = torch.randint(0, 256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0)).to(
            torch.uint8
        )

    def __len__(self) -> int:
        return len(self.values)

    def read(self, rows: np.ndarray) -> Tensor:
        return self.values[torch.from_numpy(rows)]


@pytest.fixture
def examples() -> LabelledSet:
    rows = np.array([4, 2, 9, 0, 7, 1, 3])
    return LabelledSet(RandomPixels(10), rows, np.array([0, 1, 2, 2, 1, 0, 0]), tuple(f"id{row}" for row in rows))


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return start_model("tiny", None, CLASSES, [(f"a photo of a {name}",) for name in CLASSES], 0.05, seed=2)


def test_against_a_naive_version(classifier: Classifier, examples: LabelledSet) -> None:
    table = predict(classifier, examples, CLASSES, batch_size=3)
    assert table.schema == PREDICTIONS
    view = classifier.preprocess
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (view.mean, view.std))
    for position, row in enumerate(table.to_pylist()):
        pixels = examples.pixels.read(examples.rows[position : position + 1])
        with torch.no_grad():
            probabilities = classifier.logits((pixels.float() / 255 - mean) / std)[0].double().softmax(0)
        label = examples.labels[position]
        assert row["example_id"] == examples.ids[position]
        assert row["label"] == row["task"] == CLASSES[label]
        assert row["prediction"] == CLASSES[int(probabilities.argmax())]
        assert row["loss"] == pytest.approx(-float(probabilities[label].log()), abs=1e-4)
        assert row["score"] == pytest.approx(float(probabilities.max()), abs=1e-4)


def test_a_plain_function_serves_too(classifier: Classifier, examples: LabelledSet) -> None:
    table = predict(classifier.logits, examples, CLASSES, preprocess=classifier.preprocess, batch_size=7)
    assert table.equals(predict(classifier, examples, CLASSES, batch_size=7))
    with pytest.raises(TypeError, match="preprocessing"):
        predict(classifier.logits, examples, CLASSES)


def test_what_does_not_fit_is_refused(classifier: Classifier, examples: LabelledSet) -> None:
    with pytest.raises(UserError, match="another label space"):
        predict(classifier, examples, CLASSES[::-1])
    examples.pixels.size = 64  # pyright: ignore
    with pytest.raises(UserError, match="another size"):
        predict(classifier, examples, CLASSES)


def test_numbers_that_are_not_finite_are_no_prediction(classifier: Classifier, examples: LabelledSet) -> None:
    def broken(images: Tensor) -> Tensor:
        return classifier.logits(images) * float("nan")

    with pytest.raises(TrainingError, match="not finite"):
        predict(broken, examples, CLASSES, preprocess=classifier.preprocess)


def test_the_commands(classifier: Classifier, tmp_path: Path) -> None:
    save_model(classifier, tmp_path / "run" / "model")
    out = tmp_path / "predictions.parquet"
    run = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run"), "digits", "--out", str(out), "--json"])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout)
    table = read_predictions(out)
    assert result["examples"] == len(table) == 537
    assert {name: item["accuracy"] for name, item in result["tasks"].items()} == pytest.approx(per_task_accuracy(table))
    shown = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run" / "model"), "digits", "--out", str(out)])
    assert all(name in shown.stdout for name in CLASSES)
    exported = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert exported.exit_code == 0
    assert (tmp_path / "out" / "classifier.safetensors").exists()
    again = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert isinstance(again.exception, UserError)
    missing = CliRunner().invoke(app, ["evaluate", str(tmp_path), "digits", "--out", str(out)])
    assert isinstance(missing.exception, UserError)


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_predicted(
    classifier: Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused after half a minute of predictions, and their table was not printed."""
    save_model(classifier, tmp_path / "model")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("holdfast.evaluate.predict.predict", lambda *_, **__: pytest.fail("predicted for nothing"))
    for out in (tmp_path / "file" / "p.parquet", tmp_path / "file" / "deep" / "p.parquet", tmp_path / "model"):
        ran = CliRunner().invoke(app, ["evaluate", str(tmp_path / "model"), "digits", "--out", str(out)])
        assert isinstance(ran.exception, UserError), ran.output
        assert ran.exception.message == f"cannot write {out}"
    gone = tmp_path / "new" / "p.parquet"
    ran = CliRunner().invoke(app, ["evaluate", str(tmp_path / "none"), "digits", "--out", str(gone)])
    assert isinstance(ran.exception, UserError)
    assert not gone.parent.exists()  # the check makes no folder
