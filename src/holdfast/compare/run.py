"""What a job does: train and look, or interpolate; and, if its setting is chosen, score test once.

A round hands back the old model when no candidate is safe. A comparison must not: a method that always forgets would
then look like one that never does. Here a job's result is its best checkpoint by the rule of choice, safe or not.
"""

from __future__ import annotations

import shutil
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from holdfast._version import __version__
from holdfast.artifacts import RunFolder, read_predictions, write_json, write_predictions
from holdfast.compare.grid import Job
from holdfast.compare.records import JobFolder, JobRecord, Score, read_comparison, write_comparison
from holdfast.data.round import LabelledSet, RoundData
from holdfast.errors import HoldfastError, Interrupted, UserError
from holdfast.evaluate.metrics import Comparison, choose_checkpoint, compare, per_task_accuracy
from holdfast.methods.base import Method
from holdfast.model.classifier import Classifier
from holdfast.model.folder import load_model, save_model
from holdfast.model.interpolate import interpolate
from holdfast.rounds.develop import candidate_name, shared_predictions
from holdfast.rounds.prepare import PreparedRound, inherit, prepare_round, view_settings
from holdfast.runtime import Runtime, started
from holdfast.train.loop import TrainSpec, train

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
    """Train to the end (or go on where an earlier attempt stopped); choose a checkpoint on dev images."""
    config = inherit(job.config, job.root)
    with started(config.train.device) as runtime:
        folder.root.mkdir(parents=True, exist_ok=True)
        write_json(folder.run.config, config.model_dump(mode="json"))
        write_json(
            folder.run.state, {"status": "training", "version": __version__, "root": folder.run.towards(job.root)}
        )
        folder.write(JobRecord("begun"))
        ready = prepare_round(config, job.root, runtime)
        looks = _Looks(job, folder, ready, runtime)
        plan = TrainSpec(
            config.trained,
            view_settings(config.train, config.method),
            config.seed,
            ready.fingerprint,
            config.evaluate.every,
        )
        began = time.perf_counter()
        train(ready.method, ready.assembled.data, plan, runtime, folder.run, looks.look, None)
        training_seconds = time.perf_counter() - began
        record = looks.finish()
    # What only resuming needs is three times the size of a model.
    shutil.rmtree(folder.run.checkpoints, ignore_errors=True)
    origin = folder.run.towards(job.root)
    write_json(folder.run.state, {"status": "done", "version": __version__, "root": origin})
    folder.traceback.unlink(missing_ok=True)
    return replace(record, training_seconds=training_seconds)


class _Looks:
    """The looks of one job at training and dev images, and the weights worth keeping: the best, and maybe the last."""

    def __init__(self, job: Job, folder: JobFolder, ready: PreparedRound, runtime: Runtime) -> None:
        self.job, self.folder, self.ready, self.runtime = job, folder, ready, runtime
        self.data: RoundData = ready.assembled.data
        self.training = training_images(self.data)
        self.old_dev = self._predict(ready.old, self.data.dev)
        self.old_training = self._predict(ready.old, self.training)
        write_predictions(folder.run.predictions("old", "dev"), self.old_dev)
        # Of an attempt that was cut short. Steps that are taken again give the same figures again.
        self.seen = {step: (record["dev_safety"], record["target_gain"]) for step, record in folder.looks()}

    def look(self, done: int, method: Method) -> dict[str, Any]:
        """Figures on dev and on training images; keep the weights if they are the best so far."""
        dev = self._predict(method.model, self.data.dev)
        training = self._predict(method.model, self.training)
        on_dev, on_training = self._compare(self.old_dev, dev), self._compare(self.old_training, training)
        self.seen[done] = (on_dev.dev_safety, on_dev.target_gain)
        best, last = self.best(done), self.job.keep_last and done == self.job.config.train.steps
        if done == best:
            write_predictions(self.folder.run.predictions("new", "dev"), dev)
        if done == best or last:
            self._keep(method.model, done, {candidate_name(best)})
        return {
            "dev_safety": on_dev.dev_safety,
            "target_gain": on_dev.target_gain,
            "train_safety": on_training.dev_safety,
            "train_gain": on_training.target_gain,
            "dev_accuracy": per_task_accuracy(dev),
        }

    def best(self, until: int) -> int:
        """The step to hand back, of those looked at so far."""
        steps = sorted(step for step in self.seen if step <= until)
        return steps[choose_checkpoint([self.seen[s][0] for s in steps], [self.seen[s][1] for s in steps])]

    def _keep(self, model: Classifier, done: int, others: set[str]) -> None:
        candidates, name = self.folder.run.candidates, candidate_name(done)
        shutil.rmtree(candidates / name, ignore_errors=True)
        save_model(model, candidates / name, parent=self.ready.parent)
        for path in candidates.iterdir():
            if path.name not in {name, *others}:
                shutil.rmtree(path)

    def finish(self) -> JobRecord:
        """The chosen checkpoint's record."""
        step = self.best(self.job.config.train.steps)
        compared = self._compare(self.old_dev, read_predictions(self.folder.run.predictions("new", "dev")))
        write_comparison(self.folder.dev, compared)
        return JobRecord("done", step, Score.of(compared))

    def _compare(self, old: pa.Table, new: pa.Table) -> Comparison:
        return compare(old, new, self.data.tasks.target, self.data.tasks.protected)

    def _predict(self, model: Classifier, examples: LabelledSet) -> pa.Table:
        return _predict(model, examples, self.job, self.runtime)


def training_images(data: RoundData) -> LabelledSet:
    """Constraint images and the target's own, each picture once: what "on the training set" means in the figures."""
    target = np.array(list({identity: p for p, identity in enumerate(data.target.ids)}.values()), dtype=np.int64)
    ids = (*data.constraint.ids, *(f"target/{data.target.ids[p]}" for p in target))
    rows = np.concatenate([data.constraint.rows, data.target.rows[target]])
    labels = np.concatenate([data.constraint.labels, np.full(len(target), data.tasks.target_index)])
    return LabelledSet(data.constraint.pixels, rows, labels, ids)


def _predict(model: Classifier, examples: LabelledSet, job: Job, runtime: Runtime) -> pa.Table:
    return shared_predictions(model, examples, model.classes, job.config.evaluate.batch, runtime)


# -- interpolation ----------------------------------------------------------------------------------------------------


def _interpolate(job: Job, folder: JobFolder) -> JobRecord:
    """WiSE-FT: the model at lambda between the old weights and the last ones of another job."""
    with started(job.config.train.device) as runtime:
        folder.root.mkdir(parents=True, exist_ok=True)
        ready = prepare_round(inherit(job.config, job.root), job.root, runtime)
        data = ready.assembled.data
        old = _predict(ready.old, data.dev, job, runtime)
        new = _predict(_chosen(job, ready, runtime), data.dev, job, runtime)
        write_predictions(folder.run.predictions("old", "dev"), old)
        write_predictions(folder.run.predictions("new", "dev"), new)
        compared = compare(old, new, data.tasks.target, data.tasks.protected)
    write_comparison(folder.dev, compared)
    folder.traceback.unlink(missing_ok=True)
    return JobRecord("done", job.config.train.steps, Score.of(compared))


def _chosen(job: Job, ready: PreparedRound, runtime: Runtime) -> Classifier:
    """The model that a finished job stands for."""
    if job.parent is not None:
        last = _weights(job.parent, job.config.train.steps).to(runtime.device)
        return interpolate(ready.old, last, job.position)
    step = JobFolder(job.folder).read().step
    if step is None:
        raise UserError(f"{job.folder} has not finished")
    return _weights(job.folder, step).to(runtime.device)


def _weights(folder: Path, step: int) -> Classifier:
    return load_model(RunFolder(folder).candidates / candidate_name(step))


# -- test -------------------------------------------------------------------------------------------------------------


def score_test(job: Job) -> Comparison:
    """The job's result on test images: read where it was scored before, never scored twice."""
    folder = JobFolder(job.folder)
    if folder.test.exists():
        return read_comparison(folder.test)
    with started(job.config.train.device) as runtime:
        ready = prepare_round(inherit(job.config, job.root), job.root, runtime)
        data = ready.assembled.data
        examples = data.open_test()
        old = _predict(ready.old, examples, job, runtime)
        new = _predict(_chosen(job, ready, runtime), examples, job, runtime)
        write_predictions(folder.run.predictions("old", "test"), old)
        write_predictions(folder.run.predictions("new", "test"), new)
        compared = compare(old, new, data.tasks.target, data.tasks.protected)
    write_comparison(folder.test, compared)
    return compared
