"""GEM's quadratic programme against its optimality conditions, a reference solver and known answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from holdfast.methods.gem import Gem, GemConfig, gram_matrix, task_weights
from tests.methods.small import prepared, small_data, small_model


def gradients(m: int, p: int, seed: int, *, dependent: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """g [p] and G [m, p]; with ``dependent`` the rows of G differ from a few of their sums by that much only."""
    generator = np.random.default_rng(seed)
    G = generator.normal(size=(m, p))
    if dependent:
        few = generator.normal(size=(3, p))
        G = generator.normal(size=(m, 3)) @ few + dependent * G
    g = -G.mean(axis=0) + 0.3 * generator.normal(size=p)
    return g, G


def solve(g: np.ndarray, G: np.ndarray, gamma: float) -> np.ndarray:
    return task_weights(gram_matrix(torch.from_numpy(g), torch.from_numpy(G)), gamma)


def objective(v: np.ndarray, g: np.ndarray, G: np.ndarray) -> float:
    return float(np.sum((G.T @ v) ** 2) / 2 + (G @ g) @ v)


def check_optimal(v: np.ndarray, g: np.ndarray, G: np.ndarray, gamma: float, tolerance: float) -> None:
    """KKT of min v'GG'v/2 + (Gg)'v over v >= gamma: slope >= 0, and 0 wherever v > gamma."""
    slope = G @ (G.T @ v + g)
    size = np.linalg.norm(G, axis=1).max() * (np.linalg.norm(g) + np.linalg.norm(G.T @ v))
    assert (v >= gamma).all()
    assert slope.min() >= -tolerance * size
    free = v > gamma + 1e-6 * np.abs(v).max()
    assert np.abs(slope[free]).max(initial=0) <= tolerance * size


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("m", "p", "seed"), [(1, 5, 0), (3, 10, 1), (8, 40, 2), (12, 6, 3)])
def test_it_agrees_with_a_reference_solver(m: int, p: int, seed: int, gamma: float) -> None:
    g, G = gradients(m, p, seed)
    v = solve(g, G, gamma)
    check_optimal(v, g, G, gamma, 1e-9)
    found = minimize(
        objective,
        np.full(m, gamma + 1.0),
        args=(g, G),
        jac=lambda v, g, G: G @ (G.T @ v + g),
        bounds=[(gamma, None)] * m,
        method="SLSQP",
        options={"maxiter": 1000, "ftol": 1e-14},
    )
    assert objective(v, g, G) <= found.fun + 1e-7 * max(1, abs(found.fun))
    np.testing.assert_allclose(g + G.T @ v, g + G.T @ found.x, atol=2e-4 * np.linalg.norm(g))


@pytest.mark.parametrize("dependent", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("m", [20, 364])
def test_hundreds_of_nearly_dependent_gradients(m: int, dependent: float) -> None:
    g, G = gradients(m, 500, seed=m, dependent=dependent)
    v = solve(g, G, 0.5)
    check_optimal(v, g, G, 0.5, 1e-6)


def test_identical_gradients_and_tasks_without_any() -> None:
    g, G = gradients(2, 30, 4)
    repeated = np.concatenate([np.repeat(G, 50, axis=0), np.zeros((10, 30))])
    v = solve(g, repeated, 0.0)
    check_optimal(v, g, repeated, 0.0, 1e-9)
    once = solve(g, G, 0.0)
    np.testing.assert_allclose(repeated.T @ v, G.T @ once, atol=1e-8)


@pytest.mark.parametrize("seed", range(20))
def test_hundreds_of_random_tasks(seed: int) -> None:
    g, G = gradients(300, 400, seed)
    check_optimal(solve(g, G, 0.5), g, G, 0.5, 1e-8)


def method(gamma: float) -> Gem:
    data = small_data()
    gem = Gem(small_model(data), GemConfig(gamma=gamma), 10)
    prepared(gem, data)
    return gem


def test_a_gradient_that_hurts_nobody_is_kept() -> None:
    G = torch.eye(3, 7, dtype=torch.float64)
    g = torch.tensor([0.0, 1.0, 2.0, -1.0, -1.0, 0.0, 3.0], dtype=torch.float64)
    assert method(1.0).adjust_gradients(g, G) is g


def test_one_violated_task_is_projected_away() -> None:
    """With one task and gamma = 0 the answer is the projection of g on the half-space G g >= 0."""
    generator = torch.Generator().manual_seed(0)
    G = torch.randn(1, 50, generator=generator, dtype=torch.float64)
    g = -G[0] + 0.1 * torch.randn(50, generator=generator, dtype=torch.float64)
    expected = g - (g @ G[0]) / (G[0] @ G[0]) * G[0]
    torch.testing.assert_close(method(0.0).adjust_gradients(g, G), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_task_is_hurt_by_the_adjusted_gradient(dtype: torch.dtype) -> None:
    g, G = gradients(40, 2000, 5)
    rows, own = torch.from_numpy(G).to(dtype), torch.from_numpy(g).to(dtype)
    assert (rows @ own).min() < 0
    adjusted = method(0.5).adjust_gradients(own, rows)
    assert adjusted.dtype == dtype
    scale = float(adjusted.norm() * rows.norm(dim=1).max())
    assert float((rows @ adjusted).min()) >= -1e-6 * scale


def test_the_gram_matrix_is_made_in_float64_and_in_pieces() -> None:
    generator = torch.Generator().manual_seed(1)
    G = torch.randn(5, 1000, generator=generator)
    g = torch.randn(1000, generator=generator)
    rows = torch.cat([G, g[None]]).double()
    np.testing.assert_allclose(gram_matrix(g, G, chunk=7), (rows @ rows.T).numpy(), rtol=1e-12)
