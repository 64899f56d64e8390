"""What sharded weights (train.shard = "full") take and send, computed from the architectures; nothing is measured.

``python benchmarks/sharding.py`` prints the tables of docs/scaling.md and writes results/sharding.json. Bytes are those
of float32 weights; task heads, a few million numbers, are left out.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

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
    path = Path(__file__).parent / "results" / "sharding.json"
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
