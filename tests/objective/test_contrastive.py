"""The estimator against the naive loss, in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.objective.contrastive import GlobalContrastive
from holdfast.objective.estimators import MovingAverage, commit_all

TRUE = torch.tensor(True)


def naive(images: Tensor, texts: Tensor, other_images: Tensor, other_texts: Tensor, tau: float) -> Tensor:
    """F as it is written: explicit sets, explicit sums."""
    total = torch.zeros((), dtype=images.dtype)
    for i in range(len(images)):
        own = images[i] @ texts[i]
        to_text = [torch.exp((images[i] @ text - own) / tau) for text in (texts[i], *other_texts)]
        to_image = [torch.exp((image @ texts[i] - own) / tau) for image in (images[i], *other_images)]
        total = total + tau * torch.log(sum(to_text) / len(to_text)) + tau * torch.log(sum(to_image) / len(to_image))
    return total / len(images)


def features(count: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, 6, generator=random, dtype=dtype), dim=1).requires_grad_()


@pytest.mark.parametrize("tau", [0.5, 0.05])
def test_full_batch_without_averaging_is_the_loss_and_its_gradient(tau: float) -> None:
    inputs = [features(count, seed) for seed, count in enumerate((5, 5, 8, 8))]
    expected = naive(*inputs, tau)
    contrast = GlobalContrastive(5, tau, gamma=1.0).double()
    found = contrast(*inputs, torch.arange(5), 5, set_size=9)
    torch.testing.assert_close(found.objective, expected.detach(), rtol=1e-12, atol=0)
    for item, other in zip(
        torch.autograd.grad(found.surrogate, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(item, other, rtol=1e-10, atol=1e-12)


def test_gradient_divides_by_the_average_that_was_updated_first() -> None:
    tau, gamma = 0.2, 0.3
    inputs = [features(count, seed) for seed, count in enumerate((3, 3, 4, 4))]
    contrast = GlobalContrastive(3, tau, gamma).double()
    earlier = [features(count, seed + 10) for seed, count in enumerate((3, 3, 4, 4))]
    contrast(*earlier, torch.arange(3), 3, set_size=21)
    commit_all(contrast, TRUE)
    found = contrast(*inputs, torch.arange(3), 3, set_size=21)

    def estimates(images: Tensor, texts: Tensor, other_images: Tensor, other_texts: Tensor) -> tuple[Tensor, Tensor]:
        own = (images * texts).sum(1, keepdim=True)
        first = 1 / 21 + 20 / 21 * ((images @ other_texts.T - own) / tau).exp().mean(1)
        second = 1 / 21 + 20 / 21 * ((texts @ other_images.T - own) / tau).exp().mean(1)
        return first, second

    before, now = estimates(*earlier), estimates(*inputs)
    averages = [(1 - gamma) * b.detach() + gamma * n.detach() for b, n in zip(before, now, strict=True)]
    expected = tau / 3 * sum((n / u).sum() for n, u in zip(now, averages, strict=True))
    for item, other in zip(
        torch.autograd.grad(found.surrogate, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(item, other, rtol=1e-10, atol=1e-13)


def test_extreme_similarities_at_a_small_temperature_stay_finite() -> None:
    first = F.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), dim=1).requires_grad_()
    contrast = GlobalContrastive(2, 0.01, 0.8)
    for _ in range(3):  # s_ij - s_ii = 2: the exponent is 200, exp(200) is far beyond float32
        found = contrast(first, -first, -first, first, torch.arange(2), 2, set_size=1000)
        commit_all(contrast, TRUE)
        (gradient,) = torch.autograd.grad(found.surrogate, first)
        assert torch.isfinite(found.surrogate)
        assert torch.isfinite(gradient).all()
    # both directions: one of two negatives at s_ij - s_ii = 2, so log ĝ = 200 + log(½ · 999/1000)
    assert found.objective == pytest.approx(2 * 0.01 * (200 + math.log(1 / 2 * 999 / 1000)), rel=1e-3)


def test_masked_contrast_set_equals_the_subset() -> None:
    images, texts, other_images, other_texts = (features(count, seed) for seed, count in enumerate((2, 2, 6, 6)))
    allowed = torch.tensor([[True, False, True, True, False, False]] * 2)
    masked = GlobalContrastive(2, 0.1, 1.0).double()(
        images, texts, other_images, other_texts, torch.arange(2), 2, set_size=50, allowed=allowed
    )
    subset = GlobalContrastive(2, 0.1, 1.0).double()(
        images, texts, other_images[allowed[0]], other_texts[allowed[0]], torch.arange(2), 2, set_size=50
    )
    torch.testing.assert_close(masked.surrogate, subset.surrogate, rtol=1e-12, atol=0)


def test_first_visit_is_a_flag_not_a_zero() -> None:
    average = MovingAverage(3, 0.5)
    average.propose(torch.tensor([0]), torch.tensor([0.0]), 1)
    average.commit(TRUE)
    assert average.visited.tolist() == [True, False, False]
    average.propose(torch.tensor([0, 1]), torch.tensor([1.0, 1.0]), 2)
    average.commit(TRUE)
    assert average.value.tolist() == [0.5, 1.0, 0.0]  # index 0 was visited with value 0: it is averaged


def test_what_is_not_finite_is_not_committed() -> None:
    average = MovingAverage(2, 0.5)
    average.propose(torch.tensor([0]), torch.tensor([3.0]), 1)
    average.commit(torch.tensor(False))
    assert average.visited.tolist() == [False, False]
    assert average.value.tolist() == [0.0, 0.0]


def test_log_average_equals_plain_average() -> None:
    plain, log = MovingAverage(1, 0.3).double(), MovingAverage(1, 0.3, log=True).double()
    for value in (2.0, 0.1, 5.0, 1e-6):
        estimate = torch.tensor([value], dtype=torch.float64)
        plain.propose(torch.tensor([0]), estimate, 1)
        log.propose(torch.tensor([0]), estimate.log(), 1)
        plain.commit(TRUE)
        log.commit(TRUE)
        torch.testing.assert_close(log.value.exp(), plain.value, rtol=1e-12, atol=0)
