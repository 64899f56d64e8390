"""The command line: one short function a subcommand, in the module of the same name.

Only the module of the command that is called is imported, and heavy packages (torch, pyarrow, scipy) inside its
functions: what needs none of them answers at once. ``--help`` and completion import every command.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import typer

from holdfast._version import __version__
from holdfast.cli.words import PlainCommand, PlainGroup
from holdfast.errors import Exit, HoldfastError, RenamedSetting

if TYPE_CHECKING:
    from rich.console import Console

    app: typer.Typer

# Command -> module of this package, and its function (or its own group of commands) there. In the order of --help.
COMMANDS = {
    "demo": ("demo", "demo"),
    "init": ("init", "init"),
    "data": ("data", "data"),
    "pack": ("data", "pack"),
    "leaks": ("data", "leaks"),
    "develop": ("develop", "develop"),
    "tune": ("develop", "tune"),
    "evaluate": ("evaluate", "evaluate"),
    "import": ("import_", "import_"),
    "export": ("export", "export"),
    "bench": ("bench", "bench"),
    "certify": ("certify", "certify"),
    "gate": ("policy", "gate"),
    "plan": ("plan", "plan"),
    "claim": ("verify", "claim"),
    "sign": ("verify", "sign"),
    "verify": ("verify", "verify"),
    "compare": ("compare", "compare"),
    "diagnose": ("diagnose", "diagnose"),
    "report": ("report", "report"),
    "track": ("track", "track"),
    "log": ("lineage", "log"),
    "show": ("lineage", "show"),
    "diff": ("lineage", "diff"),
    "retrieve": ("retrieve", "retrieve_app"),
}
# Commands that answer from numbers and names, mostly in a fraction of a second.
SHORT = ("certify", "gate", "plan", "claim", "sign", "verify", "log", "show", "diff")


def root(version: bool = typer.Option(False, "--version", help="Print the version and stop.", is_eager=True)) -> None:
    """Improve a CLIP model on one weak class without losing any class it already serves, and prove it."""
    if version:
        print(f"holdfast {__version__}")
        raise typer.Exit


def build(commands: Iterable[str]) -> typer.Typer:
    """The command line with these commands."""
    made = typer.Typer(
        name="holdfast",
        cls=PlainGroup,
        help="Improve a CLIP model on one weak class without losing any class it already serves, and prove it.",
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        epilog="Exit codes: 0 done (or certified) · 1 failure · 2 your input · 3 a fault was shown (regressed, leak, "
        "changed fingerprint) · 4 undecided, or the old model was kept · 130/143 interrupted.",
    )
    made.callback(invoke_without_command=True)(root)
    for name in commands:
        module, function = COMMANDS[name]
        found = getattr(importlib.import_module(f"holdfast.cli.{module}"), function)
        if isinstance(found, typer.Typer):
            made.add_typer(found, name=name)
        else:
            made.command(name, cls=PlainCommand)(found)
    return made


@cache
def _whole() -> typer.Typer:
    return build(COMMANDS)


def __getattr__(name: str) -> Any:
    """``app``, the command line with every command."""
    if name == "app":
        return _whole()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _called(arguments: list[str]) -> typer.Typer:
    """The command line with the command that the first argument names; with all of them where it names none."""
    if arguments[:1] and arguments[0] in COMMANDS:
        return build(arguments[:1])
    return _whole()


def _run(arguments: list[str]) -> Any:
    if arguments[:1] and arguments[0] in COMMANDS and arguments[0] not in SHORT:
        return _called(arguments)(standalone_mode=False)
    from holdfast.cli.process import short_lived

    with short_lived():
        return _called(arguments)(standalone_mode=False)


# Typer brings its own click in newer versions and uses the installed one in older ones: this finds the base class of
# "no such option" and its kin in either.
_USAGE_ERROR: type[Exception] = next(item for item in typer.BadParameter.__mro__ if item.__name__ == "ClickException")


def _show_warning(otherwise: Callable[..., None], message: Any, category: Any, *where: Any) -> None:
    """What was renamed is a hint to whoever wrote the file, without the line of code that said so."""
    if issubclass(category, RenamedSetting):
        _say("hint: ", "bold yellow", str(message))
    else:
        otherwise(message, category, *where)


@cache
def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def _say(label: str, style: str, sentence: str) -> None:
    from rich.text import Text

    _console().print(Text(label, style=style) + Text(sentence), soft_wrap=True)


def _error(sentence: str) -> None:
    _say("error: ", "bold red", sentence)


def main() -> None:
    """Run the command line; errors meant for people are printed without a traceback."""
    warnings.showwarning = partial(_show_warning, warnings.showwarning)
    warnings.simplefilter("always", RenamedSetting)
    if sys.argv[1:] == ["--version"]:  # asked by scripts, and by people who wonder whether it is installed
        print(f"holdfast {__version__}")
        sys.exit(0)
    try:
        code = _run(sys.argv[1:])
        sys.exit(code if isinstance(code, int) else 0)
    except HoldfastError as error:
        _error(error.text())
        sys.exit(int(error.exit_code))
    except ModuleNotFoundError as error:  # a light installation, and a command that needs more
        from holdfast.cli.extras import missing_extra

        sentence = missing_extra(error, sys.argv[1:])
        if sentence is None:
            raise
        _error(sentence)
        sys.exit(int(Exit.USER))
    except OSError as error:  # a name too long, a folder that may not be read: nobody's fault but the path's
        if error.filename is None:
            raise
        named = str(error.filename)
        _error(f"{named if len(named) <= 300 else named[:300] + '…'} cannot be used: {error.strerror}")
        sys.exit(int(Exit.USER))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(int(Exit.INTERRUPTED))
    except Exception as error:
        if not isinstance(error, _USAGE_ERROR):
            raise
        cast(Any, error).show()
        sys.exit(int(Exit.USER))
