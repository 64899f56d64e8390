"""What training leaves to choose from: its evaluations on dev images, and the weights of the best few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch.distributed as dist

from holdfast.artifacts import read_predictions, write_predictions
from holdfast.candidates.select import REFIT, Candidate, choose_checkpoint, confused_with
from holdfast.data.round import LabelledSet, RoundData
from holdfast.evaluate.metrics import Comparison, per_task_accuracy
from holdfast.files import read_jsonl
from holdfast.model.classifier import Classifier

if TYPE_CHECKING:
    from holdfast.rounds.round import Round


class Checkpoints:
    """A round's evaluations and the checkpoints that they make, in its run folder."""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._compared: dict[str, Comparison] = {}  # evaluations of this process, by checkpoint

    def evaluate(self, done: int, model: Classifier, dev: pa.Table | None = None) -> dict[str, Any]:
        """Figures of a model after step ``done``, which becomes a checkpoint. ``dev``: its predictions, where known."""
        round_, name = self._round, checkpoint_name(done)
        dev = round_.predict(model, round_.data.dev) if dev is None else dev
        compared = round_.compare(round_.old_dev, dev)
        figures = {
            "dev_safety": compared.dev_safety,
            "dev_safety_loss": compared.dev_safety_loss,
            "target_gain": compared.target_gain,
            "dev_accuracy": per_task_accuracy(dev),
        }
        if round_.training is not None and round_.old_training is not None:
            on_training = round_.compare(round_.old_training, round_.predict(model, round_.training))
            figures |= {"train_safety": on_training.dev_safety, "train_gain": on_training.target_gain}
        else:
            figures["constraint_accuracy"] = per_task_accuracy(round_.predict(model, round_.data.constraint))
        self._compared[name] = compared
        if round_.runtime.is_main:
            write_predictions(round_.folder.predictions(name, "dev"), dev)
            round_.models.put(model, round_.folder.candidates / name)
            self._prune(name)
        if dist.is_initialized():
            dist.barrier()  # every rank chooses among the checkpoints that it finds in the folder
        return figures

    def _prune(self, newest: str) -> None:
        """Keep the weights of the best few checkpoints, and of the last."""
        models, folder = self._round.models, self._round.folder.candidates
        keep = {*self.ranked()[: self._round.config.evaluate.keep_candidates], newest}
        for name in models.names(folder):
            if name not in keep:
                models.remove(folder / name)

    def kept(self) -> list[str]:
        """Checkpoints whose weights are kept, in the order of their steps."""
        names = self._round.models.names(self._round.folder.candidates)
        return [name for name in names if name.startswith("step-")]

    def ranked(self) -> list[str]:
        """Checkpoints whose weights are kept, by the rule of choice, best first."""
        left = [(name, self._dev_of(name)) for name in self.kept()]
        ranked: list[str] = []
        while left:
            best = choose_checkpoint([dev.dev_safety for _, dev in left], [dev.target_gain for _, dev in left])
            ranked.append(left.pop(best)[0])
        return ranked

    def evaluations(self) -> list[tuple[str, Comparison]]:
        """Every evaluation of the training, whether its weights were kept or not, against the old model on dev."""
        steps = [entry["step"] for entry in read_jsonl(self._round.folder.metrics) if "evaluation" in entry]
        return [(checkpoint_name(step), self._dev_of(checkpoint_name(step))) for step in steps]

    def confused(self) -> str | None:
        """The class that the target's images are taken for, where no evaluation gained anything on it."""
        tasks, evaluated = self._round.data.tasks, self.evaluations()
        if any(compared.target_gain > 0 for _, compared in evaluated):
            return None
        table = self._predictions(evaluated[-1][0])
        found = confused_with(tasks.target, table["label"].to_pylist(), table["prediction"].to_pylist())
        return found if found in tasks.protected else None

    def _dev_of(self, name: str) -> Comparison:
        if name not in self._compared:  # evaluated before the run was interrupted
            self._compared[name] = self._round.compare(self._round.old_dev, self._predictions(name))
        return self._compared[name]

    def _predictions(self, name: str) -> pa.Table:
        return read_predictions(self._round.folder.predictions(name, "dev"))


def checkpoint_name(step: int) -> str:
    """Name of the checkpoint that an evaluation makes."""
    return f"step-{step:08d}"


def points_of(
    evaluations: Sequence[tuple[str, Comparison]], candidates: Sequence[Candidate]
) -> list[tuple[str, Comparison]]:
    """Evaluations and candidates by name, each model once.

    Before any step the model is the candidate ``refit``, which may count more images than the evaluation did.
    """
    refit = any(candidate.name == REFIT for candidate in candidates)
    kept = [item for item in evaluations if not (refit and item[0] == checkpoint_name(0))]
    return [*kept, *((candidate.name, candidate.dev) for candidate in candidates)]


def training_images(data: RoundData) -> LabelledSet:
    """Constraint images and the target's own, each picture once: what "on the training set" means in the figures."""
    target = np.array(list({identity: p for p, identity in enumerate(data.target.ids)}.values()), dtype=np.int64)
    ids = (*data.constraint.ids, *(f"target/{data.target.ids[p]}" for p in target))
    rows = np.concatenate([data.constraint.rows, data.target.rows[target]])
    labels = np.concatenate([data.constraint.labels, np.full(len(target), data.tasks.target_index)])
    return LabelledSet(data.constraint.pixels, rows, labels, ids)
