"""The e-process for one fixed pair of models and images that keep arriving: it may be looked at after every image.

With X_i = +1 (gained), -1 (lost) or 0, and H0: E X <= -ε given the past,

    E_n(λ) = prod over i <= n of (1 + λ (X_i + ε)),    0 <= λ < 1 / (1 - ε)

is a supermartingale that starts at 1, so P(some E_n >= 1/δ) <= δ (Ville). The best λ depends on the unknown rates; a
mean over a preset list of λ is again such a process, and loses little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

# The preset bets, as shares of the largest λ that keeps every factor positive.
SHARES = tuple(0.98 * 0.5**power for power in range(10))


@dataclass
class EProcess:
    """Evidence against "loses ``margin`` or more", image by image; a negative margin asks for a gain."""

    margin: float
    images: int = 0
    largest: float = 1.0
    _logs: list[float] = field(default_factory=lambda: [0.0] * len(SHARES))

    def __post_init__(self) -> None:
        if not -1.0 < self.margin < 1.0:
            raise ValueError(f"a margin lies between -1 and 1, not at {self.margin}")

    def bets(self) -> list[float]:
        """λ of each process in the mean."""
        return [share / (1.0 - self.margin) for share in SHARES]

    def update(self, change: int) -> float:
        """Take one image in (+1 gained, -1 lost, 0 neither); the e-value after it."""
        if change not in (-1, 0, 1):
            raise ValueError(f"a change is -1, 0 or 1, not {change}")
        self.images += 1
        for index, bet in enumerate(self.bets()):
            self._logs[index] += math.log1p(bet * (change + self.margin))
        self.largest = max(self.largest, self.value)
        return self.value

    def extend(self, changes: Iterable[int]) -> EProcess:
        """Take many images in, in the order in which they arrived."""
        for change in changes:
            self.update(change)
        return self

    @property
    def value(self) -> float:
        """The mean over λ of E_n(λ)."""
        top = max(self._logs)
        mean = sum(math.exp(log - top) for log in self._logs) / len(self._logs)
        return math.exp(min(top + math.log(mean), 700.0))

    def passes(self, delta: float) -> bool:
        """Whether 1/δ was reached after any image so far: once reached it stays."""
        return self.largest >= 1.0 / delta


def first_passage(changes: Iterable[int], margin: float, delta: float) -> tuple[int | None, EProcess]:
    """After how many images the process first reached 1/δ (None: not yet), and the process at the end."""
    process = EProcess(margin)
    reached: int | None = None
    for change in changes:
        process.update(change)
        if reached is None and process.passes(delta):
            reached = process.images
    return reached, process
