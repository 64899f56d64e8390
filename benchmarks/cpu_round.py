"""A round with frozen towers on a CPU, first and again, beside a bare scikit-learn fit on the same features.

    OMP_NUM_THREADS=2 python benchmarks/cpu_round.py SCENES.zip              # 2,000 pictures
    python benchmarks/cpu_round.py PICTURES/ --images 5000 --steps 200

The round trains task heads (`freeze = "towers"`, `augment = false`), makes its candidates and queries its sealed
images. The first run encodes every picture, the second finds the features of all but the sealed ones on disk. What it
is compared with is `LogisticRegression` on the features of the same training pictures, in the same process: once with
the pass of the tower that makes them, once without. Seconds of the processor stand beside those of the clock: on a
machine with other work their ratios say more.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.first_answer import write_round
from holdfast.cli.process import keep_freed_memory


def main() -> None:
    """Print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a zip file or a folder of pictures, one folder a class")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--model", default="parts", help="as for `holdfast init`")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tune-steps", type=int, default=10)
    arguments = parser.parse_args()
    keep_freed_memory()  # as the command does
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HOLDFAST_CACHE"] = str(folder / "cache")
        write_round(arguments.source, folder, arguments.images, arguments.model, arguments.tune_steps)
        seconds = {what: rounds(folder, what, arguments.steps) for what in ("first run", "second run")}
        encoding, fitting = logistic_regression(folder)
    print(f"{arguments.images} pictures, {arguments.steps} steps, {arguments.model}, {os.cpu_count()} processors")
    print("| what | s | times the features and the bare fit | of the processor, s | times |")
    print("| --- | ---: | ---: | ---: | ---: |")
    bare = encoding + fitting
    seconds |= {"features and LogisticRegression": bare, "LogisticRegression": fitting}
    for what, taken in seconds.items():
        times = taken / bare
        print(f"| {what} | {taken[0]:.1f} | {times[0]:.1f} | {taken[1]:.1f} | {times[1]:.1f} |")


def used() -> np.ndarray:
    """Seconds by the clock, and of the processor by this process."""
    return np.array([time.perf_counter(), time.process_time()])


def config_of(folder: Path, run: str, steps: int) -> Any:
    """The round that `holdfast init` wrote, with frozen towers, clean views and a ledger of its own."""
    from holdfast.config import RoundConfig, parse, read_toml

    values = read_toml(folder / "ROUND.toml")
    values["model"] |= {"freeze": "towers"}
    values["train"] |= {"only_if_needed": False, "augment": False, "steps": steps, "device": "cpu"}
    values["evaluate"] |= {"every": max(1, steps // 4)}
    values["certify"] |= {"ledger": f"ledger-{run}"}
    return parse(RoundConfig, values, "ROUND.toml", folder)


def rounds(folder: Path, run: str, steps: int) -> np.ndarray:
    """Seconds of a whole round, its data read and its model loaded anew."""
    from holdfast import develop

    config = config_of(folder, run, steps)
    begin = used()
    develop(config, folder / run, folder, quiet=True)
    return used() - begin


def logistic_regression(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Seconds that the features of the round's training pictures take, and the bare fit on them."""
    import torch
    from sklearn.linear_model import LogisticRegression

    from holdfast import Round
    from holdfast.model.feature_store import encode_set, features_kept

    prepared = Round(config_of(folder, "bare", 1), folder, folder / "bare")
    data, model = prepared.data, prepared.prepared.old
    begin = used()
    with features_kept(None), torch.no_grad():
        found = [
            torch.cat([model.finished(part) for _, part in encode_set(model.towers, examples, model.towers.projection)])
            for examples in (data.constraint, data.target)
        ]
    encoding = used() - begin
    labels = np.concatenate([data.constraint.labels, np.full(len(data.target), data.tasks.target_index)])
    begin = used()
    LogisticRegression(max_iter=1000).fit(torch.cat(found).numpy(), labels)
    return encoding, used() - begin


if __name__ == "__main__":
    main()
