"""L-BFGS as PyTorch has it, without its compiler.

Whoever makes a PyTorch optimizer imports ``torch._dynamo``, for the sake of steps that are compiled: on a CPU seven
seconds, beside a fit that takes one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override


class _PlainLBFGS(LBFGS):
    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        wrapped = Optimizer.add_param_group
        getattr(wrapped, "__wrapped__", wrapped)(self, param_group)


def minimise(unknown: Tensor, loss: Callable[[], Tensor]) -> None:
    """Move ``unknown`` to where a smooth convex ``loss`` of it is least."""

    def closure() -> Tensor:
        unknown.grad = None
        value = loss()
        value.backward()
        return value

    optimizer = _PlainLBFGS(
        [unknown], max_iter=200, history_size=20, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )
    optimizer.step(closure)  # pyright: ignore[reportArgumentType] — its stubs ask for a float
