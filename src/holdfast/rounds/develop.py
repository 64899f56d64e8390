"""One round, from data to verdict: train, look on dev, choose, score test once, hand back a model.

The only room that sees both models and certificates.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor

from holdfast._version import __version__
from holdfast.artifacts import (
    RunFolder,
    read_json,
    read_jsonl,
    read_predictions,
    write_atomic,
    write_json,
    write_predictions,
)
from holdfast.config import RoundConfig, parse
from holdfast.data.tasks import LabelledSet, RoundData
from holdfast.errors import UserError
from holdfast.evaluate.metrics import Comparison, choose_checkpoint, compare, per_task_accuracy
from holdfast.evaluate.predict import predict, predict_each
from holdfast.methods.base import Method
from holdfast.model.classifier import Classifier
from holdfast.model.folder import load_model, save_model
from holdfast.model.hold_back import held_back_by
from holdfast.model.interpolate import interpolate
from holdfast.model.target_fit import TargetFit, fit_target
from holdfast.rounds.candidates import Candidate, blocking_task, bought_by_margin, confused_with, frontier
from holdfast.rounds.decide import FIRST, Decision, decide, write_certificate_of
from holdfast.rounds.served import Served, load_served, relabelled
from holdfast.rounds.setup import Ready, inherit, prepare_round, view_settings
from holdfast.runtime import Runtime, started
from holdfast.train.loop import Plan, train
from holdfast.train.progress import choose_progress


@dataclass(frozen=True)
class RoundResult:
    """What a round hands back; also in ``result.json``."""

    folder: RunFolder
    decision: Decision
    candidates: list[Candidate]
    test: Comparison | None
    blocked_by: str | None  # the protected task that stood in the target's way, where one did

    @property
    def kept_old(self) -> bool:
        """Whether the old model is handed back."""
        return self.decision.shipped is None

    @property
    def chosen(self) -> str | None:
        """Name of the candidate that is handed back."""
        return self.decision.shipped.name if self.decision.shipped else None

    @property
    def dev(self) -> Comparison:
        """What dev images say of the candidate that is handed back, or else of the one that gained most."""
        best = self.decision.shipped or max(self.candidates, key=lambda one: one.dev.target_gain)
        return best.dev


def develop(config: RoundConfig, out: Path, root: Path, *, resume: bool = False, quiet: bool = False) -> RoundResult:
    """Run a round (or go on with one) in the run folder ``out``; paths in the config are relative to ``root``."""
    config = inherit(config, root)
    with started(config.train.device) as runtime:
        folder = _open_folder(out, resume, runtime)
        ready = prepare_round(config, root, runtime)
        ready.assembled.check_leaks()
        if not resume:  # nothing is written before the round is known to be sound: a mistake leaves an empty folder
            _write_config(config, folder, root, runtime)
        round_ = _Round(config, ready, folder, runtime)
        round_.begin()
        plan = Plan(
            config.trained,
            view_settings(config.train, config.method),
            config.seed,
            ready.fingerprint,
            config.evaluate.every,
        )
        with choose_progress("developing", config.train.steps, quiet=quiet or not runtime.is_main) as progress:
            train(ready.method, ready.assembled.data, plan, runtime, folder, round_.look, progress)
        return round_.finish()


def resume_config(run: Path) -> tuple[RoundConfig, Path]:
    """Config and root of a run that was begun."""
    folder = RunFolder.open(run)
    state = read_json(folder.state)
    return parse(RoundConfig, read_json(folder.config), str(folder.config)), Path(state["root"])


def _open_folder(out: Path, resume: bool, runtime: Runtime) -> RunFolder:
    if resume:
        return RunFolder.open(out)
    if runtime.is_main:
        RunFolder.create(out)
    return RunFolder(out)


def _write_config(config: RoundConfig, folder: RunFolder, root: Path, runtime: Runtime) -> None:
    if runtime.is_main:
        write_json(folder.config, config.model_dump(mode="json"))
        write_json(folder.state, {"status": "started", "version": __version__, "root": str(root.resolve())})
    if dist.is_initialized():
        dist.barrier()


class _Round:
    """What happens around the training loop of one round."""

    def __init__(self, config: RoundConfig, ready: Ready, folder: RunFolder, runtime: Runtime) -> None:
        self.config, self.ready, self.folder, self.runtime = config, ready, folder, runtime
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

    def look(self, done: int, method: Method) -> dict[str, Any]:
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
            best = choose_checkpoint([one.dev_safety for _, one in left], [one.target_gain for _, one in left])
            ranked.append(left.pop(best))
        return ranked

    def _dev_predictions(self, name: str) -> pa.Table:
        return read_predictions(self.folder.predictions(name, "dev"))

    def _compare(self, old: pa.Table, new: pa.Table) -> Comparison:
        return compare(old, new, self.data.tasks.target, self.data.tasks.protected)

    # -- after ------------------------------------------------------------------------------------------------------

    def finish(self) -> RoundResult:
        """Walk back from the best look, choose (and certify where images are sealed), score test once."""
        looks = [(name, self._compare(self.old_dev, self._dev_predictions(name))) for name in self._looks()]
        candidates = self._walk(self._ranked()[0][0])
        decision = self._decide(candidates)
        shipped = self._model_at(decision.shipped) if decision.shipped else None
        test = self._score_test(shipped)
        points = [*looks, *((one.name, one.dev) for one in candidates)]
        result = RoundResult(self.folder, decision, candidates, test, blocking_task(points) or self._confused(looks))
        if self.runtime.is_main:
            self._save(shipped or self.ready.used or self.ready.old, self.folder.model)
            write_json(
                self.folder.result,
                {
                    **decision.to_json(),
                    "target": self.data.tasks.target,
                    "protected": list(self.data.tasks.protected),
                    "candidates": [
                        {
                            "name": one.name,
                            "step": one.step,
                            "lambda": one.walked,
                            "held": one.held,
                            "dev": comparison_json(one.dev),
                        }
                        for one in candidates
                    ],
                    "dev": comparison_json(result.dev),
                    "test": comparison_json(test) if test else None,
                    "frontier": frontier(points),
                    "bought_by_margin": bought_by_margin(points),
                    "blocked_by": result.blocked_by,
                },
            )
            if decision.certified:
                write_certificate_of(self.folder, decision)
        self._write_state("done")
        return result

    def _confused(self, looks: list[tuple[str, Comparison]]) -> str | None:
        """Who the target's images are taken for, where no look gained anything on it."""
        if any(one.target_gain > 0 for _, one in looks):
            return None
        table = self._dev_predictions(looks[-1][0])
        found = confused_with(self.data.tasks.target, table["label"].to_pylist(), table["prediction"].to_pylist())
        return found if found in self.data.tasks.protected else None

    def _looks(self) -> list[str]:
        """Every evaluation of the run, whether its weights were kept or not."""
        evaluated = [one["step"] for one in read_jsonl(self.folder.metrics) if "evaluation" in one]
        return [candidate_name(step) for step in evaluated]

    def _walk(self, step: str) -> list[Candidate]:
        """Candidates on the line from the old model to the best look, with their dev predictions.

        At each λ the target's logit is fitted anew, and there are those that hold the target back by so much: they
        share the image tower, and one pass of it.
        """
        self.end = load_model(self.folder.candidates / step).to(self.runtime.device)
        self._fits: dict[float, TargetFit] = {}
        amounts = sorted(set(self.config.certify.hold_back))
        candidates: list[Candidate] = []
        for walked in self.config.certify.walk:
            between = self._model_at_share(walked)
            with torch.no_grad():
                matrices = [one.class_matrix() for one in held_back_by(between, self.data, amounts)]
            tables = shared_predictions_of_each(
                between, matrices, self.data.dev, self.config.evaluate.batch, self.runtime
            )
            for amount, table in zip(amounts, tables, strict=True):
                candidate = Candidate(step, walked, self._compare(self.old_dev, table), amount)
                if self.runtime.is_main:
                    write_predictions(self.folder.predictions(candidate.name, "dev"), table)
                candidates.append(candidate)
        return candidates

    def _model_at(self, candidate: Candidate) -> Classifier:
        return held_back_by(self._model_at_share(candidate.walked), self.data, [candidate.held])[0]

    def _model_at_share(self, walked: float) -> Classifier:
        if walked == 0:
            model = self.ready.old
        else:
            model = self.end if walked == 1 else interpolate(self.ready.old, self.end, walked).to(self.runtime.device)
        if not self.config.certify.fit_target:
            return model
        if walked not in self._fits:
            self._fits[walked] = self._fit(model)
        return self._fits[walked].applied(model)

    def _fit(self, model: Classifier) -> TargetFit:
        """What the first rank finds, on every rank: the bits of a sum depend on the machine."""
        found: list[Any] = [None]
        if self.runtime.is_main:
            views = view_settings(self.config.train, self.config.method)
            found[0] = fit_target(
                model,
                self.data,
                in_tower=self.config.model.freeze not in ("image", "towers"),
                crop_scale=views.crop_scale,
                flip=views.flip,
            ).to("cpu")
        if self.runtime.world > 1:
            dist.broadcast_object_list(found)
        return found[0].to(self.runtime.device)

    def _decide(self, candidates: list[Candidate]) -> Decision:
        def sealed_predictions(which: Candidate | str) -> pa.Table:
            if isinstance(which, Candidate):
                return self._predict(self._model_at(which), self._sealed())
            if which == FIRST:
                return predict_served(self._first(), self._sealed(), self.config.evaluate.batch, self.runtime)
            return self._predict_old(self._sealed())

        return decide(self.config.certify, self.folder, candidates, sealed_predictions, self.runtime)

    def _first(self) -> Served:
        assert self.config.certify.first is not None
        found = load_served(self.config.certify.first, self.data.tasks)
        found.bound.to(self.runtime.device)
        if found.used is not None:
            found.used.to(self.runtime.device)
        return found

    def _sealed(self) -> LabelledSet:
        if not hasattr(self, "_sealed_set"):
            self._sealed_set = self.data.open_sealed()
        return self._sealed_set

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
        served = Served(self.ready.old, self.ready.used)
        return predict_served(served, examples, self.config.evaluate.batch, self.runtime)

    def _predict(self, model: Classifier, examples: LabelledSet) -> pa.Table:
        """Predictions of all examples; each rank makes its share."""
        return shared_predictions(model, examples, self.data.tasks.classes, self.config.evaluate.batch, self.runtime)


def predict_sealed(run: RunFolder) -> tuple[pa.Table, pa.Table]:
    """Predictions of the old and the shipped model on the sealed images of a finished run (for ``certify RUN``)."""
    config, root = resume_config(run.root)
    with started(config.train.device) as runtime:
        ready = prepare_round(config, root, runtime)
        examples = ready.assembled.data.open_sealed()
        shipped = load_model(run.model).to(runtime.device)
        classes = ready.assembled.data.tasks.classes
        served = Served(ready.old, ready.used)
        return (
            predict_served(served, examples, config.evaluate.batch, runtime),
            shared_predictions(shipped, examples, classes, config.evaluate.batch, runtime),
        )


def predict_first(run: RunFolder) -> pa.Table:
    """Predictions of the model that [certify] first names, on the sealed images of a finished run."""
    config, root = resume_config(run.root)
    assert config.certify.first is not None
    with started(config.train.device) as runtime:
        ready = prepare_round(config, root, runtime)
        served = load_served(config.certify.first, ready.assembled.data.tasks)
        return predict_served(served, ready.assembled.data.open_sealed(), config.evaluate.batch, runtime)


def predict_served(served: Served, examples: LabelledSet, batch: int, runtime: Runtime) -> pa.Table:
    """What a frozen model says, over the classes that it was used with; the loss is over the round's."""
    classes = served.bound.classes
    table = shared_predictions(served.bound, examples, classes, batch, runtime)
    if served.used is None:
        return table
    fewer = relabelled(examples, classes, served.used.classes)
    return served.with_used(table, shared_predictions(served.used, fewer, served.used.classes, batch, runtime))


def comparison_json(compared: Comparison) -> dict[str, Any]:
    """A comparison as it stands in ``result.json``."""
    return {
        "dev_safety": compared.dev_safety,
        "dev_safety_loss": compared.dev_safety_loss,
        "target_gain": compared.target_gain,
        "worst_task": compared.worst_task,
        "tasks": {
            name: {
                "examples": one.examples,
                "old_accuracy": one.old_accuracy,
                "new_accuracy": one.new_accuracy,
                "gained": one.gained,
                "lost": one.lost,
                "old_loss": one.old_loss,
                "new_loss": one.new_loss,
            }
            for name, one in compared.tasks.items()
        },
    }


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
