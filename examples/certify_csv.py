"""Two CSV files of predictions, of any two models -> a certificate. No torch.

python examples/certify_csv.py [FOLDER]
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

import holdfast

CLASSES = ("car", "bus", "truck", "bicycle")


def write_predictions(path: Path, seed: int, accuracy: dict[str, float]) -> None:
    """Stands for what your own evaluation writes: one row an image. Both models make mostly the same mistakes."""
    images, own = random.Random(0), random.Random(seed)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["example_id", "task", "label", "prediction"])
        for number in range(2000):
            label, luck, changed = CLASSES[number % 4], images.random(), own.random() < 0.02
            right = (own.random() if changed else luck) < accuracy[label]
            wrong = CLASSES[(number + 1) % 4]
            rows.writerow([number, label, label, label if right else wrong])


def main(folder: Path) -> None:
    """Certify that the new model kept every class within 2 points while the bicycle improved."""
    old, new = folder / "old.csv", folder / "new.csv"
    write_predictions(old, 1, {"car": 0.95, "bus": 0.9, "truck": 0.92, "bicycle": 0.6})
    write_predictions(new, 2, {"car": 0.95, "bus": 0.9, "truck": 0.92, "bicycle": 0.75})
    result = holdfast.certify(old, new, target="bicycle", margin=0.02, confidence=0.95)
    print(f"verdict: {result.verdict}")
    for name, task in result.tasks.items():
        gained, lost, n = task.counts.gained, task.counts.lost, task.counts.n
        print(f"{name:<8} {gained} gained, {lost} lost of {n}: {task.verdict}, p = {task.p_value:.2g}")
    result.write(folder / "certificate.json")
    print(f"check it with: holdfast verify {folder / 'certificate.json'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
