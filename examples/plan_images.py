"""How many held-out images does a certificate need? No torch.

python examples/plan_images.py
"""

from __future__ import annotations

import holdfast


def main() -> None:
    """Five classes that must all pass, with a chance of 80 %."""
    for margin in (0.05, 0.02, 0.01):
        needed = holdfast.plan(discordance=0.02, margin=margin, tasks=5).images_needed
        print(f"margin {margin:.0%}: {needed} images a class where 2 % of the predictions flip")
    allowed = holdfast.plan(discordance=0.02, images=300, tasks=5).best_margin
    print(f"300 images a class allow a margin of {allowed:.1%}")
    # From predictions of two earlier models on dev images, class by class:
    dev = {
        "task": ["day"] * 200 + ["night"] * 200,
        "label": ["car"] * 400,
        "old": ["car"] * 190 + ["bus"] * 10 + ["car"] * 170 + ["bus"] * 30,
        "new": ["car"] * 192 + ["bus"] * 8 + ["bus"] * 6 + ["car"] * 176 + ["bus"] * 18,
    }
    for name, task in holdfast.plan(dev, margin=0.02).tasks.items():
        print(f"{name}: {task['discordance']:.1%} of the predictions flip, {task['per_task']} images needed")


if __name__ == "__main__":
    main()
