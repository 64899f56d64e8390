"""``holdfast compare``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.errors import Exit, UserError

if TYPE_CHECKING:
    from holdfast.compare.grid import Study


def compare(
    study: Annotated[
        str | None, typer.Argument(metavar="STUDY.toml", help="A study's file, or the name of a ready one (--list).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study. Default: studies/ and its name.")] = None,
    root: Annotated[
        Path | None, typer.Option(help="Where the study's relative paths start. Default: its own folder.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Jobs at a time on this machine.")] = 1,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run the jobs on this Ray cluster (`local` starts one here)."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print every job and stop; no image is read.")] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="Print the ready studies, their jobs and GPU hours, and stop.")
    ] = False,
    step_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="With --list and --dry-run: milliseconds of a step (`holdfast bench`), for the GPU hours."
        ),
    ] = None,
    singular_values: Annotated[
        bool,
        typer.Option(
            "--singular-values",
            help="Then diagnose the chosen runs: smallest singular value of the tasks' gradients before and after.",
        ),
    ] = False,
    figures: Annotated[bool, typer.Option(help="Draw figures.")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line for every job.")] = False,
) -> int:
    """Compare methods on the same data, budget and rule of choice; end in the paper's tables and figures.

    Every run is a job with a folder of its own. Give the same command again after an interruption: finished jobs are
    not run again, interrupted ones go on from their checkpoint, failed ones are tried once more. Settings are chosen on
    dev images, retention ratio first and target gain second; test images are scored once, for what was chosen.
    """
    from holdfast.compare.grid import read_study

    if list_:
        return _list(step_ms)
    if study is None:
        raise UserError("which study?", expected="a STUDY.toml, or a ready study's name", do="see them with --list")
    found = read_study(study, root)
    folder = out or Path("studies") / found.name
    if dry_run:
        return _dry_run(found, folder, step_ms)
    from holdfast.compare.pool import choose_runner
    from holdfast.compare.study import run_study

    result = run_study(found, folder, choose_runner(jobs, ray), _no_line if quiet else _line, figures=figures)
    for name in ("results", "settings"):
        table = result.out / "tables" / f"{name}.txt"
        if table.exists():
            print(table.read_text(encoding="utf-8"))
    if singular_values:
        from holdfast.compare.singular import write_singular_values

        print(write_singular_values(result, _no_line if quiet else _line).text())
    print(f"{result.jobs} jobs, {len(result.failed)} failed; tables and figures in {folder}")
    for line in _failures(result.failed):
        print(line)
    return int(Exit.FAILED if result.failed else Exit.DONE)


def _failures(failed: Sequence[tuple[str, str]]) -> list[str]:
    """Each reason once, with the jobs that it stopped: what is wrong with a study stops all of them alike."""
    by_reason: dict[str, list[str]] = {}
    for name, error in failed:
        by_reason.setdefault(error, []).append(name)
    lines: list[str] = []
    for error, names in by_reason.items():
        more = f" and {len(names) - 1} more, for the same reason" if len(names) > 1 else ""
        lines += [f"failed: {names[0]}{more}", *(f"  {line}" for line in error.splitlines())]
    return lines


def _list(step_ms: float | None) -> int:
    from holdfast.compare.grid import read_study, ready_studies
    from holdfast.compare.hours import estimate

    for name, file in ready_studies().items():
        study = read_study(file)
        found = estimate(study, step_ms)
        print(f"{name:<32}{found.jobs:>6,} jobs  {found.text:>17}  {study.config.title}")
    print(_basis(step_ms))
    return int(Exit.DONE)


def _basis(step_ms: float | None) -> str:
    from holdfast.compare.hours import MACHINE, MEASURED

    if step_ms is not None:
        return f"GPU hours: training alone, {step_ms:g} ms a step"
    steps = ", ".join(f"{item.milliseconds:.1f} ms for {item.images} pictures" for item in MEASURED.values())
    return (
        f"GPU hours: training alone, every method at the step of ours on one {MACHINE} (ViT-B/16 at 224 px: {steps}; "
        "benchmarks/step.py), in proportion to the pictures of a step; others with --step-ms"
    )


def _dry_run(study: Study, folder: Path, step_ms: float | None) -> int:
    from holdfast.compare.grid import plan_all
    from holdfast.compare.hours import estimate

    jobs = plan_all(study, folder)
    for job in jobs:
        trained = f"{job.config.train.steps} steps" if job.config.method.trains() else "no steps"
        steps = f"λ = {job.position:g} of {job.parent}" if job.parent else trained
        print(f"{job.name} · {steps} · {job.folder}")
    found = estimate(study, step_ms)
    print(f"{len(jobs)} jobs, {found.steps:,} steps: {found.text}")
    print(_basis(step_ms))
    return int(Exit.DONE)


def _line(text: str) -> None:
    import sys

    print(text, file=sys.stderr, flush=True)


def _no_line(text: str) -> None:
    del text
