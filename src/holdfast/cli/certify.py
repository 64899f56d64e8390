"""``holdfast certify`` and ``plan``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from holdfast.cli.options import check_same_claim, refuse_ignored
from holdfast.errors import Exit, UserError

if TYPE_CHECKING:
    from holdfast.certify.forecast import ExpectedFlips

TABLES = (".csv", ".parquet")
EXITS = {"certified": Exit.DONE, "regressed": Exit.FAULT, "undecided": Exit.UNDECIDED}
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Margins = Annotated[
    list[str] | None,
    typer.Option("--margin", metavar="ε|TASK=ε", help="Loss of accuracy you accept, fixed beforehand; also per task."),
]
QueryBudget = Annotated[
    int | None,
    typer.Option(
        "--query-budget",
        "--queries",
        min=1,
        metavar="R",
        help="How often these images may be queried, each time at δ/R: charges the ledger.",
    ),
]
Confidence = Annotated[float | None, typer.Option(help="1 - δ. Default: 0.95, or what the run says.")]


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
    layout = {"group": group, "weight": weight, "score_range": _range(score_range), "largest_unit": largest_unit}
    layout |= {"equal_groups": equal_groups}
    if run is not None:
        of_tables = {"predictions": predictions, "old": old, "new": new, "target": target, "claim": claim}
        of_tables |= {"tasks": tasks, "labels": labels, "sequential": sequential, "distinct_rows": distinct_rows}
        of_tables |= layout
        of_tables |= {"lm_eval": lm_eval, "inspect": inspect, "nemo": nemo, "coco": coco, "metric": metric}
        of_tables |= {"task_field": task_field, "min_score": min_score, "table": table}
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
            "a query or a claim file", {"distinct_rows": distinct_rows}, "give images ids: sets are known by"
        )
    outputs = Outputs(summary, junit, sarif, out, key)
    outputs.check(of_run=run is not None)
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
        tables = list(_files([*tables, *(predictions or [])], old, new))
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


def plan(
    round_file: Annotated[
        Path | None, typer.Argument(metavar="[ROUND.toml]", help="The round whose chance to pass is asked for.")
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Number of tasks. Default: those of the predictions, or 1.")
    ] = None,
    margin: Margins = None,
    discordance: Annotated[
        float | None,
        typer.Option(help="D: share of images on which the models differ in correctness. Of a round: expected."),
    ] = None,
    power: Annotated[
        float | None, typer.Option(help="Chance that all tasks pass. Default: 0.8; advice on a round aims at 0.9.")
    ] = None,
    confidence: Confidence = None,
    difference: Annotated[float, typer.Option(help="Δ: true change in accuracy that is planned for.")] = 0.0,
    target_gain: Annotated[
        float | None, typer.Option(help="With ROUND.toml: expected gain of the target, such as 0.15.")
    ] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="Images you have a task: the best margin they allow.")
    ] = None,
    simultaneous: Annotated[bool, typer.Option("--simultaneous", help="For bounds side by side: δ/m.")] = False,
    predictions: Annotated[
        list[Path] | None, typer.Option(help="Dev predictions (as for certify) to estimate each task's D from.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Task of the predictions to leave out: it is not protected.")
    ] = None,
    group_size: Annotated[int | None, typer.Option(min=1, help="Images of a group that are not independent.")] = None,
    icc: Annotated[
        float | None, typer.Option(help="Correlation within a group: 0 none, 1 all the same. Default: 0.")
    ] = None,
    score_deviation: Annotated[
        float | None, typer.Option(help="For scores: standard deviation of their change, as a share of the range.")
    ] = None,
    group: Annotated[str | None, typer.Option(metavar="COLUMN", help="Of the predictions, as for certify.")] = None,
    weight: Annotated[str | None, typer.Option(metavar="COLUMN", help="Of the predictions, as for certify.")] = None,
    score_range: Annotated[
        str | None, typer.Option(metavar="LOW,HIGH", help="Of the predictions, as for certify.")
    ] = None,
    largest_unit: Annotated[float | None, typer.Option(metavar="N", help="As for certify.")] = None,
    equal_groups: Annotated[bool, typer.Option("--equal-groups", help="As for certify.")] = False,
    as_json: Json = False,
) -> int:
    """How many images a certificate needs, or how small a margin given images allow; by exact power.

    With ROUND.toml: what each class's sealed images can prove, the chance that the round passes, and what would raise
    it. No picture is decoded and no query is spent.
    """
    from holdfast.cli.verdicts import print_json, print_plan

    default, single = margins_of(margin)
    stated = {"group_size": group_size, "icc": icc, "score_deviation": score_deviation}
    layout = {"group": group, "weight": weight, "score_range": _range(score_range), "largest_unit": largest_unit}
    layout |= {"equal_groups": equal_groups}
    if round_file is not None:
        given = {"tasks": tasks, "images": images, "simultaneous": simultaneous, "predictions": predictions}
        given |= {**stated, **layout}
        refuse_ignored("ROUND.toml", {**given, "target": target}, "leave one of them out: the round's file says it")
        from holdfast.certify.round_plan import plan_round
        from holdfast.cli.forecasts import print_forecast

        forecast = plan_round(
            round_file,
            margin=default,
            single=single,
            confidence=confidence,
            expected=_expected(discordance, difference, target_gain),
            **({} if power is None else {"goal": _goal(power)}),
        )
        if as_json:
            print_json(forecast.to_json())
        else:
            print_forecast(forecast)
        return int(Exit.DONE)
    refuse_ignored("no ROUND.toml", {"target_gain": target_gain}, "give ROUND.toml, or leave --target-gain out")
    if predictions:
        refuse_ignored(
            "--predictions",
            {"discordance": discordance, **stated},
            "leave one of them out: each says how often models differ",
        )
    else:
        of_table = {"target": target, **layout}
        refuse_ignored("no --predictions", of_table, "leave it out: it is about a table of predictions")
    from holdfast.certify.plans import plan as answer

    files = _files(predictions, None, None) if predictions else ()
    found = answer(
        *files,
        discordance=discordance,
        margin=default,
        margins=single,
        images=images,
        tasks=tasks,
        power=0.8 if power is None else power,
        confidence=0.95 if confidence is None else confidence,
        difference=difference,
        simultaneous=simultaneous,
        target=target,
        **stated,
        **layout,
    )
    if as_json:
        print_json(found.to_json())
    else:
        print_plan(found.to_json())
    return int(Exit.DONE)


def _goal(power: float) -> float:
    from holdfast.certify.plans import check_share

    check_share("power", power)
    return power


def _expected(discordance: float | None, difference: float, target_gain: float | None) -> ExpectedFlips:
    """Expected flips: the recorded ones, or what the command line says."""
    from holdfast.certify.forecast import ExpectedFlips, Flips

    known = ExpectedFlips()
    protected, target = known.protected, known.target
    if discordance is not None or difference:
        flips = protected.gained + protected.lost if discordance is None else discordance
        protected = Flips((flips + difference) / 2, (flips - difference) / 2)
    if target_gain is not None:
        target = Flips(target_gain + target.lost, target.lost)
    return ExpectedFlips(protected, target)


def check_decided(path: Path) -> None:
    """A run whose candidate was rejected has no certificate: say which candidate, and why."""
    from holdfast.artifacts import RunFolder, read_json

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


def margins_of(given: Sequence[str] | None) -> tuple[float | None, dict[str, float]]:
    """The margin for all tasks, and those of single ones."""
    default: float | None = None
    single: dict[str, float] = {}
    for item in given or []:
        name, _, number = item.rpartition("=")
        try:
            value = float(number)
        except ValueError as error:
            raise UserError(
                f"--margin {item} is not a margin", expected="a number such as 0.02, or TASK=0.05", found=repr(number)
            ) from error
        from holdfast.certify.certificate import check_margin

        check_margin(value, name)
        if name in single or (not name and default is not None):
            raise UserError(f"two margins for {name or 'all tasks'}", do="give each --margin once")
        if name:
            single[name] = value
        else:
            default = value
    return default, single


def _range(text: str | None) -> tuple[float, float] | None:
    """The range of scores."""
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--score-range {text} is no range", expected="LOW,HIGH such as 0,1") from error
    return low, high


def names_of(text: str | None) -> list[str]:
    """A list of names that commas stand between."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _files(predictions: Sequence[Path], old: Path | None, new: Path | None) -> tuple[Path, ...]:
    """One file with both models' predictions, or the old model's and the new model's."""
    if old and new and not predictions:
        return (old, new)
    if not old and not new and len(predictions) in (1, 2):
        return tuple(predictions)
    raise UserError(
        "which predictions?",
        expected="a run, OLD and NEW, or one --predictions FILE with both models",
        do="see `holdfast certify --help`",
    )


def pools_of(given: Sequence[str]) -> dict[str, list[str]]:
    """Pooled groups of tasks, by name."""
    groups: dict[str, list[str]] = {}
    for item in given:
        name, _, members = item.partition("=")
        if not name or not names_of(members) or name in groups:
            found = "two groups have that name" if name in groups else ""
            raise UserError(f"--pool {item} is not a group", expected="NAME=TASK,TASK with a new name", found=found)
        groups[name] = names_of(members)
    return groups
