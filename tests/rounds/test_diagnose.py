"""`holdfast diagnose`: the target's gradient over whole sets, and a run from its folder to a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from holdfast.compare.grid import Study, StudyConfig, plan
from holdfast.compare.run import attempt
from holdfast.config import parse
from holdfast.errors import UserError
from holdfast.rounds.diagnose import diagnose_run, target_parts
from tests.methods.small import gradient, naive_contrastive, pairs_of, small_data, small_model

VALUES = {
    "seeds": [0],
    "sizes": [6],
    "round": {
        "task": {
            "target": "eight",
            "protected": ["zero", "one"],
            "ignored": ["two", "three", "four", "five", "six", "seven", "nine"],
        },
        "data": {
            "source": {"kind": "digits"},
            "roles": {"dev": 0.1, "sealed": 0.0, "test": 0.1},
            "target_images": 12,
        },
        "model": {"architecture": "tiny", "head_rank": 2},
        "train": {"steps": 4, "batch": 8, "images_per_task": 2, "learning_rate": 1e-3, "device": "cpu"},
        "evaluate": {"every": 4},
    },
    "methods": [{"name": "holdfast"}, {"name": "der"}],
}


def test_the_targets_gradient_in_parts_is_that_of_the_whole() -> None:
    data = small_data()
    model = small_model(data)
    model.begin_round(2, seed=1)
    for parameter in model.heads.parameters():
        torch.nn.init.normal_(parameter)
    parts = target_parts(model, data, 0.2, 100, batch=3)
    found = list(parts())
    assert len(found) == 2 + 2  # four target pairs and five negatives, three at a time

    everything = pairs_of(model, data)
    negatives = [item for item in everything if item.kind == "negative"]
    targets = [item for item in everything if item.kind == "target"]
    head = len(model.classes) - 1
    captions = [model.text_features(model.towers.tokenize([text]), head)[0] for text in data.target.texts]
    own = [
        type(target)(target.image, text, target.kind, target.identity)
        for target, text in zip(targets, captions, strict=True)
    ]
    naive = torch.stack([naive_contrastive(item, [item, *negatives], 0.2) for item in own]).mean()
    torch.testing.assert_close(torch.stack(found).sum().detach(), naive.detach(), rtol=1e-6, atol=0)
    added = sum((gradient(part, model) for part in parts()), torch.zeros(()))
    torch.testing.assert_close(added, gradient(naive, model), rtol=1e-7, atol=1e-10)


def test_a_method_with_a_linear_head_is_judged_by_its_cross_entropy() -> None:
    data = small_data()
    model = small_model(data)
    model.use_linear()
    total = torch.stack(list(target_parts(model, data, 0.2, 100, batch=3)())).sum()
    images = torch.cat([(data.target.images(np.array([i])).double() / 255 - 0.5) / 0.25 for i in range(4)])
    expected = -model.logits(images).log_softmax(dim=1)[:, 3].mean()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    study = Study("small", parse(StudyConfig, VALUES, "STUDY.toml"), root, root / "STUDY.toml")
    jobs = {job.row: job for job in plan(study, root)}
    for job in jobs.values():
        assert attempt(job, "run").record.status == "done"
    return {row: job.folder for row, job in jobs.items()}


def test_a_run_before_and_after(runs: dict[str, Path]) -> None:
    start = diagnose_run(runs["holdfast"], at="start", images=6)
    assert start.tasks == ("zero", "one")
    np.testing.assert_allclose(start.h, 0, atol=1e-6)  # the run begins as the old model
    assert start.singular_value >= start.singular_value_without_heads > 0
    assert start.kkt.feasibility < 1e-6
    end = diagnose_run(runs["holdfast"], at="end", images=6)
    assert np.abs(end.h).max() > 1e-4
    assert "eight" in end.sentence()
    assert end.gram.shape == (3, 3)
    linear = diagnose_run(runs["der"], images=6, beta=10.0)
    assert linear.singular_value == linear.singular_value_without_heads


def test_the_command_prints_a_sentence_and_writes_everything(runs: dict[str, Path]) -> None:
    import typer

    from holdfast.cli.diagnose import diagnose

    app = typer.Typer()
    app.command()(diagnose)
    shown = CliRunner().invoke(app, [str(runs["holdfast"]), "--at", "start", "--images", "6"])
    assert shown.exit_code == 0, shown.output
    assert "smallest singular value" in shown.output
    assert "KKT residuals: stationarity" in shown.output
    assert max(map(len, shown.stdout.splitlines())) <= 80
    written = json.loads((runs["holdfast"] / "diagnosis-start.json").read_text())
    assert len(written["gram"]) == 3
    assert written["in_words"]


def test_a_run_without_a_model_says_so(runs: dict[str, Path], tmp_path: Path) -> None:
    for name in ("round.json", "run.json"):
        (tmp_path / name).write_text((runs["holdfast"] / name).read_text())
    with pytest.raises(UserError, match="has no model yet"):
        diagnose_run(tmp_path)
