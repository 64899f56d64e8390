"""What a job does: train and evaluate, or interpolate; and, if its setting is chosen, score test once.

A round hands back the old model when no candidate is safe. A comparison of checkpoints must not: a method that always
forgets would then look like one that never does. There a job's result is its best checkpoint by the rule of choice,
safe or not. A comparison of what ships (``result = "shipped"``) is of what ``develop`` hands back: interpolated,
refitted, biased and certified, or the old model.
"""

from __future__ import annotations

import functools
import shutil
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from holdfast.artifacts import RunFolder, read_predictions, write_predictions
from holdfast.candidates.select import Candidate
from holdfast.compare.frontier import OLD, best_within
from holdfast.compare.grid import LEDGER, Job
from holdfast.compare.records import (
    FrontierPoint,
    JobFolder,
    JobRecord,
    Kind,
    Score,
    read_comparison,
    write_comparison,
    write_frontier,
)
from holdfast.errors import HoldfastError, Interrupted, UserError
from holdfast.evaluate.metrics import Comparison
from holdfast.files import read_json, write_json
from holdfast.model.classifier import Classifier
from holdfast.model.folder import load_model
from holdfast.model.interpolate import interpolate
from holdfast.rounds.checkpoints import checkpoint_name
from holdfast.rounds.result import read_result
from holdfast.rounds.round import Round
from holdfast.runtime import started
from holdfast.train.checkpoint import newest

Action = Literal["run", "test"]


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    job: Job
    action: Action
    record: JobRecord
    interrupted: int | None = None  # the signal's number


def attempt(job: Job, action: Action) -> Outcome:
    """Run a job, or score it on test images. A failure is written down and returned, never raised."""
    folder, began = JobFolder(job.folder), time.perf_counter()
    before = folder.read()
    try:
        if action == "test":
            score_test(job)
            return Outcome(job, action, before)
        record = _interpolate(job, folder) if job.parent is not None else _train(job, folder)
        record = replace(record, seconds=time.perf_counter() - began)
    except Interrupted as error:
        return Outcome(job, action, before, interrupted=int(error.exit_code) - 128)
    except KeyboardInterrupt:
        return Outcome(job, action, before, interrupted=2)
    except Exception as error:
        text = error.text() if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        record = JobRecord("failed", seconds=time.perf_counter() - began, error=text)
        folder.root.mkdir(parents=True, exist_ok=True)
        folder.traceback.write_text(traceback.format_exc(), encoding="utf-8")
    if action == "run":
        folder.write(record)
    return Outcome(job, action, record)


# -- training ---------------------------------------------------------------------------------------------------------


def _train(job: Job, folder: JobFolder) -> JobRecord:
    """Train to the end (or go on where an earlier attempt stopped); choose a checkpoint, or what ships."""
    with started(job.config.train.device) as runtime:
        begun = _prepare(job, folder)
        folder.write(JobRecord("begun"))
        round_ = Round(job.config, job.root, folder.run, runtime, begun=begun, training_figures=True, in_memory=True)
        began = time.perf_counter()
        round_.train()
        training_seconds = time.perf_counter() - began
        record = _shipped(round_, job, folder) if job.result == "shipped" else _checkpoint(round_, job, folder)
    # What only resuming needs is three times the size of a model.
    shutil.rmtree(folder.run.checkpoints, ignore_errors=True)
    write_json(folder.run.state, {**read_json(folder.run.state), "status": "done"})
    folder.traceback.unlink(missing_ok=True)
    return replace(record, training_seconds=training_seconds)


def _prepare(job: Job, folder: JobFolder) -> bool:
    """Make the folder, or clear it of an attempt that left no checkpoint to go on from; whether there is one.

    The sealed images are queried anew: a job's ledger is its own, and an attempt that did not end measured nothing.
    """
    begun = newest(folder.run.checkpoints) is not None
    if not begun:
        shutil.rmtree(folder.root, ignore_errors=True)
    elif job.result == "shipped":
        shutil.rmtree(folder.root / LEDGER, ignore_errors=True)
        folder.run.settled.unlink(missing_ok=True)
    folder.root.mkdir(parents=True, exist_ok=True)
    return begun


def _checkpoint(round_: Round, job: Job, folder: JobFolder) -> JobRecord:
    """The best checkpoint by the rule of choice. Its weights are kept, and the last ones where a row needs them."""
    best, last = round_.best_checkpoint(), checkpoint_name(job.config.last_step)
    _write_frontier(round_, job, folder)
    kept = {best, last} if job.keep_last else {best}
    for name in round_.checkpoints():
        path = folder.run.candidates / name
        round_.models.write(path) if name in kept else round_.models.remove(path)
    dev = read_predictions(folder.run.predictions(best, "dev"))
    write_predictions(folder.run.predictions("new", "dev"), dev)
    compared = round_.compare(round_.old_dev, dev)
    write_comparison(folder.dev, compared)
    return JobRecord("done", int(best.removeprefix("step-")), Score.of(compared))


def _shipped(round_: Round, job: Job, folder: JobFolder) -> JobRecord:
    """What ``develop`` would hand back: on dev images where it is chosen, on sealed ones where it is certified."""
    decision = round_.decide()
    _write_frontier(round_, job, folder)  # before the checkpoints are cleared away
    round_.write_result(decision, model=job.keep_model)
    result = read_result(folder.run)
    compared = (
        result.decision.shipped.dev if result.decision.shipped else round_.compare(round_.old_dev, round_.old_dev)
    )
    write_comparison(folder.dev, compared)
    if result.test is not None:
        write_comparison(folder.test, result.test)
    for path in (folder.run.candidates, folder.run.tested):
        shutil.rmtree(path, ignore_errors=True)
    best = int(result.candidates[0].step.removeprefix("step-"))
    return JobRecord("done", best, Score.of(compared), verdict=result.decision.verdict, shipped=result.chosen)


# -- the frontier -----------------------------------------------------------------------------------------------------


def _write_frontier(round_: Round, job: Job, folder: JobFolder) -> None:
    """Score on test images what gains most on dev images within each tolerance, of either kind; each model once."""
    if not job.tolerances:
        return
    kept = round_.checkpoints()
    trained = {name: compared for name, compared in round_.evaluations() if name in kept}
    pools: dict[Kind, dict[str, Comparison]] = {"trained": trained}
    candidates: dict[str, Candidate] = {}
    if job.result == "shipped":
        candidates = {candidate.name: candidate for candidate in round_.settled()}
        pools["shipped"] = {name: candidate.dev for name, candidate in candidates.items()}
    old = round_.compare(round_.old_dev, round_.old_dev)

    @functools.cache
    def judged(kind: Kind, name: str) -> Comparison:
        if name == OLD:
            return _on_test(round_, None, write=False)
        made = round_.model(candidates[name]) if kind == "shipped" else round_.checkpoint(name)
        return _on_test(round_, made, write=False)

    points: list[FrontierPoint] = []
    for kind, pool in pools.items():
        for tolerance in job.tolerances:
            name = best_within(pool, tolerance) or OLD
            points.append(FrontierPoint(kind, tolerance, name, pool.get(name, old), judged(kind, name)))
    write_frontier(folder.frontier, points)


def _on_test(round_: Round, model: Classifier | None, *, write: bool = True) -> Comparison:
    compared = round_.score_test(model, write=write)
    if compared is None:
        raise UserError("the round has no test images", do="give [round.data.roles] test, or a test split")
    return compared


# -- interpolation ----------------------------------------------------------------------------------------------------


def _interpolate(job: Job, folder: JobFolder) -> JobRecord:
    """WiSE-FT: the model at lambda between the old weights and the last ones of another job."""
    with started(job.config.train.device) as runtime:
        folder.root.mkdir(parents=True, exist_ok=True)
        round_ = Round(job.config, job.root, folder.run, runtime)
        dev = round_.predict(_chosen(job, round_), round_.data.dev)
        write_predictions(folder.run.predictions("new", "dev"), dev)
        compared = round_.compare(round_.old_dev, dev)
    write_comparison(folder.dev, compared)
    folder.traceback.unlink(missing_ok=True)
    return JobRecord("done", job.config.last_step, Score.of(compared))


def _chosen(job: Job, round_: Round) -> Classifier:
    """The model that a finished job stands for."""
    if job.parent is not None:
        last = _weights(job.parent, job.config.last_step).to(round_.runtime.device)
        return interpolate(round_.prepared.old, last, job.position)
    step = JobFolder(job.folder).read().step
    if step is None:
        raise UserError(f"{job.folder} has not finished")
    return _weights(job.folder, step).to(round_.runtime.device)


def _weights(folder: Path, step: int) -> Classifier:
    return load_model(RunFolder(folder).candidates / checkpoint_name(step))


# -- test -------------------------------------------------------------------------------------------------------------


def score_test(job: Job) -> Comparison:
    """The job's result on test images: read where it was scored before, never scored twice."""
    folder = JobFolder(job.folder)
    if folder.test.exists():
        return read_comparison(folder.test)
    with started(job.config.train.device) as runtime:
        round_ = Round(job.config, job.root, folder.run, runtime, begun=True)
        compared = _on_test(round_, _chosen(job, round_))
    write_comparison(folder.test, compared)
    return compared
