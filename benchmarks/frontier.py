"""One table of what each method gains when protected classes may lose so much: studies of the test bed side by side.

    holdfast compare bed-scenes --root BED --out STUDIES/bed-scenes --jobs 4        # and others
    python benchmarks/frontier.py STUDIES/* --out benchmarks/results/frontier.json  # keeps them, prints the table
    python benchmarks/frontier.py benchmarks/results/frontier.json --figure docs/figures/frontier.png
    python benchmarks/frontier.py STUDIES/bed-scenes-cpu* --together                # targets as one table
    python benchmarks/frontier.py benchmarks/results/frontier-quick.json --decided --figure FILE   # develop's own rule

`holdfast compare` writes STUDY/frontier.json for a study with `tolerances`, once a minute while it runs and when it
ends or is interrupted; nothing is chosen or computed anew here. A study that is not finished says how far it is.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, machine
from holdfast.compare.frontier import FrontierCell, bootstrap, cell_from_json, chosen_by, frontier_json, points
from holdfast.compare.records import Kind

Studies = dict[str, list[FrontierCell]]  # by name


def read(paths: Sequence[Path]) -> Studies:
    """Cells of study folders, or of results files that were made from them."""
    found: Studies = {}
    for path in paths:
        file = path / "frontier.json" if path.is_dir() else path
        if not file.exists():
            print(f"{path} has no frontier.json yet", file=sys.stderr)
            continue
        progress(path)
        values: Any = json.loads(file.read_text(encoding="utf-8"))
        studies: Mapping[str, Any] = values["studies"] if isinstance(values, dict) else {path.name: values}
        found |= {name: [cell_from_json(entry) for entry in entries] for name, entries in studies.items()}
    return found


def progress(folder: Path) -> None:
    """Say how many jobs of a study are done, where some are not."""
    if not (folder / "jobs.csv").is_file():
        return
    with (folder / "jobs.csv").open(newline="", encoding="utf-8") as file:
        statuses = [line["status"] for line in csv.DictReader(file)]
    if (done := statuses.count("done")) < len(statuses):
        print(f"{folder.name}: {done} of {len(statuses)} jobs are done", file=sys.stderr)


def table(studies: Studies) -> str:
    """One line a study, result, size and method; for each rule of choice gain, worst class and seeds that kept it."""
    every = sorted((cell for cells in studies.values() for cell in cells), key=lambda cell: cell.tolerance)
    rules = list(dict.fromkeys(chosen_by(cell) for cell in every))
    heads = [f"{rule}: gain | worst | kept" for rule in rules]
    lines = [f"| study | result | images | method | {' | '.join(heads)} |",
             "| --- | --- | ---: | --- |" + " ---: | ---: | ---: |" * len(rules)]  # fmt: skip
    for name, cells in studies.items():
        by_place = {(_line(cell), chosen_by(cell)): cell for cell in cells}
        for kind, column, row in dict.fromkeys(map(_line, cells)):
            here = [by_place.get(((kind, column, row), rule)) for rule in rules]
            fields = [_fields(cell) for cell in here]
            lines.append(f"| {name} | {kind} | {column} | {row} | {' | '.join(fields)} |")
    return "\n".join(lines)


def _line(cell: FrontierCell) -> tuple[str, str, str]:
    """What develop hands back stands beside what was chosen among the same candidates."""
    return "shipped" if cell.kind == "decided" else cell.kind, cell.column, cell.row


def _fields(cell: FrontierCell | None) -> str:
    if cell is None:
        return "- | - | -"
    return f"{points(cell.gain)} | {100 * cell.worst.mean:+.1f} | {cell.kept} of {cell.seeds}"


def wins(studies: Studies) -> str:
    """Against the first row of each study: where the interval of the difference lies above, below or around zero."""
    lines = ["| result | method | places | first row gains more | less | undecided |",
             "| --- | --- | ---: | ---: | ---: | ---: |"]  # fmt: skip
    counts: dict[tuple[str, str], list[int]] = {}
    for cells in studies.values():
        for cell in cells:
            if cell.against_first is not None:
                tally = counts.setdefault((cell.kind, cell.row), [0, 0, 0])
                tally[0 if cell.against_first.high < 0 else 1 if cell.against_first.low > 0 else 2] += 1
    lines += [f"| {kind} | {row} | {sum(tally)} | {tally[0]} | {tally[1]} | {tally[2]} |"
              for (kind, row), tally in counts.items()]  # fmt: skip
    return "\n".join(lines)


def pooled(studies: Studies) -> Studies:
    """Studies that differ in their target alone as one, whose seeds are pairs of target and seed.

    The bootstrap draws pairs, so that intervals speak of targets and seeds like these.
    """
    pairs: dict[tuple[str, Kind, str, float, str], dict[tuple[str, int], tuple[float, float, FrontierCell]]] = {}
    for name, cells in studies.items():
        for cell in cells:
            place = pairs.setdefault((family(name), cell.kind, cell.column, cell.tolerance, cell.row), {})
            place |= {(name, seed): (gain, worst, cell) for seed, gain, worst in cell.by_seed}
    first: dict[tuple[str, Kind, str, float], dict[tuple[str, int], tuple[float, float, FrontierCell]]] = {}
    numbers: dict[tuple[str, int], int] = {}
    found: Studies = {}
    for (name, kind, column, tolerance, _), own in pairs.items():
        if not own:
            continue
        reference = first.setdefault((name, kind, column, tolerance), own)
        gains, worsts = [gain for gain, _, _ in own.values()], [worst for _, worst, _ in own.values()]
        more = [gain - reference[pair][0] for pair, (gain, _, _) in own.items() if pair in reference]
        cell = replace(
            next(iter(own.values()))[2],
            setting="",
            seeds=len(own),
            gain=bootstrap(gains),
            worst=bootstrap(worsts),
            kept=sum(worst >= -tolerance - 1e-9 for worst in worsts),
            against_first=None if own is reference else bootstrap(more),
            by_seed=tuple(
                (numbers.setdefault(pair, len(numbers)), gain, worst) for pair, (gain, worst, _) in own.items()
            ),
        )
        found.setdefault(name, []).append(cell)
    return found


def family(name: str) -> str:
    """A study's name without its target."""
    return re.sub("-(forest|buildings)$", "", name)


def together(studies: Studies) -> str:
    """Studies of several targets as one: means over pairs of target and seed, and differences from the first row."""
    heads = ("study", "images", "method", "pairs", "on dev images", "gain", "first row gains more by")
    heads = (*heads, "worst class", "first row's is higher by", "kept")
    lines = [f"| {' | '.join(heads)} |", f"| --- | ---: | --- | ---: | --- |{' ---: |' * 5}"]
    for name, cells in pooled(studies).items():
        first: dict[tuple[Kind, str, float], FrontierCell] = {}
        for cell in cells:
            if cell.kind == "trained":
                continue
            reference = first.setdefault((cell.kind, cell.column, cell.tolerance), cell)
            apart = ["-", "-"] if cell is reference else differences(reference, cell)
            lines.append(
                f"| {name} | {cell.column} | {cell.row} | {cell.seeds} | {chosen_by(cell)} | {points(cell.gain)} | "
                f"{apart[0]} | {points(cell.worst)} | {apart[1]} | {cell.kept} of {cell.seeds} |"
            )
    return "\n".join(lines)


def differences(reference: FrontierCell, cell: FrontierCell) -> list[str]:
    """By how much the reference gains more, and its worst class is higher, pair by pair."""
    mine, own = ({place: values for place, *values in item.by_seed} for item in (reference, cell))
    shared = [(mine[place], own[place]) for place in own if place in mine]
    return [points(bootstrap([left[which] - right[which] for left, right in shared])) for which in (0, 1)]


def main() -> None:
    """Collect, keep, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", type=Path, nargs="+", help="folders of studies, or a results file")
    parser.add_argument("--out", type=Path, help="keep the figures in this file")
    parser.add_argument("--together", action="store_true", help="studies as one: means over pairs of study and seed")
    parser.add_argument("--figure", type=Path, help="draw what ships, one panel a study and size")
    parser.add_argument("--decided", action="store_true", help="in the figure: what develop hands back by its own rule")
    given = parser.parse_args()
    studies = read(given.studies)
    if given.out is not None:
        entries = {name: frontier_json(cells) for name, cells in studies.items()}
        record = {"machine": machine(), "commit": commit(), "studies": entries}
        lines = json.dumps(record).replace('{"kind"', '\n{"kind"')  # one line a cell
        given.out.write_text(lines + "\n", encoding="utf-8")
    print(together(studies) if given.together else f"{table(studies)}\n\n{wins(studies)}")
    if given.figure is not None:
        from holdfast.compare import figures

        kind = "decided" if given.decided else "shipped"
        drawn = pooled(studies) if given.together else studies
        ships = [(name, cell) for name, cells in drawn.items() for cell in cells if cell.kind == kind]
        labelled = [replace(cell, column=f"{name}, {cell.column} images a class") for name, cell in ships]
        figures.save(figures.frontier(labelled), given.figure)


if __name__ == "__main__":
    main()
