"""A round inside a project: its starting model, what it protects, whom it answers to, which ledger it queries."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from holdfast.config import RoundConfig, SourceConfig
from holdfast.errors import UserError
from holdfast.files import read_json
from holdfast.model.folder import is_model_folder, model_folder, save_model
from holdfast.rounds.decide import NO_PLAN, PlanCheck
from holdfast.rounds.develop import develop, run_round
from holdfast.rounds.prepare import bind, inherit, load_start, read_data
from holdfast.rounds.project import FIRST, Project
from holdfast.rounds.result import RoundResult
from holdfast.runtime import started


def develop_in(
    project: Project,
    config: RoundConfig,
    root: Path,
    *,
    title: str,
    parent: str | None = None,
    quiet: bool = False,
    plan: PlanCheck = NO_PLAN,
) -> RoundResult:
    """Run a new round of a project and write it down. ``parent`` is a round's name, or ``first``; default: the last.

    ``plan`` may refuse it before anything is trained.
    """
    _one_process()
    if not project.first.exists():
        adopt_first(project, config, root)
    start = project.resolve(parent)
    settled = settle(project, config, start, root)
    with started(config.train.device) as runtime, project.begin(title, start) as name:
        result = run_round(settled, project.folder(name), project.root, runtime, quiet=quiet, plan=plan)
    project.record(name)
    return result


def resume_in(project: Project, run: Path, config: RoundConfig, root: Path, *, quiet: bool = False) -> RoundResult:
    """Go on with a round of a project; one that is done and was not written down yet is written down."""
    _one_process()
    result = develop(config, run, root, resume=True, quiet=quiet)
    project.record(run.resolve().name)
    return result


def _one_process() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "a round of a project is begun by one process",
            found=f"WORLD_SIZE={os.environ['WORLD_SIZE']}",
            do="run it without torchrun, or outside the project with --out",
        )


def settle(project: Project, config: RoundConfig, parent: str, root: Path) -> RoundConfig:
    """The round as the project has it: its parent's model, everything gained so far protected, the project's ledger.

    Its paths are relative to the project: what lies inside it is found wherever the project is moved.
    """
    config = rebased(config, root, project.root)
    inside = {name: path.relative_to(project.root) for name, path in
              (("start", project.model(parent)), ("ledger", project.ledger), ("first", project.first))}  # fmt: skip
    model = config.model.model_copy(
        update={"start": inside["start"], "text": None, "architecture": None, "weights": None}
    )
    task = config.task
    if task.protected is None:
        known = [str(name) for name in read_json(project.model(parent) / "model.json")["classes"]]
        kept = tuple(name for name in known if name != task.target and name not in task.ignored)
        task = task.model_copy(update={"protected": kept})
    certify = config.certify.model_copy(
        update={
            "ledger": config.certify.ledger or inside["ledger"],
            "first": None if parent == FIRST else inside["first"],
        }
    )
    return config.model_copy(update={"model": model, "task": task, "certify": certify})


def rebased(config: RoundConfig, root: Path, onto: Path) -> RoundConfig:
    """The same config with its relative paths, which begin in ``root``, beginning in ``onto``."""

    def from_there(path: Path) -> Path:
        return path if path.is_absolute() else Path(os.path.relpath(root.resolve() / path, onto.resolve()))

    def moved(path: Path | None) -> Path | None:
        return None if path is None else from_there(path)

    def source(config: SourceConfig) -> SourceConfig:
        return config.model_copy(update={"path": moved(config.path)})

    def sources(given: SourceConfig | tuple[SourceConfig, ...] | None) -> Any:
        return source(given) if isinstance(given, SourceConfig) else given and tuple(source(part) for part in given)

    data, model, certify = config.data, config.model, config.certify
    weights = model.weights
    if weights is not None and (root / weights).exists():
        weights = str(moved(Path(weights)))
    return config.model_copy(
        update={
            "data": data.model_copy(
                update={
                    "source": sources(data.source),
                    "pairs": sources(data.pairs),
                    "negatives": sources(data.negatives),
                    "prompts": moved(data.prompts),
                }
            ),
            "method": config.method.rebased(from_there),
            "model": model.model_copy(
                update={"start": moved(model.start), "text": moved(model.text), "weights": weights}
            ),
            "certify": certify.model_copy(update={"ledger": moved(certify.ledger), "first": moved(certify.first)}),
        }
    )


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
            save_model(bind(start, assembled, known.model), made, extra=notes, seen=start.seen)
        if not project.first.exists():
            os.rename(made, project.first)
    except OSError as error:
        if not project.first.exists():  # otherwise another round was quicker, with the same outcome
            raise UserError(f"cannot write {project.first}", found=error.strerror or str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    project.record_first()
