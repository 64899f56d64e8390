"""``holdfast track``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from holdfast.errors import Exit, UserError


class Tracker(StrEnum):
    """Where metrics can go."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


def track(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[Tracker, typer.Option(help="Which tracker.")],
    where: Annotated[
        str | None, typer.Option(help="A folder (tensorboard, wandb), or the address of an MLflow server or database.")
    ] = None,
    register: Annotated[
        str | None, typer.Option(metavar="NAME", help="mlflow: also register the model as a version of NAME.")
    ] = None,
    alias: Annotated[
        str, typer.Option(help="mlflow: alias that a version gets if, and only if, certified.")
    ] = "certified",
) -> int:
    """Feed a run's metrics to a tracker. Weights & Biases stays offline.

    With --register, exit code 4 says that the version was registered and not promoted: it is not certified.
    """
    from holdfast.report import trackers

    if register is not None and to is not Tracker.MLFLOW:
        raise UserError("--register is for mlflow", do="leave it out, or use --to mlflow")
    if to is Tracker.TENSORBOARD:
        print(trackers.to_tensorboard(run, Path(where) if where else None))
        return int(Exit.DONE)
    if to is Tracker.WANDB:
        print(trackers.to_wandb(run, Path(where) if where else None))
        return int(Exit.DONE)
    reported = trackers.to_mlflow(run, where, register=register, alias=alias)
    print(f"run {reported['run']}")
    if register is None:
        return int(Exit.DONE)
    state = (
        f"promoted to @{alias}" if reported["promoted"] else f"not promoted: verdict {reported['verdict'] or 'none'}"
    )
    print(f"{register} version {reported['version']}: {state}")
    return int(Exit.DONE if reported["promoted"] else Exit.UNDECIDED)
