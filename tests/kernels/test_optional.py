"""Without ``holdfast/kernels`` the product works: the same round, the same bits, on a machine that needs no speed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

ROUND = """
seed = 3
[task]
target = "eight"
[data]
leaks = "allow"
[data.source]
kind = "digits"
[model]
architecture = "tiny"
head_rank = 2
[train]
steps = 3
batch = 8
images_per_task = 2
device = "cpu"
[evaluate]
every = 3
[candidates]
interpolation = [0.0, 1.0]
target_bias = [0.0]
[certify]
test_sealed = false
"""
SCRIPT = """
import json, sys
from pathlib import Path
import holdfast
from holdfast.config import RoundConfig, parse, read_toml
from holdfast.model.compute import fast_kernels
from holdfast.model.folder import load_model, model_fingerprint
folder = Path(sys.argv[1])
config = parse(RoundConfig, read_toml(folder / "ROUND.toml"), "ROUND")
result = holdfast.develop(config, folder / sys.argv[2], folder, quiet=True)
model = model_fingerprint(load_model(folder / sys.argv[2] / "candidates" / "step-00000003"))
found = [candidate.dev.target_gain for candidate in result.candidates]
print(json.dumps({"kernels": fast_kernels() is not None, "model": model, "gains": found}))
"""


def developed(folder: Path, package: Path, name: str, *changes: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(folder), name, *changes]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)


@pytest.mark.slow
def test_a_round_without_the_kernels_ends_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "ROUND.toml").write_text(ROUND)
    whole, without = tmp_path / "whole", tmp_path / "without"
    for copy in (whole, without):
        shutil.copytree(Path(holdfast.__file__).parent, copy / "holdfast", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(without / "holdfast" / "kernels")
    results = [developed(tmp_path, package, package.name + "-run") for package in (whole, without)]
    assert [result.returncode for result in results] == [0, 0], results[1].stderr
    first, second = (json.loads(result.stdout.splitlines()[-1]) for result in results)
    assert (first.pop("kernels"), second.pop("kernels")) == (True, False)
    assert first == second
    # Whoever asks for them by name is told.
    (tmp_path / "ROUND.toml").write_text(ROUND.replace("steps = 3", 'steps = 3\nspeed = "fast"'))
    refused = developed(tmp_path, without, "refused")
    assert "needs the package holdfast.kernels" in refused.stderr
