"""``holdfast certify RUN``: a query of the sealed images of a finished run."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast.artifacts import RunFolder, resume_command
from holdfast.certify.ledger import Ledger
from holdfast.certify.sealed import Candidates, ExtraBaseline, certify_candidates, write_run_certificate
from holdfast.certify.sealed_claim import SealedClaim, check_possible, check_unspent, ledger_of, read_sealed_claim
from holdfast.certify.settings import check_confidence
from holdfast.config import RoundConfig
from holdfast.data.round import LabelledSet
from holdfast.errors import UserError
from holdfast.evaluate.predict import predict_on_ranks
from holdfast.files import read_json
from holdfast.locks import one_writer
from holdfast.model.folder import load_model, model_fingerprint
from holdfast.rounds.decide import FIRST, OLD, known_to, open_sealed
from holdfast.rounds.develop import resume_config
from holdfast.rounds.outcome import nothing_certified
from holdfast.rounds.prepare import PreparedRound, prepare_round
from holdfast.rounds.reference import ReferenceModel, load_reference, predict_reference
from holdfast.runtime import Runtime, started

NEW = "new"


def certify_run(
    path: Path,
    *,
    margin: float | None = None,
    single: Mapping[str, float] | None = None,
    confidence: float | None = None,
    ledger: Path | None = None,
) -> dict[str, Any]:
    """A query of the sealed images of a finished run: the report of its certificate.

    Killed anywhere and called again it ends as if it had not been: a query belongs to the run and its claim.
    """
    run = RunFolder.open(path)
    if confidence is not None:
        check_confidence(confidence)
    _something_to_certify(run)
    plan = read_sealed_claim(run, margin=margin, single=single, confidence=confidence)
    config, root = resume_config(path)
    book = Ledger(ledger) if ledger is not None else ledger_of(config.certify, root)
    fingerprint = str(read_json(run.state)["fingerprint"])
    check_possible(check_unspent(plan, book, run=fingerprint, resumed=True))
    with one_writer(path), _prepared(run, config, root, plan) as models:
        run.clear()
        known = known_to(None if config.certify.first is None else root / config.certify.first)
        further = None if known is None else ExtraBaseline(tuple(known), lambda: models.predict(FIRST))
        candidates = Candidates({NEW: model_fingerprint(run.model)}, fingerprint)
        outcome = certify_candidates(plan, book, candidates, lambda: models.predict(OLD), models.predict, further)
        write_run_certificate(run, plan, outcome, book)
    return outcome.reported


def _something_to_certify(run: RunFolder) -> None:
    """A run that is finished and hands back a new model; no query is spent on any other."""
    if not run.finished:
        raise UserError(f"the run {run.root} is not finished", do=f"go on with: {resume_command(run.root)}")
    if read_json(run.result)["kept_old"]:
        raise nothing_certified(run)


@dataclass(frozen=True)
class _Models:
    """The models of a finished run and its sealed images, read and decoded."""

    run: RunFolder
    config: RoundConfig
    root: Path
    ready: PreparedRound
    sealed: LabelledSet
    runtime: Runtime

    def predict(self, name: str) -> pa.Table:
        """Predictions of the ``old``, ``new`` or ``first`` model on the sealed images."""
        batch, tasks = self.config.evaluate.batch, self.ready.assembled.data.tasks
        if name == NEW:
            shipped = load_model(self.run.model).to(self.runtime.device)
            return predict_on_ranks(shipped, self.sealed, tasks.classes, batch, self.runtime)
        if name == FIRST:
            assert self.config.certify.first is not None
            served = load_reference(self.root / self.config.certify.first, tasks)
        else:
            served = ReferenceModel(self.ready.old, self.ready.as_deployed)
        return predict_reference(served, self.sealed, batch, self.runtime)


@contextmanager
def _prepared(run: RunFolder, config: RoundConfig, root: Path, plan: SealedClaim) -> Generator[_Models]:
    with started(config.train.device) as runtime:
        ready = prepare_round(config, root, runtime, begin=False)  # nothing is trained: no old losses
        yield _Models(run, config, root, ready, open_sealed(ready.assembled.data, plan), runtime)
