"""``holdfast.certify`` and ``holdfast.plan``: the certificate from Python, without torch.

Both return the JSON object that the command of the same name prints with ``--json``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast.certify.certificate import Settings, check_confidence, margins_for, run_test
from holdfast.certify.claims import Claim
from holdfast.certify.exact.power import estimated_discordance
from holdfast.certify.plans import check_share, plan_report
from holdfast.certify.report import report
from holdfast.certify.sequential import sequential_report
from holdfast.certify.tables import Paired, paired_tables, read_joined, read_paired
from holdfast.errors import UserError, nearest

Predictions = str | Path | pa.Table


def certify(
    old: Predictions,
    new: Predictions | None = None,
    *,
    margin: float | None = None,
    task_margins: Mapping[str, float] | None = None,
    confidence: float = 0.95,
    target: str | None = None,
    claim: str = "all",
    tasks: Sequence[str] = (),
    pools: Mapping[str, Sequence[str]] | None = None,
    labels: Sequence[str] = (),
    sequential: bool = False,
) -> dict[str, Any]:
    """Test whether no protected task lost more than its margin, from the predictions of any two models.

    ``old`` and ``new`` are CSV or Parquet files, or Arrow tables, with ``example_id,task,label,prediction``; one file
    alone has ``task,label,old,new``. ``margin`` is the loss of accuracy that is accepted for every task,
    ``task_margins`` for single ones; both are fixed before looking. ``result["verdict"]`` is ``"certified"``,
    ``"regressed"`` or ``"undecided"``.
    """
    check_confidence(confidence)
    paired = read_predictions(old, new, labels)
    settings = settings_for(
        paired, margin, task_margins or {}, confidence, target, claim, tasks, pools or {}, list(labels)
    )
    return report_on_claim(paired, settings, sequential=sequential)


def plan(
    predictions: tuple[Predictions, Predictions] | str | Path | None = None,
    *,
    tasks: int | None = None,
    margin: float | None = None,
    task_margins: Mapping[str, float] | None = None,
    discordance: float | None = None,
    images: int | None = None,
    power: float = 0.8,
    confidence: float = 0.95,
    difference: float = 0.0,
    simultaneous: bool = False,
    target: str | None = None,
) -> dict[str, Any]:
    """How many images a task needs for a certificate, or how small a margin ``images`` allow; by exact power.

    How often the models differ in correctness is ``discordance``, or is estimated for each task from dev
    ``predictions`` (one file, or a pair as for :func:`certify`), the ``target`` left out.
    """
    check_confidence(confidence)
    check_share("power", power)
    if predictions is not None:
        pair = predictions if isinstance(predictions, tuple) else (predictions, None)
        counts = {name: item for name, item in read_predictions(*pair).counts().items() if name != target}
        flips = {name: estimated_discordance(item.gained, item.lost, item.n) for name, item in counts.items()}
    elif discordance is None:
        raise UserError("how often do the models differ?", do="give --discordance 0.02, or dev --predictions FILE")
    else:
        check_share("discordance", discordance, ends=True)
        flips = {"each": discordance}
    return plan_report(
        flips,
        tasks or len(flips),
        default=margin,
        single=task_margins or {},
        confidence=confidence,
        power=power,
        difference=difference,
        images=images,
        simultaneous=simultaneous,
    )


def read_predictions(old: Predictions, new: Predictions | None = None, labels: Sequence[str] = ()) -> Paired:
    """The predictions of both models, image by image."""
    if isinstance(old, pa.Table) and isinstance(new, pa.Table):
        return paired_tables(old, new, labels)
    if isinstance(old, pa.Table) or isinstance(new, pa.Table):
        raise UserError("one table and one file", expected="two Arrow tables, two files, or one file with both models")
    return read_paired(Path(old), labels) if new is None else read_joined(Path(old), Path(new), labels)


def settings_for(
    paired: Paired,
    margin: float | None,
    task_margins: Mapping[str, float],
    confidence: float,
    target: str | None,
    claim: str,
    tasks: Sequence[str],
    pools: Mapping[str, Sequence[str]],
    labels: list[str],
) -> Settings:
    """Everything that is fixed before the test, checked against the tasks that have images."""
    if claim not in list(Claim):
        raise UserError(f"there is no claim {claim!r}", expected=", ".join(Claim), found=nearest(claim, list(Claim)))
    present = paired.tasks()
    for name in pools:
        if name in present:
            raise UserError(f"the pool {name!r} is not a group", expected="a new name", found="a task has that name")
    members = [member for group in pools.values() for member in group]
    for name in [*tasks, *([target] if target else []), *members]:
        if name not in present:
            raise UserError(f"the task {name!r} has no images here", found=nearest(name, present))
    if len(set(members)) != len(members) or target in members or target in tasks:
        raise UserError("a task has two parts in the claim", expected="each task once: protected, pooled or the target")
    protected = sorted({*(tasks or present), *members} - {target})
    single = [name for name in protected if name not in members]
    if not protected:
        raise UserError("no protected task is left", found=f"only the target {target!r} has images")
    margins = margins_for([*single, *pools], margin, task_margins)
    groups = {name: list(group) for name, group in pools.items()}
    return Settings(margins, confidence, Claim(claim), target, groups, labels)


def report_on_claim(
    paired: Paired, settings: Settings, *, sequential: bool = False, lemma_constant: float = 0.0
) -> dict[str, Any]:
    """The report on a claim: by the exact test, or by e-processes for images that arrive one by one."""
    if not sequential:
        result = run_test(paired, settings, workers=min(4, os.cpu_count() or 1))
        return report(result, confidence=settings.confidence, complexity=lemma_constant)
    if settings.groups:
        raise UserError("--sequential and --pool at once", do="leave one of them out")
    return sequential_report(paired, settings.margins, settings.confidence, settings.target)
