"""Algorithm 1 in its plain form against a problem whose KKT point is known in closed form."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from holdfast import RetentionPenalty
from holdfast.train.optim import PlainStep

# minimise ½‖w - a‖²  subject to  c_k·w - b_k <= 0, k = 1 … 4; the first three are active, the last is slack.
# Constraints push against each other (negative products), so that none is overshot into the inside, where the way back
# is slow: the objective's own pull is 1/beta of the penalty's.
A = torch.tensor([2.0, 1.5, 1.0], dtype=torch.float64)
C = torch.tensor([[1.0, 0.0, 0.0], [-0.3, 1.0, 0.0], [0.0, -0.2, 1.0], [-1.0, -1.0, 0.0]], dtype=torch.float64)
B = torch.tensor([0.7, 0.4, 0.3, 5.0], dtype=torch.float64)


def kkt_point() -> tuple[Tensor, Tensor]:
    """w* = a - C_A'λ with λ = (C_A C_A')^-1 (C_A a - b_A) for the active set A."""
    active = C[:3]
    multipliers = torch.linalg.solve(active @ active.T, active @ A - B[:3])
    point = A - active.T @ multipliers
    assert (multipliers > 0.1).all()
    assert C[3] @ point < B[3]
    return point, torch.cat([multipliers, torch.zeros(1, dtype=torch.float64)])


def run(beta: float, noise: float = 0.0, gamma: float = 1.0, steps: int = 400) -> tuple[Tensor, Tensor]:
    """Algorithm 1: moving averages of h, v <- (1-θ)v + θ(G_1+G_2), w <- w - ηv. Returns the later iterates' mean."""
    random = torch.Generator().manual_seed(0)
    w = nn.Parameter(A.clone())  # the objective's own optimum, where three constraints are violated
    penalty = RetentionPenalty(4, beta, gamma).double()
    optimizer = PlainStep([w], lr=0.1 / (1 + beta / 4), theta=0.5)  # overdamped: no swing into the slow inside
    tasks = torch.arange(4).repeat_interleave(2)
    tail = torch.zeros(3, dtype=torch.float64)
    for step in range(steps):
        losses = (C @ w)[tasks] + noise * torch.randn(8, generator=random, dtype=torch.float64)
        optimizer.zero_grad()
        (0.5 * (w - A).square().sum() + penalty(losses, B[tasks], tasks).penalty).backward()
        optimizer.step()
        if step >= steps // 2:
            tail += w.detach() / (steps - steps // 2)
    return tail, beta * (C @ tail - B).clamp(min=0) / 4


def test_error_falls_as_one_over_beta_and_multipliers_are_right() -> None:
    point, multipliers = kkt_point()
    found = {beta: run(beta) for beta in (400.0, 4000.0, 40000.0)}
    errors = [float((w - point).norm()) for w, _ in found.values()]
    for larger, smaller in itertools.pairwise(errors):
        assert 9 < larger / smaller < 11
    torch.testing.assert_close(found[4000.0][1], multipliers, rtol=0.01, atol=1e-9)


def test_limit_sits_where_the_theory_says() -> None:
    """With constant beta the limit has h_k = m λ_k / beta for the active constraints, and the last stays inactive."""
    _, multipliers = kkt_point()
    found, lambdas = run(4000.0)
    torch.testing.assert_close((C @ found - B)[:3], 4 * multipliers[:3] / 4000, rtol=0.01, atol=1e-9)
    assert lambdas[3] == 0


def test_minibatch_noise_is_averaged_out() -> None:
    """Noisy estimates of h, averaged by u: the iterates' mean comes to the same point."""
    exact, _ = run(400.0)
    found, lambdas = run(400.0, noise=0.005, gamma=0.2, steps=3000)
    assert (found - exact).norm() < 0.01
    assert (lambdas[:3] > 0).all()
    assert lambdas[3] == 0
