"""Everything a study writes for people: tables in four formats, figures, and the list of its jobs."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np

from holdfast.compare.choose import Cell, Choice, cells, read_records, scores_by_place
from holdfast.compare.frontier import FrontierCell, frontier_cells, frontier_json, frontier_table
from holdfast.compare.grid import Job, Study
from holdfast.compare.over_rounds import History, rounds_table, with_this_round
from holdfast.compare.records import Curve, JobFolder, JobRecord
from holdfast.compare.tables import WRITERS, Table, main_table, settings_table, task_table
from holdfast.evaluate.metrics import Comparison
from holdfast.files import write_json, write_text

JOBS = "jobs.csv"

Scores = dict[tuple[str, str], list[Comparison]]  # by row and column, one a seed


def write_outputs(
    study: Study,
    jobs: list[Job],
    records: list[JobRecord],
    choices: list[Choice],
    out: Path,
    *,
    figures: bool,
    earlier: History | None = None,
) -> list[Path]:
    """``jobs.csv`` always; tables once test was scored; figures where they are wanted; the frontier as far as it goes.

    Of a study that is not finished they say how many of its jobs they are made of. ``earlier`` are the rounds that
    this study's own began from: with them come the classes' accuracies over rounds.
    """
    files = [_write(out / JOBS, jobs_csv(jobs, records))]
    scores = scores_by_place(choices)
    found = cells(choices, scores)
    write_json(
        out / "chosen.json", [_chosen_json(choice, found.get((choice.row, choice.column))) for choice in choices]
    )
    files.append(out / "chosen.json")
    title = _title(study, records)
    for name, table in tables(study, scores, found, title).items():
        files += write_table(table, out, name)
    rounds = with_this_round(earlier or {}, scores)
    if rounds:
        files += write_table(rounds_table(f"{title}: every class over rounds", rounds), out, "rounds")
    on_frontier = frontier_cells(jobs, records) if study.config.tolerances else []
    if on_frontier:
        files += _frontier(title, on_frontier, out, figures=figures)
    if figures and found:
        files += _figures(study, choices, scores, found, rounds, out / "figures")
    return files


def _title(study: Study, records: list[JobRecord]) -> str:
    name, done = study.config.title or study.name, sum(record.status == "done" for record in records)
    return name if done == len(records) else f"{name} ({done:,} of {len(records):,} jobs)"


def _frontier(title: str, on_frontier: list[FrontierCell], out: Path, *, figures: bool) -> list[Path]:
    write_json(out / "frontier.json", frontier_json(on_frontier))
    table = frontier_table(f"{title}: gain within a tolerance", on_frontier)
    files = [out / "frontier.json", *write_table(table, out, "frontier")]
    if figures:
        from holdfast.compare import figures as draw

        files.append(draw.save(draw.frontier(on_frontier), out / "figures" / "frontier.png"))
    return files


def write_table(table: Table, out: Path, name: str) -> list[Path]:
    """The table in all its formats."""
    return [_write(out / "tables" / f"{name}.{kind}", write(table)) for kind, write in WRITERS.items()]


def _write(path: Path, text: str) -> Path:
    write_text(path, text)
    return path


def _chosen_json(choice: Choice, cell: Cell | None) -> dict[str, object]:
    return {
        "row": choice.row,
        "column": choice.column,
        "setting": dict(choice.setting),
        "tried": choice.tried,
        "missing": choice.missing,
        "jobs": [job.folder.name for job in choice.jobs],
        **_ships_json(choice),
        "test": None
        if cell is None
        else {
            "seeds": cell.seeds,
            "retention_ratio": cell.retention_ratio,
            "dev_safety": [cell.dev_safety.mean, cell.dev_safety.std],
            "target_accuracy": [cell.target_accuracy.mean, cell.target_accuracy.std],
            "target_gain": [cell.target_gain.mean, cell.target_gain.std],
            "base_accuracy": cell.base_accuracy,
            "negative_flip_rate": [cell.negative_flip_rate.mean, cell.negative_flip_rate.std],
            "positive_flip_rate": [cell.positive_flip_rate.mean, cell.positive_flip_rate.std],
            "relative_negative_flip_rate": None
            if cell.relative_negative_flip_rate is None
            else [cell.relative_negative_flip_rate.mean, cell.relative_negative_flip_rate.std],
        },
    }


def _ships_json(choice: Choice) -> dict[str, object]:
    """Of a study of what ships: how many seeds handed back a new model, and how many of those are certified."""
    if choice.jobs[0].result != "shipped":
        return {}
    records = read_records(choice.jobs)
    return {
        "shipped": sum(record.shipped is not None for record in records),
        "certified": sum(record.verdict == "certified" for record in records),
    }


def jobs_csv(jobs: list[Job], records: list[JobRecord]) -> str:
    """One line a job: what it is, how it ended, what it reached on dev images."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        ["row", "column", "setting", "seed", "status", "step", "dev_safety", "target_gain", "seconds", "error"]
    )
    for job, record in zip(jobs, records, strict=True):
        dev = [record.dev.dev_safety, record.dev.target_gain] if record.dev else ["", ""]
        first = record.error.splitlines()[0] if record.error else ""
        step = "" if record.step is None else record.step
        writer.writerow(
            [
                job.row,
                job.column,
                job.setting_text,
                job.seed,
                record.status,
                step,
                *dev,
                round(record.seconds, 2),
                first,
            ]
        )
    return file.getvalue()


def _rows(study: Study) -> list[str]:
    return [entry.title for entry in study.config.methods]


def _columns(study: Study) -> list[str]:
    return [label for label, _, _ in study.config.columns]


def tables(
    study: Study, scores: Scores, found: dict[tuple[str, str], Cell], title: str | None = None
) -> dict[str, Table]:
    """The main table, the chosen settings, and one table of tasks a column; none before test was scored."""
    if not found:
        return {}
    rows, columns = _rows(study), _columns(study)
    title = title or study.config.title or study.name
    result = {
        "results": main_table(f"{title}: comparison on targeting {study.target}", study.target, rows, columns, found),
        "settings": settings_table(f"{title}: chosen settings", rows, columns, found),
    }
    for column in columns:
        here = {row: scores[row, column] for row in rows if (row, column) in scores}
        if here:
            name = f"tasks-{column}" if len(columns) > 1 else "tasks"
            result[name] = task_table(f"{title}: change of every task, {column}", here)
    return result


def _figures(
    study: Study,
    choices: list[Choice],
    scores: Scores,
    found: dict[tuple[str, str], Cell],
    rounds: History,
    folder: Path,
) -> list[Path]:
    from holdfast.compare import figures as draw  # matplotlib takes a while

    rows, columns = _rows(study), _columns(study)
    what = "constraint images a task" if study.config.sizes else study.config.columns[0][1] or "all images"
    files = [draw.save(draw.by_column(study.target, rows, columns, found, what), folder / "by-column.png")]
    last = columns[-1]
    here = [choice for choice in choices if choice.column == last]
    runs = {choice.row: [curve(job) for job in choice.jobs] for choice in here if choice.jobs[0].parent is None}
    if runs:
        files.append(draw.save(draw.curves(runs, study.config.epoch), folder / "curves.png"))
        files.append(draw.save(draw.trajectory(runs), folder / "trajectory.png"))
    compared = {row: scores[row, last] for row in rows if (row, last) in scores}
    if compared:
        files.append(draw.save(draw.per_task(compared), folder / "tasks.png"))
    logged = {choice.row: list(JobFolder(choice.jobs[0].folder).logged("weight")) for choice in here}
    logged = {row: records for row, records in logged.items() if records}
    if logged:
        files.append(draw.save(draw.weights(logged), folder / "weights.png"))
    if rounds:
        files.append(draw.save(draw.over_rounds(rounds), folder / "rounds.png"))
    return files


def curve(job: Job) -> Curve:
    """A job's evaluations, the old model at step 0 included."""
    names = ("dev_safety", "target_gain", "train_safety", "train_gain")
    evaluations = [(0, dict.fromkeys(names, 0.0)), *JobFolder(job.folder).evaluations()]
    values = {name: np.array([float(record[name]) for _, record in evaluations]) for name in names}
    return Curve(np.array([step for step, _ in evaluations]), values)
