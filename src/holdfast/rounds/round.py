"""One round: data, old model, method. Train, make candidates, decide.

``develop``, ``compare`` and the benchmarks all run this class; nothing else trains, evaluates or chooses::

    round = Round(config, root, "runs/foggy")
    round.train()
    candidates = round.candidates()
    decision = round.decide(candidates)

Whatever is decided from is on disk before the sealed images are opened, and ``result.json`` is the last file: a round
that is killed anywhere comes to the same end when it goes on.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist

from holdfast._version import __version__
from holdfast.artifacts import RunFolder, write_predictions
from holdfast.candidates.select import Candidate, blocking_task
from holdfast.certify.ledger import Ledger
from holdfast.certify.sealed_claim import ledger_of, read_sealed_claim
from holdfast.config import RoundConfig
from holdfast.data.round import LabelledSet, RoundData
from holdfast.data.seen import seen_in_round
from holdfast.data.survey import Survey
from holdfast.errors import UserError
from holdfast.evaluate.metrics import Comparison, compare
from holdfast.evaluate.predict import predict_on_ranks
from holdfast.files import read_json, write_atomic, write_json
from holdfast.methods.base import Method
from holdfast.model.classifier import Classifier
from holdfast.model.feature_store import MemoryStore, features_kept, user_store
from holdfast.model.folder import save_model
from holdfast.rounds.checkpoints import Checkpoints, checkpoint_name, points_of, training_images
from holdfast.rounds.decide import (
    FIRST,
    Decision,
    decide,
    known_to,
    not_queried,
    open_sealed,
    scored,
    tests_sealed,
    to_test,
    write_certificate_of,
)
from holdfast.rounds.former import read_result_json
from holdfast.rounds.kept import RunModels
from holdfast.rounds.make_candidates import CandidateMaker
from holdfast.rounds.prepare import PreparedRound, begin_method, inherit, prepare_round, view_settings
from holdfast.rounds.reference import ReferenceModel, load_reference, predict_reference
from holdfast.rounds.result import candidate_from_json, candidate_json, result_json, training_decision
from holdfast.runtime import Runtime, choose_device
from holdfast.shared import is_sharing, once
from holdfast.stages import stage
from holdfast.train.loop import Progress, TrainSpec, train
from holdfast.train.metrics import MetricsFile


class Round:
    """A round in its run folder; ``root`` is where relative paths of the config begin.

    Without a ``folder`` it works in a temporary one. A folder that was begun (``begun=True``) is gone on with.
    ``check`` may refuse the round once its files are listed, before anything is decoded or loaded. With
    ``training_figures`` every evaluation also measures training images, which figures of a comparison show. With
    ``in_memory`` models stay in memory, and go to disk with the checkpoints of the training: for a job of a study,
    which is short and hands back one model at most.
    """

    def __init__(
        self,
        config: RoundConfig,
        root: Path | str = ".",
        folder: RunFolder | Path | str | None = None,
        runtime: Runtime | None = None,
        *,
        begun: bool = False,
        check: Callable[[Survey], None] | None = None,
        training_figures: bool = False,
        in_memory: bool = False,
        resume: str = "",
    ) -> None:
        self.root = Path(root)
        self.config = inherit(config, self.root)
        self.runtime = runtime or Runtime(choose_device(config.train.device))
        self.prepared: PreparedRound = prepare_round(self.config, self.root, self.runtime, check, begin=False)
        stage("looking for sealed pictures that leaked into training")
        self.prepared.assembled.check_leaks()
        if not begun and self.config.certify.test_sealed:
            self.prepared.assembled.check_sealed()
        self.data: RoundData = self.prepared.assembled.data
        self.folder = _folder(folder)
        self.resume = resume  # the command that goes on with it
        self._in_memory = in_memory and self.runtime.world == 1
        self.models = RunModels(self.save, in_memory=self._in_memory)
        self.training = training_images(self.data) if training_figures else None
        self._store = user_store()
        if not begun:  # nothing is written before the round is known to be sound: a mistake leaves an empty folder
            self._write_config()
        self._begin()
        self._checkpoints = Checkpoints(self)
        self._test: tuple[LabelledSet, pa.Table] | None = None  # test images and the old model's predictions
        self.maker = CandidateMaker(self)

    # -- before -----------------------------------------------------------------------------------------------------

    def _write_config(self) -> None:
        if self.runtime.is_main:
            write_json(self.folder.config, self.config.model_dump(mode="json"))
            state = {"status": "started", "version": __version__, "root": self.folder.towards(self.root)}
            write_json(self.folder.state, state)
        if dist.is_initialized():
            dist.barrier()

    def _begin(self) -> None:
        """Write down roles and fingerprints, and what the old model predicts on dev images."""
        self._write_state("training")
        stage("scoring the old model on dev images")
        with self.keeping(still=True):
            self.old_dev = self.predict_old(self.data.dev)
        self.old_training = None if self.training is None else self.predict_old(self.training)
        if self.runtime.is_main:
            roles = self.prepared.assembled.roles
            write_atomic(self.folder.roles, lambda temporary: pq.write_table(roles, temporary))
            write_predictions(self.folder.predictions("old", "dev"), self.old_dev)

    def _write_state(self, status: str) -> None:
        if not self.runtime.is_main:
            return
        assembled = self.prepared.assembled
        write_json(
            self.folder.state,
            {
                **read_json(self.folder.state),
                "status": status,
                "parent": self.prepared.parent,
                "start_seen": self.prepared.start_seen.describe()["record"],
                "data": assembled.fingerprint,
                "fingerprint": self.prepared.fingerprint,
                "problems": [problem.__dict__ for problem in assembled.problems],
                "counts": {
                    "target_pairs": len(self.data.target),
                    "negatives": len(self.data.negatives),
                    "constraint": len(self.data.constraint),
                    "dev": len(self.data.dev),
                    "sealed": len(self.data.sealed_ids),
                },
            },
        )

    # -- training ---------------------------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        """Whether the round makes steps: its method does, and the run did not decide that none are needed."""
        return self.config.method.trains() and not (training_decision(self.folder) or {}).get("skipped")

    def train(self, progress: Progress | None = None) -> None:
        """Train to the end, or go on from the newest checkpoint; every evaluation makes a checkpoint to choose from.

        A round that does not train has one evaluation, of the refitted target.
        """
        config = self.config
        if not self.trains:
            self._evaluate_refit()
            return
        begin_method(self.prepared, config, self.runtime)
        spec = TrainSpec(
            config.trained,
            view_settings(config.train, config.method),
            config.seed,
            self.prepared.fingerprint,
            config.evaluate.every,
            resume=self.resume,
            checkpoint_at_end=not self._in_memory,
        )
        with self.keeping():
            train(
                self.prepared.method,
                self.data,
                spec,
                self.runtime,
                self.folder,
                self.evaluate_checkpoint,
                progress,
                before_checkpoint=self.models.write,  # a run that goes on from there chooses among them
            )

    def evaluate_checkpoint(self, done: int, method: Method) -> dict[str, Any]:
        """Per-task accuracy on dev and constraint images after step ``done``; the model becomes a checkpoint."""
        return self._checkpoints.evaluate(done, method.model)

    def _evaluate_refit(self) -> None:
        if self.folder.metrics.exists() and self.evaluations():  # the run was begun before
            return
        stage("refitting the target")
        metrics = MetricsFile(self.folder.metrics if self.runtime.is_main else None)
        with self.keeping(still=True):
            models = self.maker.refitted()
            dev = models.predictions(0.0, self.data.dev, self.config.evaluate.batch)[models.smallest_bias_index]
            metrics.write({"step": 0, "evaluation": self._checkpoints.evaluate(0, models.at(0.0), dev)})
        metrics.close()

    def save(self, model: Classifier, folder: Path) -> str:
        """Write a model folder that says which round it is from; its fingerprint."""
        if folder.exists():  # left by a run that was killed after this evaluation; it is written again
            shutil.rmtree(folder)
        task = self.config.task
        notes = {"template": task.template, "names": task.names, "target": task.target}
        # Also a model that is handed back unchanged: whoever goes on from here has looked at this round's dev images.
        fitted = self.config.candidates.refit_target and self.maker.folds is not None
        seen = self.prepared.start_seen.and_then(seen_in_round(self.prepared.assembled, fitted=fitted))
        return save_model(model, folder, parent=self.prepared.parent, extra=notes, seen=seen)

    def checkpoints(self) -> list[str]:
        """Checkpoints whose weights are kept, in the order of their steps."""
        return self._checkpoints.kept()

    def checkpoint(self, name: str) -> Classifier:
        """The weights of a checkpoint, on the device."""
        return self.models.get(self.folder.candidates / name).to(self.runtime.device)

    def best_checkpoint(self) -> str:
        """The checkpoint that the rule of choice takes: retention, then target gain, on dev images."""
        return self._checkpoints.ranked()[0]

    def evaluations(self) -> list[tuple[str, Comparison]]:
        """Every evaluation of the training, whether its weights were kept or not, against the old model on dev."""
        return self._checkpoints.evaluations()

    # -- candidates -------------------------------------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        """What needs no training, and interpolations of the old weights with checkpoints, as [candidates] says.

        All have a target bias, and most their target refitted: not checkpoints as they were trained, nor fits of the
        last layer as they are.
        """
        ends = {"best": self.best_checkpoint(), "last": self.checkpoints()[-1]}
        steps = list(dict.fromkeys(ends[which] for which in self.config.candidates.checkpoints))
        made = self.maker.refits(steps[0])
        for step in steps if self.trains else ():
            made += self.maker.from_checkpoint(step)
        return made + self.maker.of_last_layer()

    def untrained_candidates(self) -> list[Candidate]:
        """What the round can do without training, with the chance of each.

        Takes seconds, and is kept: :meth:`candidates` finds it again. Empty where nothing is refitted.
        """
        made = [*self.maker.refits(checkpoint_name(0)), *self.maker.of_last_layer()]
        return scored(self.config, self.folder, made, self._ledger())

    def model(self, candidate: Candidate) -> Classifier:
        """The weights of a candidate, to look at: what did not move may be the old model's own. Copy it to train it."""
        kept = self.folder.tested / candidate.name
        if self.models.has(kept):  # what is tested is what is handed back, bit for bit
            return self.models.get(kept).to(self.runtime.device)
        return self.maker.model(candidate)

    # -- the decision -----------------------------------------------------------------------------------------------

    def decide(self, candidates: Sequence[Candidate] | None = None) -> Decision:
        """Choose on dev images and, where images are sealed, test on them: the candidate that ships, or none.

        The candidates and the models that are tested are kept on disk: a second call finds them there.
        """
        tested, models = self._settle(candidates)
        certify = self.config.certify
        if not tested and tests_sealed(certify, self.folder):
            return not_queried(self.config, self.folder, self.settled())
        sealed = open_sealed(self.data, read_sealed_claim(self.folder)) if tests_sealed(certify, self.folder) else None

        def sealed_predictions(which: Candidate | str) -> pa.Table:
            assert sealed is not None
            stage(
                f"scoring {which.name if isinstance(which, Candidate) else f'the {which} model'} on the sealed images"
            )
            if isinstance(which, Candidate):
                return self.predict(self.model(which), sealed)
            if which == FIRST:
                return predict_reference(self._first(), sealed, self.config.evaluate.batch, self.runtime)
            return self.predict_old(sealed)

        ledger = self._ledger()
        known = known_to(None if certify.first is None else self.root / certify.first)
        with features_kept(MemoryStore()):  # for models that share their image tower; no sealed picture's are written
            return decide(certify, self.folder, tested, models, sealed_predictions, self.runtime, ledger, known)

    def settled(self) -> list[Candidate]:
        """The candidates that the decision is made from, as they are on disk."""
        entries = read_result_json(self.folder.settled)["candidates"]
        return [candidate_from_json(entry, self.data.tasks.target) for entry in entries]

    def _settle(self, candidates: Sequence[Candidate] | None) -> tuple[list[Candidate], dict[str, str]]:
        """The candidates that are tested, and the fingerprints of their models; made once and kept on disk."""
        if not self.folder.settled.exists() or not self._all_kept():
            candidates = self.candidates() if candidates is None else list(candidates)
            candidates = scored(self.config, self.folder, candidates, self._ledger())
            tested = to_test(self.config, self.folder, candidates)
            made = {candidate.name: self.model(candidate) for candidate in tested}
            if self.runtime.is_main:
                models = {name: self.models.put_named(model, self.folder.tested / name) for name, model in made.items()}
                entries = [candidate_json(candidate) for candidate in candidates]
                write_json(self.folder.settled, {"candidates": entries, "tested": models})
            if dist.is_initialized():
                dist.barrier()
        models = read_json(self.folder.settled)["tested"]
        by_name = {candidate.name: candidate for candidate in self.settled()}
        return [by_name[name] for name in models], models

    def _ledger(self) -> Ledger:
        return ledger_of(self.config.certify, self.root)

    def _all_kept(self) -> bool:
        """Whether the models that are tested are still on disk."""
        tested = read_json(self.folder.settled)["tested"]
        return all(self.models.has(self.folder.tested / name) for name in tested)

    def _first(self) -> ReferenceModel:
        assert self.config.certify.first is not None
        found = load_reference(self.root / self.config.certify.first, self.data.tasks)
        found.on_round_classes.to(self.runtime.device)
        if found.as_deployed is not None:
            found.as_deployed.to(self.runtime.device)
        return found

    # -- what it hands back -----------------------------------------------------------------------------------------

    def write_result(self, decision: Decision, *, model: bool = True) -> None:
        """Score test images once and write model (unless nobody wants it), certificate and, last, ``result.json``."""
        candidates = self.settled()
        shipped = self.model(decision.shipped) if decision.shipped else None
        test = self.score_test(shipped)
        points = points_of(self.evaluations(), candidates)
        if not self.runtime.is_main:
            return
        if model:
            self.save(shipped or self.prepared.as_deployed or self.prepared.old, self.folder.model)
        write_certificate_of(self.folder, decision)
        values = result_json(
            decision,
            candidates,
            points,
            self.data.tasks,
            test,
            start_seen=self.prepared.start_seen,
            training=training_decision(self.folder),
            blocked_by=blocking_task(points) or self._checkpoints.confused(),
        )
        write_json(self.folder.result, values)

    def score_test(self, model: Classifier | None, *, write: bool = True) -> Comparison | None:
        """A model (None: the old one) against the old model on test images; None for a round without them.

        Predictions are written for the model that a run stands for, and not for others beside it.
        """
        if self._test is None:
            try:
                examples = self.data.open_test()
            except UserError:
                return None  # dev figures are all there is
            stage("scoring test images")
            with features_kept(self._test_features()):
                self._test = examples, self.predict_old(examples)
        examples, old = self._test
        with features_kept(self._test_features()):
            new = old if model is None else self.predict(model, examples)
        if self.runtime.is_main and write:
            write_predictions(self.folder.predictions("old", "test"), old)
            write_predictions(self.folder.predictions("new", "test"), new)
        return self.compare(old, new)

    def _test_features(self) -> MemoryStore | None:
        """What backbones that do not move say of test images, for models and jobs of a process; never on disk."""
        return once("test features", MemoryStore) if is_sharing() and self.still else None

    # -- predictions ------------------------------------------------------------------------------------------------

    def keeping(self, *, still: bool = False, moved: MemoryStore | None = None) -> AbstractContextManager[None]:
        """Features of image towers that do not move are kept between runs: the old one's, its refit's, frozen ones'.

        Of a tower whose last layer alone moves the store keeps what that layer sees. Those of a tower that moved are
        kept in ``moved``, where that is given.
        """
        return features_kept(self._store if still or self.still else moved)

    @property
    def still(self) -> bool:
        """Whether no training moves what the image tower's last layer sees."""
        return self.config.model.freeze in ("image", "backbones", "towers")

    def predict(self, model: Classifier, examples: LabelledSet) -> pa.Table:
        """Predictions of all examples; each rank makes its share."""
        return predict_on_ranks(model, examples, self.data.tasks.classes, self.config.evaluate.batch, self.runtime)

    def predict_old(self, examples: LabelledSet) -> pa.Table:
        """The old model as it was deployed."""
        reference = ReferenceModel(self.prepared.old, self.prepared.as_deployed)
        batch = self.config.evaluate.batch
        if not is_sharing():
            return predict_reference(reference, examples, batch, self.runtime)
        key = ("old predictions", self.old_key(), examples.key, batch)
        return once(key, lambda: predict_reference(reference, examples, batch, self.runtime))

    def old_key(self) -> Hashable:
        """What the old model's predictions depend on, beside the examples."""
        config, runtime = self.config, self.runtime
        place = str(runtime.device), runtime.rank, runtime.world
        return self.prepared.parent, config.model.model_dump_json(), config.train.precision, place

    def compare(self, old: pa.Table, new: pa.Table) -> Comparison:
        """Two tables of predictions, task by task."""
        return compare(old, new, self.data.tasks.target, self.data.tasks.protected)


def _folder(folder: RunFolder | Path | str | None) -> RunFolder:
    if isinstance(folder, RunFolder):
        return folder
    return RunFolder.create(Path(tempfile.mkdtemp(prefix="holdfast-")) if folder is None else Path(folder))
