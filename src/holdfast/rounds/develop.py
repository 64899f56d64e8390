"""A round in a run folder: begun, gone on with, finished once. The round itself: :mod:`holdfast.rounds.round`."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from holdfast.artifacts import LOCK, RunFolder, resume_command
from holdfast.candidates.select import WithoutTraining
from holdfast.certify.forecast import Forecast
from holdfast.config import RoundConfig, parse
from holdfast.data.survey import Survey
from holdfast.errors import Interrupted
from holdfast.files import read_json, write_json
from holdfast.locks import one_writer
from holdfast.rounds.decide import NO_PLAN, PlanCheck, check_budget, without_training
from holdfast.rounds.former import former_form
from holdfast.rounds.result import RoundResult, read_result, training_decision
from holdfast.rounds.round import Round
from holdfast.runtime import Runtime, started
from holdfast.train.progress import choose_progress


def develop(
    config: RoundConfig,
    out: Path,
    root: Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    require_chance: float = 0.0,
    show_plan: Callable[[Forecast], None] | None = None,
    show_refit: Callable[[WithoutTraining], None] | None = None,
) -> RoundResult:
    """Run a round (or go on with one) in the run folder ``out``; paths in the config are relative to ``root``.

    Going on with a run that is finished changes nothing and returns its result. A new round whose chance to pass the
    test on its sealed images is below ``require_chance`` is refused before anything is trained, with a
    :class:`~holdfast.errors.UserError` that says what would help; ``show_plan`` is called with its forecast, and
    ``show_refit`` before training with the best candidate that needs none. With ``train.only_if_needed`` nothing is
    trained where that candidate is enough.
    """
    if resume and RunFolder.open(out).finished:
        return read_result(RunFolder(out))
    with started(config.train.device) as runtime, writing(out, runtime, resume=resume) as folder:
        plan = NO_PLAN if resume else PlanCheck(require_chance, show_plan, show_refit)
        return run_round(config, folder, root, runtime, resume=resume, quiet=quiet, plan=plan)


def run_round(
    config: RoundConfig,
    folder: RunFolder,
    root: Path,
    runtime: Runtime,
    *,
    resume: bool = False,
    quiet: bool = False,
    plan: PlanCheck = NO_PLAN,
) -> RoundResult:
    """:func:`develop` in a folder that this process holds."""
    if folder.result.exists():  # killed between its last file and the line that says so
        return _conclude(folder, runtime)
    try:
        return _run(config, folder, root, runtime, resume=resume, quiet=quiet, plan=plan)
    except KeyboardInterrupt as error:
        raise _interrupted(folder) from error


def _run(
    config: RoundConfig, folder: RunFolder, root: Path, runtime: Runtime, *, resume: bool, quiet: bool, plan: PlanCheck
) -> RoundResult:
    def check(surveyed: Survey) -> None:
        if runtime.is_main:
            run = str(read_json(folder.state).get("fingerprint", "")) if resume else ""
            unspent = check_budget(config, root, surveyed.sealed, run, resume)
            plan(config, surveyed, unspent)

    command = resume_command(folder.root)
    round_ = Round(config, root, folder, runtime, begun=resume, check=check, resume=command)
    if config.method.trains():
        _before_training(round_, plan)
    silent = quiet or not runtime.is_main or not round_.trains
    with choose_progress("developing", config.train.steps, quiet=silent) as progress:
        round_.train(progress)
    round_.write_result(round_.decide())
    return _conclude(folder, runtime)


def _before_training(round_: Round, plan: PlanCheck) -> None:
    """Say what can be done without training and, with ``train.only_if_needed``, decide whether that is enough.

    The decision is on record before anything follows from it, and stands: by the time that a run goes on, other rounds
    may have queried its sealed images, and its chance be another.
    """
    config, folder = round_.config, round_.folder
    decides = config.train.only_if_needed and training_decision(folder) is None
    if dist.is_initialized():  # every rank has read the record before the first one may write it
        dist.barrier()
    offered = round_.untrained_candidates() if decides or plan.show_refit is not None else []  # on every rank
    if offered and round_.runtime.is_main:
        found = without_training(config, folder, offered)
        if decides:
            training = {"skipped": found.enough, "candidate": found.best.name, "why": found.why}
            write_json(folder.state, {**read_json(folder.state), "training": training})
        if plan.show_refit is not None:
            plan.show_refit(found)
    if dist.is_initialized():
        dist.barrier()


def _interrupted(folder: RunFolder) -> Interrupted:
    begun = folder.state.exists()
    return Interrupted(
        "interrupted; nothing is lost" if begun else "interrupted before the run began",
        signal_number=signal.SIGINT,
        do=f"go on with: {resume_command(folder.root)}" if begun else "",
    )


def resume_config(run: Path) -> tuple[RoundConfig, Path]:
    """Config and root of a run that was begun."""
    folder = RunFolder.open(run)
    origin = folder.origin
    values = former_form(read_json(folder.config))
    return parse(RoundConfig, values, str(folder.config), origin), origin


@contextmanager
def writing(out: Path, runtime: Runtime, *, resume: bool) -> Generator[RunFolder]:
    """The run folder, held by this process alone; a new one must be free."""
    if not runtime.is_main:
        yield RunFolder(out)
        return
    if resume:
        RunFolder.open(out)
    elif not (out / LOCK).exists():  # where somebody writes right now the lock says who
        RunFolder.check_free(out)
    with one_writer(out):
        folder = RunFolder.open(out) if resume else RunFolder.create(out)
        folder.clear()
        yield folder


def _conclude(folder: RunFolder, runtime: Runtime) -> RoundResult:
    """Every file is in place: what only served the round goes, and then the run is done."""
    if runtime.is_main:
        shutil.rmtree(folder.tested, ignore_errors=True)
        write_json(folder.state, {**read_json(folder.state), "status": "done"})
    if dist.is_initialized():
        dist.barrier()
    return read_result(folder)
