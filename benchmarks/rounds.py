"""Does a round end well? The documented path on many folders of photographs, and the chance that was told beforehand.

    python benchmarks/rounds.py run DATA/pacs-128.zip --prefix photo --target giraffe,horse --sizes 60,100,300 --seeds 3
    python benchmarks/rounds.py table                     # from results/rounds.json, with no run

For each target, size and seed a folder is cut (SIZE images a class at most, one protected class with half of them, the
rest kept aside), and the commands of the tutorial are run in it: ``init``, ``tune`` (not for a model that needs none),
``plan``, ``develop``. The images kept aside then say what the old and the new model are worth.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, machine

RESULTS = Path(__file__).with_name("results") / "rounds.json"
PICTURES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class Walk:
    """One folder, cut from a source, and what is to be done in it."""

    source: Path
    prefix: str
    target: str
    size: int
    seed: int
    model: str
    quick: bool


def classes_of(source: Path, prefix: str) -> dict[str, list[str]]:
    """Class -> the names of its pictures in an archive laid out as [PREFIX/]CLASS/NAME."""
    found: dict[str, list[str]] = defaultdict(list)
    with zipfile.ZipFile(source) as archive:
        for name in sorted(archive.namelist()):
            if name.lower().endswith(PICTURES) and name.startswith(prefix):
                found[name.split("/")[-2]].append(name)
    return dict(found)


def cut(walk: Walk, folder: Path) -> None:
    """``photos/`` for the round, ``rest/`` kept aside; one protected class has half as many images as the others."""
    draw = random.Random(f"{walk.seed} {walk.size} {walk.target}")
    classes = classes_of(walk.source, walk.prefix)
    small = draw.choice(sorted(set(classes) - {walk.target}))
    with zipfile.ZipFile(walk.source) as archive:
        for name, files in classes.items():
            order = draw.sample(files, len(files))
            kept = min(walk.size // 2 if name == small else walk.size, max(2, len(order) * 3 // 4))
            for place, file in enumerate(order):
                where = folder / ("photos" if place < kept else "rest") / name
                where.mkdir(parents=True, exist_ok=True)
                (where / Path(file).name).write_bytes(archive.read(file))


def holdfast(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *words],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "HOLDFAST_LEDGER": str(folder / "ledger")},  # each walk stands for another user
    )
    with (folder / "log.txt").open("a") as log:
        log.write(f"$ holdfast {' '.join(words)}\n{done.stdout}{done.stderr}\n")
    return done.returncode, done.stdout


def walked(walk: Walk, folder: Path) -> dict[str, Any]:
    """One walk from folder to verdict, as a line of the results."""
    cut(walk, folder)
    line: dict[str, Any] = {
        "source": walk.source.stem, "prefix": walk.prefix, "target": walk.target, "size": walk.size, "seed": walk.seed,
        "model": walk.model, "quick": walk.quick,
    }  # fmt: skip
    code, _ = holdfast(folder, "init", "photos", "--target", walk.target, "--model", walk.model)
    if code:
        return {**line, "ended": f"init {code}"}
    if (folder / "TUNE.toml").exists():
        code, _ = holdfast(folder, "tune", "TUNE.toml", "--out", "base", "--quiet")
        if code:
            return {**line, "ended": f"tune {code}"}
    code, text = holdfast(folder, "plan", "ROUND.toml", "--json")
    line["planned"] = json.loads(text)["chance"] if text.strip().startswith("{") else None
    began = time.perf_counter()
    trained = "--quick" if walk.quick else "--train"
    code, _ = holdfast(folder, "develop", "ROUND.toml", "--out", "run", "--quiet", trained)
    line |= {"ended": f"develop {code}", "seconds": round(time.perf_counter() - began)}
    result = folder / "run" / "result.json"
    if result.exists():
        line |= judged(json.loads(result.read_text()), walk, folder)
    return line


def judged(result: Mapping[str, Any], walk: Walk, folder: Path) -> dict[str, Any]:
    """What was decided, and what the images kept aside say of it."""
    tested = (result["order"] or [None])[0]
    by_name = {item["name"]: item for item in result["candidates"]}
    line: dict[str, Any] = {
        "verdict": result["verdict"], "shipped": result["chosen"], "tested": tested,
        "predicted": by_name[tested]["chance"] if tested else None,
        "best": max(item["chance"] for item in by_name.values()),
        "dev": {name: [item["dev"]["target_gain"], item["dev"]["dev_safety"], item["chance"]]
                for name, item in by_name.items()},
    }  # fmt: skip
    reported = result["certificate"] or {}
    rows = [*reported.get("tasks", ()), *([reported["target"]] if reported.get("target") else [])]
    line["sealed"] = [[row[key] for key in ("task", "n", "gained", "lost", "margin", "p_value")] for row in rows]
    tuned = folder / "base" / "model"
    old = tuned if tuned.exists() else walk.model
    if result["chosen"]:
        before, after = (
            right(model, name, folder) for name, model in (("old", old), ("new", folder / "run" / "model"))
        )
        changes = {name: sum(after[name]) / len(after[name]) - sum(before[name]) / len(before[name]) for name in before}
        flips = {name: [len(before[name]),
                        sum(new and not was for was, new in zip(before[name], after[name], strict=True)),
                        sum(was and not new for was, new in zip(before[name], after[name], strict=True))]
                 for name in before}  # fmt: skip
        gain, margins = changes.pop(walk.target), _margins(folder, changes)
        kept = all(change >= -margins[name] for name, change in changes.items())
        line |= {"gain": gain, "worst": min(changes.values()), "kept": kept, "flips": flips}
    return line


def _margins(folder: Path, classes: Mapping[str, float]) -> dict[str, float]:
    """What the round's file allows each class to lose."""
    given = tomllib.loads((folder / "ROUND.toml").read_text()).get("certify", {}).get("margin", 0.02)
    return {name: given[name] if isinstance(given, dict) else given for name in classes}


def right(model: Path | str, name: str, folder: Path) -> dict[str, list[bool]]:
    """Class -> whether each picture kept aside is recognised."""
    import pyarrow.parquet as pq

    code, _ = holdfast(folder, "evaluate", str(model), "rest", "--out", f"{name}.parquet")
    if code:
        raise RuntimeError((folder / "log.txt").read_text()[-2000:])
    found: dict[str, list[bool]] = defaultdict(list)
    for row in sorted(pq.read_table(folder / f"{name}.parquet").to_pylist(), key=lambda row: str(row["example_id"])):
        found[row["label"]].append(row["label"] == row["prediction"])
    return dict(found)


def run(walks: Sequence[Walk], jobs: int, keep: Path | None) -> list[dict[str, Any]]:
    """All walks, some at a time."""
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:

        def done(walk: Walk) -> dict[str, Any]:
            name = f"{walk.source.stem}-{walk.prefix}-{walk.target}-{walk.size}-{walk.seed}-{walk.model}-{walk.quick:d}"
            folder = (keep or Path(scratch)) / name.replace("/", "_")
            folder.mkdir(parents=True)
            line = walked(walk, folder)
            short = {key: value for key, value in line.items() if key not in ("dev", "flips", "sealed")}
            print(json.dumps(short), flush=True)
            return line

        return list(pool.map(done, walks))


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """By source and size: how many rounds were certified, and the chances beside it."""
    rows = ["| photographs | images a class | rounds | stopped by the plan | certified | planned | predicted "
            "| margins, points | kept every margin | gain | worst class |",
            "| --- " + 10 * "| ---: " + "|"]  # fmt: skip
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[f"{line['source']} {line['prefix']}".strip(), f"{line['size']:04d}"].append(line)
        groups["all", ""].append(line)
    for (source, size), group in sorted(groups.items(), key=lambda item: (item[0][0] == "all", item[0])):
        certified = [line for line in group if line.get("verdict") == "certified"]
        stopped = [line for line in group if line["ended"] == "develop 2"]
        ran = [line for line in group if line.get("verdict")]
        judged_ = [line for line in certified if "worst" in line]
        rows.append(
            f"| {source} | {size.lstrip('0')} | {len(group)} | {len(stopped)} | {len(certified)} of {len(ran)} "
            f"| {_mean([line['planned'] for line in ran if line.get('planned') is not None], 100)} % "
            f"| {_mean([line['predicted'] for line in ran if line.get('predicted') is not None], 100)} % "
            f"| {_margins_of(group)} "
            f"| {sum(line['kept'] for line in judged_ if 'kept' in line)} of {len(judged_)} "
            f"| {_mean([line['gain'] for line in judged_], 100, '+.1f')} "
            f"| {min((100 * line['worst'] for line in judged_), default=float('nan')):+.1f} |"
        )
    return "\n".join(rows)


def _margins_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """Least, median and greatest margin of the protected classes that were tested."""
    margins = [row[4] for line in lines for row in line.get("sealed", ()) if row[0] != line["target"]]
    if not margins:
        return "–"
    return f"{100 * min(margins):g} / {100 * statistics.median(margins):g} / {100 * max(margins):g}"


def kinds(lines: Sequence[Mapping[str, Any]]) -> str:
    """By how the tested candidate was made: how often it passed and, where it shipped, its flips on the rest."""
    rows = [
        "| tested | target bias | rounds | passed | lost | gained | worst class, mean |",
        "| --- " + "| ---: " * 6 + "|",
    ]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        name = str(line.get("tested") or "")
        bias = float(name.partition("-bias")[2] or 0)
        made = (
            "refit"
            if name.startswith("refit")
            else "last layer"
            if name.startswith("last-layer")
            else "trained weights"
        )
        kind = (made, "1 and more" if bias >= 1 else "below 1") if name else ("no candidate", "")
        groups[kind].append(line)
    for (kind, bias), group in sorted(groups.items()):
        flips = [[counts for name, counts in line["flips"].items() if name != line["target"]]
                 for line in group if "flips" in line]  # fmt: skip
        images = sum(n for counts in flips for n, _, _ in counts)
        lost, gained = (sum(row[place] for counts in flips for row in counts) for place in (2, 1))
        worst = [max((c - b) / n for n, b, c in counts) for counts in flips]
        shares = f"{100 * lost / images:.2f} % | {100 * gained / images:.2f} %" if images else "– | –"
        passed = sum(line.get("verdict") == "certified" for line in group)
        rows.append(f"| {kind} | {bias} | {len(group)} | {passed} | {shares} | {_mean(worst, 100, '.1f')} points |")
    return "\n".join(rows)


def _mean(values: Sequence[float], times: float, form: str = ".0f") -> str:
    return format(times * sum(values) / len(values), form) if values else "–"


def main() -> None:
    """Run, or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("source", type=Path)
    runs.add_argument("--prefix", default="")
    runs.add_argument("--target", required=True, help="one or more, with commas")
    runs.add_argument("--sizes", default="100")
    runs.add_argument("--seeds", type=int, default=1)
    runs.add_argument("--model", default="parts")
    runs.add_argument("--quick", action="store_true")
    runs.add_argument("--jobs", type=int, default=1)
    runs.add_argument("--keep", type=Path, help="folder to keep every walk in")
    runs.add_argument("--out", type=Path, default=RESULTS)
    shows = commands.add_parser("table")
    shows.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.command == "table":
        lines = [line for part in json.loads(options.results.read_text()) for line in part["rounds"]]
        print(table(lines), kinds(lines), sep="\n\n")
        return
    walks = [
        Walk(options.source.resolve(), options.prefix, target, int(size), seed, options.model, options.quick)
        for size in options.sizes.split(",")
        for target in options.target.split(",")
        for seed in range(options.seeds)
    ]
    lines = run(walks, options.jobs, options.keep)
    parts = json.loads(options.out.read_text()) if options.out.exists() else []
    parts.append({"machine": machine(), "commit": commit(), "rounds": lines})
    options.out.write_text(json.dumps(parts) + "\n")
    print(table(lines), kinds(lines), sep="\n\n")


if __name__ == "__main__":
    main()
