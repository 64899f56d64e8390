"""The retention penalty against its naive form, and in a loop that is not ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from holdfast import RetentionPenalty


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    new = torch.rand(12, generator=random, dtype=torch.float64).requires_grad_()
    old = torch.rand(12, generator=random, dtype=torch.float64)
    tasks = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3])
    return new, old, tasks


def test_gradient_is_that_of_the_quadratic_penalty_when_u_is_h() -> None:
    new, old, tasks = problem()
    beta = 37.0
    penalty = RetentionPenalty(4, beta, gamma=1.0).double()
    found = penalty(new, old, tasks)
    h = torch.stack([(new - old)[tasks == k].mean() for k in range(4)])
    naive = beta / (2 * 4) * h.clamp(min=0).square().sum()
    assert (h > 0).any()
    assert (h < 0).any()
    torch.testing.assert_close(torch.autograd.grad(found.penalty, new)[0], torch.autograd.grad(naive, new)[0])
    torch.testing.assert_close(found.h, h.detach())
    torch.testing.assert_close(found.weight, beta * h.detach().clamp(min=0))


def test_slack_gradient_is_that_of_the_naive_form() -> None:
    new, old, tasks = problem(3)
    sizes = torch.tensor([3.0, 4.0, 2.0, 3.0], dtype=torch.float64)
    penalty = RetentionPenalty(4, 10.0, gamma=1.0, tightening=2.0, task_sizes=sizes).double()
    found = penalty(new, old, tasks)
    constraints = []
    for k in range(4):
        difference = (new - old)[tasks == k]
        constraints.append(difference.mean() + 2 * 1.6448536269514722 * difference.std(correction=0) / sizes[k].sqrt())
    naive = 10.0 / (2 * 4) * torch.stack(constraints).clamp(min=0).square().sum()
    torch.testing.assert_close(torch.autograd.grad(found.penalty, new)[0], torch.autograd.grad(naive, new)[0])


def test_slack_leaves_the_old_model_feasible() -> None:
    _, old, tasks = problem()
    same = old.clone().requires_grad_()
    penalty = RetentionPenalty(4, 10.0, tightening=2.0, task_sizes=torch.ones(4)).double()
    found = penalty(same, old, tasks)
    assert found.weight.tolist() == [0.0] * 4
    assert torch.autograd.grad(found.penalty, same)[0].abs().max() == 0


def test_tasks_that_are_not_sampled_keep_their_average_and_first_visits_start_at_h() -> None:
    penalty = RetentionPenalty(3, 1.0, gamma=0.5)
    zero = torch.zeros(1)
    penalty(torch.tensor([1.0], requires_grad=True), zero, torch.tensor([0]))
    found = penalty(torch.tensor([3.0, 5.0], requires_grad=True), torch.zeros(2), torch.tensor([0, 2]))
    assert found.u.tolist() == [2.0, 0.0, 5.0]  # task 2, first seen beside task 0, starts at its own h
    assert penalty.u.visited.tolist() == [True, False, True]
    assert torch.isnan(found.h[1])
    assert found.weight.tolist() == [2.0, 0.0, 5.0]


def test_gradient_averages_over_sampled_tasks_only() -> None:
    new = torch.tensor([1.0, 2.0], requires_grad=True)
    found = RetentionPenalty(100, beta=1.0)(new, torch.zeros(2), torch.tensor([7, 9]))
    assert torch.autograd.grad(found.penalty, new)[0].tolist() == [0.5, 1.0]  # 1/|B_c| · beta u_k, |B_c| = 2


def test_cosine_beta_rises_from_zero_to_beta() -> None:
    penalty = RetentionPenalty(1, beta=8.0, schedule="cosine", total_steps=4)
    new, first = torch.ones(1, requires_grad=True), torch.zeros(1, dtype=torch.long)
    weights = [float(penalty(new, torch.zeros(1), first).weight[0]) for _ in range(6)]
    assert weights == pytest.approx([0.0, 8 * (1 - 2**-0.5) / 2, 4.0, 8 * (1 + 2**-0.5) / 2, 8.0, 8.0], abs=1e-5)


def test_a_step_that_is_not_finite_changes_no_state() -> None:
    penalty = RetentionPenalty(2, beta=1.0)
    penalty(torch.tensor([float("nan")], requires_grad=True), torch.zeros(1), torch.tensor([0]))
    assert penalty.u.visited.tolist() == [False, False]
    assert int(penalty.steps) == 0


def test_state_is_saved_and_restored() -> None:
    new, old, tasks = problem()
    first = RetentionPenalty(4, 5.0, gamma=0.3).double()
    first(new, old, tasks)
    second = RetentionPenalty(4, 5.0, gamma=0.3).double()
    second.load_state_dict(first.state_dict())
    again, old, tasks = problem(1)
    torch.testing.assert_close(first(again, old, tasks).u, second(again, old, tasks).u, rtol=0, atol=0)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one protected task"):
        RetentionPenalty(0)
    with pytest.raises(ValueError, match="total_steps"):
        RetentionPenalty(1, schedule="cosine")
    with pytest.raises(ValueError, match="task_sizes"):
        RetentionPenalty(1, tightening=1.0)


GOOD: dict[str, Tensor] = {
    "new_losses": torch.ones(3, requires_grad=True),
    "old_losses": torch.zeros(3),
    "tasks": torch.tensor([0, 1, 1]),
}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"new_losses": torch.ones(3, requires_grad=True).mean()}, "per-example losses .*got a scalar"),
        ({"old_losses": torch.tensor(0.0)}, "old_losses must be per-example losses .*got a scalar"),
        ({"new_losses": torch.ones(3, 2, requires_grad=True)}, r"got a tensor of shape \[3, 2\]"),
        ({"old_losses": torch.zeros(3, dtype=torch.long)}, "old_losses must be floating point"),
        ({"old_losses": torch.zeros(2)}, "3 new losses, 2 old losses"),
        ({"tasks": torch.tensor([0, 1])}, "must be of the same examples"),
        ({"tasks": torch.tensor([[0], [1], [1]])}, r"task ids of shape \[3, 1\]"),
        ({"tasks": torch.tensor([0, 1, 2])}, "task ids must lie in 0 … 1, got 2"),
        ({"tasks": torch.tensor([0, -1, 1])}, "task ids must lie in 0 … 1, got -1"),
        ({"tasks": torch.tensor([0.0, 1.0, 1.0])}, "task ids must be integers"),
        ({"tasks": torch.tensor([True, False, True])}, "task ids must be integers"),
        ({"new_losses": torch.ones(3)}, "new_losses carry no gradient"),
        ({"old_losses": torch.tensor([0.0, float("nan"), 0.0])}, "old_losses must be finite"),
        ({"old_losses": torch.tensor([0.0, float("inf"), 0.0])}, "old_losses must be finite"),
    ],
)
def test_misuse_gets_a_sentence_and_changes_no_state(
    wrong: dict[str, Tensor], sentence: str, tried: Callable[..., None]
) -> None:
    tried("bad inputs")
    penalty = RetentionPenalty(2, beta=1.0)
    with pytest.raises(ValueError, match=sentence):
        penalty(**GOOD | wrong)
    assert int(penalty.steps) == 0
    assert not penalty.u.visited.any()


def test_losses_without_a_gradient_are_fine_where_nothing_is_trained() -> None:
    penalty = RetentionPenalty(2, beta=1.0)
    without = GOOD | {"new_losses": torch.ones(3)}
    with torch.no_grad():
        assert penalty(**without).h.tolist() == [1.0, 1.0]
    assert penalty.eval()(**without).h.tolist() == [1.0, 1.0]


def test_keeps_tasks_of_a_model_that_is_not_clip() -> None:
    """A regression net learns a new region while two old ones must not get worse: the README's loop."""
    torch.manual_seed(0)
    inputs = torch.linspace(-3, 3, 90)[:, None]
    values, regions = torch.sin(2 * inputs), torch.arange(90) // 30
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    known = regions < 2
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(400):
        optimizer.zero_grad()
        (model(inputs[known]) - values[known]).square().mean().backward()
        optimizer.step()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    old_losses = (model(inputs) - values).square().squeeze(1).detach()

    def develop(beta: float) -> tuple[float, Tensor]:
        model.load_state_dict(start)
        penalty = RetentionPenalty(num_tasks=2, beta=beta)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(600):
            losses = (model(inputs) - values).square().squeeze(1)
            kept = penalty(losses[known], old_losses[known], regions[known])
            optimizer.zero_grad()
            (losses[~known].mean() + kept.penalty).backward()
            optimizer.step()
        change = (model(inputs) - values).square().squeeze(1).detach() - old_losses
        return float(change[~known].mean()), torch.stack([change[regions == k].mean() for k in range(2)])

    gain, drop = develop(beta=1e4)
    _, free_drop = develop(beta=0.0)
    assert gain < -0.3
    assert drop.max() < 5e-3
    assert free_drop.max() > 20 * max(float(drop.max()), 1e-3)
