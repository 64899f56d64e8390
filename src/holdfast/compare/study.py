"""A study from its file to its tables: base model, jobs, choice, test, tables and figures."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.compare.choose import Choice, best_seed, choose, read_records
from holdfast.compare.grid import Job, Study, base_folder, before, plan
from holdfast.compare.output import JOBS, jobs_csv, write_outputs
from holdfast.compare.over_rounds import History, continued
from holdfast.compare.pool import Runner, terminations
from holdfast.compare.records import JobFolder, JobRecord
from holdfast.compare.run import Action, Outcome
from holdfast.errors import Interrupted, UserError
from holdfast.files import read_json, write_json, write_text
from holdfast.locks import one_writer
from holdfast.rounds.checkpoints import checkpoint_name
from holdfast.rounds.tune import tune

Say = Callable[[str], None]


@dataclass(frozen=True)
class StudyResult:
    """What a study came to."""

    study: Study
    out: Path
    jobs: int
    failed: list[tuple[str, str]]  # job, error
    choices: list[Choice]
    files: list[Path]  # tables and figures
    history: History  # accuracies over rounds, to the model that a next round starts from


def run_study(study: Study, out: Path, runner: Runner, say: Say, *, figures: bool = True) -> StudyResult:
    """Run what has not run yet, choose, score test once, write tables and figures. One process at a time in ``out``."""
    out = out.resolve()
    with one_writer(out), terminations():
        return _run_study(study, out, runner, say, figures=figures)


def _run_study(study: Study, out: Path, runner: Runner, say: Say, *, figures: bool) -> StudyResult:
    first = _run_first(study, out, runner, say, figures)
    jobs = plan(study, out, None if first is None else _start(study, first))
    _remember(study, out)
    _make_base(study, out, say)
    earlier = {} if first is None else first.history
    try:
        failed = run_jobs(jobs, runner, say, _Progress(study, jobs, out, earlier).update)
        records = read_records(jobs)
        choices = choose(jobs, records)
        if all(record.status in ("done", "failed") for record in records):
            failed += _score(choices, runner, say)
            link_choices(choices, out)
    except Interrupted:  # tables of what is done
        _write_so_far(study, jobs, read_records(jobs), out, earlier)
        raise
    files = write_outputs(study, jobs, records, choices, out, figures=figures, earlier=earlier)
    return StudyResult(study, out, len(jobs), failed, choices, files, continued(choices, earlier))


def _write_so_far(study: Study, jobs: list[Job], records: list[JobRecord], out: Path, earlier: History) -> None:
    """Tables and the frontier of the jobs that are done."""
    write_outputs(study, jobs, records, choose(jobs, records), out, figures=False, earlier=earlier)


_TABLES_EVERY = 60.0  # seconds; ``jobs.csv`` is written whenever a job ends
_SHARE = 0.05  # of the time may go into tables on the way: those of a thousand jobs take seconds


class _Progress:
    """What a study that is killed leaves to read."""

    def __init__(self, study: Study, jobs: list[Job], out: Path, earlier: History) -> None:
        self.study, self.jobs, self.out, self.earlier = study, jobs, out, earlier
        self.next = time.monotonic() + _TABLES_EVERY

    def update(self, records: list[JobRecord]) -> None:
        """These are the records now."""
        began = time.monotonic()
        if began < self.next:
            write_text(self.out / JOBS, jobs_csv(self.jobs, records))
            return
        _write_so_far(self.study, self.jobs, records, self.out, self.earlier)
        ended = time.monotonic()
        self.next = ended + max(_TABLES_EVERY, (ended - began) / _SHARE)


def run_jobs(
    jobs: list[Job], runner: Runner, say: Say, update: Callable[[list[JobRecord]], None] | None = None
) -> list[tuple[str, str]]:
    """Run the jobs that are not done, seed by seed: a study that is stopped has as many seeds in every row.

    Those that interpolate other jobs' results come after them.
    ``update`` is given all records at the beginning, and again whenever a job has ended.
    """
    failed: list[tuple[str, str]] = []
    records = read_records(jobs)
    places = {job.folder: place for place, job in enumerate(jobs)}
    done = sum(record.status == "done" for record in records)
    seeds = list(dict.fromkeys(job.seed for job in jobs))
    if update is not None:
        update(records)
    if done:
        say(f"{done} of {len(jobs)} jobs are done already")
    for wave in ([job for job in jobs if job.parent is None], [job for job in jobs if job.parent is not None]):
        left = [job for job in wave if JobFolder(job.folder).read().status != "done"]
        left.sort(key=lambda job: seeds.index(job.seed))
        for outcome in runner([(job, "run") for job in left]):
            done += 1
            records[places[outcome.job.folder]] = outcome.record
            if update is not None:
                update(records)
            say(_line(outcome, done, len(jobs)))
            if outcome.record.status == "failed":
                failed.append((outcome.job.name, outcome.record.error))
    return failed


def _line(outcome: Outcome, done: int, total: int) -> str:
    record = outcome.record
    if record.status == "failed" or record.dev is None:
        text = "FAILED: " + record.error.splitlines()[0]
    else:
        text = (
            f"worst task {record.dev.dev_safety * 100:+.1f}, target {record.dev.target_gain * 100:+.1f} points on dev"
        )
    return f"[{done}/{total}] {outcome.job.name}: {text} ({record.seconds:.1f} s)"


def _score(choices: list[Choice], runner: Runner, say: Say) -> list[tuple[str, str]]:
    """Score the chosen settings on test images, where that was not done before."""
    tasks: list[tuple[Job, Action]] = [
        (job, "test") for choice in choices for job in choice.jobs if not JobFolder(job.folder).test.exists()
    ]
    if tasks:
        say(f"scoring {len(tasks)} chosen models on test images")
    failed: list[tuple[str, str]] = []
    for outcome in runner(tasks):
        if outcome.record.status == "failed":
            say(f"test: {outcome.job.name}: FAILED: {outcome.record.error}")
            failed.append((f"test: {outcome.job.name}", outcome.record.error))
    return failed


def _make_base(study: Study, out: Path, say: Say) -> None:
    config, folder = study.config.base, base_folder(out)
    if config is None:
        return
    made_of, settings = folder / "made-of.json", config.model_dump(mode="json", exclude_unset=True)
    if made_of.exists():  # written when the model is whole
        if read_json(made_of) != settings:
            raise UserError(
                f"{folder} holds a base model that was made with other settings",
                do="choose another --out, or move that folder away: all jobs are then run again",
            )
        return
    say("making the base model")
    result = tune(config, folder, study.root, resume=(folder / "run.json").exists(), quiet=True)
    write_json(made_of, settings)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    say("base model: " + ", ".join(f"{name} {value * 100:.0f} %" for name, value in result.accuracy.items()))


# -- a study that starts from what another one chose ------------------------------------------------------------------


def _run_first(study: Study, out: Path, runner: Runner, say: Say, figures: bool) -> StudyResult | None:
    """The study that runs before this one, where there is one."""
    other = before(study, out)
    if other is None:
        return None
    first, folder = other
    say(f"first: {first.name}")
    return run_study(first, folder, runner, say, figures=figures)


def _start(study: Study, result: StudyResult) -> dict[tuple[str, str], Path]:
    """The models that an earlier study chose, by row and column."""
    start = {(choice.row, choice.column): chosen_folder(choice, result.out) for choice in result.choices}
    for entry in study.config.methods:
        for column, _, _ in study.config.columns:
            if (entry.of or entry.title, column) not in start:
                raise UserError(
                    f"{result.study.name} chose no model for {entry.title!r}, {column!r}",
                    do="give both studies the same labels",
                )
    return {place: path.resolve() for place, path in start.items()}


def chosen_folder(choice: Choice, out: Path) -> Path:
    """Where the model that a row and column stand for can be found."""
    return out / "chosen" / f"{choice.jobs[0].folder.parents[2].name}-{choice.jobs[0].folder.parents[1].name}"


def link_choices(choices: list[Choice], out: Path) -> None:
    """``chosen/ROW-COLUMN``: a link to the best seed's model folder, to start a next round from."""
    for choice in choices:
        job = best_seed(choice)
        step = JobFolder(job.folder).read().step
        if job.parent is not None or step is None or not job.keep_model:
            continue  # an interpolated model is not stored; `holdfast` makes it from its two ends
        link = chosen_folder(choice, out)
        link.parent.mkdir(parents=True, exist_ok=True)
        run = JobFolder(job.folder).run
        made = run.model if job.result == "shipped" else run.candidates / checkpoint_name(step)
        aim = os.path.relpath(made, link.parent)
        if link.is_symlink():
            link.unlink()
        link.symlink_to(aim, target_is_directory=True)


def _remember(study: Study, out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {out}", found=error.strerror or str(error), do="choose another --out") from error
    write_json(out / "study.json", study.config.model_dump(mode="json"))


def status(jobs: list[Job]) -> dict[str, int]:
    """How many jobs are done, failed, begun and waiting."""
    records = read_records(jobs)
    return {name: sum(record.status == name for record in records) for name in ("done", "failed", "begun", "waiting")}
