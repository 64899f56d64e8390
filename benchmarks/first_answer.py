"""How long `holdfast develop` takes to its first answer on a folder of pictures: what the refit alone would do.

    OMP_NUM_THREADS=2 python benchmarks/first_answer.py SCENES.zip          # 5,000 pictures, towers made of parts
    python benchmarks/first_answer.py PICTURES/ --images 2000 --model tiny
    python benchmarks/first_answer.py SCENES.zip --answer-only              # on a GPU, where there is one
    python benchmarks/first_answer.py SCENES.zip --images 500 --model conse --answer-only --busy 2

The source holds one folder a class, at any depth (`train/CLASS/1.jpg`). A round is written by `holdfast init`, its old
model made by a few steps of `holdfast tune`; neither is timed. What is timed, from the start of the process to the line
on the terminal: the plan, and the line "without training (refit)" with its chance; then, of `--quick`, the whole round,
the query of the sealed images included. Each is run twice: the second run finds features on disk (on a CPU), and each
run has a ledger of its own. A second table has the seconds of each stage up to the refit's answer, as `--verbose` names
them. `--device cpu` leaves a GPU alone. `--busy N` has N processes compute beside the commands that are timed.
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
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

SUFFIXES = (".jpg", ".jpeg", ".png")
START = "start of the command"
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


def develop(
    folder: Path, environment: Mapping[str, str], run: str, *options: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds from the start to each answer, and of each stage before the last; training is stopped at that.

    Beside them the processor's seconds of the whole process: what a busy machine would have taken if it were idle.
    """
    command = [sys.executable, "-m", "holdfast", "develop", "ROUND.toml", "--out", run, "--verbose", *options]
    found: dict[str, float] = {}
    stages: list[tuple[str, float]] = [(START, 0.0)]
    begin, busy = time.perf_counter(), processor()
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    printed: list[str] = []
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes) as process:
        assert process.stderr is not None
        for line in process.stderr:
            now = time.perf_counter() - begin
            printed.append(line)
            found |= {what: now for what, start in ANSWERS.items() if line.startswith(start)}
            if line.rstrip().endswith(" …") and "refit and its chance" not in found:
                stages.append((line.rstrip().removesuffix(" …"), now))
            if "refit and its chance" in found:
                process.kill()
    ended = time.perf_counter() - begin
    if "--quick" in options:
        found["quick round"] = ended
    if not found:
        raise SystemExit(f"{' '.join(command)} gave no answer:\n{''.join(printed[-20:])}")
    last = found.get("refit and its chance", ended)
    found[f"{list(found)[-1]}: processor"] = processor() - busy
    return found, by_stage(stages, last)


def by_stage(stages: Sequence[tuple[str, float]], ended: float) -> dict[str, float]:
    """Seconds of each stage, those of one name together, from the moments at which they began."""
    seconds: dict[str, float] = defaultdict(float)
    for (name, began), until in zip(stages, [*(moment for _, moment in stages[1:]), ended], strict=True):
        seconds[name] += until - began
    return dict(seconds)


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


@contextmanager
def others(count: int) -> Generator[None]:
    """So many processes that compute, and do nothing else, for as long as the block takes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


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
    parser.add_argument("--device", help="as for `holdfast develop`: cpu or cuda; a GPU where there is one")
    parser.add_argument("--answer-only", action="store_true", help="leave out the quick round")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside what is timed")
    arguments = parser.parse_args()
    device = ("--device", arguments.device) if arguments.device else ()
    seconds: dict[str, list[float]] = defaultdict(list)
    phases: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        classes = write_round(arguments.source, folder, arguments.images, arguments.model, arguments.tune_steps)
        written = (folder / "ROUND.toml").read_text(encoding="utf-8")
        for options in ((),) if arguments.answer_only else ((), ("--quick",)):
            shutil.rmtree(folder / "cache" / "features", ignore_errors=True)
            for place, turn in enumerate(("first", "again")):
                run = f"{turn}{''.join(options)}"
                text = re.sub(r'(?m)^ledger = "ledger"', f'ledger = "ledger-{run}"', written)
                (folder / "ROUND.toml").write_text(text, encoding="utf-8")
                with others(arguments.busy):
                    found, stages = develop(folder, environment_of(folder), run, "--anyway", *device, *options)
                for what, taken in found.items():
                    if not options or what.startswith("quick round"):
                        seconds[what].append(taken)
                if not options:
                    for what, taken in stages.items():
                        phases[what][place] = taken
    print(f"{arguments.images} pictures, {len(classes)} classes, {arguments.model}; ", end="")
    threads = os.environ.get("OMP_NUM_THREADS", os.cpu_count())
    beside = f", {arguments.busy} other processes that compute" if arguments.busy else ""
    print(f"{threads} threads of {os.cpu_count()} processors, {on(device)}{beside}")
    print("| answer | first run, s | again, s |\n| --- | ---: | ---: |")
    for what, (first, again) in seconds.items():
        print(f"| {what} | {first:.1f} | {again:.1f} |")
    print("\n| up to the refit and its chance | first run, s | again, s |\n| --- | ---: | ---: |")
    for what, (first, again) in phases.items():
        print(f"| {what} | {first:.1f} | {again:.1f} |")


def on(device: Sequence[str]) -> str:
    """The device in words."""
    import torch

    wants_gpu = "cpu" not in device and torch.cuda.is_available()
    return torch.cuda.get_device_name() if wants_gpu else "no GPU used"


if __name__ == "__main__":
    main()
