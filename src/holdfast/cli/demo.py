"""``holdfast demo``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another run.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Keep the run folders here. Default: thrown away, but for the report.")
    ] = None,
    report: Annotated[
        Path, typer.Option(metavar="FILE.html", help="Where the page about holdfast's round goes.")
    ] = Path("holdfast-demo.html"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "cpu",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Forgetting and its cure, on handwritten digits that need no download; under two minutes on two cores.

    Trains a small base model that has seen two eights in its life, then teaches it the eight by plain fine-tuning and
    by holdfast, from the same images in the same number of steps. It prints whatever came out,
    and leaves a page to open.
    """
    from rich.console import Console
    from rich.text import Text

    from holdfast.cli.tables import comparison_table
    from holdfast.files import write_text
    from holdfast.report.page import write_report
    from holdfast.rounds.demo import demo as run

    with tempfile.TemporaryDirectory() as folder:
        result = run(out or Path(folder), seed, device=device, quiet=quiet)
        console = Console(highlight=False)
        title = "accuracy on test images at the end of training (▼ lost)"
        console.print(comparison_table(title, [("plain", result.plain), ("holdfast", result.holdfast)]))
        for name, compared in (("plain fine-tuning", result.plain), ("holdfast", result.holdfast)):
            worst = compared.tasks[compared.worst_task].accuracy_change * 100
            gain = f"{compared.target} {compared.target_gain * 100:+.1f} points"
            console.print(
                Text(f"{name}: {gain}; worst protected class: {compared.worst_task} {worst:+.1f}", style="bold")
            )
        decision = result.round.decision
        handed = (
            f"`holdfast develop` would hand back {decision.to_json()['chosen'] or 'the old model'}: {decision.reason}."
        )
        console.print(Text(handed), soft_wrap=True)
        page = write_report(result.round.folder.root)[0]
        write_text(report, page.read_text(encoding="utf-8"))  # the run folder may be thrown away
        console.print(Text(f"The round on one page, to open in a browser: {report.resolve()}"), soft_wrap=True)
