"""How long commands that need no tensor take to answer, beside a bare Python that imports numpy.

    python benchmarks/startup.py                 # best of 5, in turns
    python benchmarks/startup.py --run RUN       # and `holdfast verify RUN`, `holdfast report RUN`

Each command is a process of its own. They are started in turns, and the best time of each is compared: ratios within a
run hold on a busy machine too, those of processor time most of all. Bytecode is kept in a folder of this run, as an
installation keeps its own: the first turn compiles and is not counted. `--no-bytecode` leaves that out, for a Python
that must compile every module again.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

GOAL = 4.0
CLASSES = ("clear", "rainy", "snowy", "foggy")
PICTURES = 150  # of each class
ROUND = """
task.target = "foggy"
data.source = { kind = "folder", path = "pictures" }
data.roles = { dev = 0.2, sealed = 0.4 }
model.architecture = "tiny"
certify.margin = 0.1
"""


def write_inputs(folder: Path) -> None:
    """A folder of pictures, a round about it, the same round with a typo, and predictions of two models."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for name in CLASSES:
        (folder / "pictures" / name).mkdir(parents=True)
        for number in range(PICTURES):
            pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / name / f"{number}.png")
    (folder / "round.toml").write_text(ROUND, encoding="utf-8")
    (folder / "typo.toml").write_text(ROUND.replace("margin", "margni"), encoding="utf-8")
    for model, wrong in (("old", 0.06), ("new", 0.05)):
        with (folder / f"{model}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["example_id", "task", "label", "prediction"])
            for number in range(400 * len(CLASSES)):
                label = CLASSES[number % len(CLASSES)]
                writer.writerow([f"image-{number}", label, label, "other" if draw.random() < wrong else label])


def commands(run: Path | None) -> dict[str, tuple[int, list[str]]]:
    """What is started and how it must end, by the name in the table; the others are compared with the first."""
    holdfast = {
        "--help": (0, ["--help"]),
        "--version": (0, ["--version"]),
        "plan, numbers": (0, ["plan", "--tasks", "5", "--images", "100", "--discordance", "0.02"]),
        "plan ROUND.toml": (0, ["plan", "round.toml"]),
        "develop, typo in ROUND.toml": (2, ["develop", "typo.toml"]),
        "develop, no such file": (2, ["develop", "missing.toml"]),
        "certify OLD.csv NEW.csv": (0, ["certify", "old.csv", "new.csv", "--margin", "0.05"]),
        "verify CERTIFICATE": (0, ["verify", "certificate.json"]),
    }
    if run is not None:
        holdfast["verify RUN"] = (0, ["verify", str(run.resolve())])
        holdfast["report RUN"] = (0, ["report", str(run.resolve())])
    bare = {"python -c 'import numpy'": (0, [sys.executable, "-c", "import numpy"])}
    start = [sys.executable, "-m", "holdfast"]
    return bare | {f"holdfast {name}": (code, [*start, *words]) for name, (code, words) in holdfast.items()}


def processor() -> float:
    """Seconds of the processor that the processes started so far have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds(code: int, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[float, float]:
    """Of one process, by the clock and of the processor; another end than the one with ``code`` is not timed."""
    begin, busy = time.perf_counter(), processor()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    taken = time.perf_counter() - begin, processor() - busy
    if done.returncode != code or "Traceback" in done.stderr:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}, not {code}:\n{done.stderr}")
    return taken


def main() -> None:
    """Print a row for each command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--run", type=Path, help="a run folder with a certificate, to verify and to report")
    parser.add_argument("--no-bytecode", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        environment = {**os.environ, "HOLDFAST_CACHE": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        if not arguments.no_bytecode:
            del environment["PYTHONDONTWRITEBYTECODE"]
            environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        made = [sys.executable, "-m", "holdfast", "certify", "old.csv", "new.csv", "--margin", "0.05"]
        seconds(0, [*made, "--out", "certificate.json"], folder, environment)
        timed = commands(arguments.run)
        best = {what: (float("inf"), float("inf")) for what in timed}
        for turn in range(arguments.turns + 1):
            for what, (code, command) in timed.items():
                taken = seconds(code, command, folder, environment)
                if turn:  # the first compiles, and reads files that are not in memory yet
                    best[what] = (min(best[what][0], taken[0]), min(best[what][1], taken[1]))
    bare, *_ = best.values()
    print(f"{os.cpu_count()} processors; best of {arguments.turns}; goal: at most {GOAL:g} times the first row")
    print("| command | ms | times | processor, ms | times |\n| --- | ---: | ---: | ---: | ---: |")
    for what, taken in best.items():
        cells = [f"{1000 * time:.0f} | {time / first:.1f}" for time, first in zip(taken, bare, strict=True)]
        print(f"| `{what}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
