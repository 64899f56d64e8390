"""``holdfast develop`` and ``tune``."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.errors import Exit, UserError

# The chance below which a round is not trained unless `--anyway` is given.
REQUIRED_CHANCE = 0.5

if TYPE_CHECKING:
    from holdfast.config import RoundConfig
    from holdfast.rounds.result import RoundResult


class Form(StrEnum):
    """Which form of a method."""

    DEFAULT = "default"
    PUBLISHED = "published"
    AUTHORS = "authors"


def develop(
    round_file: Annotated[
        Path | None, typer.Argument(metavar="ROUND.toml", help="The round: write one with `holdfast init`.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/ and the name of the TOML file.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with the run in this folder, from its last checkpoint.")
    ] = None,
    project: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Make it a round of this project; a new one is made if need be.")
    ] = None,
    parent: Annotated[
        str | None,
        typer.Option(metavar="ROUND", help="With --project: the round to start from, or `first`. Default: the last."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Another seed than the file's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Another number of steps than the file's.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N; with --resume too.")] = None,
    shard: Annotated[
        str | None,
        typer.Option(help="none, or full: each rank holds a part of the weights (torchrun); with --resume too."),
    ] = None,
    form: Annotated[
        Form | None,
        typer.Option(help="Another form of the method than the file's: default, published or authors."),
    ] = None,
    as_published: Annotated[bool, typer.Option("--as-published", hidden=True)] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Fit the last layer alone, in seconds, whatever [method] says: nothing is trained."
        ),
    ] = False,
    train: Annotated[
        bool,
        typer.Option("--train", help="Train also where what needs no training is enough ([train] only_if_needed)."),
    ] = False,
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Train also where the sealed images will probably not prove the claim."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every stage, and every class at the end.")] = False,
) -> int:
    """Run one round of development: train, choose, certify, hand back a model.

    Opens with the plan of `holdfast plan`: below a chance of one in two that the sealed images prove the claim it stops
    before training, and no query is spent, unless `--anyway` is given. It then says what can be done
    without training (the target refitted, the last layer fitted), before training begins; `--quick` does that alone.
    With `only_if_needed = true` in [train], as `holdfast init` writes it, nothing is trained where that is enough,
    unless `--train` is given.

    Leaves a run folder with the chosen model, all predictions and metrics. A run that was interrupted or killed goes on
    with `--resume RUN` and ends with the same bits.
    """
    from holdfast.cli.forecasts import print_opening, print_refit
    from holdfast.cli.process import keep_freed_memory, leave_out_pandas
    from holdfast.config import RoundConfig, parse, read_toml
    from holdfast.config.renamed import REMOVED_OPTIONS
    from holdfast.config.round import check_sections
    from holdfast.model.weights import check_model
    from holdfast.stages import stage, stages_shown

    if as_published:
        raise UserError("--as-published is gone", do=REMOVED_OPTIONS["develop", "--as-published"])
    if quick and (form is not None or steps is not None or train):
        raise UserError("--quick trains nothing", do="leave out --form, --steps and --train, or --quick")
    if project is not None and out is not None:
        raise UserError("--project and --out at once", do="leave out --out: the project has its own place for rounds")
    if parent is not None and project is None:
        raise UserError("--parent without --project", do="say which project with --project DIR")
    with stages_shown(quiet=quiet, verbose=verbose):
        if resume is not None:
            if any(given not in (None, False) for given in (round_file, out, project, form, quick, train)):
                raise UserError("--resume takes the run folder alone", do="leave out ROUND.toml and the other options")
            return _end(_resumed(resume, device, shard, quiet), as_json, verbose)
        if round_file is None:
            raise UserError(
                "which round?", expected="a ROUND.toml, or --resume RUN", do="write one with `holdfast init`"
            )
        root = round_file.parent
        always = False if train else None
        values = _with_options(
            read_toml(round_file), form=form, device=device, shard=shard, steps=steps, only_if_needed=always
        )
        check_model(check_sections(values, str(round_file)).model, root)  # before torch is imported
        leave_out_pandas()
        keep_freed_memory()
        stage("loading PyTorch")
        if form is not None:
            _check_form(values, root)
        config = parse(RoundConfig, values, str(round_file), root)
        if train and not config.method.trains():
            raise UserError(f"--train, and method.name = {config.method.name!r} trains nothing", do="leave out --train")
        if seed is not None:
            config = config.model_copy(update={"seed": seed})
        if quick:
            config = parse(RoundConfig, {**values, "method": {"name": "last_layer"}}, str(round_file), root).model_copy(
                update={"seed": config.seed}
            )
        required, show = 0.0 if anyway else REQUIRED_CHANCE, None if quiet else print_opening
        show_refit = None if quiet else partial(print_refit, decides=config.train.only_if_needed)
        if project is None:
            from holdfast.rounds.develop import develop as run

            folder = out or Path("runs") / round_file.stem
            found = run(
                config, folder, root, quiet=quiet, require_chance=required, show_plan=show, show_refit=show_refit
            )
            return _end(found, as_json, verbose)
        from holdfast.rounds.decide import PlanCheck
        from holdfast.rounds.next_round import develop_in
        from holdfast.rounds.project import Project

        opened, plan = Project.open(project, create=True), PlanCheck(required, show, show_refit)
        found = develop_in(opened, config, root, title=round_file.stem, parent=parent, quiet=quiet, plan=plan)
        return _end(found, as_json, verbose)


def _resumed(run: Path, device: str | None, shard: str | None, quiet: bool) -> RoundResult:
    """Go on with a run. Where it goes on changes no number; how long it is belongs to the round."""
    from holdfast.artifacts import RunFolder
    from holdfast.rounds.develop import develop, resume_config
    from holdfast.rounds.next_round import resume_in
    from holdfast.rounds.project import Project
    from holdfast.rounds.result import read_result
    from holdfast.runtime import speaks

    folder = RunFolder.open(run)
    if folder.finished and speaks():
        print(f"{run} is finished already; nothing was changed", file=sys.stderr)
    project = Project.around(run)
    if folder.finished and project is None:
        return read_result(folder)
    config, root = resume_config(run)
    config = _with_train(config, device=device, shard=shard)
    if project is not None:
        return resume_in(project, run, config, root, quiet=quiet)
    return develop(config, run, root, resume=True, quiet=quiet)


def _end(result: RoundResult, as_json: bool, verbose: bool) -> int:
    """Print the result; the exit code."""
    from holdfast.cli.tables import print_round
    from holdfast.runtime import speaks

    if not speaks():
        # torchrun ends all ranks when one of them ends with another code than 0: the first has files to write still.
        return int(Exit.DONE)
    print_round(result, as_json=as_json, verbose=verbose)
    return int(Exit.UNDECIDED if result.kept_old else Exit.DONE)


def _with_options(values: dict[str, Any], form: Form | None, **train: str | int | None) -> dict[str, Any]:
    """The file's values with what the command line says of [method] and [train]: read as if the file said so."""
    given = {
        "method": {} if form is None else {"form": form.value},
        "train": {name: value for name, value in train.items() if value is not None},
    }
    for section, options in given.items():
        present = values.get(section, {})
        if options and isinstance(present, dict):  # what is no table is refused when the file is read
            values = {**values, section: {**present, **options}}
    return values


def _check_form(values: dict[str, Any], root: Path) -> None:
    """Refuse --form for a method that has none."""
    from holdfast.config.round import DEFAULT_METHOD
    from holdfast.methods.registry import find

    method = values["method"]
    name = method.get("name", DEFAULT_METHOD) if isinstance(method, dict) else None
    if isinstance(name, str) and "form" not in find(name, root).settings.model_fields:
        raise UserError(
            "--form is for a method that has other forms than its default",
            expected='method.name = "holdfast" or "rm"',
            found=f'method.name = "{name}"',
            do="leave out --form",
        )


def _with_train(config: RoundConfig, **given: str | int | None) -> RoundConfig:
    """A begun round with what the command line says of [train]."""
    from holdfast.config import parse

    train = {name: value for name, value in given.items() if value is not None}
    if not train:
        return config
    values = {**config.train.model_dump(), **train}
    return config.model_copy(update={"train": parse(type(config.train), values, "[train]")})


def tune(
    tune_file: Annotated[Path, typer.Argument(metavar="TUNE.toml", help="Classes, data, model and training.")],
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/ and the name of the TOML file.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Another seed than the file's.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Make a base model on a labelled source, by global contrastive loss or cross-entropy.

    The model folder it leaves (`RUN/model`) is what `[model] start` of a round names.
    """
    from holdfast.artifacts import RunFolder
    from holdfast.cli.process import keep_freed_memory, leave_out_pandas
    from holdfast.cli.tables import print_accuracy
    from holdfast.config import TuneConfig, parse, read_toml
    from holdfast.config.known import check_kind
    from holdfast.rounds.tune import tune as run
    from holdfast.runtime import speaks

    leave_out_pandas()
    keep_freed_memory()
    values = read_toml(tune_file)
    check_kind(values, str(tune_file), tuning=True)
    config = parse(TuneConfig, values, str(tune_file))
    if seed is not None:
        config = config.model_copy(update={"seed": seed})
    folder = out or Path("runs") / tune_file.stem
    if resume and RunFolder.open(folder).finished and speaks():
        print(f"{folder} is finished already; nothing was changed", file=sys.stderr)
    words = ["holdfast", "tune", str(tune_file), *(["--out", str(out)] if out else []), "--resume"]
    command = shlex.join(words + ([] if seed is None else ["--seed", str(seed)]))
    result = run(config, folder, tune_file.parent, resume=resume, quiet=quiet, command=command)
    if speaks():
        print_accuracy(f"accuracy on dev images · model in {result.model}", result.accuracy)
