"""Choosing the model without spending the promise: a fixed sequence of candidates, tested until the first failure.

Candidates and their order are fixed on dev data. Each is tested on sealed data with every task at the full level; the
first failure ends the sequence, and the last that passed is shipped, else the old model. A bad model is shipped only if
the first bad candidate of the sequence passes, so no correction for their number is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.certify.claims import Counts

Candidate = TypeVar("Candidate")


@dataclass(frozen=True)
class SelectionResult(Generic[Candidate]):
    """Which candidate ships (None: keep the old model), and how far the sequence went."""

    shipped: Candidate | None
    index: int | None  # of the shipped candidate
    tested: int

    @property
    def passed(self) -> bool:
        """Whether anything passed."""
        return self.shipped is not None


def fixed_sequence(candidates: Sequence[Candidate], test: Callable[[Candidate], bool]) -> SelectionResult[Candidate]:
    """Test candidates in their order, stop at the first failure, ship the last that passed.

    ``test`` is called no further than the sequence goes: only candidates that it reaches predict sealed images.
    """
    shipped: Candidate | None = None
    index: int | None = None
    for place, candidate in enumerate(candidates):
        if not test(candidate):
            return SelectionResult(shipped, index, place + 1)
        shipped, index = candidate, place
    return SelectionResult(shipped, index, len(candidates))


def retained(
    counts: Sequence[Counts], margins: Mapping[str, float], level: float, target: Counts | None = None
) -> bool:
    """The one bit: every task Δ_k > -ε_k at ``level`` (intersection-union) and, where given, Δ_target > 0."""
    hypotheses = [(count, margins[count.task]) for count in counts] + ([(target, 0.0)] if target else [])
    return all(item.p_value(margin, level) <= level for item, margin in hypotheses)
