"""Plain words of the command line are what typer makes of them."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from holdfast.cli.words import PlainCommand


class Colour(enum.StrEnum):
    RED = "red"


def answered(words: list[str], cls: type[Any] | None) -> tuple[int, str, list[Any]]:
    """Exit code, what was printed, and the values that a command with every kind of parameter was called with."""
    app, called = typer.Typer(), list[Any]()

    @app.command(cls=cls)
    def command(
        paths: Annotated[list[Path] | None, typer.Argument()] = None,
        text: Annotated[str | None, typer.Option()] = None,
        file: Annotated[Path | None, typer.Option()] = None,
        there: Annotated[Path | None, typer.Option(exists=True)] = None,
        number: Annotated[int | None, typer.Option(min=1, max=100)] = None,
        share: Annotated[float, typer.Option(min=0.0)] = 0.5,
        clamped: Annotated[int, typer.Option(max=5, clamp=True)] = 1,
        several: Annotated[list[str] | None, typer.Option()] = None,
        colour: Annotated[Colour, typer.Option()] = Colour.RED,
        parsed: Annotated[str | None, typer.Option(parser=str.upper)] = None,
        flag: Annotated[bool, typer.Option("--flag/--no-flag")] = False,
    ) -> None:
        called.extend([paths, text, file, there, number, share, clamped, several, colour, parsed, flag])

    done = CliRunner().invoke(app, words)
    return done.exit_code, done.output, [(type(value), value) for value in called]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "a.csv b.csv",
        "--text word --file a.csv --several one --several two --flag",
        "--text 5 --share 1 --number 7 --no-flag",
        "--share 0.25 --number 100",
        "--share 1e-3",
        "--share .5",
        "--share -1",
        "--share nan",
        "--share 1_0",
        "--number 0",
        "--number 101",
        "--number 1.0",
        "--number 007",
        "--number ٣",
        "--number x",
        "--clamped 9",
        "--there missing",
        "--there .",
        "--colour red",
        "--colour blue",
        "--parsed word",
        "--none",
        "--number",
        "--help",
    ],
)
def test_every_word_is_what_typer_makes_of_it(words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert answered(words.split(), PlainCommand) == answered(words.split(), None)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused_as_before(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch(mode=0o000)
    words = ["--file", str(tmp_path / "a.csv")]
    assert answered(words, PlainCommand) == answered(words, None)


def test_an_argument_that_is_required_is_missed() -> None:
    app = typer.Typer()

    @app.command(cls=PlainCommand)
    def command(path: Path) -> None:
        raise AssertionError(path)

    done = CliRunner().invoke(app, [])
    assert done.exit_code == 2
    assert "Missing argument" in done.output
