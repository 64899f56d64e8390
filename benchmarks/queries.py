"""How often ten queries of one set of images let a worse model through, by what is shown and at which level.

    python benchmarks/queries.py [--draws 4000] [--through-the-command 30]

A developer proposes models whose true change is exactly -ε, so that every certificate is a false one, and uses whatever
is shown. Scores can be climbed on: a proposal changes some answers of the best model so far and replaces it where the
score on these images did not fall. A single bit cannot: before the first pass every answer was "no".

The last lines put some of those developers through `holdfast certify --ledger DIR --query-budget 10` itself, files,
ledger and all, and compare every bit with the simulation's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.validity import critical_statistic
from holdfast.certify.charged import certify_charged
from holdfast.certify.exact.region import statistics
from holdfast.certify.ledger import Budget, Ledger
from holdfast.errors import UserError

DELTA, MARGIN, IMAGES, QUERIES = 0.05, 0.05, 200, 10
RATES = (0.03, 0.03 + MARGIN)  # gained and lost in the population: Δ = -ε
CHANGED = 0.3  # share of the images whose outcome a new proposal draws anew


@dataclass(frozen=True)
class Policy:
    """What is shown after a query, and the level that it is tested at."""

    name: str
    scores: bool
    level: float


POLICIES = (
    Policy("scores shown, each at δ (no ledger)", True, DELTA),
    Policy("scores shown, each at δ/R", True, DELTA / QUERIES),
    Policy("one bit shown, each at δ", False, DELTA),
    Policy("one bit shown, each at δ/R (the ledger)", False, Budget(DELTA, QUERIES).level),
)


def fresh(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Outcomes of a model at Δ = -ε: 1 gained, -1 lost, 0 the same."""
    u = generator.random(shape)
    return np.where(u < RATES[0], 1, np.where(u < sum(RATES), -1, 0)).astype(np.int8)


def passes(outcomes: np.ndarray, level: float) -> np.ndarray:
    """Which sets of images, [draws, n], pass the exact test."""
    gained, lost = (outcomes == 1).sum(axis=1), (outcomes == -1).sum(axis=1)
    return statistics(gained, lost, outcomes.shape[1], MARGIN) >= critical_statistic(IMAGES, MARGIN, level) - 1e-8


def false_certificates(policy: Policy, draws: int, queries: int = QUERIES, seed: int = 0) -> list[float]:
    """Share of developers with a false certificate after 1, 2, … queries."""
    generator = np.random.default_rng(seed)
    best = fresh(generator, (draws, IMAGES))
    shipped = passes(best, policy.level)
    shares = [float(shipped.mean())]
    for _ in range(queries - 1):
        anew = generator.random(best.shape) < (CHANGED if policy.scores else 1.0)
        proposal = np.where(anew, fresh(generator, best.shape), best)
        shipped |= passes(proposal, policy.level)
        shares.append(float(shipped.mean()))
        better = proposal.sum(axis=1) >= best.sum(axis=1)
        best = np.where(better[:, None], proposal, best) if policy.scores else proposal
    return shares


def through_the_command(developers: int, folder: Path, seed: int = 1) -> tuple[int, int, int]:
    """Queries made by the code of ``certify --ledger``, bits that the simulation has otherwise, false certificates."""
    generator = np.random.default_rng(seed)
    claimed = {"target": None, "margin": MARGIN, "margins": {}, "confidence": 1 - DELTA, "claim": "all"}
    claimed |= {"tasks": (), "pools": None, "labels": ()}
    made = different = shipped = 0
    for developer in range(developers):
        ledger = Ledger(folder / f"{developer}")
        for _ in range(QUERIES):
            outcomes = fresh(generator, (1, IMAGES))
            files = write_predictions(folder, outcomes[0])
            made += 1
            passed = certify_charged(files, ledger, QUERIES, claimed).passed
            different += passed != bool(passes(outcomes, POLICIES[-1].level)[0])
            if passed:
                shipped += 1
                break
        refused = False
        try:
            certify_charged(write_predictions(folder, fresh(generator, (1, IMAGES))[0]), ledger, QUERIES, claimed)
        except UserError:
            refused = True
        different += not refused
    return made, different, shipped


def write_predictions(folder: Path, outcomes: np.ndarray) -> tuple[Path, Path]:
    """Two files of predictions with these outcomes, about the same images each time."""
    paths = (folder / "old.csv", folder / "new.csv")
    for path, wrong in zip(paths, (1, -1), strict=True):
        lines = [f"{k},a,a,{'b' if outcome == wrong else 'a'}" for k, outcome in enumerate(outcomes)]
        path.write_text("\n".join(["example_id,task,label,prediction", *lines]) + "\n")
    return paths


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--through-the-command", type=int, default=30, metavar="DEVELOPERS")
    arguments = parser.parse_args()
    started = time.perf_counter()
    print(f"false certificates: {IMAGES} images, ε = {MARGIN:g}, δ = {DELTA:g}, {arguments.draws} developers")
    print(f"{'':<42}{'1 query':>9}{'5':>9}{'10':>9}")
    for policy in POLICIES:
        shares = false_certificates(policy, arguments.draws)
        print(f"{policy.name:<42}" + "".join(f"{shares[place]:>9.4f}" for place in (0, 4, 9)))
    with tempfile.TemporaryDirectory() as name:
        made, different, shipped = through_the_command(arguments.through_the_command, Path(name))
    print(
        f"through `certify --ledger --query-budget {QUERIES}`: {arguments.through_the_command} developers, "
        f"{made} queries, {shipped} false certificates, {different} bits or refusals that differ from the simulation"
    )
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
