"""One round, from data to verdict: train, look on dev, choose, score test once, hand back a model.

The only room that sees both models and certificates.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor

from holdfast._version import __version__
from holdfast.artifacts import (
    LOCK,
    RunFolder,
    read_json,
    read_jsonl,
    read_predictions,
    write_atomic,
    write_json,
    write_predictions,
)
from holdfast.candidates.logit_bias import with_target_bias
from holdfast.candidates.refit import TargetRefit, refit_target
from holdfast.candidates.select import Candidate, blocking_task, confused_with, frontier, gain_by_margin
from holdfast.certify.sealed import SealedClaim, check_readable, read_sealed_claim
from holdfast.config import RoundConfig, parse
from holdfast.data.assemble import Survey
from holdfast.data.round import LabelledSet, RoundData
from holdfast.errors import Interrupted, UserError
from holdfast.evaluate.metrics import Comparison, choose_checkpoint, compare, per_task_accuracy
from holdfast.evaluate.predict import predict, predict_each
from holdfast.locks import one_writer
from holdfast.methods.base import Method
from holdfast.model.classifier import Classifier
from holdfast.model.folder import is_model_folder, load_model, save_model
from holdfast.model.interpolate import interpolate
from holdfast.rounds.decide import (
    FIRST,
    Decision,
    check_budget,
    decide,
    known_to,
    ledger_of,
    tests_sealed,
    to_test,
    write_certificate_of,
)
from holdfast.rounds.prepare import PreparedRound, inherit, prepare_round, view_settings
from holdfast.rounds.reference import ReferenceModel, load_reference, relabelled
from holdfast.rounds.result import RoundResult, candidate_from_json, candidate_json, comparison_json, read_result
from holdfast.runtime import Runtime, started
from holdfast.train.loop import TrainSpec, train
from holdfast.train.progress import choose_progress


def develop(config: RoundConfig, out: Path, root: Path, *, resume: bool = False, quiet: bool = False) -> RoundResult:
    """Run a round (or go on with one) in the run folder ``out``; paths in the config are relative to ``root``.

    Going on with a run that is finished changes nothing and returns its result.
    """
    if resume and RunFolder.open(out).finished:
        return read_result(RunFolder(out))
    with started(config.train.device) as runtime, writing(out, runtime, resume=resume) as folder:
        return run_round(config, folder, root, runtime, resume=resume, quiet=quiet)


def run_round(
    config: RoundConfig, folder: RunFolder, root: Path, runtime: Runtime, *, resume: bool = False, quiet: bool = False
) -> RoundResult:
    """:func:`develop` in a folder that this process holds."""
    if folder.result.exists():  # killed between its last file and the line that says so
        return _conclude(folder, runtime)
    try:
        return _run(inherit(config, root), folder, root, runtime, resume=resume, quiet=quiet)
    except KeyboardInterrupt as error:
        raise _interrupted(folder) from error


def _run(
    config: RoundConfig, folder: RunFolder, root: Path, runtime: Runtime, *, resume: bool, quiet: bool
) -> RoundResult:
    def check(surveyed: Survey) -> None:
        if runtime.is_main:
            run = str(read_json(folder.state).get("fingerprint", "")) if resume else ""
            check_budget(config, root, surveyed.sealed, run, resume)

    ready = prepare_round(config, root, runtime, check)
    ready.assembled.check_leaks()
    if not resume:  # nothing is written before the round is known to be sound: a mistake leaves an empty folder
        _write_config(config, folder, root, runtime)
    round_ = _Round(config, ready, folder, runtime, root)
    round_.begin()
    plan = TrainSpec(
        config.trained,
        view_settings(config.train, config.method),
        config.seed,
        ready.fingerprint,
        config.evaluate.every,
        resume=resume_command(folder),
    )
    with choose_progress("developing", config.train.steps, quiet=quiet or not runtime.is_main) as progress:
        train(ready.method, ready.assembled.data, plan, runtime, folder, round_.evaluate_checkpoint, progress)
    return round_.finish()


def resume_command(folder: RunFolder) -> str:
    """What goes on with a run."""
    return f"holdfast develop --resume {folder.root}"


def _interrupted(folder: RunFolder) -> Interrupted:
    begun = folder.state.exists()
    return Interrupted(
        "interrupted; nothing is lost" if begun else "interrupted before the run began",
        signal_number=signal.SIGINT,
        do=f"go on with: {resume_command(folder)}" if begun else "",
    )


def resume_config(run: Path) -> tuple[RoundConfig, Path]:
    """Config and root of a run that was begun."""
    folder = RunFolder.open(run)
    origin = folder.origin
    return parse(RoundConfig, read_json(folder.config), str(folder.config), origin), origin


@contextmanager
def writing(out: Path, runtime: Runtime, *, resume: bool) -> Generator[RunFolder]:
    """The run folder, held by this process alone; a new one must be free."""
    if not runtime.is_main:
        yield RunFolder(out)
        return
    if resume:
        RunFolder.open(out)
    elif not (out / LOCK).exists():  # where somebody writes right now the lock says who
        RunFolder.check_free(out)
    with one_writer(out):
        folder = RunFolder.open(out) if resume else RunFolder.create(out)
        folder.clear()
        yield folder


def _conclude(folder: RunFolder, runtime: Runtime) -> RoundResult:
    """Every file is in place: what only served the round goes, and then the run is done."""
    if runtime.is_main:
        shutil.rmtree(folder.tested, ignore_errors=True)
        write_json(folder.state, {**read_json(folder.state), "status": "done"})
    if dist.is_initialized():
        dist.barrier()
    return read_result(folder)


def _write_config(config: RoundConfig, folder: RunFolder, root: Path, runtime: Runtime) -> None:
    if runtime.is_main:
        write_json(folder.config, config.model_dump(mode="json"))
        write_json(folder.state, {"status": "started", "version": __version__, "root": folder.towards(root)})
    if dist.is_initialized():
        dist.barrier()


class _Round:
    """What happens around the training loop of one round."""

    def __init__(
        self, config: RoundConfig, ready: PreparedRound, folder: RunFolder, runtime: Runtime, root: Path
    ) -> None:
        self.config, self.ready, self.folder, self.runtime, self.root = config, ready, folder, runtime, root
        self.data: RoundData = ready.assembled.data

    # -- before -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Write down roles and fingerprints, and what the old model says on dev images."""
        self._write_state("training")
        old_dev = self._predict_old(self.data.dev)
        if self.runtime.is_main:
            roles = self.ready.assembled.roles
            write_atomic(self.folder.roles, lambda temporary: pq.write_table(roles, temporary))
            write_predictions(self.folder.predictions("old", "dev"), old_dev)
        self.old_dev = old_dev

    def _write_state(self, status: str) -> None:
        if not self.runtime.is_main:
            return
        state = read_json(self.folder.state)
        problems = [problem.__dict__ for problem in self.ready.assembled.problems]
        write_json(
            self.folder.state,
            {
                **state,
                "status": status,
                "parent": self.ready.parent,
                "data": self.ready.assembled.fingerprint,
                "fingerprint": self.ready.fingerprint,
                "problems": problems,
                "counts": {
                    "target_pairs": len(self.data.target),
                    "negatives": len(self.data.negatives),
                    "constraint": len(self.data.constraint),
                    "dev": len(self.data.dev),
                    "sealed": len(self.data.sealed_ids),
                },
            },
        )

    # -- during -----------------------------------------------------------------------------------------------------

    def evaluate_checkpoint(self, done: int, method: Method) -> dict[str, Any]:
        """An evaluation: per-task accuracy on dev and constraint images; the model becomes a candidate."""
        name = candidate_name(done)
        dev = self._predict(method.model, self.data.dev)
        constraint = self._predict(method.model, self.data.constraint)
        compared = self._compare(self.old_dev, dev)
        if self.runtime.is_main:
            write_predictions(self.folder.predictions(name, "dev"), dev)
            self._save(method.model, self.folder.candidates / name)
            self._prune(done)
        return {
            "dev_safety": compared.dev_safety,
            "dev_safety_loss": compared.dev_safety_loss,
            "target_gain": compared.target_gain,
            "dev_accuracy": per_task_accuracy(dev),
            "constraint_accuracy": per_task_accuracy(constraint),
        }

    def _save(self, model: Classifier, folder: Path) -> str:
        if folder.exists():  # left by a run that was killed after this evaluation; it is written again
            shutil.rmtree(folder)
        task = self.config.task
        notes = {"template": task.template, "names": task.names, "target": task.target}
        return save_model(model, folder, parent=self.ready.parent, extra=notes)

    def _prune(self, done: int) -> None:
        """Keep the weights of the best few candidates, and of the last."""
        ranked = [name for name, _ in self._ranked()]
        keep = {*ranked[: self.config.evaluate.keep_candidates], candidate_name(done)}
        for path in self.folder.candidates.iterdir():
            if path.name not in keep:
                shutil.rmtree(path)

    def _ranked(self) -> list[tuple[str, Comparison]]:
        """Candidates by the rule of choice, best first: retention, then target gain, on dev images."""
        names = sorted(path.name for path in self.folder.candidates.iterdir() if path.name.startswith("step-"))
        left = [(name, self._compare(self.old_dev, self._dev_predictions(name))) for name in names]
        ranked: list[tuple[str, Comparison]] = []
        while left:
            best = choose_checkpoint(
                [compared.dev_safety for _, compared in left], [compared.target_gain for _, compared in left]
            )
            ranked.append(left.pop(best))
        return ranked

    def _dev_predictions(self, name: str) -> pa.Table:
        return read_predictions(self.folder.predictions(name, "dev"))

    def _compare(self, old: pa.Table, new: pa.Table) -> Comparison:
        return compare(old, new, self.data.tasks.target, self.data.tasks.protected)

    # -- after ------------------------------------------------------------------------------------------------------

    def finish(self) -> RoundResult:
        """Walk back from the best look, choose (and certify where images are sealed), score test once.

        Whatever is decided from is on disk before the sealed images are opened, and ``result.json`` is the last file:
        a run that is killed anywhere in here comes to the same end when it goes on.
        """
        evaluated = [(name, self._compare(self.old_dev, self._dev_predictions(name))) for name in self._evaluated()]
        candidates, tested, models = self._settle()
        decision = self._decide(tested, models)
        shipped = self._tested_model(decision.shipped) if decision.shipped else None
        test = self._score_test(shipped)
        points = [*evaluated, *((candidate.name, candidate.dev) for candidate in candidates)]
        result = RoundResult(
            self.folder, decision, candidates, test, blocking_task(points) or self._confused(evaluated)
        )
        if self.runtime.is_main:
            self._save(shipped or self.ready.as_deployed or self.ready.old, self.folder.model)
            if decision.certified:
                write_certificate_of(self.folder, decision)
            write_json(
                self.folder.result,
                {
                    **decision.to_json(),
                    "target": self.data.tasks.target,
                    "protected": list(self.data.tasks.protected),
                    "candidates": [candidate_json(candidate) for candidate in candidates],
                    "dev": comparison_json(result.dev),
                    "test": comparison_json(test) if test else None,
                    "frontier": frontier(points),
                    "gain_by_margin": gain_by_margin(points),
                    "blocked_by": result.blocked_by,
                },
            )
        return _conclude(self.folder, self.runtime)

    def _settle(self) -> tuple[list[Candidate], list[Candidate], dict[str, str]]:
        """All candidates, those that are tested, and the fingerprints of their models; made once and kept on disk."""
        if not self.folder.settled.exists() or not self._all_kept(read_json(self.folder.settled)):
            candidates = self._walk(self._ranked()[0][0])
            tested = to_test(self.config, self.folder, candidates)
            made = {candidate.name: self._model_at(candidate) for candidate in tested}
            if self.runtime.is_main:
                models = {name: self._save(model, self.folder.tested / name) for name, model in made.items()}
                entries = [candidate_json(candidate) for candidate in candidates]
                write_json(self.folder.settled, {"candidates": entries, "tested": models})
            if dist.is_initialized():
                dist.barrier()
        settled = read_json(self.folder.settled)
        target = self.data.tasks.target
        candidates = [candidate_from_json(entry, target) for entry in settled["candidates"]]
        by_name = {candidate.name: candidate for candidate in candidates}
        return candidates, [by_name[name] for name in settled["tested"]], settled["tested"]

    def _all_kept(self, settled: Mapping[str, Any]) -> bool:
        """Whether the models that are tested are still there."""
        return all(is_model_folder(self.folder.tested / name) for name in settled["tested"])

    def _tested_model(self, candidate: Candidate) -> Classifier:
        """A candidate as it lies on disk: what is tested is what is handed back, bit for bit."""
        return load_model(self.folder.tested / candidate.name).to(self.runtime.device)

    def _confused(self, evaluated: list[tuple[str, Comparison]]) -> str | None:
        """Who the target's images are taken for, where no evaluation gained anything on it."""
        if any(compared.target_gain > 0 for _, compared in evaluated):
            return None
        table = self._dev_predictions(evaluated[-1][0])
        found = confused_with(self.data.tasks.target, table["label"].to_pylist(), table["prediction"].to_pylist())
        return found if found in self.data.tasks.protected else None

    def _evaluated(self) -> list[str]:
        """Every evaluation of the run, whether its weights were kept or not."""
        evaluated = [item["step"] for item in read_jsonl(self.folder.metrics) if "evaluation" in item]
        return [candidate_name(step) for step in evaluated]

    def _walk(self, step: str) -> list[Candidate]:
        """Candidates on the line from the old model to the best look, with their dev predictions.

        At each λ the target's logit is fitted anew, and there are those that hold the target back by so much: they
        share the image tower, and one pass of it.
        """
        self.end = load_model(self.folder.candidates / step).to(self.runtime.device)
        self._fits: dict[float, TargetRefit] = {}
        amounts = sorted(set(self.config.candidates.target_bias))
        candidates: list[Candidate] = []
        for lam in self.config.candidates.lambdas:
            between = self._model_at_share(lam)
            with torch.no_grad():
                matrices = [
                    with_target_bia.class_matrix() for with_target_bia in with_target_bias(between, self.data, amounts)
                ]
            tables = shared_predictions_of_each(
                between, matrices, self.data.dev, self.config.evaluate.batch, self.runtime
            )
            for amount, table in zip(amounts, tables, strict=True):
                candidate = Candidate(step, lam, self._compare(self.old_dev, table), amount)
                if self.runtime.is_main:
                    write_predictions(self.folder.predictions(candidate.name, "dev"), table)
                candidates.append(candidate)
        return candidates

    def _model_at(self, candidate: Candidate) -> Classifier:
        return with_target_bias(self._model_at_share(candidate.lam), self.data, [candidate.bias])[0]

    def _model_at_share(self, lam: float) -> Classifier:
        if lam == 0:
            model = self.ready.old
        else:
            model = self.end if lam == 1 else interpolate(self.ready.old, self.end, lam).to(self.runtime.device)
        if not self.config.candidates.refit_target:
            return model
        if lam not in self._fits:
            self._fits[lam] = self._fit(model)
        return self._fits[lam].applied(model)

    def _fit(self, model: Classifier) -> TargetRefit:
        """What the first rank finds, on every rank: the bits of a sum depend on the machine."""
        found: list[Any] = [None]
        if self.runtime.is_main:
            views = view_settings(self.config.train, self.config.method)
            found[0] = refit_target(
                model,
                self.data,
                in_tower=self.config.model.freeze not in ("image", "towers"),
                crop_scale=views.crop_scale,
                flip=views.flip,
            ).to("cpu")
        if self.runtime.world > 1:
            dist.broadcast_object_list(found)
        return found[0].to(self.runtime.device)

    def _decide(self, tested: list[Candidate], models: dict[str, str]) -> Decision:
        certify = self.config.certify
        if tests_sealed(certify, self.folder):
            self._open_sealed()

        def sealed_predictions(which: Candidate | str) -> pa.Table:
            if isinstance(which, Candidate):
                return self._predict(self._tested_model(which), self._sealed)
            if which == FIRST:
                return predict_reference(self._first(), self._sealed, self.config.evaluate.batch, self.runtime)
            return self._predict_old(self._sealed)

        ledger = ledger_of(certify, self.root)
        known = known_to(None if certify.first is None else self.root / certify.first)
        return decide(certify, self.folder, tested, models, sealed_predictions, self.runtime, ledger, known)

    def _open_sealed(self) -> None:
        """Read and decode every sealed picture before the look is on record: one that is broken costs no look."""
        self._sealed = open_sealed(self.data, read_sealed_claim(self.folder))

    def _first(self) -> ReferenceModel:
        assert self.config.certify.first is not None
        found = load_reference(self.root / self.config.certify.first, self.data.tasks)
        found.on_round_classes.to(self.runtime.device)
        if found.as_deployed is not None:
            found.as_deployed.to(self.runtime.device)
        return found

    def _score_test(self, shipped: Classifier | None) -> Comparison | None:
        try:
            examples = self.data.open_test()
        except UserError:
            return None  # a round without test images: dev figures are all there is
        tables: dict[str, pa.Table] = {}
        for name, model in (("old", None), ("new", shipped)):
            tables[name] = self._predict_old(examples) if model is None else self._predict(model, examples)
            if self.runtime.is_main:
                write_predictions(self.folder.predictions(name, "test"), tables[name])
        return self._compare(tables["old"], tables["new"])

    def _predict_old(self, examples: LabelledSet) -> pa.Table:
        """The old model as it was used."""
        served = ReferenceModel(self.ready.old, self.ready.as_deployed)
        return predict_reference(served, examples, self.config.evaluate.batch, self.runtime)

    def _predict(self, model: Classifier, examples: LabelledSet) -> pa.Table:
        """Predictions of all examples; each rank makes its share."""
        return shared_predictions(model, examples, self.data.tasks.classes, self.config.evaluate.batch, self.runtime)


def open_sealed(data: RoundData, plan: SealedClaim) -> LabelledSet:
    """The sealed images, read and decoded; one that cannot be is an error that costs no look."""
    examples = data.open_sealed()
    check_readable(plan, examples.ids)
    for start in range(0, len(examples), 1024):
        examples.images(slice(start, start + 1024))
    return examples


def predict_reference(served: ReferenceModel, examples: LabelledSet, batch: int, runtime: Runtime) -> pa.Table:
    """What a frozen model says, over the classes that it was used with; the loss is over the round's."""
    classes = served.on_round_classes.classes
    table = shared_predictions(served.on_round_classes, examples, classes, batch, runtime)
    if served.as_deployed is None:
        return table
    fewer = relabelled(examples, classes, served.as_deployed.classes)
    return served.with_deployed(
        table, shared_predictions(served.as_deployed, fewer, served.as_deployed.classes, batch, runtime)
    )


def candidate_name(step: int) -> str:
    """Name of the candidate that an evaluation makes."""
    return f"step-{step:08d}"


def shared_predictions(
    model: Classifier, examples: LabelledSet, classes: tuple[str, ...], batch: int, runtime: Runtime
) -> pa.Table:
    """:func:`predict`, with the examples shared out over the ranks and the tables put together again."""
    share = _share(examples, runtime)
    return _together(predict(model, share, classes, batch_size=batch, device=runtime.device), examples, runtime)


def shared_predictions_of_each(
    model: Classifier, matrices: Sequence[Tensor], examples: LabelledSet, batch: int, runtime: Runtime
) -> list[pa.Table]:
    """The same of models that differ from ``model`` in their class matrix alone."""
    tables = predict_each(model, matrices, _share(examples, runtime), batch_size=batch, device=runtime.device)
    return [_together(table, examples, runtime) for table in tables]


def _share(examples: LabelledSet, runtime: Runtime) -> LabelledSet:
    """What this rank predicts."""
    if runtime.world == 1:
        return examples
    mine = slice(runtime.rank, None, runtime.world)
    return LabelledSet(examples.pixels, examples.rows[mine], examples.labels[mine], examples.ids[mine])


def _together(table: pa.Table, examples: LabelledSet, runtime: Runtime) -> pa.Table:
    """The ranks' tables as one, in the order of the examples."""
    if runtime.world == 1:
        return table
    tables: list[Any] = [None] * runtime.world
    dist.all_gather_object(tables, table)
    together = pa.concat_tables(tables)
    place = {identity: row for row, identity in enumerate(together["example_id"].to_pylist())}
    return together.take([place[identity] for identity in examples.ids])
