"""How often the tests for groups, scores and weights certify falsely, what they cost, and what others do.

    python benchmarks/groups.py [--sets 2000] [--out benchmarks/results/groups.json]

Every population of the first table loses exactly its margin, so that every certificate is false. Beside the betting
test: the exact test that takes images for independent, the clustered normal interval of "Adding error bars to evals"
(Miller 2024), and Learn then Test's Hoeffding-Bentkus p-value (Angelopoulos et al. 2021) on group means.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from scipy.special import bdtr, ndtri

from holdfast.certify.betting import ORDERS, batched_e_values, log_capital
from holdfast.certify.exact.power import Truth, images_needed
from holdfast.certify.exact.score_test import passes
from holdfast.certify.unit_power import Flips, Scores, unit_power, units_needed
from holdfast.files import write_json

DELTA = 0.05
_NAIVE_SETS = 400  # exact tests are slower than all the others together


@dataclass(frozen=True)
class Sample:
    """Many data sets of units, [G, sets]; of rights and wrongs also what the images of a set add up to."""

    totals: np.ndarray
    weights: np.ndarray
    limit: float
    gained: np.ndarray | None = None  # [sets]
    lost: np.ndarray | None = None


def betting(sample: Sample, margin: float, seed: int = 0, level: float = DELTA) -> np.ndarray:
    """Which sets the betting test certifies, each over as many orders as in use."""
    generator, (units, sets) = np.random.default_rng(seed), sample.totals.shape
    payoffs = np.maximum((sample.totals + margin * sample.weights) / ((1 - margin) * sample.limit), -1.0)
    certified = np.zeros(sets, bool)
    block = max(1, (1 << 22) // (units * ORDERS))
    for start in range(0, sets, block):
        chosen = payoffs[:, start : start + block]
        shuffled = np.stack([chosen[generator.permutation(units)] for _ in range(ORDERS)], axis=1)
        certified[start : start + block] = batched_e_values(shuffled, level) >= 1.0 / level
    return certified


def clustered(sample: Sample, margin: float) -> np.ndarray:
    """Mean change minus 1.645 clustered standard errors lies above -ε."""
    change = sample.totals.sum(axis=0) / sample.weights.sum(axis=0)
    residuals = sample.totals - change * sample.weights
    error = np.sqrt((residuals**2).sum(axis=0)) / sample.weights.sum(axis=0)
    return change - ndtri(1 - DELTA) * error > -margin


def hoeffding_bentkus(sample: Sample, margin: float) -> np.ndarray:
    """Learn then Test on the loss (1 - group's share of the change) / 2 in [0, 1], against a risk of (1 + ε) / 2."""
    units = len(sample.totals)
    shares = sample.totals / sample.limit + margin * (sample.weights / sample.limit - 1)  # Y/limit - ε
    risk, bound = (1 - shares).mean(axis=0) / 2, (1 + margin) / 2
    inner = np.clip(np.minimum(risk, bound), 1e-12, 1 - 1e-12)
    divergence = inner * np.log(inner / bound) + (1 - inner) * np.log((1 - inner) / (1 - bound))
    bentkus = np.e * bdtr(np.minimum(np.ceil(units * risk), units), units, bound)
    return np.minimum(np.exp(-units * divergence), bentkus) <= DELTA


@lru_cache(maxsize=100_000)
def _passes(gained: int, lost: int, n: int, margin: float) -> bool:
    return passes(gained, lost, n, margin, DELTA)


def naive(sample: Sample, margin: float) -> np.ndarray:
    """The exact test, as if images were independent."""
    assert sample.gained is not None
    assert sample.lost is not None
    images = sample.weights.sum(axis=0)[:_NAIVE_SETS].astype(int)
    rows = zip(sample.gained.tolist(), sample.lost.tolist(), images.tolist(), strict=False)
    return np.array([_passes(int(b), int(c), int(n), margin) for b, c, n in rows])


# -- populations at the boundary --------------------------------------------------------------------------------------


def flips(
    generator: np.random.Generator,
    units: int,
    sets: int,
    sizes: np.ndarray,
    rates: tuple[float | np.ndarray, float | np.ndarray],
    icc: float,
    limit: float,
) -> Sample:
    """Groups of ``sizes`` [units, sets]: an image shares its group's draw with probability sqrt(icc)."""
    up, down = (np.broadcast_to(np.asarray(rate, float), (units, sets)) for rate in rates)
    together = generator.binomial(sizes, np.sqrt(icc))
    number = generator.random((units, sets))
    shared_up, shared_down = together * (number < up), together * (number > 1 - down)
    own_up = generator.binomial(sizes - together, up)
    own_down = generator.binomial(sizes - together - own_up, np.clip(down / (1 - up), 0, 1))
    gained, lost = shared_up + own_up, shared_down + own_down
    return Sample((gained - lost).astype(float), sizes.astype(float), limit, gained.sum(axis=0), lost.sum(axis=0))


def videos(units: int, size: int, margin: float, discordance: float, icc: float) -> Callable[..., Sample]:
    """Groups of one size that lose the margin."""
    rates = ((discordance - margin) / 2, (discordance + margin) / 2)

    def draw(generator: np.random.Generator, sets: int) -> Sample:
        return flips(generator, units, sets, np.full((units, sets), size), rates, icc, float(size))

    return draw


def uneven(units: int, margin: float, icc: float, *, informative: bool) -> Callable[..., Sample]:
    """Groups of 1 to 50 images; with ``informative`` sizes the larger half loses all that is lost, and more."""

    def draw(generator: np.random.Generator, sets: int) -> Sample:
        sizes = generator.integers(1, 51, (units, sets))
        if not informative:
            return flips(generator, units, sets, sizes, (0.015, 0.015 + margin), icc, 50.0)
        # Images in groups above 25: a share of 950/1275. The smaller groups gain 1 point.
        large = sizes > 25
        loss = (margin + 0.01 * 325 / 1275) * 1275 / 950
        rates = (np.where(large, 0.0, 0.01), np.where(large, loss, 0.0))
        return flips(generator, units, sets, sizes, rates, icc, 50.0)

    return draw


def two_points(units: int, size: int, margin: float, bad: float) -> Callable[..., Sample]:
    """A share ``bad`` of the groups loses every image; all others gain as much as makes the mean -ε."""
    gain = (bad - margin) / (1 - bad)

    def draw(generator: np.random.Generator, sets: int) -> Sample:
        worst = generator.random((units, sets)) < bad
        totals = np.where(worst, -1.0, gain) * size
        return Sample(totals, np.full((units, sets), float(size)), float(size))

    return draw


def noisy_scores(units: int, margin: float, deviation: float) -> Callable[..., Sample]:
    """Scores whose change is nearly normal."""

    def draw(generator: np.random.Generator, sets: int) -> Sample:
        totals = np.clip(generator.normal(-margin, deviation, (units, sets)), -1, 1)
        return Sample(totals, np.ones((units, sets)), 1.0)

    return draw


def skewed_scores(units: int, margin: float) -> Callable[..., Sample]:
    """Scores that mostly rise a little and at times fall a lot: change = g - Beta(0.1, 0.9)."""

    def draw(generator: np.random.Generator, sets: int) -> Sample:
        totals = 0.1 - margin - generator.beta(0.1, 0.9, (units, sets))
        return Sample(totals, np.ones((units, sets)), 1.0)

    return draw


def weighted_rows(units: int, margin: float) -> Callable[..., Sample]:
    """Rows of weight 0.05 to 1, rights and wrongs; heavy rows lose, light ones gain; -ε by weight."""

    def draw(generator: np.random.Generator, sets: int) -> Sample:
        heavy = generator.random((units, sets)) < 0.05
        weights = np.where(heavy, 1.0, 0.05)
        share = 0.05 / (0.05 + 0.95 * 0.05)  # of the weight that is heavy
        lose = (margin + 0.01 * (1 - share)) / share
        number = generator.random((units, sets))
        changes = np.where(heavy, -(number < lose).astype(float), (number < 0.01).astype(float))
        return Sample(changes * weights, weights, 1.0)

    return draw


CASES: dict[str, tuple[float, Callable[..., Sample]]] = {
    "100 videos x 10, correlation 0": (0.02, videos(100, 10, 0.02, 0.05, 0.0)),
    "100 videos x 10, correlation 0.5": (0.02, videos(100, 10, 0.02, 0.05, 0.5)),
    "100 videos x 10, correlation 1": (0.02, videos(100, 10, 0.02, 0.05, 1.0)),
    "300 videos x 10, correlation 0.5": (0.02, videos(300, 10, 0.02, 0.05, 0.5)),
    "100 videos x 10, 5 points, correlation 0.5": (0.05, videos(100, 10, 0.05, 0.1, 0.5)),
    "100 videos x 10, few flips, correlation 1": (0.02, videos(100, 10, 0.02, 0.02, 1.0)),
    "150 groups of 1 to 50, correlation 0.5": (0.05, uneven(150, 0.05, 0.5, informative=False)),
    "150 groups of 1 to 50, large ones lose": (0.05, uneven(150, 0.05, 0.5, informative=True)),
    "100 groups, 1 in 20 loses all": (0.02, two_points(100, 10, 0.02, 0.05)),
    "100 groups, 1 in 40 loses all": (0.02, two_points(100, 10, 0.02, 0.025)),
    "20 groups, 1 in 5 loses all": (0.1, two_points(20, 5, 0.1, 0.2)),
    "scores, n = 100, deviation 0.1": (0.05, noisy_scores(100, 0.05, 0.1)),
    "scores, n = 1000, deviation 0.3": (0.02, noisy_scores(1000, 0.02, 0.3)),
    "scores, n = 200, skewed": (0.02, skewed_scores(200, 0.02)),
    "scores, n = 60, 1 in 15 falls to 0": (0.02, two_points(60, 1, 0.02, 1 / 15)),
    "weights 0.05 to 1, n = 500": (0.05, weighted_rows(500, 0.05)),
}


def false_certificates(name: str, sets: int, seed: int = 7) -> dict[str, float | None]:
    """How often each test certifies a population that loses exactly its margin."""
    margin, draw = CASES[name]
    sample = draw(np.random.default_rng(seed), sets)
    return {
        "betting": float(betting(sample, margin).mean()),
        "images as independent": None if sample.gained is None else float(naive(sample, margin).mean()),
        "clustered interval": float(clustered(sample, margin).mean()),
        "Hoeffding-Bentkus": float(hoeffding_bentkus(sample, margin).mean()),
    }


def power_table(sets: int, seed: int = 8) -> dict[str, dict[str, float | None]]:
    """Chance of a certificate at Δ = 0 with 3,000 images, 5 % of them flipping, margin 2 points."""
    found: dict[str, dict[str, float | None]] = {}
    for size, icc in ((1, 0.0), (3, 0.2), (10, 0.0), (10, 0.1), (10, 0.3), (10, 0.5), (10, 1.0), (30, 0.1)):
        units = 3000 // size
        generator = np.random.default_rng(seed)
        sample = flips(generator, units, sets, np.full((units, sets), size), (0.025, 0.025), icc, float(size))
        found[f"{units} groups x {size}, correlation {icc:g}"] = {
            "betting": float(betting(sample, 0.02).mean()),
            "clustered interval (not valid)": float(clustered(sample, 0.02).mean()),
            "Hoeffding-Bentkus": float(hoeffding_bentkus(sample, 0.02).mean()),
        }
    return found


def order_table(sets: int, seed: int = 9) -> dict[str, dict[str, float | None]]:
    """One order of the groups against the mean over many: power, and how often two namings of groups disagree."""
    found: dict[str, dict[str, float | None]] = {}
    for units, size, margin, discordance, icc in ((100, 10, 0.05, 0.1, 0.5), (300, 5, 0.02, 0.02, 0.5)):
        generator, half = np.random.default_rng(seed), discordance / 2
        sample = flips(generator, units, sets, np.full((units, sets), size), (half, half), icc, float(size))
        payoffs = (sample.totals + margin * sample.weights) / ((1 - margin) * sample.limit)
        # A single order stops at 1/δ: it need not make up for others.
        single = [log_capital(payoffs[generator.permutation(units)], 2 * DELTA) >= np.log(1 / DELTA) for _ in range(2)]
        many = [betting(sample, margin, seed=seed + again) for again in range(2)]
        found[f"{units} groups x {size}, margin {margin:g}, flips {discordance:g}, correlation {icc:g}"] = {
            "one order": float(np.mean(single)),
            f"mean over {ORDERS}": float(np.mean(many)),
            "one order, renamed groups disagree": float((single[0] != single[1]).mean()),
            f"mean over {ORDERS}, renamed groups disagree": float((many[0] != many[1]).mean()),
        }
    return found


def cost_table() -> dict[str, dict[str, float | None]]:
    """Groups and images for an 80 % chance at Δ = 0, against independent images by the exact test."""
    found: dict[str, dict[str, float | None]] = {}
    for margin, discordance in ((0.02, 0.05), (0.05, 0.1)):
        alone = images_needed(margin, Truth(discordance), DELTA, 0.8)
        found[f"margin {margin:g}, flips {discordance:g}: independent images"] = {"images": alone}
        for size, icc in ((5, 0.0), (5, 0.5), (10, 0.0), (10, 0.2), (10, 0.5), (10, 1.0)):
            groups = units_needed(Flips(size, discordance, 0.0, icc), margin, DELTA, 0.8)
            found[f"margin {margin:g}, flips {discordance:g}: groups of {size}, correlation {icc:g}"] = {
                "groups": groups,
                "images": groups * size,
                "times the independent images": round(groups * size / alone, 2),
            }
    for deviation in (0.05, 0.1, 0.2, 0.3):
        rows = units_needed(Scores(1, deviation), 0.02, DELTA, 0.8)
        normal = (ndtri(0.95) + ndtri(0.8)) ** 2 * deviation**2 / 0.02**2
        found[f"scores, margin 0.02, deviation {deviation:g}"] = {
            "rows": rows,
            "z test (not valid)": float(np.ceil(normal)),
            "chance": unit_power(Scores(1, deviation), rows, 0.02, DELTA),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    started = time.perf_counter()
    results: dict[str, dict[str, dict[str, float | None]]] = {
        "false certificates at a loss of exactly the margin (at most 0.05 is promised)": {
            name: false_certificates(name, arguments.sets) for name in CASES
        },
        "chance of a certificate at no change, 3,000 images, margin 2 points, 5 % flips": power_table(500),
        "chance at no change, and two namings of the groups": order_table(1000),
        "needed for a chance of 80 % at no change": cost_table(),
    }
    for title, rows in results.items():
        print(title)
        for name, row in rows.items():
            cells = (f"{label} {'-' if value is None else format(value, '.4g')}" for label, value in row.items())
            print(f"    {name:<58}{'   '.join(cells)}")
    print(f"{time.perf_counter() - started:.0f} s")
    if arguments.out is not None:
        write_json(arguments.out, {"results": results, "machine": platform.platform(), "delta": DELTA})


if __name__ == "__main__":
    main()
