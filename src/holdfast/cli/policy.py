"""``holdfast gate``: a policy over many tasks, tested as one claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.certify import EXITS, print_verdict
from holdfast.cli.gate import Outputs, certify_files
from holdfast.cli.logs import (
    Coco,
    Inspect,
    LmEval,
    LogOptions,
    Metric,
    MinScore,
    Nemo,
    TableFile,
    TaskField,
    layout_for,
)
from holdfast.cli.options import Json, refuse_ignored
from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.certify.policy import Policy, Resolved


def gate(
    policy: Annotated[Path, typer.Argument(metavar="POLICY.toml", help="Tasks with their tiers and margins.")],
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Predictions or logs of the old model.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Predictions or logs of the new model.")],
    lm_eval: LmEval = False,
    inspect: Inspect = False,
    nemo: Nemo = False,
    coco: Coco = None,
    metric: Metric = None,
    task_field: TaskField = None,
    min_score: MinScore = None,
    table: TableFile = None,
    out: Annotated[Path | None, typer.Option(help="Write a certificate that `holdfast verify` can check.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="Ledger to charge; the policy says its query_budget.")] = None,
    summary: Annotated[Path | None, typer.Option(metavar="FILE.md", help="Write the report as Markdown too.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE.xml", help="Write the report as JUnit XML too.")] = None,
    sarif: Annotated[
        Path | None, typer.Option(metavar="FILE.sarif", help="Write the report as SARIF 2.1.0 too.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Let a new model pass only if no task of a policy lost more than its margin.

    Critical and supporting tasks must all be certified, those that are required must be there; advisory tasks are shown
    and never fail the gate. Exit code, as of certify: 0 passed, 3 a task regressed, 4 undecided or a required task is
    missing, 2 bad input or a spent set.
    """
    from holdfast.certify.policy import read_policy

    chosen = read_policy(policy)
    logs = LogOptions(lm_eval, inspect, nemo, coco, tuple(metric or ()), task_field, min_score, table, chosen.metrics)
    logs.check({})
    if chosen.values.query_budget is None:
        refuse_ignored("a policy without query_budget", {"ledger": ledger}, "add query_budget to the policy")
    outputs = Outputs(summary, junit, sarif, out)
    outputs.check()
    with ExitStack() as stack:
        files, layout, source, one_sided = [old, new], chosen.layout, None, dict[str, str]()
        if logs.kind is None:
            measured = _tasks(files, layout)
        else:
            joined = logs.read(files, layout, tasks_may_differ=True)
            measured, one_sided, source = joined.tasks, joined.missing, joined.source()
            layout = layout_for(joined, layout)
            files = [stack.enter_context(logs.written(joined, out))]
        reported = _decide(chosen, chosen.resolve(measured, one_sided), files, layout, source, ledger, outputs)
    outputs.write(reported, new)
    print_verdict(reported, outputs, as_json=as_json)
    return int(EXITS[reported["verdict"]])


def _tasks(files: Sequence[Path], layout: Mapping[str, Any]) -> list[str]:
    from holdfast.certify.predictions import evidence
    from holdfast.certify.settings import layout_of

    return evidence(files[0], files[1], (), layout_of(layout))[0].tasks()


def _decide(
    policy: Policy,
    resolved: Resolved,
    files: Sequence[Path],
    layout: Mapping[str, Any],
    source: Mapping[str, Any] | None,
    ledger: Path | None,
    outputs: Outputs,
) -> dict[str, Any]:
    """The tasks that gate as one claim; without a query where a required task is missing, since none could pass."""
    from holdfast.certify.policy import GATING

    common = {"confidence": policy.values.confidence, "target": None, "labels": [], **layout}
    if not resolved.names(*GATING):
        raise UserError(
            f"no task of {policy.path} that gates was measured",
            expected="critical or supporting tasks",
            found=", ".join([*resolved.missing, *resolved.names("advisory")][:8]) or "no task at all",
        )
    charged = policy.values.query_budget is not None
    if resolved.missing and charged:
        raise UserError(
            f"{len(resolved.missing)} required tasks are missing: {', '.join(sorted(resolved.missing)[:5])}",
            expected=f"results of every task that {policy.path} requires",
            do="evaluate both models on them; no query was spent",
        )
    reported = certify_files(
        files,
        {**common, **resolved.claimed(*GATING), "claim": "all"},
        None,
        (ledger, policy.values.query_budget),
        Outputs() if resolved.missing else outputs,  # an incomplete gate has no certificate
        {"policy": policy.path},
        source,
    )
    incomplete = reported["verdict"] == "certified" and bool(resolved.missing)
    number = len(resolved.names(*GATING))
    return {
        **reported,
        "verdict": "undecided" if incomplete else reported["verdict"],
        "gate": {
            "policy": str(policy.path),
            "fingerprint": policy.fingerprint,
            "tiers": dict(sorted(resolved.tiers.items())),
            "missing": dict(sorted(resolved.missing.items())),
            "not_measured": sorted(resolved.absent),
            "correction": f"{number} tasks gate together: intersection-union, each at δ without correction",
            "advisory": _advisory(resolved, files, common) if "devsafety" in reported else [],
        },
    }


def _advisory(resolved: Resolved, files: Sequence[Path], common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tasks beside the gate, each for itself."""
    if not resolved.names("advisory"):
        return []
    from holdfast.certify.predictions import certify

    return certify(*files, **common, **resolved.claimed("advisory"), claim="each").to_json()["tasks"]
