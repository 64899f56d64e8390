"""The studies of README and docs: ready studies that ``holdfast compare`` runs, and one table of what they found.

    python benchmarks/studies.py run DATA --work FOLDER --jobs 2    # DATA holds intel-scene-64.zip and the others
    python benchmarks/studies.py table                              # prints the table from results/studies.json

``run`` unpacks the photographs, runs each study as the command line does and writes what the table needs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, machine

RESULTS = Path(__file__).with_name("results") / "studies.json"
STUDIES = tuple(f"intel-scenes{target}{kind}" for kind in ("", "-shipped") for target in ("", "-sea", "-buildings"))


def unpack(data: Path, work: Path) -> None:
    """The photographs as folders."""
    for file in data.glob("*-64.zip"):
        if not (work / file.stem).exists():
            with zipfile.ZipFile(file) as archive:
                archive.extractall(work / file.stem)


def run(data: Path, work: Path, jobs: int, names: list[str]) -> None:
    """Run studies and keep what they chose."""
    work.mkdir(parents=True, exist_ok=True)
    unpack(data, work)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        out = work / "studies" / name
        command = [sys.executable, "-m", "holdfast", "compare", name, "--root", str(work), "--out", str(out)]
        subprocess.run([*command, "--jobs", str(jobs), "--no-figures"], check=True)
        rows = [entry for entry in json.loads((out / "chosen.json").read_text()) if entry["test"]]
        kept = [{key: entry[key] for key in ("row", "column", "test", "shipped", "certified") if key in entry}
                for entry in rows]  # fmt: skip
        results[name] = {"machine": machine(), "commit": commit(), "rows": kept}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def table(results: dict[str, Any]) -> str:
    """Means over the targets: worst change of a protected class, change of the target, and what was kept."""
    lines = ["| method | result | images a task | worst class | target | kept every class | certified |",
             "| --- | --- | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for kind, label in (("-shipped", "what ships"), ("", "best checkpoint")):
        found = [study["rows"] for name, study in results.items() if name.endswith("-shipped") == bool(kind)]
        places = dict.fromkeys((entry["row"], entry["column"]) for rows in found for entry in rows)
        for row, column in places:
            cells = [entry for rows in found for entry in rows if (entry["row"], entry["column"]) == (row, column)]
            lines.append(f"| {row} | {label} | {column} | {_summary(cells)} |")
    return "\n".join(lines)


def _summary(cells: list[dict[str, Any]]) -> str:
    tests = [cell["test"] for cell in cells]
    seeds = sum(test["seeds"] for test in tests)
    worst, gain = (sum(test[key][0] for test in tests) / len(tests) * 100 for key in ("dev_safety", "target_gain"))
    kept = sum(round(test["retention_ratio"] * test["seeds"]) for test in tests)
    certified = f"{sum(cell['certified'] for cell in cells)} of {seeds}" if "certified" in cells[0] else ""
    return f"{worst:+.1f} | {gain:+.1f} | {kept} of {seeds} | {certified}"


def main() -> None:
    """Run, or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("data", type=Path)
    runs.add_argument("--work", type=Path, required=True)
    runs.add_argument("--jobs", type=int, default=1)
    runs.add_argument("--studies", nargs="*", default=list(STUDIES))
    commands.add_parser("table")
    given = parser.parse_args()
    if given.command == "run":
        run(given.data, given.work, given.jobs, given.studies)
    print(table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
