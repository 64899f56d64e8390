"""What sharded weights (train.shard = "full") take and send, computed from the architectures; nothing is measured.

``python benchmarks/sharding.py`` prints the tables of docs/appendix/scaling.md and writes results/sharding.json.
Bytes are those of float32 weights; task heads, a few million numbers, are left out. What several GPUs would give
(docs/how-to/scaling.md) is computed from steps that were measured in a group of one rank (results/ranks.json) and from
these bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.model.openclip import architecture_config
from holdfast.model.openclip_towers import OpenClipTowers
from holdfast.model.towers import Preprocess
from holdfast.train.sharded import blocks

ARCHITECTURES = ("ViT-B-16", "ViT-L-14", "ViT-H-14", "ViT-bigG-14")
WORLDS = {8: 450e9, 64: 50e9}  # ranks -> bytes a second and GPU: inside one machine, and between eight of them
NUMBER = 4  # bytes


@dataclass(frozen=True)
class Sizes:
    """Parameters of an architecture, by what is gathered when."""

    architecture: str
    blocks: int  # gathered twice in a step, forward and backward
    largest: int  # of them
    rest: int  # embeddings, projections, last norms: gathered once and held through the step

    @property
    def total(self) -> int:
        return self.blocks + self.rest

    def gathered(self, world: int) -> float:
        """Bytes of weights that a rank receives in a step."""
        return NUMBER * (2 * self.blocks + self.rest) * (world - 1) / world

    def scattered(self, world: int) -> float:
        """Bytes of gradients that a rank receives, averaged into its part."""
        return NUMBER * self.total * (world - 1) / world

    def reduced(self, world: int) -> float:
        """The same where every rank holds the whole model: a ring all-reduce."""
        return 2 * NUMBER * self.total * (world - 1) / world

    def held(self, world: int) -> float:
        """Bytes of a rank: weights, gradients, two moments in parts; the rest and two blocks whole, with gradients."""
        whole = self.rest + 2 * self.largest
        return 4 * NUMBER * self.total / world + 2 * NUMBER * whole


@dataclass(frozen=True)
class Several:
    """What a step would take on so many ranks, each with as many pictures as were measured on one."""

    world: int
    way: str
    step: float  # milliseconds, measured in a group of one rank, which sends nothing
    sent: float  # what is sent while nothing else is computed
    alone: float  # milliseconds of a step without a group

    @property
    def times(self) -> float:
        """Pictures a second, of those of one GPU."""
        return self.world * self.alone / (self.step + self.sent)


def several(model: Sizes, ranks: Mapping[str, Any], pairs: int = 128, width: int = 512) -> list[Several]:
    """Recorded steps send gradients behind the backward pass, launched ones beside it; features are waited for."""
    measured = {way: run["milliseconds"] for way, run in ranks["runs"].items()}
    found: list[Several] = []
    for world, rate in WORLDS.items():
        gathered = 2 * pairs * (world - 1) * NUMBER * width
        returned = 2 * (world - 1) / world * 2 * pairs * world * NUMBER * width
        features = 1000 * (gathered + returned) / rate
        gradients = 1000 * model.reduced(world) / rate
        alone = measured["no group, recorded"]
        found += [
            Several(world, "recorded", measured["group, recorded"], features + gradients, alone),
            Several(world, "launched", measured["group, launched"], features, alone),
        ]
    return found


def sizes(architecture: str) -> Sizes:
    """Counted in a model without memory."""
    with torch.device("meta"):
        towers = OpenClipTowers(
            architecture, architecture_config(architecture), Preprocess(224, (0.5,) * 3, (0.5,) * 3)
        )
    units = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks(towers)]
    total = sum(parameter.numel() for parameter in towers.parameters())
    return Sizes(architecture, sum(units), max(units), total - sum(units))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    """Print the tables."""
    found = [sizes(architecture) for architecture in ARCHITECTURES]
    print("| | parameters | whole model | 8 ranks | 64 ranks |\n| --- | --- | --- | --- | --- |")
    for item in found:
        whole = 4 * NUMBER * item.total
        held = " | ".join(f"{item.held(world) / 1e9:.1f} GB" for world in WORLDS)
        print(f"| {item.architecture} | {item.total / 1e6:.0f} M | {whole / 1e9:.1f} GB | {held} |")
    print("\n| | weights gathered | gradients | 8 GPUs | 64 GPUs | whole model, 8 | 64 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for item in found:
        last = max(WORLDS)
        sharded = " | ".join(
            f"{1000 * (item.gathered(world) + item.scattered(world)) / rate:.0f} ms" for world, rate in WORLDS.items()
        )
        reduced = " | ".join(f"{1000 * item.reduced(world) / rate:.0f} ms" for world, rate in WORLDS.items())
        print(
            f"| {item.architecture} | {item.gathered(last) / 1e9:.2f} GB | {item.scattered(last) / 1e9:.2f} GB "
            f"| {sharded} | {reduced} |"
        )
    results = Path(__file__).parent / "results"
    print("\n| GPUs | steps | step of one rank, measured | sending, not overlapped | step | times one GPU |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for row in several(found[0], json.loads((results / "ranks.json").read_text())):
        took = row.step + row.sent
        print(
            f"| {row.world} | {row.way} | {row.step:.1f} ms | {row.sent:.1f} ms | {took:.1f} ms "
            f"| {row.times:.1f}, {100 * row.times / row.world:.0f} % |"
        )
    path = results / "sharding.json"
    rows = [
        {
            **asdict(item),
            **{
                f"{name}, {world} ranks": value(world)
                for world in WORLDS
                for name, value in (
                    ("held", item.held),
                    ("gathered", item.gathered),
                    ("scattered", item.scattered),
                    ("all-reduced if whole", item.reduced),
                )
            },
        }
        for item in found
    ]
    path.write_text(json.dumps({"computed": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
