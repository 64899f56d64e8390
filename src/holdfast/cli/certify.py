"""``holdfast certify``."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.gate import Outputs, certify_files, read_claim
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
from holdfast.cli.options import (
    Confidence,
    Json,
    Margins,
    QueryBudget,
    check_same_claim,
    margins_of,
    names_of,
    pools_of,
    prediction_files,
    range_of,
    refuse_ignored,
)
from holdfast.cli.process import leave_out_pandas
from holdfast.errors import Exit

TABLES = (".csv", ".parquet")
EXITS = {"certified": Exit.DONE, "regressed": Exit.FAULT, "undecided": Exit.UNDECIDED}


def certify(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[OLD NEW | RUN]", help="Predictions of two models, or a run with sealed images."),
    ] = None,
    predictions: Annotated[
        list[Path] | None,
        typer.Option(help="CSV or Parquet with task,label,old,new; or given twice (old, new), joined by example_id."),
    ] = None,
    old: Annotated[Path | None, typer.Option(help="As OLD: example_id,task,label,prediction.")] = None,
    new: Annotated[Path | None, typer.Option(help="As NEW: example_id,task,label,prediction.")] = None,
    margin: Margins = None,
    confidence: Confidence = None,
    target: Annotated[str | None, typer.Option(help="Claim also that this task improved; it is not protected.")] = None,
    claim: Annotated[
        str | None,
        typer.Option(
            help="all (default): every task is retained; each: these tasks are; bounds: side by side; devsafety."
        ),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="Protected tasks. Default: all but the target.")
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=A,B", help="Claim about a group of tasks as a whole, each image once."),
    ] = None,
    labels: Annotated[str | None, typer.Option(metavar="A,B", help="All labels there are; others are refused.")] = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Rows arrive one by one: e-processes, valid whenever you stop.")
    ] = False,
    distinct_rows: Annotated[
        bool, typer.Option("--distinct-rows", help="State, for lack of example_id, that each row is another image.")
    ] = False,
    group: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="What rows were drawn with: a video, a patient, a prompt.")
    ] = None,
    weight: Annotated[str | None, typer.Option(metavar="COLUMN", help="Weights of rows, from 0 on.")] = None,
    score_range: Annotated[
        str | None, typer.Option(metavar="LOW,HIGH", help="Test old_score,new_score, which lie in it. Default: 0,1.")
    ] = None,
    largest_unit: Annotated[
        float | None, typer.Option(metavar="N", help="Most rows (or weight) that a group may have, fixed beforehand.")
    ] = None,
    equal_groups: Annotated[
        bool, typer.Option("--equal-groups", help="Every group counts the same, whatever its size.")
    ] = False,
    lemma_constant: Annotated[
        float | None, typer.Option(min=0.0, max=1e9, help="C of the paper's Lemma 1, shown beside. Default: 0.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write a certificate that `holdfast verify` can check.")] = None,
    summary: Annotated[Path | None, typer.Option(metavar="FILE.md", help="Write the report as Markdown too.")] = None,
    old_model: Annotated[Path | None, typer.Option(help="Weights to name in the certificate.")] = None,
    new_model: Annotated[Path | None, typer.Option(help="Weights to name in the certificate.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data to name in the certificate.")] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Ledger of sealed sets. Default of a run: $HOLDFAST_LEDGER, or yours; of predictions: none."),
    ] = None,
    query_budget: QueryBudget = None,
    claim_file: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Test what `holdfast claim` wrote down beforehand.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE.xml", help="Write the report as JUnit XML too.")] = None,
    sarif: Annotated[
        Path | None, typer.Option(metavar="FILE.sarif", help="Write the report as SARIF 2.1.0 too.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--sign", metavar="KEY", help="Sign the certificate with this SSH key.")
    ] = None,
    lm_eval: LmEval = False,
    inspect: Inspect = False,
    nemo: Nemo = False,
    coco: Coco = None,
    metric: Metric = None,
    task_field: TaskField = None,
    min_score: MinScore = None,
    table: TableFile = None,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Of a run: every class and the promise.")] = False,
) -> int:
    """Prove that no protected task lost more than its margin, or say what is missing.

    Works on the predictions of any two models (OLD NEW: example_id,task,label,prediction; CSV or Parquet), on the logs
    of other tools (--lm-eval, --inspect, --nemo, --coco), or on the sealed images of a run, under the ledger. With
    --ledger or --query-budget predictions are charged too: only pass or not is shown until the set is retired. Exit
    code: 0 certified, 3 regressed, 4 undecided, 2 bad input or a spent set.
    """
    logs = LogOptions(lm_eval, inspect, nemo, coco, tuple(metric or ()), task_field, min_score, table)
    run, tables = _given(paths or [])
    fixed_set = {"pool": pool, "lemma_constant": lemma_constant, "out": out}
    fixed_set |= {"query_budget": query_budget, "claim_file": claim_file}
    named = {"old_model": old_model, "new_model": new_model, "data": data}
    layout = {"group": group, "weight": weight, "score_range": range_of(score_range), "largest_unit": largest_unit}
    layout |= {"equal_groups": equal_groups}
    if run is not None:
        of_tables = {"predictions": predictions, "old": old, "new": new, "target": target, "claim": claim}
        of_tables |= {"tasks": tasks, "labels": labels, "sequential": sequential, "distinct_rows": distinct_rows}
        of_tables |= layout
        of_tables |= asdict(logs)
        refuse_ignored(
            "a run", {**of_tables, **fixed_set, **named}, "give either RUN or predictions: a run says the rest"
        )
        refuse_ignored("--json", {"verbose": as_json and verbose}, "leave --verbose out: --json prints everything")
    else:
        refuse_ignored("predictions", {"verbose": verbose}, "leave it out: it is for the sealed images of a run")
        logs.check(
            {"predictions": predictions, "old": old, "new": new, "labels": labels, "distinct_rows": distinct_rows}
        )
    if sequential:
        other = {**fixed_set, **named, **layout, "claim": None if claim == "all" else claim, "ledger": ledger}
        refuse_ignored(
            "--sequential", other, "leave one of them out: it tests the claim `all`, on images that keep arriving"
        )
    if out is None and run is None:
        refuse_ignored("no --out", named, "give --out CERTIFICATE too: they are named in it")
    if ledger is not None or query_budget is not None or claim_file is not None:
        refuse_ignored(
            "a query or a claim file",
            {"distinct_rows": distinct_rows},
            "give every row an example_id: a set is known by its ids",
        )
    outputs = Outputs(summary, junit, sarif, out, key)
    outputs.check(of_run=run is not None)
    leave_out_pandas()
    if run is not None:
        return _certify_run(run, margins_of(margin), confidence, ledger, outputs, as_json, verbose)
    default, single = margins_of(margin)
    claimed: dict[str, Any] = {
        "target": target,
        "margin": default,
        "margins": single,
        "confidence": 0.95 if confidence is None else confidence,
        "tasks": names_of(tasks),
        "labels": names_of(labels),
        "distinct_rows": distinct_rows,
    }
    fixed = {"margin": margin, "confidence": confidence, "target": target, "tasks": tasks, "pool": pool}
    own = None if claim == "all" else claim  # what is claimed without a word
    fixed |= {"labels": labels, "query-budget": query_budget, "claim": own}

    def test(files: Sequence[Path], layout: dict[str, Any], source: dict[str, Any] | None = None) -> dict[str, Any]:
        if sequential:
            from holdfast.certify.predictions import certify_sequentially

            return certify_sequentially(*files, **claimed)
        return certify_files(
            files,
            {**claimed, **layout, "claim": claim or "all", "pools": pools_of(pool or [])},
            read_claim(claim_file, {**fixed, **layout}),
            (ledger, query_budget),
            outputs,
            {name.replace("_", " "): path for name, path in named.items() if path is not None},
            source,
            lemma_constant=lemma_constant or 0.0,
            workers=min(4, os.cpu_count() or 1),
        )

    if logs.kind is None:
        tables = list(prediction_files([*tables, *(predictions or [])], old, new))
        reported = test(tables, layout)
    else:
        joined = logs.read(tables, layout)
        if joined.group is not None:
            groups = {"sequential": sequential, "claim_file": claim_file}
            refuse_ignored(f"groups (the {joined.group} of a row)", groups, "leave it out: it is for single rows")
        with logs.written(joined, out) as made:
            reported = test((made,), layout_for(joined, layout), joined.source())
    outputs.write(reported, tables[-1])
    print_verdict(reported, outputs, as_json=as_json)
    return int(EXITS[reported["verdict"]])


def print_verdict(reported: dict[str, Any], outputs: Outputs, *, as_json: bool) -> None:
    """The report on predictions: as JSON, the one bit of a set that is charged for, or in full."""
    from holdfast.cli.verdicts import print_json, print_report, print_sealed

    if as_json:
        print_json(reported)
    elif "sealed" in reported:
        print_sealed(reported)
        if outputs.certificate is not None and not reported["sealed"]["passed"]:
            print("no certificate was written: the query did not pass.")
    else:
        print_report(reported)


def check_decided(path: Path) -> None:
    """A run whose candidate was rejected has no certificate: say which candidate, and why."""
    from holdfast.artifacts import RunFolder
    from holdfast.files import read_json

    run = RunFolder(path)
    if run.result.is_file() and not run.certificate.exists() and read_json(run.result).get("kept_old"):
        from holdfast.rounds.outcome import nothing_certified

        raise nothing_certified(run)


def _certify_run(
    path: Path,
    margins: tuple[float | None, dict[str, float]],
    confidence: float | None,
    ledger: Path | None,
    outputs: Outputs,
    as_json: bool,
    verbose: bool,
) -> int:
    """A query of the sealed images of a run, or what its certificate says already."""
    from rich.console import Console

    from holdfast.artifacts import RunFolder
    from holdfast.certify.certificate import verify_certificate
    from holdfast.cli.verdicts import print_json, print_outcome, print_sealed
    from holdfast.rounds.outcome import read_outcome

    run = RunFolder.open(path)
    if run.certificate.exists():
        held = verify_certificate(run.certificate)
        check_same_claim(path, held["settings"], margins, confidence)
        reported = held["report"]
    else:
        check_decided(path)
        gc.enable()  # this takes longer than other certificates, and cycles may hold tensors
        from holdfast.rounds.certify_run import certify_run  # torch: only where something is to be predicted

        reported = certify_run(path, margin=margins[0], single=margins[1], confidence=confidence, ledger=ledger)
    outputs.sign(run.certificate)
    outputs.write(reported, path)
    if as_json:
        print_json(reported)
    else:
        print_outcome(Console(highlight=False), read_outcome(run, reported))
        if verbose:
            print_sealed(reported)
    return int(Exit.DONE if reported["verdict"] == "certified" else Exit.UNDECIDED)


def _given(paths: Sequence[Path]) -> tuple[Path | None, list[Path]]:
    """The run, or the tables of predictions, that stand on the command line without an option."""
    if len(paths) == 1 and not paths[0].is_file() and paths[0].suffix not in TABLES:
        return paths[0], []
    return None, list(paths)
