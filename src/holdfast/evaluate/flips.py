"""The field's own figures of an update (Yan et al., 2021, "Positive-congruent training"): pure functions of counts.

negative flip rate   NFR = share of examples that the old model had right and the new one has wrong
positive flip rate   PFR = share of examples that the old model had wrong and the new one has right
relative NFR             = NFR / ((1 - err_old) · err_new)

The denominator is the NFR of two models whose errors are independent: 1 says "as many as by chance", 0 says "none". It
is 0, and the relative NFR undefined, where the old model had nothing right or the new one has nothing wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class FlipRates:
    """What became of examples, in counts."""

    examples: int
    old_correct: int
    gained: int  # wrong before, right now: positive flips
    lost: int  # right before, wrong now: negative flips

    @property
    def negative(self) -> float:
        """NFR."""
        return self.lost / self.examples

    @property
    def positive(self) -> float:
        """PFR."""
        return self.gained / self.examples

    @property
    def relative(self) -> float | None:
        """NFR / ((1 - err_old) · err_new); None where that is not defined."""
        new_wrong = self.examples - self.old_correct - self.gained + self.lost
        expected = self.old_correct * new_wrong
        return self.lost * self.examples / expected if expected else None

    def as_json(self) -> dict[str, float | None]:
        """The three figures under the names that reports and trackers use."""
        return {
            "negative_flip_rate": self.negative,
            "positive_flip_rate": self.positive,
            "relative_negative_flip_rate": self.relative,
        }


def overall(tasks: Iterable[FlipRates]) -> FlipRates:
    """All examples of several tasks together."""
    rates = list(tasks)
    return FlipRates(
        sum(item.examples for item in rates),
        sum(item.old_correct for item in rates),
        sum(item.gained for item in rates),
        sum(item.lost for item in rates),
    )
