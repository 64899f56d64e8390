"""Gates: a policy over tasks in tiers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.certify.policy import read_policy
from holdfast.errors import UserError
from tests.certify.helpers import predictions, rows, write_csv
from tests.certify.test_cli import Shell
from tests.certify.test_harness import lm_line, lm_logs

POLICY = """
format = "holdfast-policy/1"
confidence = 0.95

[tiers]
critical = 0.02
supporting = 0.05
advisory = 0.02

[tasks.gsm8k]
tier = "critical"

[tasks.mmlu]
pool = ["mmlu_*"]

[tasks.ifeval]
tier = "advisory"

[tasks.humaneval]
tier = "critical"
margin = 0.1
required = false
"""


def write_policy(tmp_path: Path, text: str = POLICY) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return path


def logs(tmp_path: Path, **wrong: tuple[int, int, int]) -> tuple[Path, Path]:
    """Logs of lm-eval: for each task the number of documents, and how many each model gets wrong."""
    folders = (tmp_path / "old", tmp_path / "new")
    for place, (task, (n, *mistakes)) in enumerate(wrong.items()):
        for folder, count in zip(folders, mistakes, strict=True):
            if count >= 0:  # below 0: not evaluated
                lines = [lm_line(1000 * place + k, float(k >= count)) for k in range(n)]
                lm_logs(folder, task, lines)
    return folders


WELL = {"gsm8k": (400, 2, 2), "mmlu_law": (120, 1, 2), "mmlu_sums": (120, 1, 1)}


def test_a_gate_passes_when_every_task_that_gates_is_certified(shell: Shell, tmp_path: Path) -> None:
    old, new = logs(tmp_path, **WELL, ifeval=(100, 0, 40))
    out = tmp_path / "c.json"
    assert shell("gate", write_policy(tmp_path), old, new, "--lm-eval", "--out", out, "--json") == 0
    reported = shell.json
    assert (reported["verdict"], reported["confidence"]) == ("certified", 0.95)
    assert {row["task"]: (row["n"], row["margin"]) for row in reported["tasks"]} == {
        "gsm8k": (400, 0.02),
        "mmlu": (240, 0.05),
    }
    gate = reported["gate"]
    assert gate["tiers"] == {"gsm8k": "critical", "ifeval": "advisory", "mmlu": "supporting"}
    assert (gate["missing"], gate["not_measured"]) == ({}, ["humaneval"])
    # An advisory task that is shown to have regressed is told, and does not fail the gate.
    assert [(row["task"], row["verdict"]) for row in gate["advisory"]] == [("ifeval", "regressed")]
    assert "intersection-union" in gate["correction"]
    held = json.loads(out.read_text())
    assert set(held["files"]) == {"predictions", "policy"}
    assert shell("verify", out, "--json") == 0


def test_a_task_that_gates_and_regressed_fails(shell: Shell, tmp_path: Path) -> None:
    old, new = logs(tmp_path, **{**WELL, "mmlu_law": (120, 0, 60)})
    assert shell("gate", write_policy(tmp_path), old, new, "--lm-eval") == 3
    assert "critical: gsm8k" in shell.out
    assert "supporting: mmlu" in shell.out


@pytest.mark.parametrize("side", [{"gsm8k": (400, -1, -1)}, {"gsm8k": (400, 2, -1)}])
def test_a_required_task_that_is_missing_keeps_the_gate_from_passing(
    shell: Shell, tmp_path: Path, side: dict[str, tuple[int, int, int]]
) -> None:
    old, new = logs(tmp_path, **{**WELL, **side})
    out, summary = tmp_path / "c.json", tmp_path / "s.md"
    junit = tmp_path / "junit.xml"
    words = ("gate", write_policy(tmp_path), old, new, "--lm-eval", "--out", out, "--summary", summary, "--json")
    assert shell(*words, "--junit", junit) == 4
    assert 'failures="1"' in junit.read_text()
    assert list(shell.json["gate"]["missing"]) == ["gsm8k"]
    assert not out.exists()
    assert "missing, and required: gsm8k" in summary.read_text()


def test_an_optional_task_gates_once_it_is_measured(shell: Shell, tmp_path: Path) -> None:
    old, new = logs(tmp_path, **WELL, humaneval=(20, 0, 0))
    assert shell("gate", write_policy(tmp_path), old, new, "--lm-eval", "--json") == 4
    assert shell.json["undecided"] == ["humaneval"]


def test_unlisted_tasks_gate_unless_the_policy_says_otherwise(shell: Shell, tmp_path: Path) -> None:
    old, new = logs(tmp_path, **WELL, arc=(100, 0, 50))
    assert shell("gate", write_policy(tmp_path), old, new, "--lm-eval", "--json") == 3
    relaxed = POLICY.replace("confidence = 0.95", 'unlisted = "advisory"')
    assert shell("gate", write_policy(tmp_path, relaxed), old, new, "--lm-eval", "--json") == 0
    strict = POLICY.replace("confidence = 0.95", 'unlisted = "refuse"')
    assert shell("gate", write_policy(tmp_path, strict), old, new, "--lm-eval") == 2
    assert "does not name arc" in shell.err


def test_tables_of_predictions_and_a_ledger(shell: Shell, tmp_path: Path) -> None:
    table = rows({"clear": (500, 5, 3), "snowy": (400, 4, 1), "foggy": (60, 0, 30)})
    files = [tmp_path / "old.csv", tmp_path / "new.csv"]
    for path, model in zip(files, ("old", "new"), strict=True):
        kept = [{**row, "prediction": row[model]} for row in table]
        write_csv(path, kept, "example_id,task,label,prediction")
    assert predictions(table, "old").num_rows == 960
    text = 'format = "holdfast-policy/1"\nquery_budget = 2\nunlisted = "critical"\n[tiers]\ncritical = 0.03\n'
    text += '[tasks.foggy]\ntier = "advisory"\nmargin = 0.1\n'
    policy = write_policy(tmp_path, text)
    assert shell("gate", policy, *files, "--ledger", tmp_path / "ledger", "--json") == 0
    assert shell.json["sealed"]["queries"] == 1
    assert shell.json["sealed"]["retired"]
    lacking = write_policy(tmp_path, text + '[tasks.windy]\ntier = "critical"\n')
    assert shell("gate", lacking, *files, "--ledger", tmp_path / "other") == 2
    assert "no query was spent" in shell.err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "format"),
        ('format = "holdfast-policy/1"\nconfidense = 0.9', "confidence"),
        ('format = "holdfast-policy/1"\nconfidence = 95.0', "the confidence 95 is not usable"),
        ('format = "holdfast-policy/1"\n[tiers]\ncritical = 2.0', "the margin 2 of the tier critical is not usable"),
        ('format = "holdfast-policy/1"\n[tasks.a]\nmargin = 1.5', "the margin 1.5 of a is not usable"),
        ('format = "holdfast-policy/1"\n[tasks.a]\ntier = "blocking"', "tier"),
        ('format = "holdfast-policy/1"\n[tasks.a]\ntier = "advisory"\nrequired = true', "never fail the gate"),
        ('format = "holdfast-policy/1"\n[layout]\nequal_groups = true', "--equal-groups without groups"),
    ],
)
def test_policies_with_faults(tmp_path: Path, text: str, expected: str, tried: Callable[..., None]) -> None:
    tried("bad inputs")
    with pytest.raises(UserError) as caught:
        read_policy(write_policy(tmp_path, text))
    assert expected in caught.value.text()


def test_a_task_of_its_own_is_in_no_pool_and_margins_are_needed(tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("bad inputs", 3)
    text = POLICY + '[tasks.mmlu_law]\ntier = "critical"\n'
    resolved = read_policy(write_policy(tmp_path, text)).resolve(["gsm8k", "mmlu_law", "mmlu_sums"])
    assert resolved.pools == {"mmlu": ["mmlu_sums"]}
    assert resolved.tiers["mmlu_law"] == "critical"
    bare = read_policy(write_policy(tmp_path, 'format = "holdfast-policy/1"'))
    with pytest.raises(UserError, match="has no margin for gsm8k"):
        bare.resolve(["gsm8k"])
    twice = POLICY + '[tasks.other]\npool = ["mmlu_law"]\n'
    with pytest.raises(UserError, match="mmlu_law in two pools"):
        read_policy(write_policy(tmp_path, twice)).resolve(["gsm8k", "mmlu_law"])
    with pytest.raises(UserError, match="calls a pool mmlu, which is a task"):
        read_policy(write_policy(tmp_path)).resolve(["mmlu", "mmlu_law"])
