"""Whether the chance that is told matches the share that passes.

    python benchmarks/chances.py                          # from results/chances.json, with no run
    python benchmarks/chances.py --results benchmarks/results/last_layer.json
    for prefix in sketch cartoon art_painting; do python benchmarks/last_layer.py DATA/pacs-128.zip --prefix $prefix \
        --sizes 60 --results benchmarks/results/chances.json; done          # makes them: 20 rounds

One test passes or fails, so that few rounds say little. Here the sealed images of each round are drawn again, 2,000
times, from all images that its fits have not seen (sealed and kept aside), and the share of draws is counted in which
the chosen candidate passes. That is compared with the chance told, by the rule as it is and as it was before:

    before        the target's prior was ten images of which 25 % were gained and 1.5 % lost, whatever the old model
                  missed; fits of the last layer were expected to flip what trained weights flip
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.candidates.chance import Rates, SealedTest, critical_region, passing_mass, predicted_chance
from holdfast.candidates.select import Candidate
from holdfast.evaluate.metrics import Comparison

RESULTS = Path(__file__).with_name("results") / "chances.json"
DRAWS = 2000
BINS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0)
_region = lru_cache(maxsize=None)(critical_region)


def drawn(unseen: Comparison, test: SealedTest, margins: Mapping[str, float]) -> float:
    """The share of draws of the sealed images, from all that no fit has seen, in which every claim passes."""
    draw, share = np.random.default_rng(0), 1.0
    for name, change in unseen.tasks.items():
        count = test.images.get(name, test.target or 0)
        first = _region(count, margins.get(name, 0.0), test.level)
        if first is None:
            return 0.0
        kinds = [change.gained, change.lost, change.examples - change.gained - change.lost]
        counts = draw.multivariate_hypergeometric(kinds, count, size=DRAWS)
        share *= float((counts[:, 0] >= first[counts[:, 0] + counts[:, 1]]).mean())
    return share


def former_target(dev: Comparison) -> Rates:
    """What was expected of the target before."""
    change = dev.tasks[dev.target]
    gained, lost = change.gained + 2.5, change.lost + 0.15
    return Rates(gained, lost, change.examples + 10 - gained - lost)


def with_former_chances(candidates: Sequence[Candidate], test: SealedTest) -> list[Candidate]:
    """Chances as they were told before."""
    assert test.target is not None
    protected = replace(test, target=None)
    return [
        replace(
            item,
            chance=predicted_chance(item.dev, protected, lam=item.lam, bias=item.bias)
            * passing_mass(test.target, 0.0, test.level, former_target(item.dev)),
        )
        for item in candidates
    ]


def lines_of(results: Sequence[Mapping[str, Any]], way: str, rule: str) -> Iterator[dict[str, Any]]:
    """What one way and rule came to, round by round."""
    for result in results:
        for item in result["rounds"]:
            yield item[way] if rule == "now" else item[way]["before"]


def print_table(results: Sequence[Mapping[str, Any]]) -> None:
    """One line a way and rule, and below it one a bin of the chance told."""
    ways = [way for way, line in results[0]["rounds"][0].items() if isinstance(line, dict) and "before" in line]
    print("way          rule    rounds  tested   told  passes  certified  gain shipped    told: passes (tests)")
    for way in ways:
        for rule in ("before", "now"):
            lines = list(lines_of(results, way, rule))
            tested = [line for line in lines if line["tested"]]
            told, passes = (np.array([line[key] for line in tested]) for key in ("chance", "drawn"))
            certified = sum(line["passed"] for line in lines)
            shipped = 100 * sum(line["gain"] * line["drawn"] for line in tested) / len(lines)
            place = np.clip(np.searchsorted(BINS, told, side="right") - 1, 0, len(BINS) - 2)
            bins = [
                f"{told[place == k].mean():.2f}: {passes[place == k].mean():.2f} ({(place == k).sum()})"
                for k in range(len(BINS) - 1)
                if (place == k).any()
            ]
            print(
                f"{way:13}{rule:7}{len(lines):7}{len(tested):8}{told.mean():8.2f}{passes.mean():8.2f}{certified:8}"
                f"{shipped:+14.1f}      {'   '.join(bins)}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether the chance that is told matches the share that passes.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--source", default="", help="of the archives in the file, this one alone")
    given = parser.parse_args()
    results = json.loads(given.results.read_text())
    print_table([item for item in results if given.source in item["source"]])


if __name__ == "__main__":
    main()
