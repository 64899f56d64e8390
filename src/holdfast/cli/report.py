"""``holdfast report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    path: Annotated[Path, typer.Argument(metavar="RUN|STUDY|PROJECT", help="The folder to report on.")],
    out: Annotated[Path | None, typer.Option(help="Where the page goes. Default: report.html in that folder.")] = None,
) -> None:
    """Write one self-contained HTML page, with an update card in Markdown and JSON beside it.

    Made from artifacts alone, on any machine. Of sealed images it shows what the ledger allows, and no more.
    """
    from holdfast.report.page import write_report

    for file in write_report(path, out):
        print(file)
