"""``holdfast init``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.certify.forecast import Forecast
    from holdfast.config import ModelConfig, RolesConfig, SourceConfig
    from holdfast.data.catalogue import Catalogue, Problem
    from holdfast.data.init_round import ChosenPlan, Findings

TUNE = "TUNE.toml"


def init(
    source: Annotated[str, typer.Argument(help="Your images: a folder (class/picture.jpg), a table, or `digits`.")],
    target: Annotated[str | None, typer.Option(help="The class to improve.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model to improve: a model folder, or ARCHITECTURE/WEIGHTS of OpenCLIP (a tag or a file, as in "
            "ViT-B-16/openai). Without one: `conse` (pretrained, zero-shot, needs no training), or what TUNE.toml "
            "makes: `parts` (pretrained towers) or `tiny` (from scratch). "
            "Default: base/model, else parts, else ViT-B-16/openai, the first that is on this machine."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to write the round; TUNE.toml goes beside it.")] = Path("ROUND.toml"),
    margin: Annotated[
        float, typer.Option(help="Loss of accuracy you would like to rule out; larger where images cannot prove it.")
    ] = 0.05,
    confidence: Annotated[float, typer.Option(help="How sure you want to be: 1 - δ.")] = 0.95,
) -> None:
    """Write a commented ROUND.toml for a folder of your own images, and a TUNE.toml where there is no model yet.

    Reads the images' names and hashes and decodes no picture. Looks for the model's weights first. Chooses how many
    images of each class to seal, and larger margins for small classes, so that the claim can be proven, and says why in
    the file. Without --target it proposes the smallest class, in a comment.
    """
    from holdfast.model.weights import default_model, find_model, is_conse

    tune_file = out.parent / TUNE
    _check_free(out)
    found = default_model(out.parent) if model is None else find_model(model, beside=out.parent)  # before all else
    make = found.make
    if make is not None:
        _check_free(tune_file)

    from holdfast.certify.settings import check_confidence, check_margin
    from holdfast.cli.forecasts import percent
    from holdfast.cli.process import leave_out_pandas
    from holdfast.config import ModelConfig
    from holdfast.data.init_round import check_target, counted, inspect, old_model, round_text, tune_text
    from holdfast.data.sources import catalogue
    from holdfast.files import write_text

    leave_out_pandas()
    check_margin(margin, "")
    check_confidence(confidence)
    findings = inspect(source)
    check_target(findings, target, make)
    main = catalogue([findings.source], Path())
    findings = counted(findings, main)
    if make is not None:
        settings = old_model(make)
    else:
        freeze = "text" if is_conse(found.architecture) else "nothing"
        settings = ModelConfig(start=found.start, architecture=found.architecture, weights=found.weights, freeze=freeze)
    plan, forecast = _planned(findings, main, target, settings, margin, confidence, out.parent)
    if make is not None and target is not None:
        write_text(tune_file, tune_text(findings, make, target, relative_to=out.parent, plan=plan))
    write_text(out, round_text(findings, settings, make=make, target=target, relative_to=out.parent, plan=plan))
    for line in [*_class_lines(findings), *_problem_lines(findings.problems)]:
        print(line)
    print(f"wrote {out}" + (f" and {tune_file}" if make else ""))
    for line in _margin_lines(forecast, margin):
        print(line)
    print(f"chance that the round passes: {percent(forecast.chance)}")
    print("next:")
    if target is None:
        print(f"  say in {out} which class is the target")
    if make is not None:
        _print_command("tune", tune_file, "--out", out.parent / "base")
    _print_command("plan", out)
    beside = () if out.parent == Path() else ("--out", out.parent / "run")  # default: runs/ROUND, here
    _print_command("develop", out, *beside)


def _print_command(*words: str | Path) -> None:
    print("  " + shlex.join(["holdfast", *map(str, words)]))


def _margin_lines(forecast: Forecast, asked: float) -> list[str]:
    """Which classes have too few sealed images for the margin that was asked for, and get a larger one."""
    import textwrap

    from holdfast.cli.forecasts import WIDTH, points

    larger = {task.task: task.margin for task in forecast.tasks if not task.is_target and task.margin > asked}
    if not larger:
        return []
    by_size = sorted(larger.items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f"{name} {points(value)}" for name, value in by_size[:6])
    more = f" and {len(by_size) - 6} more" if len(by_size) > 6 else ""
    text = f"margins above the {points(asked)} points aimed at (--margin), which so few images cannot prove: {listed}"
    return textwrap.wrap(f"{text}{more}", WIDTH, subsequent_indent="  ")


def _class_lines(findings: Findings) -> list[str]:
    """The classes with their numbers of images."""
    import textwrap

    from holdfast.cli.forecasts import WIDTH

    listed = ", ".join(f"{name} ({count})" for name, count in findings.classes.items())
    text = f"found {len(findings.classes)} classes: {listed}"
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _problem_lines(problems: Sequence[Problem]) -> list[str]:
    """What was left out: folders that are no class, since they hold no picture, and files that are not read."""
    import textwrap

    from holdfast.cli.forecasts import WIDTH
    from holdfast.data.sources.folder import NO_PICTURES

    lines: list[str] = []
    for kind in dict.fromkeys(problem.kind for problem in problems):
        found = [problem for problem in problems if problem.kind == kind]
        if kind == NO_PICTURES:
            text, shown = "left out, without a picture", [problem.where for problem in found]
        else:
            shown = [f"{item.where} ({item.detail})" if item.detail else item.where for item in found]
            text = f"{kind} ({len(found)})"
        text = f"{text}: {', '.join(shown[:5])}{', …' if len(shown) > 5 else ''}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return lines


def _check_free(path: Path) -> None:
    if path.exists():
        raise UserError(
            f"{path} exists already",
            do="remove it to begin again, or choose another place with --out FOLDER/ROUND.toml",
        )


def _planned(
    findings: Findings,
    main: Catalogue,
    target: str | None,
    settings: ModelConfig,
    margin: float,
    confidence: float,
    root: Path,
) -> tuple[ChosenPlan, Forecast]:
    """Shares and margins, and the forecast that `holdfast plan` will make of them."""
    from dataclasses import replace

    from holdfast.certify.choose_shares import choose_shares
    from holdfast.certify.round_plan import forecast_survey
    from holdfast.certify.sealed_claim import ClaimedSettings
    from holdfast.cli.forecasts import percent
    from holdfast.config import CandidatesConfig, CertifyConfig, DataConfig, TaskConfig
    from holdfast.data.survey import survey

    aimed = target or findings.smallest
    roles = _roles_of(settings, findings, root)
    plan = choose_shares(main, target, proposed=aimed, margin=margin, confidence=confidence, roles=roles)
    task = TaskConfig(target=aimed)
    claimed = ClaimedSettings(
        CertifyConfig(margin=plan.margin, confidence=confidence, target_gain=plan.target_gain), CandidatesConfig(), task
    )
    data = DataConfig(source=findings.source, roles=plan.roles)
    forecast = forecast_survey(claimed, survey(data, task, root=Path(), main=main))
    return replace(plan, chance=percent(forecast.chance)), forecast


def _roles_of(settings: ModelConfig, findings: Findings, root: Path) -> RolesConfig | None:
    """The shares that a model was tuned with on the same source: others would seal images that it was trained on."""
    from holdfast.artifacts import RunFolder
    from holdfast.config import TuneConfig, parse
    from holdfast.files import read_json

    if settings.start is None:
        return None
    run = RunFolder(root / settings.start.parent)
    values = read_json(run.config) if run.config.is_file() and run.state.is_file() else {}
    if "at_most" not in values:  # not a run of `holdfast tune`
        return None
    tuned = parse(TuneConfig, values, str(run.config)).data
    same = any(_place(item, run.origin) == _place(findings.source, Path()) for item in tuned.sources)
    return tuned.roles if same else None


def _place(source: SourceConfig, root: Path) -> tuple[str, Path | None]:
    return source.kind, None if source.path is None else (root / source.path).resolve()
