"""Real event files, real offline runs of Weights & Biases, a real MLflow server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.artifacts import RunFolder
from holdfast.files import write_json
from holdfast.report.content import read_run
from holdfast.report.tracked import tracked_run
from holdfast.report.trackers import scalars, to_tensorboard, to_wandb
from tests.certify.helpers import rows, write_csv
from tests.certify.test_cli import Shell
from tests.report.fabricated import certify_made_up_run, made_up_run, tampered_runs


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    for name in ("WANDB_MODE", "WANDB_BASE_URL", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return Shell(monkeypatch, capsys)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certify_made_up_run(made_up_run(tmp_path_factory.mktemp("run") / "run"))


@pytest.fixture(scope="module")
def undecided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = made_up_run(tmp_path_factory.mktemp("undecided") / "undecided", sealed="failed", seed=1)
    write_json(RunFolder(made).model / "model.json", {"fingerprint": "sha256:4", "classes": ["fog"]})
    return made


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

    read = EventAccumulator(str(to_tensorboard(tracked_run(run), tmp_path)), size_guidance={"scalars": 0})
    read.Reload()
    found = [(scalar.step, scalar.value) for scalar in read.Scalars("train/h/rain")]
    assert found == [(step, pytest.approx(value)) for step, value in expected(run, "train/h/rain")]
    assert read.Scalars("result/certified")[0].value == 1.0
    dev = read_run(run).dev
    lost, images = (sum(getattr(task, name) for task in dev.tasks.values()) for name in ("lost", "examples"))
    assert read.Scalars("result/negative_flip_rate")[0].value == pytest.approx(lost / images)
    assert read.Scalars("result/negative_flip_rate/fog")[0].value == pytest.approx(dev.tasks["fog"].lost / 40)


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


def logged_to_wandb(folder: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    records: list[Any] = []
    for data in records_of(next(folder.glob("*.wandb"))):
        records.append(wandb_internal_pb2.Record())
        records[-1].ParseFromString(data)
    return records


@pytest.mark.slow
def test_weights_and_biases_stays_offline_and_holds_every_step(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # an address alone is no wish to upload
    made = to_wandb(tracked_run(run), tmp_path)
    found: list[tuple[int, float]] = []
    for record in logged_to_wandb(Path(made.run)):
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "dev/target_gain" in items:
                found.append((int(items["_step"]), items["dev/target_gain"]))
    assert found == [(step, pytest.approx(value)) for step, value in expected(run, "dev/target_gain")]


@pytest.mark.slow
@pytest.mark.parametrize("certified", [True, False])
def test_an_artifact_has_the_alias_only_where_it_is_certified(
    certified: bool, run: Path, undecided: Path, shell: Shell, tmp_path: Path
) -> None:
    tracked = run if certified else undecided
    code = shell("track", tracked, "--to", "wandb", "--where", tmp_path, "--register", "weather", "--alias", "shipped")
    assert code == (0 if certified else 4)
    told = "promoted to @shipped" if certified else "not promoted: the old model was kept, verdict undecided"
    assert f"weather (model artifact): {told}" in shell.out
    (artifact,) = [
        record.artifact for record in logged_to_wandb(Path(shell.out.splitlines()[0])) if record.HasField("artifact")
    ]
    assert (artifact.name, artifact.type) == ("weather", "model")
    assert set(artifact.aliases) == ({"latest", "shipped"} if certified else {"latest"})
    metadata = json.loads(artifact.metadata)
    assert metadata["verdict"] == ("certified" if certified else "undecided")
    assert metadata["fingerprint"] == ("sha256:3" if certified else "sha256:4")
    assert metadata["margins"] == dict.fromkeys(("fog", "rain", "sun", "snow"), 0.3)
    assert metadata["confidence"] == 0.95
    assert metadata["target_gain"] == read_run(tracked).dev.target_gain
    files = {path.name for path in RunFolder(tracked).model.iterdir()}
    assert {entry.path for entry in artifact.manifest.contents} == files


def test_what_cannot_work_is_one_sentence(
    run: Path, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Callable[..., None]
) -> None:
    certificate = run / "certificate.json"
    refused: list[tuple[tuple[object, ...], str]] = [
        ((run, "--to", "tensorboard", "--register", "weather"), "--to tensorboard and --register at once"),
        ((certificate, "--to", "tensorboard"), "has no steps to draw"),
        ((run, "--to", "wandb", "--alias", "shipped"), "no --register and --alias at once"),
        ((run, "--to", "mlflow", "--register", "weather", "--model", tmp_path), "a run and --model at once"),
        ((run, "--to", "wandb", "--where", "http://localhost:8080"), "is no folder"),
        ((run, "--to", "wandb", "--where", tmp_path, "--register", "a/b"), "W&B does not take the name 'a/b'"),
        *(
            ((run, "--to", to, "--register", "weather", "--alias", alias), "cannot be the alias")
            for to in ("wandb", "mlflow")
            for alias in ("latest", "v3", "a:b", "")
        ),
    ]
    for words, sentence in refused:
        assert shell("track", *words) == 2, words
        assert sentence in shell.err
        assert "Traceback" not in shell.err
        tried("bad inputs")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert shell("track", run, "--to", "wandb", "--where", tmp_path) == 2
    assert "nothing would be recorded" in shell.err


@pytest.mark.slow
def test_wandb_mode_online_is_honoured_and_a_server_that_is_gone_is_one_sentence(
    run: Path, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Callable[..., None]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can answer there
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
        assert shell("track", run, "--to", "wandb", "--where", tmp_path) == 2
    assert "W&B refuses:" in shell.err
    assert "Traceback" not in shell.err
    tried("addresses")


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
def test_only_a_certified_run_is_promoted_on_a_real_server(
    run: Path,
    undecided: Path,
    server: str,
    shell: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tried: Callable[..., None],
) -> None:
    from mlflow.artifacts import download_artifacts
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    client = MlflowClient(server, server)

    def aliases() -> dict[str, str]:
        return {name: str(version) for name, version in client.get_registered_model("weather").aliases.items()}

    def track(subject: Path, *more: object) -> int:
        return shell("track", subject, "--to", "mlflow", "--where", server, "--register", "weather", *more)

    assert track(undecided) == 4
    assert "weather version 1: not promoted: the old model was kept, verdict undecided" in shell.out
    assert aliases() == {}
    client.set_registered_model_alias("weather", "certified", "1")  # by another hand
    assert track(undecided) == 4
    assert "the same files are version 1 already" in shell.out
    assert "@certified stays at version 1, which no certificate of holdfast stands behind" in shell.out
    assert len(client.search_model_versions("name='weather'")) == 1

    assert track(run) == 0
    assert "weather version 2: promoted to @certified" in shell.out
    assert "@certified was version 1 before" in shell.out
    assert aliases() == {"certified": "2"}
    number = next(line.removeprefix("run ") for line in shell.out.splitlines() if line.startswith("run "))
    history = client.get_metric_history(number, "dev/target_gain")
    assert sorted((item.step, item.value) for item in history) == expected(run, "dev/target_gain")
    assert client.get_run(number).data.metrics["result/negative_flip_rate"] == read_run(run).dev.flips.negative
    names = {artifact.path for artifact in client.list_artifacts(number)}
    assert {"round.json", "result.json", "certificate.json", "model"} <= names
    assert client.get_model_version("weather", "1").tags["holdfast.verdict"] == "undecided"

    assert track(run) == 0  # again: the same version
    assert "the same files are version 2 already" in shell.out
    assert len(client.search_model_versions("name='weather'")) == 2
    assert track(undecided) == 4
    assert "@certified stays at version 2" in shell.out
    assert "no certificate" not in shell.out

    for wrong in tampered_runs(run, tmp_path):
        assert track(wrong) in (2, 3), wrong.name
        assert shell.err.startswith("error: ")
        assert "Traceback" not in shell.err
        tried("bad inputs")
    assert aliases() == {"certified": "2"}
    assert len(client.search_model_versions("name='weather'")) == 2  # nothing of it was registered

    served = Path(download_artifacts("models:/weather@certified", dst_path=str(tmp_path / "served")))
    model = RunFolder(run).model
    assert {path.name: path.read_bytes() for path in served.iterdir()} == {
        path.name: path.read_bytes() for path in model.iterdir()
    }


@pytest.mark.slow
def test_a_certificate_of_any_model_promotes_exactly_that_model(
    server: str, shell: Shell, tmp_path: Path, tried: Callable[..., None]
) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(server, server)
    weights = tmp_path / "new.onnx"
    weights.write_bytes(b"any framework's file")
    columns = "example_id,task,label,old,new"
    for name, spec in (("good", {"clear": (500, 5, 3)}), ("open", {"clear": (20, 0, 0)})):
        table = write_csv(tmp_path / f"{name}.csv", rows(spec), columns)
        certificate = tmp_path / f"{name}.json"
        shell("certify", "--predictions", table, "--margin", "0.02", "--new-model", weights, "--out", certificate)
    moved = tmp_path / "elsewhere" / "model.onnx"
    moved.parent.mkdir()
    weights.rename(moved)

    def track(certificate: str, *more: object) -> int:
        words = ("--to", "mlflow", "--where", server, "--register", "any", *more)
        return shell("track", tmp_path / certificate, *words)

    assert track("open.json", "--model", moved) == 4
    assert "not promoted: verdict undecided" in shell.out
    assert track("good.json") == 2  # where it was, it is no longer
    assert "say where the certified model is with --model" in shell.err
    assert track("good.json", "--model", moved) == 0
    assert "any version 1: promoted to @certified" in shell.out  # the same files, certified now
    version = client.get_model_version_by_alias("any", "certified")
    assert version.tags["holdfast.verdict"] == "certified"
    (tmp_path / "other.onnx").write_bytes(b"another model")
    assert track("good.json", "--model", tmp_path / "other.onnx") == 3
    assert "is not the model that" in shell.err
    tried("bad inputs")
    (tmp_path / "good.csv").unlink()  # nothing left to compute the verdict again from
    assert track("good.json", "--model", moved, "--alias", "other") == 4
    assert "not promoted: the certificate is not fully checked" in shell.out
    assert set(client.get_registered_model("any").aliases) == {"certified"}
