"""``holdfast plan ROUND.toml`` as it is typed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from holdfast.certify.round_plan import plan_round
from holdfast.config import EvaluateConfig, ModelConfig, RoundConfig, TrainConfig, parse
from holdfast.config.known import KEYS, SECTIONS, check_keys
from holdfast.config.round import RoundSections
from holdfast.errors import UserError

ROUND = """
[task]
target = "eight"
[data]
source = { kind = "digits" }
[model]
architecture = "tiny"
[certify]
margin = 0.05
"""
NO_TORCH = """
import atexit, sys
from holdfast.cli import main
atexit.register(lambda: "torch" in sys.modules and print("torch was imported", file=sys.stderr))
main()
"""


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", NO_TORCH, "plan", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "torch was imported" not in done.stderr
    return done


def test_the_plan_of_a_round_needs_no_torch_and_fits_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "ROUND.toml"
    path.write_text(ROUND)
    done = plan(str(path))
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert "Chance that the round passes: <1 %" in done.stdout
    assert "What would raise it:" in done.stdout
    found = json.loads(plan(str(path), "--json", "--margin", "0.3", "--target-gain", "0.4").stdout)
    assert found["chance"] > 0.9
    assert {item["task"] for item in found["classes"]} >= {"zero", "eight"}
    assert found["classes"][0]["margin"] == 0.3
    assert list(tmp_path.iterdir()) == [path]


def test_a_round_without_sealed_images_and_options_that_do_not_belong_are_said_so(tmp_path: Path) -> None:
    path = tmp_path / "ROUND.toml"
    path.write_text(ROUND + "[data.roles]\nsealed = 0.0\n")
    done = plan(str(path))
    assert done.returncode == 2
    assert "there are no sealed images" in done.stderr
    path.write_text(ROUND)
    done = plan(str(path), "--tasks", "3")
    assert done.returncode == 2
    assert "ROUND.toml and --tasks at once" in done.stderr


def test_a_plan_only_reads_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused where the ledger's folder could not be written, and writes nothing there."""
    path, folder = tmp_path / "ROUND.toml", tmp_path / "ledger"
    path.write_text(ROUND + 'ledger = "ledger"\n')
    folder.mkdir()
    monkeypatch.setattr("os.access", lambda place, mode: not (Path(place) == folder and mode & os.W_OK))
    assert 0.0 < plan_round(path).level < 1.0
    assert list(folder.iterdir()) == []


def test_a_misspelt_section_is_an_error_and_not_planned_without(tmp_path: Path) -> None:
    path = tmp_path / "ROUND.toml"
    path.write_text(ROUND.replace("[certify]", "[certifiy]"))
    done = plan(str(path))
    assert done.returncode == 2
    assert "unknown key 'certifiy'" in done.stderr
    assert "did you mean 'certify'?" in done.stderr


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [("train", "setps", "steps"), ("model", "freze", "freeze"), ("evaluate", "evry", "every")],
)
def test_a_misspelt_key_is_the_error_that_develop_makes_of_it(
    tmp_path: Path, section: str, key: str, meant: str
) -> None:
    """Also of sections that a plan does not read."""
    values: dict[str, Any] = {
        "task": {"target": "a"},
        "data": {"source": {"kind": "digits"}},
        "model": {"architecture": "tiny"},
    }
    values[section] = {**values.get(section, {}), key: 1}
    with pytest.raises(UserError) as expected:
        parse(RoundConfig, values, "ROUND.toml")
    with pytest.raises(UserError) as found:
        check_keys(values, "ROUND.toml")
    assert str(found.value) == str(expected.value)
    path = tmp_path / "ROUND.toml"
    path.write_text(f"{ROUND}\n[{section}]\n{key} = 1\n" if f"[{section}]" not in ROUND else
                    ROUND.replace(f"[{section}]", f"[{section}]\n{key} = 1"))  # fmt: skip
    done = plan(str(path))
    assert done.returncode == 2
    assert f"unknown key '{section}.{key}'" in done.stderr
    assert f"did you mean '{meant}'?" in done.stderr


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "seed"])
@pytest.mark.parametrize("value", ["5", '"holdfst"', "[]", "false"])
def test_a_section_that_is_no_table_is_the_error_that_develop_makes_of_it(
    tmp_path: Path, section: str, value: str
) -> None:
    path = tmp_path / "ROUND.toml"
    values = {**tomllib.loads(ROUND), section: tomllib.loads(f"value = {value}")["value"]}
    path.write_text(f"{section} = {value}\n" + re.sub(rf"(?s)\[{section}\][^\[]*", "", ROUND))
    with pytest.raises(UserError) as planned:
        plan_round(path)
    with pytest.raises(UserError) as developed:
        parse(RoundConfig, values, str(path))
    assert str(planned.value) == str(developed.value)


def test_a_plan_knows_every_section_of_a_round_and_its_keys() -> None:
    assert set(SECTIONS) == set(RoundSections.model_fields)
    sections = {"model": ModelConfig, "train": TrainConfig, "evaluate": EvaluateConfig}
    assert {name: tuple(item.model_fields) for name, item in sections.items()} == KEYS, "adapt config/known.py"


def test_former_names_of_settings_are_no_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "ROUND.toml"
    path.write_text(f"{ROUND}\n[train]\nmomentum = 0.1\n")
    assert plan(str(path)).returncode == 0
