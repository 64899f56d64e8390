"""The loop: the same seed gives the same run, another seed another; what is not finite stops it; methods resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.artifacts import RunFolder
from holdfast.config import TrainConfig
from holdfast.data.loader import BatchSizes, Pool, RoundSampler, ViewSettings
from holdfast.data.round import RoundData
from holdfast.errors import TrainingError, UserError
from holdfast.files import read_jsonl
from holdfast.methods import build_method
from holdfast.methods.base import Method
from holdfast.methods.holdfast import HoldfastConfig
from holdfast.model.classifier import Classifier
from holdfast.model.openclip import load_towers
from holdfast.runtime import Runtime
from holdfast.train import checkpoint as checkpoints
from holdfast.train.loop import TrainSpec, train
from holdfast.train.optim import learning_rate_factor
from tests.helpers import made_up_round

CPU = Runtime(torch.device("cpu"))
SMALL: dict[str, Any] = {
    "steps": 6,
    "batch": 8,
    "images_per_task": 3,
    "learning_rate": 1e-3,
    "log_every": 2,
    "checkpoint_every": 2,
    "device": "cpu",
}


def ready(data: RoundData, seed: int = 0, steps: int = 6, **method: Any) -> Method:
    towers = load_towers("tiny", None, seed=1)
    old = Classifier(towers, data.tasks.classes, data.tasks.prompts, 0.05).frozen_copy()
    new = old.copy().requires_grad_(True)
    new.begin_round(4, seed)
    built = build_method(new, HoldfastConfig(form="published", **method), steps)
    built.prepare(old, data)
    return built


def plan(seed: int = 0, protected: str = "clean", **train_settings: Any) -> TrainSpec:
    config = TrainConfig(**{**SMALL, **train_settings})
    return TrainSpec(config, ViewSettings(True, protected, (0.7, 1.0), True), seed, "sha256:test", evaluate_every=3)


def weights(method: Method) -> torch.Tensor:
    return torch.cat([value.flatten().double() for value in method.state_dict().values()])


def test_same_seed_same_run_and_another_seed_another() -> None:
    data = made_up_round()
    results = []
    for seed in (0, 0, 1):
        method = ready(data)
        train(method, data, plan(seed), CPU)
        results.append(weights(method))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("views", "added"),
    [
        ("clean", {}),
        ("paired", {}),
        ("mismatched", {}),
        ("clean", {"distill_weight": 30.0, "distill_share": 0.5, "replay": 1.0}),
    ],
)
def test_a_run_stopped_at_a_checkpoint_and_resumed_ends_with_the_same_bits(
    tmp_path: Path, views: str, added: dict[str, Any]
) -> None:
    data = made_up_round()
    settings: dict[str, Any] = {"research": {"views": views}, **added}
    steps_seen: list[int] = []

    def evaluate(done: int, method: Method) -> dict[str, Any]:
        steps_seen.append(done)
        return {"sum": float(weights(method).sum())}

    whole, folder = ready(data, **settings), RunFolder.create(tmp_path / "whole")
    train(whole, data, plan(protected=views), CPU, folder, evaluate)

    class Stopped(Exception):  # noqa: N818
        pass

    def stop(done: int, method: Method) -> dict[str, Any]:
        raise Stopped

    parts = RunFolder.create(tmp_path / "parts")
    with pytest.raises(Stopped):
        train(ready(data, **settings), data, plan(protected=views), CPU, parts, stop)
    # a stray line after the checkpoint, as a killed process leaves it
    with parts.metrics.open("a") as file:
        file.write('{"step": 3, "half a li')
    resumed = ready(data, **settings)
    train(resumed, data, plan(protected=views), CPU, parts, evaluate)
    assert torch.equal(weights(whole), weights(resumed))

    def without_speed(path: Path) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        return [{key: value for key, value in record.items() if key != "images_per_second"} for record in records]

    assert without_speed(folder.metrics) == without_speed(parts.metrics)
    assert steps_seen == [3, 6, 3, 6]


def test_metrics_hold_what_is_promised(tmp_path: Path) -> None:
    data, folder = made_up_round(), RunFolder.create(tmp_path / "run")
    train(ready(data), data, plan(), CPU, folder)
    first = next(read_jsonl(folder.metrics))
    assert {"step", "objective", "learning_rate", "images_per_second", "h", "u", "weight", "gradient_share"} <= set(
        first
    )
    assert set(first["h"]) == set(data.tasks.protected)
    assert sum(first["gradient_share"].values()) == pytest.approx(1, abs=1e-6)


def test_a_loss_that_is_not_finite_names_step_part_and_batch_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    data, folder = made_up_round(), RunFolder.create(tmp_path / "run")
    method = ready(data)
    method.old_losses[:] = float("nan")  # type: ignore[operator]
    before = {name: value.clone() for name, value in method.model.state_dict().items()}
    with pytest.raises(TrainingError, match="step 0: retention") as caught:
        train(method, data, plan(), CPU, folder)
    assert "constraint images" in caught.value.found
    assert all(torch.equal(before[name], value) for name, value in method.model.state_dict().items())
    assert not any(bool(part.visited.any()) for part in method.modules() if hasattr(part, "visited"))


def test_a_checkpoint_of_another_round_or_cut_short_is_not_used(tmp_path: Path) -> None:
    data, folder = made_up_round(), RunFolder.create(tmp_path / "run")
    method = ready(data)
    train(method, data, plan(), CPU, folder)
    with pytest.raises(UserError, match="another round"):
        checkpoints.latest(folder.checkpoints, "sha256:other")
    newest = sorted(folder.checkpoints.iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    found = checkpoints.latest(folder.checkpoints, "sha256:test")
    assert found is not None
    assert found.step == 4  # the one before is whole
    with pytest.raises(UserError, match="cannot be read"):
        checkpoints.load(newest)


def test_a_round_starts_at_the_old_model_exactly() -> None:
    data = made_up_round()
    method = ready(data)
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(method.model.logits(images), method.old.logits(images))


def test_draws_are_a_function_of_seed_and_step_without_repeats() -> None:
    data = made_up_round()
    sizes = BatchSizes(target=4, negatives=5, tasks=2, per_task=3)
    first, second, other = (RoundSampler(data, sizes, seed) for seed in (7, 7, 8))
    later = first.draw(9)
    for step in range(9):
        second.draw(step)
    assert np.array_equal(later.protected, second.draw(9).protected)
    assert later.view_seed == second.draw(9).view_seed
    differs = [not np.array_equal(first.draw(step).protected, other.draw(step).protected) for step in range(5)]
    assert any(differs)
    for step in range(20):
        draw = first.draw(step)
        for positions in (draw.target, draw.negatives, draw.tasks, draw.protected):
            assert len(set(positions.tolist())) == len(positions)
        assert set(data.constraint.labels[draw.protected]) == set(draw.tasks)


def test_a_pool_visits_everything_in_an_epoch() -> None:
    pool = Pool(12, 4, "name")
    assert sorted(np.concatenate([pool.draw(step) for step in range(3)]).tolist()) == list(range(12))
    assert not np.array_equal(pool.draw(0), pool.draw(3))


def test_the_first_of_a_draw_are_a_random_sample_of_it() -> None:
    """A method that reads a share of a step's pairs reads the first of them, and every pair is as likely as another."""
    pool, epochs = Pool(7, 3, 0, "pairs"), 4000
    times = np.zeros(7)
    for step in range(2 * epochs):
        times[pool.draw(step)[:1]] += 1
    expected = 2 * epochs / 7
    assert abs(times - expected).max() < 5 * (expected * 6 / 7) ** 0.5
    within = np.array([np.argmax(pool.draw(2 * epoch)) for epoch in range(epochs)])  # where the largest stands
    assert abs(np.bincount(within, minlength=3) - epochs / 3).max() < 5 * (epochs * 2 / 9) ** 0.5


def test_an_empty_side_is_an_error_at_set_up_time() -> None:
    data = made_up_round(negatives=0)
    with pytest.raises(UserError, match="no negatives"):
        RoundSampler(data, BatchSizes(2, 2, None, 2), 0)
    empty = replace(data, target=replace(data.target, rows=data.target.rows[:0], texts=(), ids=()))
    with pytest.raises(UserError, match="no training pairs"):
        RoundSampler(empty, BatchSizes(2, 2, None, 2), 0)


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    config = TrainConfig(steps=10, warmup_steps=2)
    factors = [learning_rate_factor(config, step) for step in range(10)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors == sorted(factors[:2]) + sorted(factors[2:], reverse=True)
    assert learning_rate_factor(config, 10) == pytest.approx(0)
    assert learning_rate_factor(TrainConfig(steps=10, schedule="constant"), 9) == 1
