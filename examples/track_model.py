"""Register a model in MLflow, and promote it only if its certificate verifies. Offline, in a SQLite file.

    python examples/track_model.py FOLDER

Serving asks for ``models:/weather@certified``. A model that is not proven to keep every task never gets that alias.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import holdfast
from holdfast.report.tracked import tracked_certificate
from holdfast.report.trackers import to_mlflow


def predictions(path: Path, lost: float, seed: int) -> Path:
    """Two models on 600 images of two tasks; the new one loses a share of what the old one had right."""
    draw = random.Random(seed)
    lines = ["example_id,task,label,old,new"]
    for task in ("clear", "snowy"):
        for image in range(600):
            old = task if draw.random() < 0.9 else "other"
            new = "other" if old == task and draw.random() < lost else old
            lines.append(f"{task}-{image},{task},{task},{old},{new}")
    path.write_text("\n".join(lines) + "\n")
    return path


def main(folder: Path) -> None:
    """Two updates of one model: a careful one, and one that forgets."""
    for name, lost in (("careful", 0.003), ("forgetful", 0.08)):
        weights = folder / f"{name}.onnx"
        weights.write_bytes(name.encode())  # your model: any file or folder, of any framework
        table = predictions(folder / f"{name}.csv", lost, seed=0)
        result = holdfast.certify(table, margin=0.03)
        certificate = folder / f"{name}.json"
        result.write(certificate, {"new model": weights})
        flips = result.report["flips"]
        tracked = tracked_certificate(certificate, weights, register=True)
        logged = to_mlflow(tracked, f"sqlite:///{folder}/mlflow.db", register="weather")
        state = "promoted to @certified" if logged.promoted else f"not promoted: {logged.refused}"
        print(f"{name}: NFR {flips['negative_flip_rate']:.2%}, version {logged.version}, {state}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
