"""``holdfast certify``, ``plan`` and ``verify``."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.errors import Exit, UserError, nearest

if TYPE_CHECKING:
    from holdfast.certify.certificate import Settings
    from holdfast.certify.tables import Paired

EXITS = {"certified": Exit.DONE, "regressed": Exit.FAULT, "undecided": Exit.UNDECIDED}
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Margins = Annotated[
    list[str] | None,
    typer.Option("--margin", metavar="ε|TASK=ε", help="Loss of accuracy you accept, fixed beforehand; also per task."),
]
Confidence = Annotated[float | None, typer.Option(help="1 - δ. Default: 0.95, or what the run says.")]


def certify(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A run folder with sealed images.")] = None,
    predictions: Annotated[
        list[Path] | None,
        typer.Option(help="CSV or Parquet with task,label,old,new; or given twice (old, new), joined by example_id."),
    ] = None,
    old: Annotated[Path | None, typer.Option(help="Old model: example_id,task,label,prediction.")] = None,
    new: Annotated[Path | None, typer.Option(help="New model: example_id,task,label,prediction.")] = None,
    margin: Margins = None,
    confidence: Confidence = None,
    target: Annotated[str | None, typer.Option(help="Claim also that this task improved; it is not protected.")] = None,
    claim: Annotated[
        str, typer.Option(help="all: every task is retained; each: these tasks are; bounds: side by side; devsafety.")
    ] = "all",
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="Protected tasks. Default: all but the target.")
    ] = None,
    pool: Annotated[
        list[str] | None, typer.Option(metavar="NAME=A,B", help="Claim about a group of tasks as a whole.")
    ] = None,
    labels: Annotated[str | None, typer.Option(metavar="A,B", help="All labels there are; others are refused.")] = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Rows arrive one by one: e-processes, to be looked at any time.")
    ] = False,
    lemma_constant: Annotated[
        float, typer.Option(min=0.0, max=1e9, help="C of the paper's Lemma 1, shown beside.")
    ] = 0.0,
    out: Annotated[Path | None, typer.Option(help="Write a certificate that `holdfast verify` can check.")] = None,
    old_model: Annotated[Path | None, typer.Option(help="Weights to name in the certificate.")] = None,
    new_model: Annotated[Path | None, typer.Option(help="Weights to name in the certificate.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data to name in the certificate.")] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Ledger of sealed sets. Default: $HOLDFAST_LEDGER, or yours.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Prove that no protected task lost more than its margin, or say what is missing.

    Works on predictions of any two models (`--predictions`), or on the sealed images of a run, under the ledger. Exit
    code: 0 certified, 3 regressed, 4 undecided, 2 bad input.
    """
    if run is not None:
        if predictions or old or new:
            raise UserError("a run and predictions at once", do="give either RUN or --predictions")
        return _certify_run(run, _margins(margin), confidence, ledger, as_json)
    from holdfast.certify.certificate import check_confidence, read_evidence, run_test, write_certificate
    from holdfast.certify.report import report
    from holdfast.certify.sequential import sequential_report
    from holdfast.cli.verdicts import print_json, print_report

    confidence = check_confidence(0.95 if confidence is None else confidence)
    if not math.isfinite(lemma_constant):
        raise UserError(f"the constant C = {lemma_constant} of Lemma 1 is not usable", expected="a number from 0 on")
    files = _files(predictions or [], old, new)
    names = _names(labels)
    paired = read_evidence(files, names)
    assert paired is not None
    settings = _settings(paired, margin, confidence, target, claim, _names(tasks), pool or [], names)
    if sequential:
        if settings.groups:
            raise UserError("--sequential and --pool at once", do="leave one of them out")
        reported = sequential_report(paired, settings.margins, confidence, target)
    else:
        result = run_test(paired, settings, workers=min(4, os.cpu_count() or 1))
        reported = report(result, confidence=confidence, complexity=lemma_constant)
    if out is not None:
        if sequential:
            raise UserError("a certificate is written for a fixed set of images", do="leave out --sequential or --out")
        named = {"old model": old_model, "new model": new_model, "data": data}
        files |= {name: path for name, path in named.items() if path is not None}
        write_certificate(out, settings, reported, files)
    if as_json:
        print_json(reported)
    else:
        print_report(reported)
    return int(EXITS[reported["verdict"]])


def plan(
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Number of tasks. Default: those of the predictions, or 1.")
    ] = None,
    margin: Margins = None,
    discordance: Annotated[
        float | None, typer.Option(help="D: share of images on which the models differ in correctness.")
    ] = None,
    power: Annotated[float, typer.Option(help="Chance that all tasks pass.")] = 0.8,
    confidence: Confidence = None,
    difference: Annotated[float, typer.Option(help="Δ: true change in accuracy that is planned for.")] = 0.0,
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
    as_json: Json = False,
) -> int:
    """How many images a certificate needs, or how small a margin given images allow; by exact power."""
    from holdfast.certify.certificate import check_confidence, read_evidence
    from holdfast.certify.exact.power import estimated_discordance
    from holdfast.certify.plans import check_share, plan_report
    from holdfast.cli.verdicts import print_json, print_plan

    confidence = check_confidence(0.95 if confidence is None else confidence)
    check_share("power", power)
    default, single = _margins(margin)
    if predictions:
        paired = read_evidence(_files(predictions, None, None), [])
        assert paired is not None
        counts = {name: item for name, item in paired.counts().items() if name != target}
        flips = {name: estimated_discordance(item.gained, item.lost, item.n) for name, item in counts.items()}
    elif discordance is None:
        raise UserError("how often do the models differ?", do="give --discordance 0.02, or dev --predictions FILE")
    else:
        check_share("discordance", discordance, ends=True)
        flips = {"each": discordance}
    reported = plan_report(
        flips,
        tasks or len(flips),
        default=default,
        single=single,
        confidence=confidence,
        power=power,
        difference=difference,
        images=images,
        simultaneous=simultaneous,
    )
    if as_json:
        print_json(reported)
    else:
        print_plan(reported)
    return int(Exit.DONE)


def verify(
    certificate: Annotated[
        Path, typer.Argument(metavar="CERTIFICATE", help="A certificate, a run that holds one, or a project.")
    ],
    as_json: Json = False,
) -> int:
    """Check every fingerprint of a certificate and compute everything again from the predictions it names.

    Of a project: every byte of every round, the ledger, and all certificates.
    """
    if (certificate / "project.json").exists():
        from holdfast.cli.lineage import verify_project

        return verify_project(certificate, as_json)
    from holdfast.certify.certificate import verify_certificate
    from holdfast.cli.verdicts import print_json

    path = certificate / "certificate.json" if certificate.is_dir() else certificate
    held = verify_certificate(path)
    reported = {
        "holds": True,
        "verdict": held["report"]["verdict"],
        "files": held["files"],
        "claim": held["report"]["claim"],
    }
    if as_json:
        print_json(reported)
    else:
        names = ", ".join(held["files"]) or "no files"
        print(f"the certificate holds: verdict {reported['verdict']}; checked {names}")
        print(f"promise: {held['report']['promise']}")
    return int(Exit.DONE)


def _certify_run(
    path: Path,
    margins: tuple[float | None, dict[str, float]],
    confidence: float | None,
    ledger: Path | None,
    as_json: bool,
) -> int:
    """A look at the sealed images of a run, or what its certificate says already."""
    from holdfast.artifacts import RunFolder
    from holdfast.certify.certificate import verify_certificate
    from holdfast.cli.verdicts import print_json, print_sealed

    run = RunFolder.open(path)
    if run.certificate.exists():
        reported = verify_certificate(run.certificate)["report"]
    else:
        from holdfast.rounds.certify_run import certify_run  # torch: only where something is to be predicted

        reported = certify_run(path, margin=margins[0], single=margins[1], confidence=confidence, ledger=ledger)
    if as_json:
        print_json(reported)
    else:
        print_sealed(reported)
    return int(Exit.DONE if reported["verdict"] == "certified" else Exit.UNDECIDED)


def _margins(given: Sequence[str] | None) -> tuple[float | None, dict[str, float]]:
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
        if name:
            single[name] = value
        else:
            default = value
    return default, single


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _files(predictions: Sequence[Path], old: Path | None, new: Path | None) -> dict[str, Path]:
    from holdfast.certify.certificate import NEW_PREDICTIONS, OLD_PREDICTIONS

    if old and new and not predictions:
        return {OLD_PREDICTIONS: old, NEW_PREDICTIONS: new}
    if not old and not new and len(predictions) == 2:
        return {OLD_PREDICTIONS: predictions[0], NEW_PREDICTIONS: predictions[1]}
    if not old and not new and len(predictions) == 1:
        return {"predictions": predictions[0]}
    raise UserError(
        "which predictions?",
        expected="a run, one --predictions FILE, or two files: --old FILE --new FILE",
        do="see `holdfast certify --help`",
    )


def _settings(
    paired: Paired,
    margin: Sequence[str] | None,
    confidence: float,
    target: str | None,
    claim: str,
    tasks: Sequence[str],
    pools: Sequence[str],
    labels: list[str],
) -> Settings:
    """Everything that is fixed before the test, checked against the tasks that there are."""
    from holdfast.certify.certificate import Settings, margins_for
    from holdfast.certify.claims import Claim

    if claim not in list(Claim):
        raise UserError(f"there is no claim {claim!r}", expected=", ".join(Claim), found=nearest(claim, list(Claim)))
    present = paired.tasks()
    groups = _groups(pools, present)
    asked = [*tasks, *([target] if target else []), *(member for members in groups.values() for member in members)]
    for name in asked:
        if name not in present:
            raise UserError(f"the task {name!r} has no images here", found=nearest(name, present))
    members = [member for group in groups.values() for member in group]
    if len(set(members)) != len(members) or target in members or target in tasks:
        raise UserError("a task has two parts in the claim", expected="each task once: protected, pooled or the target")
    protected = sorted({*(tasks or present), *members} - {target})
    single = [name for name in protected if name not in members]
    if not protected:
        raise UserError("no protected task is left", found=f"only the target {target!r} has images")
    default, own = _margins(margin)
    return Settings(margins_for([*single, *groups], default, own), confidence, Claim(claim), target, groups, labels)


def _groups(pools: Sequence[str], tasks: Sequence[str]) -> dict[str, list[str]]:
    """Pooled groups of tasks, by name; a name stands for one thing only."""
    groups: dict[str, list[str]] = {}
    for pool in pools:
        name, _, members = pool.partition("=")
        group = _names(members)
        if not name or not group or name in tasks or name in groups:
            found = "a task has that name" if name in tasks else "two groups have that name" if name in groups else ""
            raise UserError(f"--pool {pool} is not a group", expected="NAME=TASK,TASK with a new name", found=found)
        groups[name] = group
    return groups
