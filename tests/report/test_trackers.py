"""Real event files, a real offline run of Weights & Biases, a real MLflow server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.artifacts import RunFolder, write_json
from holdfast.report.trackers import scalars, to_mlflow, to_tensorboard, to_wandb
from tests.report.fabricated import made_up_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = made_up_run(tmp_path_factory.mktemp("run") / "run")
    _model(made)
    return made


def _model(run: Path) -> None:
    write_json(RunFolder(run).model / "model.json", {"fingerprint": "sha256:3", "classes": ["fog"]})


def expected(run: Path, name: str) -> list[tuple[int, float]]:
    return [(step, values[name]) for step, values in scalars(RunFolder(run)) if name in values]


def test_names_and_values_are_those_of_the_metrics_file(run: Path) -> None:
    lines = [json.loads(line) for line in RunFolder(run).metrics.read_text(encoding="utf-8").splitlines()]
    found = [(line["step"], line["weight"]["fog"]) for line in lines if "weight" in line]
    assert expected(run, "train/weight/fog") == found
    assert expected(run, "dev/target_gain") == [
        (line["step"], line["evaluation"]["target_gain"]) for line in lines if "evaluation" in line
    ]


def test_event_files_can_be_read_by_tensorboard(run: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(to_tensorboard(run, tmp_path)), size_guidance={"scalars": 0})
    read.Reload()
    found = [(scalar.step, scalar.value) for scalar in read.Scalars("train/h/rain")]
    assert found == [(step, pytest.approx(value)) for step, value in expected(run, "train/h/rain")]
    assert read.Scalars("result/certified")[0].value == 1.0


def records_of(file: Path) -> Iterator[bytes]:
    """The records of an offline run: a LevelDB log, in blocks of 32 KiB, behind a header of 7 bytes."""
    content, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield whole
            whole = b""


@pytest.mark.slow
def test_weights_and_biases_stays_offline_and_holds_every_step(run: Path, tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    made = to_wandb(run, tmp_path)
    found: list[tuple[int, float]] = []
    for data in records_of(next(made.glob("*.wandb"))):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "dev/target_gain" in items:
                found.append((int(items["_step"]), items["dev/target_gain"]))
    assert found == [(step, pytest.approx(value)) for step, value in expected(run, "dev/target_gain")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An MLflow server of its own, on a free port."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    files = str(folder / "files")
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
               "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", files]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder)
    try:
        while process.poll() is None:
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=60):
                    break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail("the MLflow server did not start")
        yield address
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_only_a_certified_run_is_promoted_on_a_real_server(run: Path, server: str, tmp_path: Path) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    undecided = made_up_run(tmp_path / "undecided", sealed="failed", seed=1)
    _model(undecided)
    client = MlflowClient(server, server)
    first = to_mlflow(undecided, server, register="weather")
    assert not first["promoted"]
    with pytest.raises(MlflowException):
        client.get_model_version_by_alias("weather", "certified")
    second = to_mlflow(run, server, register="weather")
    assert second["promoted"]
    assert client.get_model_version_by_alias("weather", "certified").version == second["version"]
    third = to_mlflow(undecided, server, register="weather")
    assert client.get_model_version_by_alias("weather", "certified").version == second["version"]
    assert client.get_model_version("weather", third["version"]).tags["holdfast.verdict"] == "undecided"
    history = client.get_metric_history(second["run"], "dev/target_gain")
    assert sorted((item.step, item.value) for item in history) == expected(run, "dev/target_gain")
    names = {artifact.path for artifact in client.list_artifacts(second["run"])}
    assert {"round.json", "result.json", "model"} <= names
