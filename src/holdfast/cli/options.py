"""Options that several commands share, how their values are read, and a refusal of those that would be ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.errors import UserError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Margins = Annotated[
    list[str] | None,
    typer.Option("--margin", metavar="ε|TASK=ε", help="Loss of accuracy you accept, fixed beforehand; also per task."),
]
QueryBudget = Annotated[
    int | None,
    typer.Option(
        "--query-budget",
        "--queries",
        min=1,
        metavar="R",
        help="How often these images may be queried, each time at δ/R: charges the ledger.",
    ),
]
Confidence = Annotated[float | None, typer.Option(help="1 - δ. Default: 0.95, or what the run says.")]


def refuse_ignored(beside: str, ignored: Mapping[str, Any], do: str) -> None:
    """Refuse options that would be ignored; those that were not given are None, False or empty."""
    for name, value in ignored.items():
        empty = isinstance(value, list | tuple | dict) and not value
        if value is not None and value is not False and not empty:
            raise UserError(f"{beside} and --{name.replace('_', '-')} at once", do=do)


def check_same_claim(
    run: Path, settings: Mapping[str, Any], margins: tuple[float | None, dict[str, float]], confidence: float | None
) -> None:
    """A run that has its certificate has no other: refuse to answer another question with it."""
    default, single = margins
    asked = {name: single.get(name, default) for name in settings["margins"]}
    different = [name for name, margin in asked.items() if margin not in (None, settings["margins"][name])]
    different += sorted(set(single) - set(asked))
    if different or confidence not in (None, settings["confidence"]):
        found = f"margin {settings['margins'].get(different[0])} for {different[0]}" if different else ""
        raise UserError(
            f"{run} has its certificate already, for another claim",
            found=found or f"confidence {settings['confidence']:g}",
            do="leave --margin and --confidence out to see it: its sealed set is retired",
        )


def margins_of(given: Sequence[str] | None) -> tuple[float | None, dict[str, float]]:
    """The margin for all tasks, and those of single ones."""
    default: float | None = None
    single: dict[str, float] = {}
    for item in given or []:
        name, _, number = item.rpartition("=")
        try:
            value = float(number)
        except ValueError as error:
            raise UserError(
                f"--margin {item} is not a margin", expected="a number such as 0.02, or TASK=0.05", found=repr(number)
            ) from error
        from holdfast.certify.settings import check_margin

        check_margin(value, name)
        if name in single or (not name and default is not None):
            raise UserError(f"two margins for {name or 'all tasks'}", do="give each --margin once")
        if name:
            single[name] = value
        else:
            default = value
    return default, single


def range_of(text: str | None) -> tuple[float, float] | None:
    """The range of scores."""
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--score-range {text} is no range", expected="LOW,HIGH such as 0,1") from error
    return low, high


def names_of(text: str | None) -> list[str]:
    """A list of names that commas stand between."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def prediction_files(predictions: Sequence[Path], old: Path | None, new: Path | None) -> tuple[Path, ...]:
    """One file with both models' predictions, or the old model's and the new model's."""
    if old and new and not predictions:
        return (old, new)
    if not old and not new and len(predictions) in (1, 2):
        return tuple(predictions)
    raise UserError(
        "which predictions?",
        expected="a run, OLD and NEW, or one --predictions FILE with both models",
        do="see `holdfast certify --help`",
    )


def pools_of(given: Sequence[str]) -> dict[str, list[str]]:
    """Pooled groups of tasks, by name."""
    groups: dict[str, list[str]] = {}
    for item in given:
        name, _, members = item.partition("=")
        if not name or not names_of(members) or name in groups:
            found = "two groups have that name" if name in groups else ""
            raise UserError(f"--pool {item} is not a group", expected="NAME=TASK,TASK with a new name", found=found)
        groups[name] = names_of(members)
    return groups
