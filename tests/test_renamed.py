"""Settings under their former names are read for one release, with a hint; under both names they are refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import RoundConfig, parse, upgraded
from holdfast.config.renamed import _MOVED, _MOVED_OF_HOLDFAST  # pyright: ignore[reportPrivateUsage]
from holdfast.errors import RenamedSetting, UserError

BASE: dict[str, Any] = {"task": {"target": "a"}, "data": {"source": {"kind": "digits"}}, "model": {"architecture": "x"}}
ROOT = Path(__file__).resolve().parents[1]


def at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(("old", "new"), {**_MOVED, **_MOVED_OF_HOLDFAST}.items())
def test_every_former_name_is_read_where_it_belongs_now(old: str, new: str) -> None:
    default = at(parse(RoundConfig, BASE, "x"), new)
    other = {bool: lambda: not default, float: lambda: default + 0.25, int: lambda: default + 2}.get(type(default))
    words = {"views": "paired", "constraint": "soft_error", "beta_schedule": "cosine"}
    name = new.rpartition(".")[2]
    value = [1.0] if isinstance(default, tuple) else words[name] if name in words else other() if other else None
    section, _, key = old.partition(".")
    with pytest.warns(RenamedSetting, match=re.escape(f"[{section}] {key} is now")):
        config = parse(RoundConfig, {**BASE, section: {key: value}}, "ROUND.toml")
    assert at(config, new) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("former", "speed"),
    [
        ({"towers": "plain"}, "plain"),
        ({"compile": False}, "fast"),
        ({"graphs": False}, "compiled"),
        ({"graphs": True}, "graphs"),
        ({"towers": "auto", "compile": True, "graphs": "auto"}, "auto"),
        ({"towers": "fast"}, "fast"),
    ],
)
def test_three_words_for_speed_became_one(former: dict[str, Any], speed: str) -> None:
    values, hints = upgraded({"train": former})
    assert values == {"train": {"speed": speed}}
    assert len(hints) == 1


def test_both_names_at_once_are_refused() -> None:
    both = {**BASE, "certify": {"looks": 2, "query_budget": 3}}
    with pytest.raises(UserError, match=r"unknown key 'certify\.looks'"):
        parse(RoundConfig, both, "run/config.json")


def test_another_method_keeps_its_own_words() -> None:
    values = {"method": {"name": "theirs", "margin": 1.0}}
    assert upgraded(values) == (values, [])


def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    toml = '[task]\ntarget = "a"\n[data.source]\nkind = "folder"\npath = "nowhere"\n[model]\narchitecture = "tiny"\n'
    (tmp_path / "ROUND.toml").write_text(f"{toml}[certify]\nlooks = 2\n")
    command = [
        sys.executable,
        "-m",
        "holdfast",
        "develop",
        str(tmp_path / "ROUND.toml"),
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    error = done.stderr
    assert done.returncode == 2
    assert error.count("hint: ") == 1
    assert "[certify] looks is now [certify] query_budget" in error
    assert "warnings.warn" not in error
