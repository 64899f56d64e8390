"""Five gates side by side: how often each lets a worse model through, and how often it lets an equal one through.

    python benchmarks/gates.py [--margin 0.02] [--accuracy 0.8] [--markdown]

| gate | passes if |
| --- | --- |
| exact test | the exact paired test shows a loss below the margin, at δ = 5 % |
| t interval | the 95 % t interval of the paired differences lies above minus the margin (NeMo Evaluator's `nel gate`) |
| McNemar | the one-sided exact McNemar test finds no significant loss, p > 5 % (`nel compare`) |
| threshold | the new accuracy is at least the old one less the margin (a threshold of MLflow) |
| unpaired z | the two accuracies do not differ significantly, |z| < 1.96 or better (lm-eval's model_comparator) |

Everything is a sum over the outcomes (gained, lost and, for the unpaired z, right by both), each with its multinomial
probability: nothing is simulated. Outcomes beyond ten standard deviations are left out; their share is below 1e-9.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln
from scipy.stats import binom
from scipy.stats import t as student

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.validity import accepted

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
DELTA, MARGIN, ACCURACY = 0.05, 0.02, 0.8
SIZES = (10, 30, 100, 300, 1000, 5000)
WIDTH = 10.0  # standard deviations that a sum goes through
FEW, MANY = 0.01, 0.05  # flips of models that are equally good


def exact(gained: Counts, lost: Counts, n: int, margin: float) -> Bools:
    """The exact paired test."""
    return accepted(gained, lost, n, margin, DELTA)


def t_interval(gained: Counts, lost: Counts, n: int, margin: float) -> Bools:
    """Mean less t times standard error, rounded to six digits as `nel gate` does, at or above minus the margin."""
    mean = (gained - lost) / n
    deviation = np.sqrt(np.maximum((gained + lost) / n - mean**2, 0.0) * n / (n - 1))
    return np.round(mean - student.ppf(0.975, n - 1) * deviation / np.sqrt(n), 6) >= -margin


def mcnemar(gained: Counts, lost: Counts, n: int, margin: float) -> Bools:
    """P(at least so many lost among the flips, each lost or gained alike) above 5 %; the margin has no part in it."""
    return binom.sf(lost - 1, gained + lost, 0.5) > DELTA


def threshold(gained: Counts, lost: Counts, n: int, margin: float) -> Bools:
    """The loss that was seen is at most the margin."""
    return (gained - lost) / n >= -margin - 1e-12


PAIRED: dict[str, Callable[[Counts, Counts, int, float], Bools]] = {
    "exact test": exact,
    "t interval": t_interval,
    "McNemar, not significant": mcnemar,
    "threshold": threshold,
}


def window(n: int, rate: float) -> Counts:
    """Counts of a binomial that matter."""
    spread = WIDTH * np.sqrt(n * rate * (1 - rate)) + WIDTH
    return np.arange(max(0, int(n * rate - spread)), min(n, int(n * rate + spread)) + 1)


def outcomes(n: int, rates: Sequence[float]) -> tuple[Counts, Counts, Floats]:
    """Gained, lost and probability of the outcomes that matter; ``rates`` of gained and lost."""
    grid = np.meshgrid(window(n, rates[0]), window(n, rates[1]), indexing="ij")
    gained, lost = (item.ravel() for item in grid)
    kept = gained + lost <= n
    gained, lost = gained[kept], lost[kept]
    return gained, lost, np.exp(log_multinomial(n, (gained, lost), rates))


def log_multinomial(n: int, counts: Sequence[Counts], rates: Sequence[float]) -> Floats:
    """Log probability of counts, the rest included."""
    rest = n - sum(counts)
    total = gammaln(n + 1) - gammaln(rest + 1) + rest * np.log(max(1e-300, 1 - sum(rates)))
    for count, rate in zip(counts, rates, strict=True):
        total = total - gammaln(count + 1) + count * np.log(max(1e-300, rate))
    return total


def unpaired_z(n: int, rates: Sequence[float], accuracy: float) -> float:
    """Chance that (new - old) / sqrt(se² + se²) is above -1.96; ``accuracy`` is the old model's."""
    gained, lost, probability = outcomes(n, rates)
    kept = probability > 1e-12
    gained, lost, probability = gained[kept], lost[kept], probability[kept]
    share = (accuracy - rates[1]) / (1 - sum(rates))  # right by both, among those that did not flip
    total = 0.0
    for start in range(0, len(gained), 2000):
        b, c, p = (item[start : start + 2000, None] for item in (gained, lost, probability))
        same = n - b - c
        both = window(n, share * (1 - sum(rates)))[None, :]
        old, new = (both + c) / n, (both + b) / n
        errors = (old * (1 - old) + new * (1 - new)) / max(1, n - 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            passes = np.where(b >= c, True, (new - old) / np.sqrt(errors) > -1.96)
        total += float((p * binom.pmf(both, same, share) * passes).sum())
    return total


@cache
def chance(gate: str, n: int, margin: float, discordance: float, difference: float, accuracy: float) -> float:
    """Chance that a gate passes."""
    rates = ((discordance + difference) / 2, (discordance - difference) / 2)
    if gate == "unpaired z":
        return unpaired_z(n, rates, accuracy)
    gained, lost, probability = outcomes(n, rates)
    return float(probability[PAIRED[gate](gained, lost, n, margin)].sum())


def row(gate: str, n: int, margin: float, accuracy: float) -> tuple[float, float, float, float, float]:
    """False passes with fewest flips and at worst, and power at no, few and many flips."""
    at = [chance(gate, n, margin, d, -margin, accuracy) for d in (margin, margin + FEW, margin + MANY, margin + 0.15)]
    equal = [chance(gate, n, margin, d, 0.0, accuracy) for d in (0.0, FEW, MANY)]
    return at[0], max(at), equal[0], equal[1], equal[2]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--margin", type=float, default=MARGIN)
    parser.add_argument("--accuracy", type=float, default=ACCURACY, help="of the old model, for the unpaired z")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    started = time.perf_counter()
    names = ("gate", "n", "false, few flips", "false, worst", "equal, no flips", "equal, 1 % flips", "equal, 5 % flips")
    if arguments.markdown:
        print("| " + " | ".join(names) + " |\n| --- |" + " ---: |" * (len(names) - 1))
    else:
        print(f"margin {arguments.margin:g}, δ = {DELTA:g}; false: the new model lost exactly the margin")
        print(f"{names[0]:<26}{names[1]:>6}" + "".join(f"{name:>18}" for name in names[2:]))
    for gate in (*PAIRED, "unpaired z"):
        for n in SIZES:
            values = row(gate, n, arguments.margin, arguments.accuracy)
            if arguments.markdown:
                print(f"| {gate} | {n:,} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
            else:
                print(f"{gate:<26}{n:>6}" + "".join(f"{value:>18.3f}" for value in values))
    if not arguments.markdown:
        print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
