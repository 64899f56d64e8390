"""The CI recipe, run locally."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.certify.helpers import rows, write_csv

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"


def run(folder: Path, spec: dict[str, tuple[int, int, int]], **settings: str) -> subprocess.CompletedProcess[str]:
    columns = "example_id,task,label,prediction"
    for model in ("old", "new"):
        write_csv(folder / f"{model}.csv", [{**row, "prediction": row[model]} for row in rows(spec)], columns)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OLD": "old.csv", "NEW": "new.csv", "MARGIN": "0.02", **settings}
    return subprocess.run(
        ["bash", str(RECIPES / "certify.sh")], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("spec", "code", "words"),
    [
        ({"clear": (500, 5, 3), "snowy": (400, 4, 1)}, 0, "✓ certified"),
        ({"clear": (500, 5, 60), "snowy": (400, 4, 1)}, 3, "a protected task regressed"),
        ({"clear": (500, 5, 3), "snowy": (20, 0, 0)}, 4, "the evidence does not suffice"),
    ],
)
def test_a_pull_request_fails_unless_certified(tmp_path: Path, spec, code: int, words: str) -> None:
    done = run(tmp_path, spec, GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"))
    assert done.returncode == code, done.stderr
    assert words in done.stdout
    assert "verdict:" in (tmp_path / "summary.md").read_text()
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert certificate["settings"]["margins"] == {"clear": 0.02, "snowy": 0.02}


def test_bad_input_fails_too(tmp_path: Path) -> None:
    done = run(tmp_path, {"clear": (50, 5, 3)}, MARGIN="2")
    assert done.returncode == 2
    assert "in [0, 1)" in done.stderr


def test_the_action_runs_the_script_with_what_it_needs() -> None:
    action = (RECIPES / "certify.yml").read_text()
    script = (RECIPES / "certify.sh").read_text()
    assert "bash .github/certify.sh" in action
    for name in ("OLD", "NEW", "MARGIN", "CONFIDENCE"):
        assert f"{name}:" in action
        assert f"${name}" in script or f"${{{name}" in script
