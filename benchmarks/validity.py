"""How often the certificate is wrong, by exact enumeration and by seeded simulation.

    python benchmarks/validity.py [--out benchmarks/results/validity.json]

Every function here is also what `tests/validity` runs, with fewer draws. None of them uses the code that computes
p-values to compute probabilities: those come from multinomial coefficients or from random numbers.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import numpy as np
from scipy.special import gammaln

from holdfast.certify.corrections import holm, hommel
from holdfast.certify.eprocess import SHARES
from holdfast.certify.exact.region import statistics
from holdfast.certify.exact.score_test import p_value
from holdfast.certify.ledger import Budget
from holdfast.files import write_json

DELTA = 0.05


def accepted(b: np.ndarray, c: np.ndarray, n: int, margin: float, level: float = DELTA) -> np.ndarray:
    """Which outcomes pass at the level. p falls as T rises: the smallest passing T among them is found by bisection."""
    t = statistics(b, c, n, margin)
    values, first = np.unique(np.round(t, 9), return_index=True)
    passing, failing = len(values), -1
    while passing - failing > 1:
        middle = (passing + failing) // 2
        single = first[middle]
        if p_value(int(b[single]), int(c[single]), n, margin) <= level:
            passing = middle
        else:
            failing = middle
    return t >= values[passing] - 1e-8 if passing < len(values) else np.zeros(len(t), bool)


def enumerated_false_acceptance(n: int, margin: float, points: int = 2001) -> float:
    """max over a dense line Δ = -ε of the exact probability that an outcome passes."""
    b, c = (item.ravel() for item in np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij"))
    b, c = b[b + c <= n], c[b + c <= n]
    chosen = accepted(b, c, n, margin)
    b, c = b[chosen], c[chosen]
    if len(b) == 0:
        return 0.0
    log_count = gammaln(n + 1) - gammaln(b + 1) - gammaln(c + 1) - gammaln(n - b - c + 1)
    worst = 0.0
    for share in np.linspace(0.0, 1.0, points) ** 2:  # denser where flips are rare
        p01 = share * (1 - margin) / 2
        rates = np.maximum(np.array([p01, p01 + margin, 1 - margin - 2 * p01]), 1e-300)
        log_p = log_count + b * np.log(rates[0]) + c * np.log(rates[1]) + (n - b - c) * np.log(rates[2])
        worst = max(worst, float(np.exp(log_p).sum()))
    return worst


def draw(generator: np.random.Generator, n: int, discordance: float, difference: float, size: int) -> np.ndarray:
    """(b, c) of ``size`` data sets, [size, 2]."""
    gained, lost = (discordance + difference) / 2, (discordance - difference) / 2
    return generator.multinomial(n, [gained, lost, 1 - gained - lost], size=size)[:, :2]


def simulated_false_acceptance(n: int, margin: float, discordance: float, draws: int, seed: int = 0) -> float:
    """Share of data sets at Δ = -ε that pass."""
    outcomes = draw(np.random.default_rng(seed), n, discordance, -margin, draws)
    return float(accepted(outcomes[:, 0], outcomes[:, 1], n, margin).mean())


def one_bad_task(draws: int, tasks: int = 364, n: int = 1000, margin: float = 0.02, seed: int = 1) -> dict[str, float]:
    """All tasks but one improved by 3 %; one sits at Δ = -ε. How often is "every task" certified?"""
    generator = np.random.default_rng(seed)
    bad = draw(generator, n, 0.05, -margin, draws)
    good = draw(generator, n, 0.05, 0.03, draws * (tasks - 1))
    both = np.concatenate([bad, good])
    passed = accepted(both[:, 0], both[:, 1], n, margin)
    others = passed[draws:].reshape(draws, tasks - 1).all(axis=1)
    return {"certified": float((passed[:draws] & others).mean()), "others all pass": float(others.mean())}


def lists_of_tasks(draws: int, tasks: int = 364, bad: int = 182, n: int = 300, seed: int = 2) -> dict[str, float]:
    """Half of the tasks at Δ = -ε: how often does a list of "retained" tasks hold a false entry?"""
    margin, generator = 0.02, np.random.default_rng(seed)

    @cache
    def p(b: int, c: int) -> float:
        return p_value(b, c, n, margin)

    wrong = {"uncorrected": 0, "hommel": 0, "holm": 0}
    found = 0
    for _ in range(draws):
        outcomes = np.concatenate(
            [draw(generator, n, 0.05, -margin, bad), draw(generator, n, 0.02, 0.015, tasks - bad)]
        )
        values = [p(int(b), int(c)) for b, c in outcomes]
        lists = {"uncorrected": values, "hommel": hommel(values), "holm": holm(values)}
        for name, adjusted in lists.items():
            wrong[name] += min(adjusted[:bad]) <= DELTA
        found += sum(item <= DELTA for item in lists["hommel"][bad:])
    return {**{name: count / draws for name, count in wrong.items()}, "true entries found": found / draws}


def bad_candidates(draws: int, candidates: int = 20, n: int = 1000, seed: int = 3) -> dict[str, float]:
    """Candidates all at Δ = -ε: choosing any that passes, against a fixed sequence."""
    margin = 0.02
    outcomes = draw(np.random.default_rng(seed), n, 0.05, -margin, draws * candidates)
    passed = accepted(outcomes[:, 0], outcomes[:, 1], n, margin).reshape(draws, candidates)
    # A fixed sequence ships something only if its first candidate passes.
    return {"any that passes": float(passed.any(axis=1).mean()), "fixed sequence": float(passed[:, 0].mean())}


def attacker(draws: int, rounds: int = 100, n: int = 1000, seed: int = 4) -> dict[str, float]:
    """A developer who proposes models at Δ = -ε round after round, and keeps what the answers seem to favour.

    Every round a tenth of the images fall anew. With scores told, a proposal is kept when the score rose: the sealed
    set is fitted, the population change stays at -ε. With one bit told there is nothing to climb on before the first
    pass, which retires the set.
    """
    margin, rates = 0.02, np.array([0.015, 0.035, 0.95])
    budget = Budget(DELTA, queries=rounds)
    generator = np.random.default_rng(seed)
    edges = np.cumsum(rates)

    def fresh(size: int) -> np.ndarray:
        return np.array([1, -1, 0])[np.searchsorted(edges, generator.random(size))]

    policies: dict[str, tuple[bool, float]] = {
        "scores told, δ a round": (True, DELTA),
        "scores told, δ/R a round": (True, DELTA / rounds),
        "one bit told, ledger": (False, budget.level),
    }
    found: dict[str, float] = {}
    for name, (reported, level) in policies.items():
        threshold = critical_statistic(n, margin, level)
        shipped = np.zeros(draws, bool)
        for index in range(draws):
            current = fresh(n)
            for _ in range(rounds):
                proposal = current.copy()
                again = generator.random(n) < 0.1
                proposal[again] = fresh(int(again.sum()))
                b, c = int((proposal == 1).sum()), int((proposal == -1).sum())
                if statistics(np.array([b]), np.array([c]), n, margin)[0] >= threshold - 1e-8:
                    shipped[index] = True
                    break
                if not reported or proposal.sum() >= current.sum():
                    current = proposal
        found[name] = float(shipped.mean())
    return found


@cache
def critical_statistic(n: int, margin: float, level: float) -> float:
    """The smallest T that passes, among outcomes of up to 15 % flips."""
    flips = min(n, int(0.15 * n) + 30)
    b, c = (item.ravel() for item in np.meshgrid(np.arange(flips), np.arange(flips), indexing="ij"))
    kept = b + c <= min(n, flips)
    chosen = accepted(b[kept], c[kept], n, margin, level)
    return float(statistics(b[kept][chosen], c[kept][chosen], n, margin).min())


def watched_eprocess(draws: int, images: int = 2000, seed: int = 5) -> dict[str, float]:
    """Looked at after every image, at Δ = -ε: how often is 1/δ ever reached? And at Δ = 0?"""
    margin, generator = 0.02, np.random.default_rng(seed)
    found: dict[str, float] = {}
    for name, difference in (("at Δ = -ε", -margin), ("at Δ = 0", 0.0)):
        rates = [(0.05 + difference) / 2, (0.05 - difference) / 2]
        reached = 0
        for _ in range(draws):
            u = generator.random(images)
            x = np.where(u < rates[0], 1, np.where(u < sum(rates), -1, 0))
            logs = np.cumsum(np.log1p(np.outer(np.array(SHARES) / (1 - margin), x + margin)), axis=1)
            reached += bool((np.exp(logs).mean(axis=0) >= 1 / DELTA).any())
        found[name] = reached / draws
    return found


def largest_false_acceptance(sizes: Iterable[int], margins: Iterable[float]) -> dict[str, float]:
    """Exact worst cases, by n and ε."""
    return {f"n={n} ε={e:g}": enumerated_false_acceptance(n, e) for n in sizes for e in margins}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/validity.json"))
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "worst false acceptance, exact": lambda: largest_false_acceptance(
            (1, 5, 20, 43, 100, 200), (0, 0.005, 0.02, 0.05)
        ),
        "false acceptance at Δ = -ε, 200000 draws": lambda: {
            f"n={n} ε={e:g} D={d:g}": simulated_false_acceptance(n, e, d, 200_000)
            for n, e in ((500, 0.02), (1000, 0.02), (5000, 0.01))
            for d in (e, 0.05, 0.3)
        },
        "one bad task of 364, 20000 draws": lambda: one_bad_task(20_000),
        "false entry in a list, 182 bad tasks of 364, 2000 draws": lambda: lists_of_tasks(2000),
        "20 bad candidates, 20000 draws": lambda: bad_candidates(20_000),
        "reuse attacker, 100 rounds, 2000 draws": lambda: attacker(2000),
        "e-process watched after each of 2000 images, 20000 draws": lambda: watched_eprocess(20_000),
    }
    results: dict[str, dict[str, float]] = {}
    for name, part in parts.items():
        started = time.perf_counter()
        results[name] = part()
        print(f"{name} ({time.perf_counter() - started:.0f} s)")
        for case, value in results[name].items():
            print(f"    {case:<32}{value:.4f}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    write_json(
        arguments.out,
        {"results": results, "machine": platform.platform(), "commit": commit.stdout.strip(), "delta": DELTA},
    )


if __name__ == "__main__":
    main()
