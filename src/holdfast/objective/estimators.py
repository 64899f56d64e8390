"""Moving averages as buffers: u is part of the algorithm's state, so it is part of the module's.

An update has two halves. :meth:`MovingAverage.propose` returns the updated averages of the indices in a batch and
remembers them; :meth:`MovingAverage.commit` writes them once the step has proved finite. On several ranks every rank
gathers what all of them saw and makes the same update.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from holdfast.runtime import gather


class Deferred(nn.Module):
    """A module with an update that waits until the step has proved finite."""

    def commit(self, finite: Tensor) -> None:
        """Make the update where ``finite`` (a boolean scalar on the device: no host synchronisation) is true."""
        raise NotImplementedError


def commit_all(module: nn.Module, finite: Tensor) -> None:
    """Commit every deferred update inside a module."""
    for part in module.modules():
        if isinstance(part, Deferred):
            part.commit(finite)


class MovingAverage(Deferred):
    """u_i <- (1-gamma) u_i + gamma ĝ_i for the indices in a batch; the first visit of an index sets u_i = ĝ_i.

    "Visited" is a flag of its own, never "the value is 0". With ``log=True`` values and estimates are logarithms and
    the update is made with logaddexp: at a temperature of 0.01 the exponent reaches 200, where float32 overflows.
    """

    value: Tensor
    visited: Tensor

    def __init__(self, size: int, gamma: float, *, log: bool = False) -> None:
        super().__init__()
        self.gamma, self.log = gamma, log
        self.register_buffer("value", torch.zeros(size))
        self.register_buffer("visited", torch.zeros(size, dtype=torch.bool))
        self._pending: tuple[Tensor, Tensor, Tensor] | None = None  # index, new value, becomes visited

    def propose(self, index: Tensor, estimate: Tensor, total: int) -> Tensor:
        """Updated averages of ``index`` [n], given this step's estimates [n]; an index occurs once over all ranks.

        ``total`` is n over all ranks. The update is remembered for :meth:`commit`.
        """
        new = torch.where(self.visited[index], self._mix(self.value[index], estimate), estimate.detach())
        new = new.to(self.value.dtype)
        everywhere = gather(index, total)
        self._pending = (everywhere, gather(new, total), torch.ones_like(everywhere, dtype=torch.bool))
        return new

    def propose_everywhere(self, estimate: Tensor, present: Tensor) -> Tensor:
        """Updated averages of all indices, where every rank holds the same estimates [size]; absent ones stay."""
        updated = torch.where(self.visited, self._mix(self.value, estimate), estimate.detach()).to(self.value.dtype)
        new = torch.where(present, updated, self.value)
        index = torch.arange(len(present), device=present.device)
        self._pending = (index, new, present)
        return new

    def _mix(self, old: Tensor, estimate: Tensor) -> Tensor:
        estimate = estimate.detach().to(old.dtype)
        if not self.log:
            return torch.lerp(old, estimate, self.gamma)
        keep = math.log1p(-self.gamma) if self.gamma < 1 else -math.inf
        return torch.logaddexp(old + keep, estimate + math.log(self.gamma))

    def commit(self, finite: Tensor) -> None:
        """Write the proposed averages where the step was finite."""
        if self._pending is None:
            return
        index, new, present = self._pending
        self.value[index] = torch.where(finite, new, self.value[index])
        self.visited[index] = self.visited[index] | (present & finite)
        self._pending = None
