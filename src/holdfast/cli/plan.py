"""``holdfast plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.options import Confidence, Json, Margins, margins_of, prediction_files, range_of, refuse_ignored
from holdfast.errors import Exit

if TYPE_CHECKING:
    from holdfast.certify.forecast import ExpectedFlips


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
    layout = {"group": group, "weight": weight, "score_range": range_of(score_range), "largest_unit": largest_unit}
    layout |= {"equal_groups": equal_groups}
    if round_file is not None:
        given = {"tasks": tasks, "images": images, "simultaneous": simultaneous, "predictions": predictions}
        given |= {**stated, **layout}
        refuse_ignored("ROUND.toml", {**given, "target": target}, "leave one of them out: the round's file says it")
        from holdfast.certify.round_plan import plan_round
        from holdfast.cli.forecasts import print_forecast
        from holdfast.cli.process import without_pandas

        with without_pandas():
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

    files = prediction_files(predictions, None, None) if predictions else ()
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
