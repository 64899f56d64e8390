"""``holdfast log``, ``show`` and ``diff``: the rounds of a project."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.errors import Exit

if TYPE_CHECKING:
    from rich.text import Text

    from holdfast.rounds.project import ProjectRound

ProjectFolder = Annotated[
    Path, typer.Option("--project", "-p", metavar="DIR", help="The project. Default: the folder you are in.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def log(project: ProjectFolder = Path(), as_json: Json = False) -> None:
    """The history of a project as a tree, with the accuracy of every class over its rounds."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    from rich.tree import Tree

    from holdfast.artifacts import resume_command
    from holdfast.cli.verdicts import print_json
    from holdfast.rounds.project import FIRST, Project

    opened = Project.open(project)
    history = opened.history()
    if as_json:
        print_json({"rounds": [item.entry for item in history], "unfinished": opened.unfinished()})
        return
    console = Console(highlight=False)
    tree = Tree(Text(FIRST, style="bold"))
    branches = {FIRST: tree}
    for item in history:
        branches[item.name] = branches[item.parent].add(_line(item))
    console.print(tree)
    for name in opened.unfinished():
        console.print(Text(f"{name}: not finished ({resume_command(opened.folder(name).root)})", style="yellow"))
    if not history:
        return
    console.print("accuracy of the model handed back, on each round's own images (▼: lost there)")
    table = Table("class")
    table.add_column(FIRST, justify="right")
    for item in history:
        table.add_column(item.name, justify="right")
    for name, values in opened.accuracy().items():
        changes = [None, *(item.change(name) for item in history)]
        table.add_row(Text(name), *(_accuracy(*pair) for pair in zip(values, changes, strict=True)))
    console.print(table)


def _line(entry: ProjectRound) -> Text:
    from rich.text import Text

    from holdfast.cli.verdicts import MARKS, STYLES

    verdict = entry.verdict or "no certificate"
    change = entry.accuracy[entry.target] - entry.entry["accuracy"]["old"][entry.target]
    what = "old model kept" if entry.kept_old else f"{entry.target} {change * 100:+.1f}"
    text = Text(f"{entry.name}  ", style="bold") + Text(
        f"{MARKS.get(verdict, '·')} {verdict}", STYLES.get(verdict, "dim")
    )
    return text + Text(f"  {what} ({entry.entry['accuracy']['role']})", style="dim")


def _accuracy(value: float | None, change: float | None) -> Text:
    from rich.text import Text

    if value is None:
        return Text("–", style="dim")
    dropped = change is not None and change < 0
    return Text(f"{value * 100:.1f} %{' ▼' if dropped else ''}", style="bold red" if dropped else "")


def _change(change: float) -> Text:
    """A change in points; a drop has a mark for readers without colour."""
    from rich.text import Text

    style, mark = ("bold red", " ▼") if change < 0 else ("green", "") if change > 0 else ("dim", "")
    return Text(f"{change * 100:+.1f}{mark}", style=style)


def show(
    round_: Annotated[str, typer.Argument(metavar="ROUND", help="Name or number of a round.")],
    project: ProjectFolder = Path(),
    as_json: Json = False,
) -> None:
    """One round of a project: where it came from, what it protected, what came of it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from holdfast.cli.verdicts import print_json
    from holdfast.rounds.outcome import training_skipped
    from holdfast.rounds.project import Project

    opened = Project.open(project)
    entry = opened.find(round_)
    if as_json:
        print_json(entry.entry)
        return
    console = Console(highlight=False)
    console.print(_line(entry))
    facts = {
        "parent": entry.parent,
        "target": entry.target,
        "protected": ", ".join(entry.entry["protected"]),
        "method": f"{entry.entry['method']}, seed {entry.entry['seed']}",
        **({"training": skipped} if (skipped := training_skipped(entry.entry)) else {}),
        "reason": entry.entry["reason"],
        "handed back": "the old model" if entry.kept_old else str(entry.entry["chosen"]),
        "against first": "certified too" if entry.entry["against_first"] and entry.verdict == "certified" else "–",
        "candidates": _some(entry.entry["candidates"]),
        "model": entry.entry["model"],
        "data": entry.entry["data"],
        "finished": entry.entry["time"],
        "folder": str(opened.folder(entry.name).root),
    }
    for name, value in facts.items():
        console.print(Text(f"{name + ':':<15}", style="dim") + Text(str(value)), soft_wrap=True)
    console.print(f"on {entry.entry['accuracy']['role']} images:")
    table = Table("class")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right")
    before = entry.entry["accuracy"]["old"]
    for name, value in entry.accuracy.items():
        table.add_row(Text(name), f"{before[name] * 100:.1f} %", f"{value * 100:.1f} %", _change(value - before[name]))
    console.print(table)


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A round, or `first`.")],
    after: Annotated[str, typer.Argument(metavar="B", help="A round, or `first`.")],
    project: ProjectFolder = Path(),
    most: Annotated[int, typer.Option(min=0, help="Images to list.")] = 40,
    as_json: Json = False,
) -> None:
    """Classes and images that flipped between two models of a project (dev images, and those of retired sets)."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from holdfast.cli.verdicts import print_json
    from holdfast.rounds.project import Project
    from holdfast.rounds.verify import difference

    found = difference(Project.open(project), before, after)
    if as_json:
        classes = {
            name: {"images": found.examples[name], "before": found.right[name][0], "after": found.right[name][1]}
            for name in found.classes
        }
        reported = {"before": found.before, "after": found.after, "classes": classes}
        print_json({**reported, "flips": [asdict(flip) for flip in found.flips]})
        return
    console = Console(highlight=False)
    table = Table("class", title=f"{found.before} → {found.after}", title_justify="left")
    for name in ("images", "right before", "right after", "lost", "gained", "change"):
        table.add_column(name, justify="right")
    for name in found.classes:
        lost = sum(flip.label == name and not flip.gained for flip in found.flips)
        gained = sum(flip.label == name and flip.gained for flip in found.flips)
        counts = (found.examples[name], *found.right[name], lost, gained)
        table.add_row(Text(name), *map(str, counts), _change(found.change(name)))
    console.print(table)
    for flip in found.flips[:most]:
        mark = Text("gained ", style="green") if flip.gained else Text("lost ▼ ", style="bold red")
        where = flip.locator or flip.example_id[:12]
        console.print(mark + Text(f"{flip.label}: {flip.before} → {flip.after}  {where}"), soft_wrap=True)
    if len(found.flips) > most:
        console.print(Text(f"and {len(found.flips) - most} more (--most)", style="dim"))


def verify_project(path: Path, as_json: bool) -> int:
    """`holdfast verify PROJECT`."""
    from dataclasses import asdict

    from holdfast.cli.verdicts import print_json
    from holdfast.rounds.verify import verify_project as check

    found = check(path)
    code = int(Exit.UNDECIDED if found.not_checked else Exit.DONE)
    if as_json:
        print_json({"holds": None if found.not_checked else True, **asdict(found)})
        return code
    held = {"round": found.rounds, "file": found.files, "certificate": found.certificates}
    counts = ", ".join(f"{number} {name}{'' if number == 1 else 's'}" for name, number in held.items()) + " checked"
    print(f"{'not fully checked: nothing was changed' if found.not_checked else 'the project holds'}: {counts}")
    for missing in found.not_checked:
        print(f"not checked: {missing}")
    for note in found.notes:
        print(f"note: {note}")
    return code


def _some(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, … ({len(names)} in all; --json names them)"
