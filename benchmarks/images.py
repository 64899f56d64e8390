"""False certificates when images are counted wrongly, without and with the rules of ledger and record.

    python benchmarks/images.py [--draws 4000]

Every model here has lost exactly the margin on the population, so every certificate is a false one; δ = 0.05. The rules
are the library's own code: :func:`holdfast.certify.families.admit` says which images a query may be about.

- *memorised*: a share of the sealed images was trained on, and the new model gets them right. With the rule they are
  refused as sealed images (``seen.parquet``), and the others decide.
- *copies*: five pictures of a sealed set are saved again twenty times. With the rule they count as five.
- *ten "new" sets*: before each query one image is added to the sealed set, so that its fingerprint is a new one.
- *pooled failures*: thirty small sealed sets are queried with other models; those whose query failed are pooled and
  queried again. Each image is queried twice at most, at δ/2 each, and images of a pass are retired: a limit on the
  queries of each image allows it. The chance is that of one given set to take part in a false certificate.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from holdfast.certify.exact.region import statistics
from holdfast.certify.families import Family, admit, image_keys
from holdfast.certify.ledger import Budget
from holdfast.files import fingerprint_ids, write_json
from validity import critical_statistic

DELTA, MARGIN = 0.05, 0.05
GAINED, LOST = 0.05, 0.10  # of a model at Δ = -ε


def passes(flips: np.ndarray, level: float) -> bool:
    """The exact test on what became of each image: +1 gained, -1 lost, 0 as before."""
    b, c = int((flips == 1).sum()), int((flips == -1).sum())
    statistic = statistics(np.array([b]), np.array([c]), len(flips), MARGIN)[0]
    return bool(statistic >= critical_statistic(len(flips), MARGIN, level) - 1e-8)


def bad_model(generator: np.random.Generator, n: int) -> np.ndarray:
    """A model that lost the margin, on n images."""
    u = generator.random(n)
    return np.where(u < GAINED, 1, np.where(u < GAINED + LOST, -1, 0))


def memorised(draws: int, share: float = 0.17, n: int = 150, seed: int = 1) -> dict[str, float]:
    """A share of the sealed images was trained on: nothing is lost on them."""
    generator, count = np.random.default_rng(seed), round(share * n)
    without = with_rule = 0
    for _ in range(draws):
        flips = bad_model(generator, n)
        with_rule += passes(flips[count:], DELTA)
        flips[:count] = np.maximum(flips[:count], 0)
        without += passes(flips, DELTA)
    return {"without the rule": without / draws, "with the rule": with_rule / draws}


def copies(draws: int, n: int = 100, pictures: int = 5, times: int = 20, seed: int = 2) -> dict[str, float]:
    """A sealed set of n pictures, five of which are in it twenty times."""
    generator = np.random.default_rng(seed)
    without = with_rule = 0
    for _ in range(draws):
        flips = bad_model(generator, n)
        without += passes(np.concatenate([flips, np.repeat(flips[:pictures], times - 1)]), DELTA)
        with_rule += passes(flips, DELTA)
    return {"without the rule": without / draws, "with the rule": with_rule / draws}


def queried(families: list[Family], asked: list[str], home: str | None, budget: Budget, passed: bool) -> None:
    """Write a query down, as the ledger does."""
    keys = frozenset(key for item in asked for key in image_keys(item))
    old = next((family for family in families if family.fingerprint == home), None)
    queries, known = (1, frozenset[str]()) if old is None else (old.queries + 1, old.keys)
    if old is not None:
        families.remove(old)
    name = fingerprint_ids(asked) if old is None else old.fingerprint
    sets = frozenset({name, fingerprint_ids(asked)}) | (frozenset() if old is None else old.sets)
    families.append(Family(name, known | keys, sets, passed or queries >= budget.queries, queries, int(passed)))


def new_sets(draws: int, looks: int = 10, n: int = 300, redrawn: float = 0.5, seed: int = 3) -> dict[str, float]:
    """Ten candidates one after another, the sealed set with one image more each time."""
    generator = np.random.default_rng(seed)
    budgets = {"with the rule, one query": Budget(DELTA), "with the rule, ten queries": Budget(DELTA, queries=looks)}
    counts = dict.fromkeys(["without the rule", *budgets], 0)
    allowed = {name: _allowed(budget, looks, n) for name, budget in budgets.items()}
    for _ in range(draws):
        flips = bad_model(generator, n + looks)
        shipped = dict.fromkeys(counts, False)
        for look in range(looks):
            again = generator.random(n + looks) < redrawn  # the next candidate agrees with the last on most images
            flips = np.where(again, bad_model(generator, n + looks), flips)
            asked = flips[: n + look]
            shipped["without the rule"] |= passes(asked, DELTA)
            for name, budget in budgets.items():
                if allowed[name][look] == n + look and not shipped[name]:  # otherwise too few images are left to test
                    shipped[name] = passes(asked, budget.level)
        for name in counts:
            counts[name] += shipped[name]
    return {name: count / draws for name, count in counts.items()}


def _allowed(budget: Budget, looks: int, n: int) -> list[int]:
    """How many images each query may be about while none has passed."""
    families: list[Family] = []
    found: list[int] = []
    for look in range(looks):
        asked = [str(number) for number in range(n + look)]
        images = {item: image_keys(item) for item in asked}
        admitted = admit(fingerprint_ids(asked), images, families)
        found.append(len(admitted.ids))
        if admitted.ids:
            queried(families, sorted(admitted.ids), admitted.family, budget, passed=False)
    return found


def pooled(draws: int, blocks: int = 30, n: int = 60, seed: int = 4) -> dict[str, float]:
    """Small sets are asked about a model that does well where the next one does badly; failures are pooled."""
    generator, budget = np.random.default_rng(seed), Budget(DELTA, queries=2)
    names = [[f"{block} {number}" for number in range(n)] for block in range(blocks)]
    images = {item: image_keys(item) for block in names for item in block}
    block_of = {item: block for block, items in enumerate(names) for item in items}
    without = with_rule = 0
    for _ in range(draws):
        flips = bad_model(generator, blocks * n).reshape(blocks, n)
        better = -flips  # a true improvement, by the margin
        ended = [passes(better[block], budget.level) for block in range(blocks)]
        families: list[Family] = []
        for block in range(blocks):
            queried(families, names[block], None, budget, ended[block])
        failed = [block for block in range(blocks) if not ended[block]]
        if not failed:
            continue
        if passes(flips[failed].ravel(), budget.level):
            without += len(failed)
        asked = {item: images[item] for block in failed for item in names[block]}
        admitted = admit(fingerprint_ids(asked), asked, families)
        kept = sorted({block_of[item] for item in admitted.ids})
        if passes(flips[kept].ravel(), budget.level):
            with_rule += len(kept)
    total = draws * blocks
    return {"a limit for each image": without / total, "with the rule": with_rule / total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/images.json"))
    arguments = parser.parse_args()
    draws = arguments.draws
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "17 % of 150 sealed images memorised": lambda: memorised(draws),
        "five of 100 pictures saved twenty times": lambda: copies(draws),
        'ten "new" sets, one image added each time': lambda: new_sets(draws),
        "pooled failures of 30 sets": lambda: pooled(max(1, draws // 8)),
    }
    results: dict[str, dict[str, float]] = {}
    for name, part in parts.items():
        started = time.perf_counter()
        results[name] = part()
        print(f"{name} ({time.perf_counter() - started:.0f} s)")
        for case, value in results[name].items():
            print(f"    {case:<32}{value:.3f}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    machine = platform.platform()
    write_json(
        arguments.out,
        {"results": results, "delta": DELTA, "draws": draws, "machine": machine, "commit": commit.stdout.strip()},
    )


if __name__ == "__main__":
    main()
