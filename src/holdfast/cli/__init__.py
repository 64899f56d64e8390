"""The command line: one short function a subcommand, in the module of the same name.

Heavy imports (torch, pyarrow, scipy) happen inside the functions, so that ``--help`` and completion answer at once.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import typer
from rich.console import Console
from rich.text import Text

from holdfast._version import __version__
from holdfast.cli import bench as _bench
from holdfast.cli import certify as _certify
from holdfast.cli import compare as _compare
from holdfast.cli import data as _data
from holdfast.cli import demo as _demo
from holdfast.cli import develop as _develop
from holdfast.cli import diagnose as _diagnose
from holdfast.cli import evaluate as _evaluate
from holdfast.cli import export as _export
from holdfast.cli import import_ as _import
from holdfast.cli import init as _init
from holdfast.cli import lineage as _lineage
from holdfast.cli import plan as _plan
from holdfast.cli import policy as _policy
from holdfast.cli import report as _report
from holdfast.cli import track as _track
from holdfast.cli import verify as _verify
from holdfast.cli.extras import missing_extra
from holdfast.cli.retrieve import retrieve_app
from holdfast.errors import Exit, HoldfastError, RenamedSetting

app = typer.Typer(
    name="holdfast",
    help="Improve a CLIP model on one weak class without losing any class it already serves, and prove it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done (or certified) · 1 failure · 2 your input · 3 a fault was shown (regressed, leak, "
    "changed fingerprint) · 4 undecided, or the old model was kept · 130/143 interrupted.",
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and stop.", is_eager=True)) -> None:
    """Improve a CLIP model on one weak class without losing any class it already serves, and prove it."""
    if version:
        print(f"holdfast {__version__}")
        raise typer.Exit


app.command("demo")(_demo.demo)
app.command("init")(_init.init)
app.command("data")(_data.data)
app.command("pack")(_data.pack)
app.command("leaks")(_data.leaks)
app.command("develop")(_develop.develop)
app.command("tune")(_develop.tune)
app.command("evaluate")(_evaluate.evaluate)
app.command("import")(_import.import_)
app.command("export")(_export.export)
app.command("bench")(_bench.bench)
app.command("certify")(_certify.certify)
app.command("gate")(_policy.gate)
app.command("plan")(_plan.plan)
app.command("claim")(_verify.claim)
app.command("sign")(_verify.sign)
app.command("verify")(_verify.verify)
app.command("compare")(_compare.compare)
app.command("diagnose")(_diagnose.diagnose)
app.command("report")(_report.report)
app.command("track")(_track.track)
app.command("log")(_lineage.log)
app.command("show")(_lineage.show)
app.command("diff")(_lineage.diff)
app.add_typer(retrieve_app, name="retrieve")


# Typer brings its own click in newer versions and uses the installed one in older ones: this finds the base class of
# "no such option" and its kin in either.
_USAGE_ERROR: type[Exception] = next(item for item in typer.BadParameter.__mro__ if item.__name__ == "ClickException")


def _show_warning(console: Console, otherwise: Callable[..., None], message: Any, category: Any, *where: Any) -> None:
    """What was renamed is a hint to whoever wrote the file, without the line of code that said so."""
    if issubclass(category, RenamedSetting):
        console.print(Text("hint: ", style="bold yellow") + Text(str(message)), soft_wrap=True)
    else:
        otherwise(message, category, *where)


def main() -> None:
    """Run the command line; errors meant for people are printed without a traceback."""
    console = Console(stderr=True, highlight=False)
    warnings.showwarning = partial(_show_warning, console, warnings.showwarning)
    warnings.simplefilter("always", RenamedSetting)
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except HoldfastError as error:
        console.print(Text("error: ", style="bold red") + Text(error.text()), soft_wrap=True)
        sys.exit(int(error.exit_code))
    except ModuleNotFoundError as error:  # a light installation, and a command that needs more
        sentence = missing_extra(error, sys.argv[1:])
        if sentence is None:
            raise
        console.print(Text("error: ", style="bold red") + Text(sentence), soft_wrap=True)
        sys.exit(int(Exit.USER))
    except OSError as error:  # a name too long, a folder that may not be read: nobody's fault but the path's
        if error.filename is None:
            raise
        named = str(error.filename)
        sentence = f"{named if len(named) <= 300 else named[:300] + '…'} cannot be used: {error.strerror}"
        console.print(Text("error: ", style="bold red") + Text(sentence), soft_wrap=True)
        sys.exit(int(Exit.USER))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(int(Exit.INTERRUPTED))
    except Exception as error:
        if not isinstance(error, _USAGE_ERROR):
            raise
        cast(Any, error).show()
        sys.exit(int(Exit.USER))
