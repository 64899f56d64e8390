"""Diagnostics against dense float64 versions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional

from holdfast.data.round import LabelledSet
from holdfast.errors import UserError
from holdfast.evaluate import diagnostics
from holdfast.evaluate.diagnostics import (
    LossParts,
    assumption4_ratio,
    class_loss,
    conflict,
    cosines,
    diagnose,
    gradient_grams,
    kkt_residuals,
    parameter_groups,
    smallest_singular_value,
)
from holdfast.model.classifier import Classifier
from holdfast.model.folder import start_model

M = 5
NAMES = ("clear", "overcast", "snowy", "rainy", "tunnel", "foggy")


@pytest.fixture
def problem() -> tuple[list[LossParts], dict[str, list[nn.Parameter]], list[Tensor]]:
    """A small network, a loss for the target and one for each of M tasks, and their dense gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, M + 1), nn.Linear(3, 3)).double()
    data = torch.randn(M + 1, 12, 7, dtype=torch.float64)

    def loss(k: int) -> LossParts:
        def parts() -> Iterator[Tensor]:
            for piece in data[k].split(5):
                scores = model[2](model[1](model[0](piece)))
                yield functional.cross_entropy(scores, torch.full((len(piece),), k), reduction="sum") / 12

        return parts

    # The last layer is used by no loss: its gradient is 0, not missing.
    groups = {"first": list(model[0].parameters()), "rest": [*model[2].parameters(), *model[3].parameters()]}
    dense = []
    for k in range(M + 1):
        model.zero_grad()
        functional.cross_entropy(model[2](model[1](model[0](data[k]))), torch.full((12,), k)).backward()
        dense.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for g in groups.values() for p in g])
    rows = [torch.cat([item.flatten() for item in gradient]) for gradient in dense]
    return [loss(k) for k in range(M + 1)], groups, rows


@pytest.mark.parametrize("held", [1, 2, 4, 100])
def test_grams_of_any_block_size_equal_the_dense_one(
    problem: tuple[list[LossParts], dict[str, list[nn.Parameter]], list[Tensor]],
    held: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses, groups, rows = problem
    monkeypatch.setattr(diagnostics, "_COLUMNS", 10)
    size = rows[0].numel() * 8
    calls = 0

    def counted(loss: LossParts) -> LossParts:
        def parts() -> Iterator[Tensor]:
            nonlocal calls
            calls += 1
            yield from loss()

        return parts

    found = gradient_grams([counted(loss) for loss in losses], groups, memory_bytes=size * (held + 1))
    stacked = torch.stack(rows)
    np.testing.assert_allclose(found.gram(), (stacked @ stacked.T).numpy(), rtol=1e-12, atol=1e-14)
    first = stacked[:, : sum(p.numel() for p in groups["first"])]
    np.testing.assert_allclose(found.gram("first"), (first @ first.T).numpy(), rtol=1e-12, atol=1e-14)
    block = min(held, M + 1)
    assert calls == sum(M + 1 - start for start in range(0, M + 1, block))
    singular = float(torch.linalg.svdvals(stacked[1:])[-1])
    assert smallest_singular_value(found.gram()[1:, 1:]) == pytest.approx(singular, rel=1e-6)


def test_memory_is_that_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tasks, room for three gradients: never more than that many are alive."""
    weight = nn.Parameter(torch.randn(1000))
    alive: list[int] = []
    products = diagnostics._products

    def watched(held: list[Tensor], *rest: object) -> object:
        alive.append(len(held))
        return products(held, *rest)  # pyright: ignore

    monkeypatch.setattr(diagnostics, "_products", watched)
    losses: list[LossParts] = [lambda k=k: [(weight[k : k + 50] ** 2).sum()] for k in range(40)]
    found = gradient_grams(losses, {"all": [weight]}, memory_bytes=4000 * 3)
    assert max(alive) == 2
    expected = float(4 * (weight.detach()[20:50] ** 2).sum())
    assert found.gram()[0, 20] == pytest.approx(expected, rel=1e-5)


def test_kkt_residuals_and_the_ratio_of_assumption_4() -> None:
    rng = np.random.default_rng(0)
    gradients, h = rng.normal(size=(M + 1, 30)), np.array([0.2, -0.1, 0.0, 0.05, -0.3])
    gram, beta = gradients @ gradients.T, 40.0
    found = kkt_residuals(gram, h, beta)
    expected = [beta * max(value, 0) / M for value in h]
    np.testing.assert_allclose(found.multipliers, expected)
    residual = gradients[0] + sum(expected[k] * gradients[k + 1] for k in range(M))
    assert found.stationarity == pytest.approx(np.linalg.norm(residual))
    assert found.relative_stationarity == pytest.approx(np.linalg.norm(residual) / np.linalg.norm(gradients[0]))
    assert found.feasibility == 0.2
    assert found.complementarity == pytest.approx(max(abs(expected[k] * h[k]) for k in range(M)))
    violation = np.maximum(h, 0)
    ratio = np.linalg.norm(violation @ gradients[1:]) / np.linalg.norm(violation)
    assert assumption4_ratio(gram[1:, 1:], h) == pytest.approx(ratio)
    assert assumption4_ratio(gram[1:, 1:], -np.abs(h)) is None


def test_a_kkt_point_has_no_residual() -> None:
    """min (x−2)² + (y−1)² subject to x <= 1: with penalty β the point and its multiplier are known."""
    beta = 100.0
    violation = 2 / (2 + beta)  # 2 (x − 2) + β (x − 1) = 0
    point = torch.tensor([1 + violation, 1.0], dtype=torch.float64, requires_grad=True)
    losses: list[LossParts] = [lambda: [(point[0] - 2) ** 2 + (point[1] - 1) ** 2], lambda: [point[0] - 1]]
    found = diagnose(
        losses[0], losses[1:], [0.0], target="t", tasks=["x"], shared=[point], beta=beta, memory_bytes=1 << 20
    )
    assert found.kkt.stationarity == pytest.approx(0, abs=1e-7)
    assert found.kkt.multipliers[0] == pytest.approx(2, rel=0.03)
    assert found.kkt.feasibility == pytest.approx(violation)
    assert found.conflict.free_share == pytest.approx(0, abs=1e-12)
    assert found.sentence().startswith("'x' stands in the way of 't': keeping it takes back 100 %")


@pytest.mark.parametrize("seed", range(4))
def test_the_conflict_against_a_general_solver(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gradients = rng.normal(size=(M + 1, 8))
    gradients[3] = gradients[2] * 0.7 + 1e-9 * gradients[3]  # nearly dependent tasks
    gram = gradients @ gradients.T

    def squared(v: np.ndarray) -> float:
        return float(np.sum((gradients[0] + v @ gradients[1:]) ** 2))

    best = minimize(squared, np.ones(M), bounds=[(0, None)] * M, tol=1e-14, options={"maxiter": 10_000})
    found = conflict(gram, NAMES[:M])
    assert found.free_share == pytest.approx(best.fun / gram[0, 0], abs=1e-6)
    assert sum(obstacle.taken_back for obstacle in found.obstacles) + found.free_share == pytest.approx(1)
    assert [obstacle.taken_back for obstacle in found.obstacles] == sorted(
        (obstacle.taken_back for obstacle in found.obstacles), reverse=True
    )
    for obstacle in found.obstacles:
        k = NAMES.index(obstacle.task) + 1
        cosine = gradients[0] @ gradients[k] / np.linalg.norm(gradients[0]) / np.linalg.norm(gradients[k])
        assert obstacle.cosine == pytest.approx(cosine)


def test_words_for_a_way_that_is_open_and_one_that_is_shut() -> None:
    gradients = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.5, 0.0, 1.0]])
    open_way = conflict(gradients @ gradients.T, ["clear", "snowy"])
    assert open_way.free_share == 1
    assert open_way.sentence("foggy").startswith("No protected task stands in the way of 'foggy'")
    gradients[1] = -gradients[0] * 3
    shut = conflict(gradients @ gradients.T, ["clear", "snowy"])
    assert shut.free_share == pytest.approx(0, abs=1e-12)
    assert [obstacle.task for obstacle in shut.obstacles] == ["clear"]
    assert "'clear' stands in the way of 'foggy'" in shut.sentence("foggy")
    assert "cosine -1.00" in shut.sentence("foggy")
    vanished = np.zeros((3, 3))
    assert conflict(vanished, ["clear", "snowy"]).obstacles == ()
    assert not cosines(vanished).any()


class Noise:
    size = 32

    def __init__(self, count: int) -> None:
        self.values = torch.randint(0, 256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(1)).to(
            torch.uint8
        )

    def __len__(self) -> int:
        return len(self.values)

    def read(self, rows: np.ndarray) -> Tensor:
        return self.values[torch.from_numpy(rows)]


@pytest.fixture(scope="module")
def model() -> Classifier:
    classifier = start_model("tiny", None, NAMES, [(f"the weather is {name}",) for name in NAMES], 0.05, seed=4)
    classifier.begin_round(rank=4, seed=0)
    return classifier


def test_diagnosis_of_a_classifier(model: Classifier) -> None:
    labels = np.arange(36) % len(NAMES)
    examples = LabelledSet(Noise(36), np.arange(36), labels, tuple(str(i) for i in range(36)))
    shared, heads = parameter_groups(model)
    losses = [class_loss(model, examples, label, batch_size=4) for label in range(len(NAMES))]
    old = [float(sum(part.detach() for part in loss())) - 0.01 * k for k, loss in enumerate(losses)]
    found = diagnose(
        losses[-1],
        losses[:-1],
        old[:-1],
        target="foggy",
        tasks=NAMES[:-1],
        shared=shared,
        heads=heads,
        beta=100,
        memory_bytes=40 << 20,
    )
    rows = []
    for label in range(len(NAMES)):
        images = model.preprocess.normalise(examples.images(examples.of_class(label)))
        loss = functional.cross_entropy(model.logits(images), torch.full((6,), label))
        assert float(loss.detach()) == pytest.approx(float(sum(part.detach() for part in losses[label]())), rel=1e-5)
        rows.append(torch.cat([item.flatten().double() for item in torch.autograd.grad(loss, [*shared, *heads])]))
    stacked = torch.stack([rows[-1], *rows[:-1]])
    np.testing.assert_allclose(found.gram, (stacked @ stacked.T).numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.h, [0.01 * k for k in range(M)], atol=1e-5)
    assert found.singular_value == pytest.approx(float(torch.linalg.svdvals(stacked[1:])[-1]), rel=1e-3)
    alone = stacked[1:, : sum(p.numel() for p in shared)]
    assert found.singular_value_without_heads == pytest.approx(float(torch.linalg.svdvals(alone)[-1]), rel=1e-3)
    assert found.singular_value > found.singular_value_without_heads
    values = found.to_json()
    assert values["in_words"] == found.sentence()
    assert np.asarray(values["cosines"]).shape == (M + 1, M + 1)


def test_a_class_without_examples(model: Classifier) -> None:
    examples = LabelledSet(Noise(2), np.arange(2), np.zeros(2, dtype=np.int64), ("a", "b"))
    with pytest.raises(UserError, match="no examples of 'overcast'"):
        class_loss(model, examples, 1)


def test_nothing_to_diagnose() -> None:
    with pytest.raises(ValueError, match="at least one"):
        gradient_grams([], {"all": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="one old loss"):
        diagnose(list, [list], [], target="t", tasks=["a"], shared=[], beta=1)
