"""SIGKILL at a hundred random moments of whole commands: the same command again comes to the end of an unbroken one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KILLS = {"develop": 25, "project": 20, "tune": 20, "pack": 15, "certify": 20}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KILLS)
def test_killed_at_random_moments(kind: str, tmp_path: Path, tried: Callable[..., None]) -> None:
    command = [sys.executable, "-m", "tests.faults.random_kills", str(tmp_path), str(KILLS[kind]), "7", kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)[kind]
    print(f"{kind}: killed {found['killed']} times, survived {found['survived']}")
    assert found["wrong"] == []
    tried("signals", found["killed"])
