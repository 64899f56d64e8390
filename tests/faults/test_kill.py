"""A second process, killed half way with a real SIGKILL: the run goes on and ends with the same bits."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from holdfast.files import read_jsonl
from tests.processes import Forked

ROUND = """
[task]
target = "eight"
template = "the digit {{}}"
[data]
source = {{ kind = "digits" }}
constraint_images = 8
target_images = 20
[data.roles]
dev = 8
sealed = 0.0
test = 8
[model]
architecture = "tiny"
head_rank = 2
[method]
views = "paired"
[train]
steps = {steps}
batch = 8
images_per_task = 2
learning_rate = 1e-3
log_every = 1
checkpoint_every = 3
device = "cpu"
[evaluate]
every = 5
[candidates]
interpolation = [1.0]
"""

Start = Callable[..., Forked]


@pytest.fixture
def start() -> Generator[Start]:
    """Start the command line in a process of its own; none outlives its test."""
    started: list[Forked] = []

    def begin(*arguments: str) -> Forked:
        started.append(Forked("-m", "holdfast", *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def wait_for_step(process: Forked, metrics: Path, step: int) -> None:
    while process.poll() is None:
        if metrics.exists() and any(item["step"] >= step for item in read_jsonl(metrics)):
            return
        time.sleep(0.005)
    pytest.fail(f"step {step} was not reached: {process.printed()[1]}")


def records(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "images_per_second"} for line in lines]


def test_killed_and_resumed_ends_with_the_same_bits(start: Start, tmp_path: Path) -> None:
    toml = tmp_path / "ROUND.toml"
    toml.write_text(ROUND.format(steps=14))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert start("develop", str(toml), "--anyway", "--out", str(whole), "-q").wait() in (0, 4)
    process = start("develop", str(toml), "--anyway", "--out", str(parts), "-q")
    for step in (4, 11):
        wait_for_step(process, parts / "metrics.jsonl", step)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process = start("develop", "--resume", str(parts), "-q")
    assert process.wait() in (0, 4)
    assert records(whole) == records(parts)
    for name in ("model/model.safetensors", "result.json", "predictions/new-test.parquet"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name


def test_sigterm_finishes_the_step_and_says_how_to_go_on(start: Start, tmp_path: Path) -> None:
    toml, run = tmp_path / "ROUND.toml", tmp_path / "run"
    toml.write_text(ROUND.format(steps=100000).replace("checkpoint_every = 3", "checkpoint_every = 50000"))
    process = start("develop", str(toml), "--anyway", "--out", str(run), "-q")
    wait_for_step(process, run / "metrics.jsonl", 3)
    process.terminate()
    _, message = process.communicate()
    assert process.returncode == 143
    assert f"holdfast develop --resume {run}" in message
    assert len(list((run / "checkpoints").glob("step-*.pt"))) == 1
