"""``holdfast track``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.options import refuse_ignored
from holdfast.errors import Exit, UserError

if TYPE_CHECKING:
    from holdfast.report.tracked import Tracked
    from holdfast.report.trackers import Logged


class Tracker(StrEnum):
    """Where metrics can go."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


def track(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, or a certificate of `holdfast certify --out`.")
    ],
    to: Annotated[Tracker, typer.Option(help="Which tracker.")],
    where: Annotated[
        str | None, typer.Option(help="A folder (tensorboard, wandb), or the address of an MLflow server or database.")
    ] = None,
    register: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="mlflow, wandb: also register the model, as a version of NAME."),
    ] = None,
    alias: Annotated[
        str, typer.Option(help="Alias that the version gets if, and only if, its certificate verifies.")
    ] = "certified",
    model: Annotated[
        Path | None,
        typer.Option(help="Of a certificate: where the model is that it names. Default: where it was."),
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Ledger that the certificate was issued under, as for `holdfast verify`.")
    ] = None,
    signers: Annotated[
        Path | None, typer.Option(help="The certificate must be signed by one of these, as for `holdfast verify`.")
    ] = None,
) -> int:
    """Feed a run's metrics to a tracker, and register its model. Weights & Biases stays offline.

    The alias rests on a certificate that verifies and names the very files of the model. Exit code with --register: 0
    promoted; 4 registered and not promoted; 3 the certificate or the model was changed, and nothing was registered.
    WANDB_MODE=online uploads a W&B run to WANDB_BASE_URL at once.
    """
    _check(run, to, where, register, {"alias": alias != "certified", "ledger": ledger, "signers": signers}, model)
    from holdfast.report import trackers
    from holdfast.report.promotion import Evidence, check_alias
    from holdfast.report.tracked import tracked_certificate, tracked_run

    check_alias(alias)
    evidence = Evidence(ledger, signers)
    if run.is_file():
        tracked = tracked_certificate(run, model, register=register is not None, evidence=evidence)
    else:
        tracked = tracked_run(run, register=register is not None, evidence=evidence)
    folder = run.resolve().parent if run.is_file() else run
    if to is Tracker.TENSORBOARD:
        print(trackers.to_tensorboard(tracked, Path(where) if where else folder / "tensorboard"))
        return int(Exit.DONE)
    if to is Tracker.WANDB:
        place = Path(where) if where else folder / "wandb-offline"
        logged = trackers.to_wandb(tracked, place, register=register, alias=alias)
        print(logged.run)
    else:
        _check_finished(run, tracked)
        logged = trackers.to_mlflow(tracked, where, register=register, alias=alias)
        print(f"run {logged.run}")
    return _told(logged, register, alias)


def _check(
    run: Path, to: Tracker, where: str | None, register: str | None, registered: dict[str, object], model: Path | None
) -> None:
    """Refuse what would have no effect, before anything is read."""
    if to is Tracker.TENSORBOARD:
        refuse_ignored("--to tensorboard", {"register": register}, "leave it out, or use --to mlflow or --to wandb")
        if run.is_file():
            raise UserError(f"{run} has no steps to draw", expected="a run", do="use --to mlflow or --to wandb")
    if register is None:
        refuse_ignored("no --register", {**registered, "model": model}, "give --register NAME too")
    if not run.is_file():
        refuse_ignored("a run", {"model": model}, "leave it out: a run holds its model")
    if where is not None and "://" in where and to is not Tracker.MLFLOW:
        address = f"set WANDB_MODE=online and WANDB_BASE_URL={where}" if to is Tracker.WANDB else "give a folder"
        raise UserError(f"--where {where} is no folder", expected=f"a folder, for --to {to}", do=address)


def _check_finished(run: Path, tracked: Tracked) -> None:
    from holdfast.artifacts import resume_command

    if not tracked.outcome:
        raise UserError(f"the run {run} is not finished", do=f"go on with: {resume_command(run)}")


def _told(logged: Logged, register: str | None, alias: str) -> int:
    """What became of the model, and the exit code that says so."""
    if register is not None:
        named = f"{register} version {logged.version}" if logged.version else f"{register} (model artifact)"
        print(f"{named}: promoted to @{alias}" if logged.promoted else f"{named}: not promoted: {logged.refused}")
    for note in logged.notes:
        print(note)
    return int(Exit.DONE if register is None or logged.promoted else Exit.UNDECIDED)
