"""How long `holdfast develop` takes to its first answer on a folder of pictures: what the refit alone would do.

    OMP_NUM_THREADS=2 python benchmarks/first_answer.py SCENES.zip          # 5,000 pictures, towers made of parts
    python benchmarks/first_answer.py PICTURES/ --images 2000 --model tiny

The source holds one folder a class, at any depth (`train/CLASS/1.jpg`). A round is written by `holdfast init`, its old
model made by a few steps of `holdfast tune`; neither is timed. What is timed, from the start of the process to the line
on the terminal: the plan, and the line "without training (refit)" with its chance; then, of `--quick`, the whole round,
the query of the sealed images included. Each is run twice: the second run finds features on disk, and each run has a
ledger of its own.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

SUFFIXES = (".jpg", ".jpeg", ".png")
ANSWERS = {"plan": "plan: ", "refit and its chance": "without training ("}


def pictures(source: Path) -> Iterator[tuple[str, str, bytes]]:
    """Class, file name and bytes of the pictures of a zip file or a folder."""
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.suffix.lower() in SUFFIXES:
                yield path.parent.name, path.name, path.read_bytes()
        return
    with zipfile.ZipFile(io.BytesIO(source.read_bytes())) as archive:
        for name in sorted(archive.namelist()):
            path = PurePosixPath(name)
            if path.suffix.lower() in SUFFIXES:
                yield path.parent.name, path.name, archive.read(name)


def write_folder(source: Path, folder: Path, images: int) -> list[str]:
    """As many pictures, the classes in equal parts as far as they go; the names of the classes."""
    found: dict[str, list[tuple[str, bytes]]] = defaultdict(list)
    for label, name, content in pictures(source):
        found[label].append((name, content))
    for place in range(images):
        label = sorted(found)[place % len(found)]
        if place // len(found) < len(found[label]):
            name, content = found[label][place // len(found)]
            (folder / label).mkdir(parents=True, exist_ok=True)
            (folder / label / f"{place}-{name}").write_bytes(content)
    return sorted(found)


def holdfast(folder: Path, environment: Mapping[str, str], *words: str) -> None:
    """A command that is not timed."""
    command = [sys.executable, "-m", "holdfast", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"holdfast {' '.join(words)}: {done.stderr}")


def processor() -> float:
    """Seconds of the processor that the processes started so far have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def develop(folder: Path, environment: Mapping[str, str], run: str, *options: str) -> dict[str, float]:
    """Seconds from the start to each answer; a round that would go on training is stopped at the last of them.

    Beside them the processor's seconds of the whole process: what a busy machine would have taken if it were idle.
    """
    command = [sys.executable, "-m", "holdfast", "develop", "ROUND.toml", "--out", run, *options]
    found: dict[str, float] = {}
    begin, busy = time.perf_counter(), processor()
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes) as process:
        assert process.stderr is not None
        for line in process.stderr:
            found |= {what: time.perf_counter() - begin for what, start in ANSWERS.items() if line.startswith(start)}
            if "refit and its chance" in found:
                process.kill()
    if "--quick" in options:
        found["quick round"] = time.perf_counter() - begin
    if not found:
        raise SystemExit(f"{' '.join(command)} gave no answer")
    found[f"{list(found)[-1]}: processor"] = processor() - busy
    return found


def write_round(source: Path, folder: Path, images: int, model: str, tune_steps: int) -> list[str]:
    """A folder of pictures, ROUND.toml about it, and the old model that it names; the classes."""
    environment = environment_of(folder)
    classes = write_folder(source, folder / "pictures", images)
    holdfast(folder, environment, "init", "pictures", "--target", classes[1], "--model", model)
    if (folder / "TUNE.toml").exists():
        text = (folder / "TUNE.toml").read_text(encoding="utf-8")
        text = re.sub(r"(?m)^(steps|every) = \d+", rf"\1 = {tune_steps}", text)
        (folder / "TUNE.toml").write_text(text, encoding="utf-8")
        holdfast(folder, environment, "tune", "TUNE.toml", "--out", "base", "--quiet")
    return classes


def environment_of(folder: Path) -> dict[str, str]:
    """Caches of its own, and bytecode as an installation has it."""
    environment = {**os.environ, "HOLDFAST_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment | {"PYTHONPYCACHEPREFIX": str(folder / "bytecode")}


def main() -> None:
    """Print a row for each answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a zip file or a folder of pictures, one folder a class")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--model", default="parts", help="as for `holdfast init`")
    parser.add_argument("--tune-steps", type=int, default=10)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        classes = write_round(arguments.source, folder, arguments.images, arguments.model, arguments.tune_steps)
        written = (folder / "ROUND.toml").read_text(encoding="utf-8")
        for options in ((), ("--quick",)):
            shutil.rmtree(folder / "cache" / "features", ignore_errors=True)
            for turn in ("first", "again"):
                run = f"{turn}{''.join(options)}"
                text = re.sub(r'(?m)^ledger = "ledger"', f'ledger = "ledger-{run}"', written)
                (folder / "ROUND.toml").write_text(text, encoding="utf-8")
                for what, taken in develop(folder, environment_of(folder), run, "--anyway", *options).items():
                    if not options or what.startswith("quick round"):
                        seconds[what].append(taken)
    print(f"{arguments.images} pictures, {len(classes)} classes, {arguments.model}; ", end="")
    print(f"{os.environ.get('OMP_NUM_THREADS', os.cpu_count())} threads of {os.cpu_count()} processors")
    print("| answer | first run, s | again, s |\n| --- | ---: | ---: |")
    for what, (first, again) in seconds.items():
        print(f"| {what} | {first:.1f} | {again:.1f} |")


if __name__ == "__main__":
    main()
