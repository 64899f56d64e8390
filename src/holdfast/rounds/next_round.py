"""A round inside a project: which model it starts from, what it protects, whom it answers to, where its looks are."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from holdfast.artifacts import read_json
from holdfast.config import RoundConfig
from holdfast.errors import UserError
from holdfast.model.folder import is_model_folder, model_folder, save_model
from holdfast.rounds.develop import RoundResult, develop, resume_config
from holdfast.rounds.lineage import FIRST, Project
from holdfast.rounds.setup import bind, inherit, load_start, read_data


def develop_in(
    project: Project, config: RoundConfig, root: Path, *, title: str, parent: str | None = None, quiet: bool = False
) -> RoundResult:
    """Run a new round of a project and write it down. ``parent`` is a round's name, or ``first``; default: the last."""
    _one_process()
    if not project.first.exists():
        adopt_first(project, config, root)
    start = project.resolve(parent)
    settled = settle(project, config, start)
    name = project.begin(title, start)
    result = develop(settled, project.folder(name).root, root, quiet=quiet)
    project.record(name)
    return result


def resume_in(project: Project, run: Path, *, quiet: bool = False) -> RoundResult | None:
    """Go on with a round of a project; None where it was done already and only had to be written down."""
    _one_process()
    folder = project.folder(run.resolve().name)
    if folder.result.exists() and read_json(folder.state).get("status") == "done":
        project.record(folder.root.name)
        return None
    config, root = resume_config(folder.root)
    result = develop(config, folder.root, root, resume=True, quiet=quiet)
    project.record(folder.root.name)
    return result


def _one_process() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "a round of a project is begun by one process",
            found=f"WORLD_SIZE={os.environ['WORLD_SIZE']}",
            do="run it without torchrun, or outside the project with --out",
        )


def settle(project: Project, config: RoundConfig, parent: str) -> RoundConfig:
    """The round as the project has it: its parent's model, everything gained so far protected, the project's ledger."""
    model = config.model.model_copy(
        update={"start": project.model(parent).resolve(), "architecture": None, "weights": None}
    )
    task = config.task
    if parent != FIRST and task.protected is None:
        known = [str(name) for name in read_json(project.model(parent) / "model.json")["classes"]]
        kept = tuple(name for name in known if name != task.target and name not in task.ignored)
        task = task.model_copy(update={"protected": kept})
    certify = config.certify.model_copy(
        update={
            "ledger": config.certify.ledger or project.ledger.resolve(),
            "first": None if parent == FIRST else project.first.resolve(),
        }
    )
    return config.model_copy(update={"model": model, "task": task, "certify": certify})


def adopt_first(project: Project, config: RoundConfig, root: Path) -> None:
    """Make the model that the first round starts from the project's first model, in one step."""
    temporary = Path(tempfile.mkdtemp(prefix=".first.", dir=project.root))
    try:
        made = temporary / "model"
        if config.model.start is not None:
            source = model_folder(root / config.model.start)
            if not is_model_folder(source):
                raise UserError(f"{source} is not a model folder", do="name one in [model] start")
            shutil.copytree(source, made)
        else:
            known = inherit(config, root)
            start = load_start(known.model, root, known.seed)
            assembled = read_data(known.data, known.task, start.towers, known.seed, root)
            notes = {"template": known.task.template, "names": known.task.names}
            save_model(bind(start, assembled, known.model), made, extra=notes)
        if not project.first.exists():
            os.rename(made, project.first)
    except OSError as error:
        if not project.first.exists():  # otherwise another round was quicker, with the same outcome
            raise UserError(f"cannot write {project.first}", found=error.strerror or str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    project.record_first()
