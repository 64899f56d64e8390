"""The GitHub Action, its shell steps run here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
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
        found = re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: values[match[1]], text)
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
        "GITHUB_RUN_ID": "11",
        "GITHUB_SERVER_URL": f"file://{folder}",
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


# -- the ledger, on a branch of its own -------------------------------------------------------------------------------

BAD = {"clear": (500, 5, 60), "snowy": (400, 4, 1)}
LEDGER = {"ledger-branch": "holdfast-ledger", "query-budget": "3"}


def git(*arguments: object) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *map(str, arguments)], check=True, capture_output=True, text=True)
    return done.stdout


def repository(folder: Path, branch: str = "holdfast-ledger") -> Path:
    """The repository of the models, as a server holds it, with an empty branch for the ledger."""
    bare = folder / "owner" / "models"
    git("init", "--quiet", "--bare", bare)
    git("init", "--quiet", folder / "first")
    git("-C", folder / "first", "checkout", "--quiet", "--orphan", branch)
    git("-C", folder / "first", "commit", "--quiet", "--allow-empty", "--message", "Ledger")
    git("-C", folder / "first", "push", "--quiet", bare, branch)
    return bare


def recorded(bare: Path) -> list[dict[str, Any]]:
    """The entries that the branch holds."""
    names = git("-C", bare, "ls-tree", "--name-only", "holdfast-ledger").split()
    texts = [git("-C", bare, "show", f"holdfast-ledger:{name}") for name in names if name.endswith(".jsonl")]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def refusing(bare: Path, times: int) -> None:
    """A server that takes no push so many times, as when another job was faster."""
    (bare / "left").write_text("x" * times)
    hook = bare / "hooks" / "pre-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(
        f'#!/usr/bin/env bash\nleft=$(cat "{bare}/left")\n'
        f'if [[ -n "$left" ]]; then printf %s "${{left#x}}" > "{bare}/left"; exit 1; fi\n'
    )
    hook.chmod(0o755)


def test_pull_requests_share_a_budget_that_outlives_the_job(tmp_path: Path) -> None:
    bare = repository(tmp_path)
    done = run(tmp_path, BAD, **LEDGER, junit="j.xml")
    assert done.returncode == 4, done.stderr
    assert "negative flips" not in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "j.xml").exists()
    assert [entry["event"] for entry in recorded(bare)] == ["opened", "query", "result"]
    assert run(tmp_path, BAD, **LEDGER).returncode == 4  # the same models again: no second query
    assert len(recorded(bare)) == 3
    assert run(tmp_path, GOOD, **LEDGER).returncode == 0
    assert recorded(bare)[-1]["passed"]
    assert json.loads((tmp_path / "certificate.json").read_text())["ledger"]["head"]["entries"] == 5
    done = run(tmp_path, {"clear": (500, 5, 4), "snowy": (400, 4, 1)}, **LEDGER)
    assert done.returncode == 2
    assert "spent" in done.stderr
    assert not (tmp_path / "certificate.json").exists()  # that of an earlier model is none of this one


def test_no_result_is_shown_before_its_query_is_recorded(tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("faults", 2)
    bare = repository(tmp_path)
    refusing(bare, 99)
    done = run(tmp_path, GOOD, **LEDGER, junit="j.xml")
    assert done.returncode == 1
    assert "could not be recorded" in done.stderr
    assert (tmp_path / "output.txt").read_text() == "verdict=\n"
    for text in (done.stdout, (tmp_path / "summary.md").read_text()):
        assert "certified" not in text
    assert not (tmp_path / "certificate.json").exists()
    assert not (tmp_path / "j.xml").exists()
    refusing(bare, 1)  # the next try reads the ledger anew
    assert run(tmp_path, GOOD, **LEDGER).returncode == 0
    assert [entry["event"] for entry in recorded(bare)] == ["opened", "query", "result"]


def test_a_missing_ledger_is_not_an_empty_one(tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("bad inputs", 3)
    repository(tmp_path, "another")
    done = run(tmp_path, GOOD, **LEDGER)
    assert (done.returncode, "missing is not an empty one" in done.stdout) == (2, True)
    assert run(tmp_path, GOOD, **{"query-budget": "3"}).returncode == 2
    arguments = [sys.executable, "-m", "holdfast", "claim", "old.csv", "--margin", "0.02", "--query-budget", "3"]
    subprocess.run(arguments, cwd=tmp_path, check=True)
    done = run(tmp_path, GOOD, margin="", **{"claim-file": "claim.toml"})
    assert (done.returncode, "ledger-branch is not set" in done.stderr) == (2, True), done.stderr + done.stdout


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
