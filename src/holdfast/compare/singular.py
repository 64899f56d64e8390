"""The paper's table of singular values: are the tasks' gradients independent, before training and after?"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.compare.choose import Choice, Spread
from holdfast.compare.grid import Job
from holdfast.compare.output import write_table
from holdfast.compare.study import StudyResult
from holdfast.compare.tables import Entry, Table
from holdfast.files import read_json, write_json
from holdfast.rounds.diagnose import At, diagnose_run

NAME = "singular-values"
_KEYS = {"with heads": "singular_value", "without": "singular_value_without_heads"}


def write_singular_values(result: StudyResult, say: Callable[[str], None], images: int = 1000) -> Table:
    """Diagnose the start and the end of every chosen run that was trained, and write the table; runs that were
    diagnosed before are not diagnosed again."""
    choices = [choice for choice in result.choices if choice.jobs[0].parent is None]
    lines = tuple(_line(choice, say, images) for choice in choices)
    heading = tuple(f"{when}, {kind}" for when in ("before", "after") for kind in _KEYS)
    table = Table(
        f"{result.study.config.title or result.study.name}: smallest singular value of the tasks' gradients",
        ("Method", "Column", *heading),
        (lines,),
        f"Mean(std) over seeds, at most {images} constraint images a task. "
        "Without: the same model, the gradient of its heads left out.",
        left=2,
    )
    write_table(table, result.out, NAME)
    return table


def _line(choice: Choice, say: Callable[[str], None], images: int) -> tuple[Entry, ...]:
    entries = [Entry(choice.row), Entry(choice.column)]
    times: tuple[At, ...] = ("start", "end")
    for at in times:
        found = [_diagnosis(job, at, say, images) for job in choice.jobs]
        for key in _KEYS.values():
            spread = Spread.of(values[key] for values in found)
            entries.append(Entry(f"{spread.mean:.4g}({spread.std:.2g})"))
    return tuple(entries)


def _diagnosis(job: Job, at: At, say: Callable[[str], None], images: int) -> dict[str, float]:
    """The two singular values of a run at one of its ends, kept in its folder."""
    path = job.folder / f"{NAME}-{at}.json"
    if path.exists() and (kept := read_json(path))["images"] == images:
        return kept
    say(f"diagnosing the {at} of {job.name}")
    found = diagnose_run(job.folder, at=at, images=images)
    values = {key: float(getattr(found, key)) for key in _KEYS.values()}
    write_json(path, {**values, "images": images})
    return values
