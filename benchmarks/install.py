"""What an installation costs: the certificate alone, against everything that training needs.

    python benchmarks/install.py            writes benchmarks/results/install.json

Each gets a wheel of this checkout in a virtual environment of its own, with an empty cache: seconds are those of a
machine that has none of the packages, its network included. Then, in the light one, the least of five starts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import commit, machine  # noqa: E402
from tests.certify.helpers import rows, write_csv  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "install.json"
SPEC = {"clear": (500, 5, 3), "snowy": (400, 4, 1), "foggy": (300, 3, 2)}
REPEATS = 5
CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def uv(*arguments: object, **environment: str) -> None:
    program = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        sys.exit("uv is not installed")
    subprocess.run([program, *map(str, arguments)], check=True, env=CLEAN | environment)


def install(folder: Path, requirement: str) -> dict[str, Any]:
    """Seconds, bytes and packages of a new environment with one requirement."""
    uv("venv", "--quiet", "--python", sys.executable, folder)
    python, cache = folder / "bin" / "python", str(folder.with_name(folder.name + "-cache"))
    start = time.perf_counter()
    uv("pip", "install", "--quiet", "--python", python, requirement, UV_CACHE_DIR=cache)
    seconds = time.perf_counter() - start
    shutil.rmtree(cache)
    (packages,) = folder.glob("lib/python*/site-packages")
    size = sum(file.lstat().st_size for file in packages.rglob("*") if file.is_file())
    return {
        "seconds": round(seconds, 1),
        "megabytes": round(size / 1e6),
        "packages": len(list(packages.glob("*.dist-info"))),
    }


def start(*command: object, folder: Path) -> dict[str, float]:
    """From the start of a process to its end, the least of several: seconds, and processor seconds."""
    times: list[tuple[float, float]] = []
    for _ in range(REPEATS):
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([*map(str, command)], cwd=folder, env=CLEAN, check=True, stdout=subprocess.DEVNULL)
        seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append((seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    seconds, processor = (round(min(values), 2) for values in zip(*times, strict=True))
    return {"seconds": seconds, "processor_seconds": processor}


def starts(python: Path, folder: Path) -> dict[str, dict[str, float]]:
    table = write_csv(folder / "predictions.csv", rows(SPEC))
    program = python.with_name("holdfast")
    certify = (program, "certify", table, "--margin", "0.02")
    return {
        "python alone": start(python, "-c", "pass", folder=folder),
        "import holdfast": start(python, "-c", "import holdfast", folder=folder),
        "holdfast --help": start(program, "--help", folder=folder),
        f"holdfast certify, {sum(n for n, _, _ in SPEC.values()):,} images": start(*certify, folder=folder),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    results: dict[str, Any] = {"machine": machine(), "commit": commit(), "load_average": round(os.getloadavg()[0], 2)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        uv("build", "--quiet", "--wheel", "--out-dir", folder, ROOT)
        (wheel,) = folder.glob("*.whl")
        results["holdfast"] = install(folder / "light", str(wheel))
        results["starts"] = starts(folder / "light" / "bin" / "python", folder)
        results["holdfast[train]"] = install(folder / "full", f"holdfast[train] @ {wheel.as_uri()}")
    OUT.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
