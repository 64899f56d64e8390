"""Trackers and registries that people already use: TensorBoard, Weights & Biases, MLflow.

All three are fed from the run's ``metrics.jsonl``, under the same names, after the fact: training knows none of them.
In W&B and MLflow the model can be registered as well; only a model whose certificate verifies gets the alias that
serving asks for (:mod:`holdfast.report.promotion`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.errors import UserError
from holdfast.report.promotion import Promotion, check_alias
from holdfast.report.tracked import Tracked, scalars

__all__ = ["ALIAS", "Logged", "scalars", "to_mlflow", "to_tensorboard", "to_wandb"]

EXTRA = "pip install 'holdfast[trackers]'"
ALIAS = "certified"


@dataclass(frozen=True)
class Logged:
    """Where something was logged, and what became of the model."""

    run: str  # id of an MLflow run, or the folder of a W&B run
    version: str | None = None  # of the registered model; W&B gives one when the run is synced
    promoted: bool = False
    refused: str = ""  # why the model was not promoted
    notes: tuple[str, ...] = ()


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def to_tensorboard(tracked: Tracked, where: Path) -> Path:
    """Write an event file into a folder and return it."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise _missing("tensorboard") from error
    writer = EventFileWriter(str(where))
    last = max((step for step, _ in tracked.history), default=0)
    for step, values in (*tracked.history, (last, tracked.outcome)):
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
    writer.close()
    return where


# -- Weights & Biases -------------------------------------------------------------------------------------------------


def to_wandb(
    tracked: Tracked, where: Path, *, project: str = "holdfast", register: str | None = None, alias: str = ALIAS
) -> Logged:
    """Write a run below a folder: offline, unless WANDB_MODE says ``online``. `wandb sync FOLDER` uploads it.

    With ``register`` the model is logged as an artifact of that name, of the type ``model``; it gets ``alias`` only
    where its certificate verifies.
    """
    try:
        import wandb
        from wandb.errors import Error
    except ImportError as error:
        raise _missing("wandb") from error
    mode = wandb_mode()
    artifact = None if register is None else _artifact(wandb, _registered(tracked), register, check_alias(alias))
    where.mkdir(parents=True, exist_ok=True)
    merged: dict[int, dict[str, float]] = {}
    for step, values in tracked.history:
        merged.setdefault(step, {}).update(values)
    try:
        session = wandb.init(
            mode=mode,
            dir=str(where),
            project=project,
            name=tracked.name,
            config=tracked.parameters,
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        for step, values in sorted(merged.items()):
            session.log(values, step=step)
        session.summary.update(tracked.outcome)
        promoted = artifact is not None and _registered(tracked).allowed
        if artifact is not None:
            session.log_artifact(artifact, aliases=["latest", *([alias] if promoted else [])])
        made, address = Path(session.dir).parent, session.url
        session.finish()
        wandb.teardown()  # its writer is another process: the file is whole once that one is gone
    except Error as error:  # no key, no server, a name that it does not take
        raise UserError(
            f"W&B refuses: {_first_line(error)}", do="see WANDB_API_KEY, WANDB_BASE_URL; or unset WANDB_MODE"
        ) from error
    notes = (f"uploaded: {address}",) if mode == "online" else ()
    if artifact is None:
        return Logged(str(made), notes=notes)
    return Logged(str(made), promoted=promoted, refused=_registered(tracked).refused, notes=notes)


def wandb_mode() -> Literal["online", "offline"]:
    """What WANDB_MODE asks for; offline without it, whatever WANDB_BASE_URL names."""
    wanted = os.environ.get("WANDB_MODE") or "offline"
    if wanted in ("online", "run"):
        return "online"
    if wanted in ("offline", "dryrun"):
        return "offline"
    raise UserError(f"WANDB_MODE is {wanted!r}, and nothing would be recorded", expected="online or offline")


def _artifact(wandb: Any, promotion: Promotion, name: str, alias: str) -> Any:
    """The model as an artifact that refers to its files where they lie: nothing is copied before it is uploaded."""
    metadata = {**promotion.metadata, "alias_if_certified": alias}
    try:
        artifact = wandb.Artifact(name, type="model", metadata=metadata)
    except ValueError as error:
        raise UserError(
            f"W&B does not take the name {name!r}", found=_first_line(error), do="see --register"
        ) from error
    for path in _files(promotion.model):
        inside = path.name if path == promotion.model else path.relative_to(promotion.model).as_posix()
        artifact.add_file(str(path), name=inside, policy="immutable")
    return artifact


def _files(model: Path) -> Iterator[Path]:
    yield from [model] if model.is_file() else sorted(path for path in model.rglob("*") if path.is_file())


# -- MLflow -----------------------------------------------------------------------------------------------------------


def to_mlflow(
    tracked: Tracked,
    where: str | None = None,
    *,
    experiment: str = "holdfast",
    register: str | None = None,
    alias: str = ALIAS,
) -> Logged:
    """Log a run; with ``register`` also a version of that model, which gets ``alias`` only if its certificate verifies.

    ``where`` is the address of a tracking server, or a database such as sqlite:///mlflow.db. A model whose very files
    are a version already gets no second one.
    """
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise _missing("mlflow") from error
    if register is not None:
        check_alias(alias)
    try:
        client = MlflowClient(tracking_uri=where, registry_uri=where)
        if register is not None:
            _create(client, register)
        with _mlflow_run(client, tracked, experiment) as number:
            _log(client, tracked, number)
            if register is None:
                return Logged(number)
            return _register(client, _registered(tracked), number, register, alias)
    except MlflowException as error:  # an address that is none, a name that it does not take, a server that is gone
        raise UserError(f"MLflow refuses: {_first_line(error)}", do="see --where and --register") from error


@contextmanager
def _mlflow_run(client: Any, tracked: Tracked, experiment: str) -> Generator[str]:
    """A run of its own, ended as what became of it."""
    found = client.get_experiment_by_name(experiment)
    experiment_id = found.experiment_id if found else client.create_experiment(experiment)
    number = client.create_run(experiment_id, run_name=tracked.name, tags=tracked.tags).info.run_id
    try:
        yield number
    except BaseException:
        client.set_terminated(number, "FAILED")
        raise
    client.set_terminated(number)


def _log(client: Any, tracked: Tracked, number: str) -> None:
    from mlflow.entities import Metric, Param

    now = int(time.time() * 1000)
    metrics = [
        Metric(_plain(name), value, now, step) for step, values in tracked.history for name, value in values.items()
    ]
    metrics += [Metric(_plain(name), value, now, 0) for name, value in tracked.outcome.items()]
    for start in range(0, len(metrics), 500):
        client.log_batch(number, metrics=metrics[start : start + 500])
    settings = [Param(_plain(name), value[:500]) for name, value in tracked.parameters.items()]
    for start in range(0, len(settings), 90):
        client.log_batch(number, params=settings[start : start + 90])
    for path in tracked.files:
        client.log_artifact(number, str(path))


def _create(client: Any, name: str) -> None:
    """The registered model, before anything is logged: a name that is refused leaves nothing behind."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _register(client: Any, promotion: Promotion, number: str, name: str, alias: str) -> Logged:
    """A version of the model; its certificate decides about its promotion, and nothing else does."""
    notes: list[str] = []
    version = _registered_before(client, name, promotion.files)
    if version is None:
        if promotion.model.is_file():
            client.log_artifact(number, str(promotion.model), "model")
        else:
            client.log_artifacts(number, str(promotion.model), "model")
        source = f"{client.get_run(number).info.artifact_uri}/model"
        version = str(client.create_model_version(name, source, number, tags=promotion.tags).version)
    else:
        notes.append(f"the same files are version {version} already: no other version was made")
    if promotion.allowed:
        for key, value in promotion.tags.items():
            client.set_model_version_tag(name, version, key, value)
    held = client.get_registered_model(name).aliases.get(alias)
    if promotion.allowed and str(held) != version:
        client.set_registered_model_alias(name, alias, version)
        notes += [] if held is None else [f"@{alias} was version {held} before"]
    elif held is not None and not promotion.allowed:
        notes.append(f"@{alias} stays at version {held}{_doubt(client, name, str(held))}")
    return Logged(number, version, promotion.allowed, promotion.refused, tuple(notes))


def _registered_before(client: Any, name: str, files: str) -> str | None:
    """The version whose files these are, the newest of several."""
    quote = '"' if "'" in name else "'"
    token: str | None = None
    found: list[int] = []
    while True:
        page = client.search_model_versions(f"name={quote}{name}{quote}", max_results=1000, page_token=token)
        found += [
            int(item.version) for item in page if item.tags.get("holdfast.files") == files and item.status == "READY"
        ]
        token = page.token
        if not token:
            return str(max(found)) if found else None


def _doubt(client: Any, name: str, version: str) -> str:
    """A version that got the alias by another hand."""
    verdict = client.get_model_version(name, version).tags.get("holdfast.verdict")
    return "" if verdict == "certified" else ", which no certificate of holdfast stands behind"


def _plain(name: str) -> str:
    """Names that MLflow takes: letters, digits, and _ - . space : /."""
    return "".join(item if item.isalnum() or item in "_-. :/" else "_" for item in name)[:240]


def _registered(tracked: Tracked) -> Promotion:
    assert tracked.promotion is not None, "what is registered was read with register=True"
    return tracked.promotion


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:300]


def _missing(name: str) -> UserError:
    return UserError(f"{name} is not installed", do=EXTRA)
