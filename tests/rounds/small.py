"""Rounds that nobody trained, written into a project: as few files as a lineage asks for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from holdfast.artifacts import RunFolder
from holdfast.files import write_json
from holdfast.rounds.project import FIRST, Project


def first_model(project: Project, classes: tuple[str, ...] = ("a", "b", "c")) -> None:
    project.first.mkdir(exist_ok=True)
    write_json(project.first / "model.json", {"classes": list(classes), "fingerprint": "sha256:first"})
    project.record_first()


def fill(folder: RunFolder, target: str = "c", *, kept: bool = False, change: float = 0.1) -> None:
    """What a finished run holds, with made-up figures."""
    tasks: dict[str, Any] = {
        name: {"old_accuracy": 0.8, "new_accuracy": 0.8 + (change if name == target else -0.01), "examples": 100,
               "gained": 10, "lost": 1, "old_loss": 0.5, "new_loss": 0.4}
        for name in ("a", "b", "c")
    }  # fmt: skip
    protected = [name for name in tasks if name != target]
    write_json(folder.config, {"seed": 0, "method": {"name": "holdfast"}, "task": {"target": target}})
    write_json(folder.model / "model.json", {"classes": list(tasks), "fingerprint": f"sha256:{folder.root.name}"})
    write_json(
        folder.result,
        {"target": target, "protected": protected, "verdict": None, "kept_old": kept, "chosen": None if kept else "x",
         "reason": "made up", "certificate": None, "candidates": [{"name": "x"}], "dev": {"tasks": tasks},
         "test": None},
    )  # fmt: skip
    write_json(folder.state, {"status": "done", "parent": "sha256:first", "data": "sha256:1"})


def add_round(project: Project, title: str = "next", parent: str | None = None, **more: Any) -> str:
    with project.begin(title, project.resolve(parent)) as name:
        fill(project.folder(name), **more)
    project.record(name)
    return name


def main(root: str, rounds: str) -> None:
    """Many rounds one after another, to be killed in the middle of; says on a line of its own what is recorded."""
    project = Project.open(Path(root), create=True)
    if not project.first.exists():
        first_model(project)
    for _ in range(int(rounds)):
        print(json.dumps(add_round(project, parent=FIRST)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
