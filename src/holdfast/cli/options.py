"""Options that would be ignored are refused: whoever gives one expects that it does something."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import UserError


def refuse_ignored(beside: str, ignored: Mapping[str, Any], do: str) -> None:
    """Refuse options that would be ignored; those that were not given are None, False or empty."""
    for name, value in ignored.items():
        if value is not None and value is not False and value != []:
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
