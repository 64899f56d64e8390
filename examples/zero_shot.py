"""Teach it the giraffe, keep the dog: a zero-shot model that was never trained on your images learns one class.

python examples/zero_shot.py PHOTOS --target giraffe [--out runs/zero_shot] [--size 224]

PHOTOS has a subfolder for each class. Needs `pip install 'holdfast[parts]'`; nothing is fetched.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast import develop
from holdfast.config import RoundConfig, parse


def main(photos: Path, target: str, out: Path, size: int, margin: float) -> None:
    """The old model puts a picture among sentences by the names of the ImageNet classes that it resembles (ConSE).

    `refit` moves the target's logit alone, by a rank-one change of the last layer, and trains nothing: seconds.
    """
    round_ = {
        "task": {"target": target},
        "data": {
            "source": {"kind": "folder", "path": str(photos.resolve())},
            "roles": {"dev": 0.15, "sealed": 0.5, "test": 0.0},
        },
        "model": {"architecture": f"conse-{size}", "freeze": "text"},
        "method": {"name": "refit"},
        "certify": {"margin": margin, "ledger": "ledger"},
    }
    result = develop(parse(RoundConfig, round_, "the round"), out, out.parent, quiet=True)
    print("the old model is handed back" if result.kept_old else f"{result.chosen} is handed back")
    print(result.decision.reason)
    for name, task in result.dev.tasks.items():
        print(f"{name:<12} {task.old_accuracy:4.0%} -> {task.new_accuracy:4.0%} of the dev images")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/zero_shot"))
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--margin", type=float, default=0.2)
    arguments = parser.parse_args()
    main(arguments.photos, arguments.target, arguments.out, arguments.size, arguments.margin)
