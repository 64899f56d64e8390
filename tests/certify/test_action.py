"""The GitHub Action, its shell steps run here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.certify.helpers import rows, write_csv

ROOT = Path(__file__).parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
GOOD = {"clear": (500, 5, 3), "snowy": (400, 4, 1)}
BASH = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c"]  # as GitHub runs `shell: bash`
# `gh` that notes down what it is asked, and knows of one earlier comment if the file says so.
GH = """#!/usr/bin/env bash
echo "$@" >> "$RUNNER_TEMP/asked.txt"
if [[ "$*" == *--paginate* ]]; then cat "$RUNNER_TEMP/former.txt" 2>/dev/null; exit 0; fi
exit "${GH_CODE:-0}"
"""


def inputs(given: dict[str, str]) -> dict[str, str]:
    """The environment of the second step, as GitHub would fill it in."""
    values = {name: str(item.get("default", "")) for name, item in ACTION["inputs"].items()} | given

    def filled(text: str) -> str:
        found = re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: values[match[1]], text)
        return found.replace("${{ github.event.pull_request.number }}", "7").replace("${{ github.token }}", "secret")

    return {name: filled(text) for name, text in STEPS["Certify"]["env"].items()}


def run(folder: Path, spec: dict[str, tuple[int, int, int]], **given: str) -> subprocess.CompletedProcess[str]:
    columns = "example_id,task,label,prediction"
    for model in ("old", "new"):
        write_csv(folder / f"{model}.csv", [{**row, "prediction": row[model]} for row in rows(spec)], columns)
    temporary = folder / "runner"
    (temporary / "holdfast" / "bin").mkdir(parents=True, exist_ok=True)
    program = temporary / "holdfast" / "bin" / "holdfast"
    program.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" -m holdfast "$@"\n')
    fake = temporary / "gh"
    fake.write_text(GH)
    for file in (program, fake):
        file.chmod(0o755)
    settings = {"old": "old.csv", "new": "new.csv", "margin": "0.02"} | {
        name: value for name, value in given.items() if name.islower()
    }
    environment = {
        **os.environ,
        **inputs(settings),
        **{name: value for name, value in given.items() if name.isupper()},
        "PATH": f"{temporary}{os.pathsep}{os.environ['PATH']}",
        "RUNNER_TEMP": str(temporary),
        "GITHUB_OUTPUT": str(folder / "output.txt"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        "GITHUB_REPOSITORY": "owner/models",
        "GITHUB_JOB": "certify",
    }
    command = [*BASH, STEPS["Certify"]["run"]]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("spec", "code", "verdict"),
    [
        (GOOD, 0, "certified"),
        ({"clear": (500, 5, 60), "snowy": (400, 4, 1)}, 3, "regressed"),
        ({"clear": (500, 5, 3), "snowy": (20, 0, 0)}, 4, "undecided"),
    ],
)
def test_a_pull_request_fails_unless_certified(tmp_path: Path, spec: Any, code: int, verdict: str) -> None:
    done = run(tmp_path, spec)
    assert done.returncode == code, done.stderr
    assert (f"::error::holdfast certify: {verdict}" in done.stdout) == (code != 0)
    assert (tmp_path / "output.txt").read_text() == f"verdict={verdict}\n"
    summary = (tmp_path / "summary.md").read_text()
    assert f"holdfast {verdict}" in summary.splitlines()[0]
    assert "| snowy |" in summary
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert certificate["settings"]["margins"] == {"clear": 0.02, "snowy": 0.02}
    assert certificate["report"]["verdict"] == verdict
    assert not (tmp_path / "runner" / "asked.txt").exists()  # no comment was asked for


def test_what_is_given_reaches_the_command(tmp_path: Path) -> None:
    spec = {**GOOD, "foggy": (60, 20, 1), "rainy": (300, 3, 1)}
    done = run(
        tmp_path,
        spec,
        margin="0.03\nsnowy=0.05\n",
        target="foggy",
        confidence="0.9",
        claim="each",
        arguments="--pool=wet and cold=rainy,clear\n",
        certificate="kept here.json",
    )
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "kept here.json").read_text())["settings"]
    assert settings["margins"] == {"snowy": 0.05, "wet and cold": 0.03}
    assert (settings["target"], settings["confidence"], settings["claim"]) == ("foggy", 0.9, "each")


def test_bad_input_fails_and_says_why(tmp_path: Path) -> None:
    done = run(tmp_path, GOOD, margin="2", comment="true")
    assert done.returncode == 2
    assert "in [0, 1)" in done.stderr
    assert (tmp_path / "output.txt").read_text() == "verdict=\n"
    assert "in [0, 1)" in (tmp_path / "summary.md").read_text()


def test_inputs_are_data_and_never_shell(tmp_path: Path) -> None:
    done = run(tmp_path, GOOD, target='$(touch hit)`touch hit`"; touch hit; "', arguments="--labels=$(touch hit)")
    assert done.returncode == 2
    assert not (tmp_path / "hit").exists()
    for step in STEPS.values():
        assert "${{" not in step["run"]


def test_one_comment_a_job_which_the_next_run_writes_over(tmp_path: Path) -> None:
    assert run(tmp_path, GOOD, comment="true").returncode == 0
    asked = (tmp_path / "runner" / "asked.txt").read_text().splitlines()
    assert len(asked) == 2
    assert "--method POST repos/owner/models/issues/7/comments" in asked[1]
    body = (tmp_path / "runner" / "holdfast-comment.md").read_text()
    assert body.splitlines()[0] == "<!-- holdfast certify: certify -->"
    assert "holdfast certified" in body
    url = "https://api.example/repos/owner/models/issues/comments/12"
    (tmp_path / "runner" / "former.txt").write_text(url + "\n")
    assert run(tmp_path, GOOD, comment="true").returncode == 0
    assert f"--method PATCH {url}" in (tmp_path / "runner" / "asked.txt").read_text().splitlines()[-1]


def test_a_comment_that_may_not_be_written_changes_no_verdict(tmp_path: Path) -> None:
    done = run(tmp_path, GOOD, comment="true", GH_CODE="1")
    assert done.returncode == 0
    assert "::warning::the comment could not be written" in done.stdout


def test_the_recipe_uses_inputs_that_there_are() -> None:
    recipe = yaml.safe_load((ROOT / "docs" / "recipes" / "certify.yml").read_text(encoding="utf-8"))
    (used,) = [step["with"] for step in recipe["jobs"]["certify"]["steps"] if "holdfast@" in step.get("uses", "")]
    required = {name for name, item in ACTION["inputs"].items() if item.get("required")}
    assert required <= set(used) <= set(ACTION["inputs"])


@pytest.mark.slow
def test_the_install_step_brings_a_holdfast_without_torch(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    base = Path(sys.executable).resolve().parent
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")} | {
        "PATH": f"{base}{os.pathsep}{os.environ['PATH']}",
        "RUNNER_TEMP": str(tmp_path),
        "SOURCE": str(source),
        "VERSION": "",
    }
    command = [
        "bash",
        "--noprofile",
        "--norc",
        "-eo",
        "pipefail",
        "-c",
        STEPS["Install holdfast, without torch"]["run"],
    ]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    listed = [str(tmp_path / "holdfast" / "bin" / "python"), "-m", "pip", "list", "--format=freeze"]
    packages = subprocess.run(listed, check=True, capture_output=True, text=True, env=environment).stdout
    assert "holdfast==" in packages
    assert "torch" not in packages
