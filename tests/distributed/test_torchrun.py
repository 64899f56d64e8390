"""The commands as several ranks run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from holdfast.artifacts import RunFolder, read_predictions
from holdfast.files import read_json

TUNE = """
template = "the digit {}"
[data]
source = { kind = "digits" }
[data.roles]
base = 20
dev = 8
sealed = 0.0
test = 8
[model]
architecture = "tiny"
[train]
steps = 10
batch = 16
images_per_task = 3
learning_rate = 1e-3
device = "cpu"
shard = "full"
[evaluate]
every = 10
"""
ROUND = """
[task]
target = "eight"
[data]
source = { kind = "digits" }
constraint_images = 8
target_images = 20
[data.roles]
base = 20
dev = 8
sealed = 0.0
test = 8
[model]
start = "runs/TUNE/model"
head_rank = 2
[method]
views = "paired"
[train]
steps = 8
batch = 8
images_per_task = 2
learning_rate = 1e-3
log_every = 2
checkpoint_every = 4
device = "cpu"
precision = "float64"
[evaluate]
every = 4
[candidates]
interpolation = [0.5, 1.0]
"""


def command(folder: Path, *words: str, ranks: int = 1) -> str:
    """What is printed. torchrun makes every exit code but 0 a failure, the one of a model that is kept too."""
    start = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    call = [sys.executable, *start, "-m", "holdfast", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert "/holdfast/" not in done.stderr, done.stderr  # in a traceback; torchrun's own is about exit codes
    return done.stdout


@pytest.mark.slow
def test_tune_develop_and_bench_on_two_ranks_with_sharded_weights(tmp_path: Path) -> None:
    (tmp_path / "TUNE.toml").write_text(TUNE)
    (tmp_path / "ROUND.toml").write_text(ROUND)
    assert command(tmp_path, "tune", "TUNE.toml", "-q", ranks=2).count("runs/TUNE/model") == 1
    command(tmp_path, "develop", "ROUND.toml", "--anyway", "--out", "alone", "-q")
    output = command(
        tmp_path, "develop", "ROUND.toml", "--anyway", "--out", "sharded", "-q", "--shard", "full", ranks=2
    )
    assert output.count("Model in sharded/model") == 1  # the first rank speaks for all
    alone, sharded = RunFolder(tmp_path / "alone"), RunFolder(tmp_path / "sharded")
    assert read_json(sharded.config)["train"]["shard"] == "full"
    first, second = read_json(alone.result), read_json(sharded.result)
    for name in ("chosen", "kept_old", "blocked_by", "frontier"):
        assert first[name] == second[name], name
    names = sorted(path.name for path in (alone.root / "predictions").iterdir())
    assert len(names) >= 7  # old, two checkpoints, two interpolations on dev; old and new on test
    for name in names:
        left, right = (read_predictions(run.root / "predictions" / name) for run in (alone, sharded))
        assert left["prediction"].equals(right["prediction"]), name
        np.testing.assert_allclose(right["loss"].to_numpy(), left["loss"].to_numpy(), rtol=1e-6, err_msg=name)
    assert command(tmp_path, "bench", "ROUND.toml", "--steps", "4", ranks=2).count("images") == 1
