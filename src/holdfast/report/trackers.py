"""The metrics of a run for trackers that people already use: TensorBoard, Weights & Biases (offline), MLflow.

All three are fed from the run's ``metrics.jsonl``, under the same names, after the fact: training knows none of them.
In MLflow a run can be registered as a version of a model; only a certified one gets the alias that serving asks for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.artifacts import RunFolder, read_json
from holdfast.errors import UserError
from holdfast.report.content import RunContent, read_run
from holdfast.report.shapes import read_metrics

EXTRA = "pip install 'holdfast[trackers]'"


def scalars(run: RunFolder) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, name -> value) of every record: ``train/objective``, ``train/h/CLASS``, ``dev/target_gain``, …"""
    for record in read_metrics(run.metrics):
        values: dict[str, float] = {}
        if record.get("evaluation") is not None:
            _flatten("dev", record["evaluation"], values)
        else:
            _flatten("train", {name: value for name, value in record.items() if name != "step"}, values)
        yield int(record["step"]), values


def _flatten(prefix: str, value: Any, into: dict[str, float]) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _flatten(f"{prefix}/{name}", inner, into)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        into[prefix] = float(value)


def outcome(content: RunContent) -> dict[str, float]:
    """The end of a run in single figures."""
    found = {
        "result/certified": float(content.verdict == "certified"),
        "result/kept_old": float(content.kept_old),
        "result/dev_safety": content.dev.dev_safety,
        "result/target_gain": content.dev.target_gain,
    }
    if content.test is not None:
        found |= {
            "result/test_dev_safety": content.test.dev_safety,
            "result/test_target_gain": content.test.target_gain,
        }
    return found


def parameters(run: RunFolder) -> dict[str, str]:
    """The round's settings as flat text."""
    found: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else str(name), inner)
        else:
            found[prefix] = str(value)

    walk("", read_json(run.config))
    return found


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def to_tensorboard(run: Path, where: Path | None = None) -> Path:
    """Write an event file and return its folder (default: ``tensorboard`` in the run)."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise _missing("tensorboard") from error
    folder = RunFolder.open(run)
    place = where or run / "tensorboard"
    writer = EventFileWriter(str(place))
    last = 0
    for step, values in (*scalars(folder), *_last(run)):
        last = max(last, step)
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        writer.add_event(Event(wall_time=time.time(), step=last if step < 0 else step, summary=summary))
    writer.close()
    return place


def _last(run: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """The outcome, at the last step, where the run is finished."""
    if RunFolder(run).result.exists():
        yield -1, outcome(read_run(run))


# -- Weights & Biases -------------------------------------------------------------------------------------------------


def to_wandb(run: Path, where: Path | None = None, project: str = "holdfast") -> Path:
    """Write an offline run and return its folder; `wandb sync FOLDER` uploads it, if and when you wish."""
    try:
        import wandb
    except ImportError as error:
        raise _missing("wandb") from error
    folder = RunFolder.open(run)
    place = where or run / "wandb-offline"
    place.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    session = wandb.init(
        mode="offline",
        dir=str(place),
        project=project,
        name=run.resolve().name,
        config=parameters(folder),
        settings=settings,
    )
    merged: dict[int, dict[str, float]] = {}
    for step, values in scalars(folder):
        merged.setdefault(step, {}).update(values)
    for step, values in sorted(merged.items()):
        session.log(values, step=step)
    for _, values in _last(run):
        session.summary.update(values)
    made = Path(session.dir).parent
    session.finish()
    wandb.teardown()  # its writer is another process: the file is whole once that one is gone
    return made


# -- MLflow -----------------------------------------------------------------------------------------------------------


def to_mlflow(
    run: Path,
    where: str | None = None,
    *,
    experiment: str = "holdfast",
    register: str | None = None,
    alias: str = "certified",
) -> dict[str, Any]:
    """Log a run; with ``register`` also a version of that model, which gets ``alias`` only if it is certified.

    ``where`` is the address of a tracking server, or a database such as sqlite:///mlflow.db. Returns run id, version
    and whether the version was promoted.
    """
    try:
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise _missing("mlflow") from error
    content = read_run(run)
    try:
        return _logged_to_mlflow(content, run, where, experiment, register, alias)
    except MlflowException as error:  # an address that is none, a name that it does not take, a server that is gone
        raise UserError(
            f"MLflow refuses: {(str(error).splitlines() or [repr(error)])[0][:300]}", do="see --where and --register"
        ) from error


def _logged_to_mlflow(
    content: RunContent, run: Path, where: str | None, experiment: str, register: str | None, alias: str
) -> dict[str, Any]:
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import MlflowClient

    folder = content.folder
    client = MlflowClient(tracking_uri=where, registry_uri=where)
    found = client.get_experiment_by_name(experiment)
    experiment_id = found.experiment_id if found else client.create_experiment(experiment)
    tags = [RunTag("holdfast.verdict", content.verdict or "none"), RunTag("holdfast.target", content.target)]
    session = client.create_run(experiment_id, run_name=run.resolve().name, tags={tag.key: tag.value for tag in tags})
    number = session.info.run_id
    now = int(time.time() * 1000)
    metrics = [
        Metric(_plain(name), value, now, step) for step, values in scalars(folder) for name, value in values.items()
    ]
    metrics += [Metric(_plain(name), value, now, 0) for name, value in outcome(content).items()]
    for start in range(0, len(metrics), 500):
        client.log_batch(number, metrics=metrics[start : start + 500])
    settings = [Param(_plain(name), value[:500]) for name, value in parameters(folder).items()]
    for start in range(0, len(settings), 90):
        client.log_batch(number, params=settings[start : start + 90])
    for path in (folder.config, folder.result, folder.certificate):
        if path.exists():
            client.log_artifact(number, str(path))
    reported: dict[str, Any] = {"run": number, "verdict": content.verdict, "version": None, "promoted": False}
    if register is not None:
        reported |= _register(client, content, number, register, alias)
    client.set_terminated(number)
    return reported


def _register(client: Any, content: RunContent, number: str, name: str, alias: str) -> dict[str, Any]:
    """A version of the model; the verdict decides about its promotion, and nothing else does."""
    from mlflow.exceptions import MlflowException

    client.log_artifacts(number, str(content.folder.model), "model")
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"{client.get_run(number).info.artifact_uri}/model"
    fingerprint = str(read_json(content.folder.model / "model.json")["fingerprint"])
    tags = {"holdfast.verdict": content.verdict or "none", "holdfast.fingerprint": fingerprint}
    version = client.create_model_version(name, source, number, tags=tags)
    promoted = content.verdict == "certified" and not content.kept_old
    if promoted:
        client.set_registered_model_alias(name, alias, version.version)
    return {"version": str(version.version), "promoted": promoted}


def _plain(name: str) -> str:
    """Names that MLflow takes: letters, digits, and _ - . space : /."""
    return "".join(item if item.isalnum() or item in "_-. :/" else "_" for item in name)[:240]


def _missing(name: str) -> UserError:
    return UserError(f"{name} is not installed", do=EXTRA)
