"""``holdfast diagnose``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.evaluate.diagnostics import Diagnosis


class At(StrEnum):
    """Which model of a run."""

    START = "start"
    END = "end"


def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a job's folder of a study.")],
    at: Annotated[At, typer.Option(help="The run's result, or what it began with (new heads included).")] = At.END,
    images: Annotated[int, typer.Option(min=1, help="At most so many constraint images a task, and pairs.")] = 1000,
    beta: Annotated[float | None, typer.Option(min=0, help="Penalty of the KKT residuals. Default: the run's.")] = None,
    memory: Annotated[float, typer.Option(min=0.01, help="GiB for gradients that are held at a time.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Say which protected task stands in the target's way, and how far the run is from a KKT point.

    Reads constraint images and target pairs alone. Writes all figures, the Gram matrix of the tasks' gradients among
    them, to diagnosis-start.json or diagnosis-end.json in the run folder.
    """
    import json

    from holdfast.files import write_json
    from holdfast.rounds.diagnose import diagnose_run

    if beta is not None and not beta <= 1e30:
        raise UserError(f"--beta {beta} is not usable", expected="a penalty from 0 to 1e30")
    if not memory <= 1e6:
        raise UserError(f"--memory {memory} is not usable", expected="GiB, from 0.01 to a million")
    found = diagnose_run(run, at=at.value, images=images, beta=beta, memory_bytes=int(memory * 2**30))
    write_json(run / f"diagnosis-{at.value}.json", found.to_json())
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        _show(found)


def _show(found: Diagnosis) -> None:
    import textwrap

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from holdfast.cli.forecasts import WIDTH

    table = Table("task", "h", "multiplier", "cosine with target", "takes back")
    taken = {obstacle.task: obstacle.taken_back for obstacle in found.conflict.obstacles}
    lengths = found.gram.diagonal() ** 0.5
    order = sorted(range(len(found.tasks)), key=lambda k: -taken.get(found.tasks[k], 0.0))
    for k in order[:20]:
        scale = lengths[0] * lengths[k + 1]
        cosine = found.gram[0, k + 1] / scale if scale > 0 else 0.0
        name = found.tasks[k]
        share = f"{taken[name] * 100:.1f} %" if name in taken else ""
        table.add_row(name, f"{found.h[k]:+.4f}", f"{found.kkt.multipliers[k]:.4f}", f"{cosine:+.3f}", share)
    console = Console(highlight=False)
    console.print(Text(found.sentence()))
    console.print(table)
    ratio = "no constraint is violated" if found.assumption4 is None else f"{found.assumption4:.4g}"
    texts = (
        f"smallest singular value of the tasks' gradients: {found.singular_value:.4g} with heads, "
        f"{found.singular_value_without_heads:.4g} without",
        f"KKT residuals: stationarity {found.kkt.stationarity:.4g} "
        f"({found.kkt.relative_stationarity:.2f} of the target's gradient), feasibility {found.kkt.feasibility:.4g}, "
        f"complementarity {found.kkt.complementarity:.4g}",
        f"ratio of Assumption 4: {ratio}",
    )
    for text in texts:
        console.print(Text("\n".join(textwrap.wrap(text, WIDTH, subsequent_indent="  "))), soft_wrap=True)
