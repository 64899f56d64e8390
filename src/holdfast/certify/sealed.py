"""Certifying on a run's sealed images: under the ledger, one bit a query, everything once the set is retired."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.artifacts import RunFolder, write_predictions
from holdfast.certify.certificate import NEW_PREDICTIONS, OLD_PREDICTIONS, run_test, select, write_certificate
from holdfast.certify.claims import PROMISE, UNIT_PROMISE
from holdfast.certify.flips import flip_report
from holdfast.certify.ledger import Ledger, Standing, default_ledger, entries_until
from holdfast.certify.report import report
from holdfast.certify.sealed_claim import SealedClaim, check_possible, restricted, tested_margins
from holdfast.certify.selection import SelectionResult, fixed_sequence, retained
from holdfast.certify.settings import PLAIN, Settings
from holdfast.certify.tables import Paired, paired_tables
from holdfast.errors import HoldfastError, UndecidedError
from holdfast.files import read_json

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class SealedOutcome:
    """What may be known after a query: the bit, which candidate ships, and, of a retired set, everything."""

    passed: bool
    shipped: str | None
    standing: Standing
    reported: dict[str, Any]  # the report: one bit, or in full
    old: pa.Table | None = None  # predictions of a retired set
    new: pa.Table | None = None
    first: pa.Table | None = None
    claim: SealedClaim | None = None  # about the images that were tested, where some were left out


@dataclass(frozen=True)
class ExtraBaseline:
    """A further model that candidates must hold up against: a project's first one, over the classes that it knows."""

    classes: tuple[str, ...]
    predict: Callable[[], pa.Table]

    def settings(self, plan: SealedClaim) -> Settings:
        """The same margins, for the tasks that it knows; no claim about the target."""
        margins = {task: margin for task, margin in plan.settings.margins.items() if task in self.classes}
        return replace(plan.settings, margins=margins, target=None)


@dataclass(frozen=True)
class Candidates:
    """Models that are tested in a fixed sequence, and whose run they are of."""

    models: Mapping[str, str]  # name -> fingerprint, in the order of the sequence
    run: str = ""  # fingerprint of the run: a query that it made and did not finish is made again


def certify_candidates(
    plan: SealedClaim,
    ledger: Ledger,
    candidates: Candidates,
    predict_old: Callable[[], pa.Table],
    predict: Callable[[str], pa.Table],
    further: ExtraBaseline | None = None,
) -> SealedOutcome:
    """One query: a fixed-sequence test of ``candidates``, in their order, on the sealed images.

    The query is on record before ``predict_old`` and ``predict`` are called, and ``predict`` is called no further than
    the sequence goes. Ship the last that passes; None means keep the old model. With ``further``, a candidate passes if
    it holds up against that model as well: more hypotheses of the intersection-union, each at the same level.
    """
    names = list(candidates.models)
    if not names:
        raise UndecidedError("there is no candidate to test", do="no query was spent; the old model is kept")
    made: dict[str, pa.Table] = {}
    claim = plan.identity(
        candidates.run, candidates.models, None if further is None else further.settings(plan).margins
    )
    claim = claim if candidates.run else ""
    asked, keys = plan.fingerprint, plan.keys
    admitted = None if keys is None else ledger.admit(asked, keys, claim=claim)
    if admitted is not None and admitted.ids:  # with none left the ledger says why
        plan = restricted(plan, admitted)
    check_possible(plan)
    with ledger.query(
        asked,
        plan.budget,
        run=candidates.run,
        claim=claim,
        candidates=len(names),
        tasks=plan.tasks,
        margins=plan.settings.margins,
        images=keys,
        admitted=admitted,
    ) as query:
        old = _checked(plan, predict_old())
        first = None if further is None else _checked(plan, further.predict())

        def passes(name: str) -> bool:
            made[name] = _checked(plan, predict(name))
            counts, target = select(_paired(plan, old, made[name]), plan.settings)
            return retained(counts, plan.settings.margins, query.level, target) and (
                further is None or first is None or _holds(plan, further, first, made[name], query.level)
            )

        chosen: SelectionResult[str] = fixed_sequence(names, passes)
        query.close(chosen.passed, chosen.shipped)
    standing = ledger.standing(plan.fingerprint, after=query.number)
    assert standing is not None
    # What is shown of a retired set that did not pass: the candidate at which the sequence ended.
    shown = chosen.shipped if chosen.passed else names[chosen.tested - 1]
    reported = one_bit(plan, chosen.passed, standing)
    if further is not None:
        reported["against_first"] = {"margins": further.settings(plan).margins}
    if not standing.retired:
        return SealedOutcome(chosen.passed, chosen.shipped, standing, reported, claim=plan)
    paired = _paired(plan, old, made[str(shown)])
    full = report(run_test(paired, plan.settings), confidence=plan.settings.confidence)
    full["flips"] = flip_report(paired, plan.settings.groups)
    bit = reported
    reported = {**full, "verdict": bit["verdict"], "sealed": {**bit["sealed"], "shown": shown}}
    if further is not None and first is not None:
        reported["against_first"] = {**bit["against_first"], **against_first(plan, further, first, made[str(shown)])}
    return SealedOutcome(chosen.passed, chosen.shipped, standing, reported, old, made[str(shown)], first, plan)


def _holds(plan: SealedClaim, further: ExtraBaseline, first: pa.Table, new: pa.Table, level: float) -> bool:
    settings = further.settings(plan)
    if not settings.margins:
        return True
    counts, _ = select(_paired(plan, first, new), settings)
    return retained(counts, settings.margins, level, None)


def against_first(plan: SealedClaim, further: ExtraBaseline, first: pa.Table, new: pa.Table) -> dict[str, Any]:
    """Of a retired set: the evidence of every task against the further model."""
    settings = further.settings(plan)
    if not settings.margins:
        return {"tasks": []}
    result = run_test(_paired(plan, first, new), settings)
    return {"tasks": [task.as_json() for task in result.tasks], "devsafety": result.devsafety}


def _checked(plan: SealedClaim, table: pa.Table) -> pa.Table:
    """Predictions of exactly the sealed images, of the tasks that the claim is about."""
    ids = table["example_id"].to_pylist()
    if len(ids) != len(set(ids)) or not plan.ids <= set(ids):
        raise HoldfastError(
            "the predictions are not those of the sealed images",
            expected=f"{len(plan.ids)} examples of the set {plan.fingerprint}",
            found=f"{len(ids)} rows, {len(plan.ids - set(ids))} sealed examples missing",
            do="this is a fault of holdfast; report it. The query has no result, and can be made again",
        )
    import pyarrow as pa

    wanted = set(tested_margins(plan))
    kept = [
        identity in plan.ids and task in wanted for identity, task in zip(ids, table["task"].to_pylist(), strict=True)
    ]
    table = table.filter(pa.array(kept))
    if plan.groups:
        groups = [plan.groups[identity] for identity in table["example_id"].to_pylist()]
        table = table.append_column("group", pa.array(groups, pa.string()))
    return table


def _paired(plan: SealedClaim, old: pa.Table, new: pa.Table) -> Paired:
    """Two models' predictions of the sealed images, as the claim reads them."""
    return paired_tables(old, new, plan.settings.labels, trusted=True, layout=plan.settings.layout)


def one_bit(plan: SealedClaim, passed: bool, standing: Standing) -> dict[str, Any]:
    """The report of a query of a set that is not retired: passed or not, and what was asked."""
    settings = plan.settings
    return {
        "verdict": "certified" if passed else "undecided",
        "confidence": settings.confidence,
        "claim": str(settings.claim),
        "promise": PROMISE if plan.settings.layout == PLAIN else UNIT_PROMISE,
        "level": plan.budget.level,
        "tasks": [{"task": task, "n": plan.images[task], "margin": settings.margins[task]} for task in plan.tasks],
        "target": settings.target,
        "sealed": {
            "set": plan.fingerprint,
            "passed": passed,
            "queries": standing.queries,
            "queries_left": standing.queries_left,
            "passes": standing.passes,
            "retired": standing.retired,
            **({"left_out": dict(plan.left_out)} if plan.left_out else {}),
        },
    }


def write_run_certificate(
    run: RunFolder, plan: SealedClaim, outcome: SealedOutcome, ledger: Ledger, model: Path | None = None
) -> Path | None:
    """After a pass, the certificate of the run; None without one. Predictions are kept once they may be shown."""
    plan = outcome.claim or plan
    if outcome.old is not None and outcome.new is not None:
        write_predictions(run.predictions("old", "sealed"), outcome.old)
        write_predictions(run.predictions("new", "sealed"), outcome.new)
    if outcome.first is not None:
        write_predictions(run.predictions("first", "sealed"), outcome.first)
    if not outcome.passed:
        return None
    files = {"roles of the data": run.roles, "round": run.config}
    if outcome.old is not None:
        files[OLD_PREDICTIONS] = run.predictions("old", "sealed")
        files[NEW_PREDICTIONS] = run.predictions("new", "sealed")
    if outcome.first is not None:
        files["predictions of the first model"] = run.predictions("first", "sealed")
    weights = run.model if model is None else model
    if weights.exists():
        files["new model"] = weights
    state = read_json(run.state)
    identities = {name: state[name] for name in ("parent", "data", "fingerprint", "start_seen") if name in state}
    record = ledger_record(ledger, plan.fingerprint, outcome.standing.queries, run.root)
    write_certificate(run.certificate, plan.settings, outcome.reported, files, identities=identities, ledger=record)
    return run.certificate


def ledger_record(ledger: Ledger, fingerprint: str, number: int, folder: Path) -> dict[str, Any]:
    """What a certificate in ``folder`` keeps of the ledger: the record of its set up to its query, and where it is."""
    record: dict[str, Any] = {"set": fingerprint, "entries": entries_until(ledger.entries(fingerprint), number)}
    if ledger.folder.resolve() != default_ledger().resolve():  # that one is found without its path
        record["folder"] = os.path.relpath(ledger.folder.resolve(), folder.resolve())
    return record
