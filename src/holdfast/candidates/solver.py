"""The two solvers of a refit: L-BFGS and, on a GPU where the logit is linear in what it sees, Newton's method.

L-BFGS is PyTorch's, without its compiler: whoever makes a PyTorch optimizer imports ``torch._dynamo``, for the sake of
steps that are compiled: on a CPU seven seconds, beside a fit that takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

_NEWTON = 100  # steps at most; about ten are taken
_SMALL = 1 << 22  # entries of a matrix that one thread multiplies with as fast as several, or faster


class _PlainLBFGS(LBFGS):
    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        wrapped = Optimizer.add_param_group
        getattr(wrapped, "__wrapped__", wrapped)(self, param_group)


def minimise(unknown: Tensor, loss: Callable[[], Tensor], *, steps: int = 200) -> None:
    """Move ``unknown`` to where a smooth convex ``loss`` of it is least, in so many steps at most."""

    def closure() -> Tensor:
        unknown.grad = None
        value = loss()
        value.backward()
        return value

    _lbfgs(unknown, closure, steps)


def minimise_linear(
    unknown: Tensor, columns: Tensor, ridge: Tensor, loss: Callable[[Tensor], Tensor], *, steps: int = 200
) -> None:
    """The same for ``loss(columns @ unknown) + (ridge * unknown²).sum()``, with [n, width] columns.

    Nearly all time goes into two products with the columns. Each is made with the layout that is fast for it.
    """
    across = columns.T.contiguous()

    def closure() -> Tensor:
        with torch.no_grad():
            reached = columns @ unknown
        reached.requires_grad_()
        with torch.enable_grad():
            value = loss(reached)
            value.backward()
        assert reached.grad is not None
        with torch.no_grad():
            unknown.grad = across @ reached.grad + 2 * ridge * unknown
            return value.detach() + (ridge * unknown.square()).sum()

    with _threads_for(columns):
        _lbfgs(unknown, closure, steps)


@contextmanager
def _threads_for(columns: Tensor) -> Generator[None]:
    """One thread where the matrix is small.

    Thousands of products take less than a millisecond each. Several threads wait for one another after every one of
    them, and where the machine has other work that is nearly all of the time.
    """
    usual = torch.get_num_threads()
    if columns.numel() > _SMALL or usual == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def _lbfgs(unknown: Tensor, closure: Callable[[], Tensor], steps: int) -> None:
    optimizer = _PlainLBFGS(
        [unknown], max_iter=steps, history_size=20, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )
    optimizer.step(closure)  # pyright: ignore[reportArgumentType] — its stubs ask for a float


def logistic(design: Tensor, offset: Tensor, sign: Tensor, weight: Tensor, ridge: Tensor, start: Tensor) -> Tensor:
    """u that minimises sum_i weight_i log(1 + exp(-sign_i (offset_i + design_i · u))) + sum_j ridge_j u_j², by Newton.

    Some ten products of the design matrix with itself, in place of some forty passes over it in which L-BFGS asks for
    a number several times, and waits for the GPU. Steps that overshoot are halved.
    """

    def margins(u: Tensor) -> Tensor:
        return sign * (offset + design @ u)

    def loss(u: Tensor, margin: Tensor) -> float:
        return float((weight * functional.softplus(-margin)).sum() + (ridge * u.square()).sum())

    unknown = start.clone()
    margin = margins(unknown)
    value = loss(unknown, margin)
    for _ in range(_NEWTON):
        wrong = torch.sigmoid(-margin)
        gradient = 2 * ridge * unknown - design.T @ (weight * sign * wrong)
        curved = design * (weight * wrong * (1 - wrong))[:, None]
        hessian = design.T @ curved + torch.diag(2 * ridge)
        hessian.diagonal().add_(1e-12 * hessian.diagonal().amax())  # an entry without a ridge may be told by no picture
        step = torch.linalg.solve(hessian, gradient)
        length, expected = 1.0, float(gradient @ step)
        while length > 1e-6:
            tried = unknown - length * step
            margin = margins(tried)
            reached = loss(tried, margin)
            if reached <= value - 1e-4 * length * expected:
                break
            length /= 2
        else:
            return unknown  # at the bottom, up to rounding
        unknown, fell, value = tried, value - reached, reached
        if fell < 1e-13 * max(1.0, abs(value)):
            break
    return unknown
