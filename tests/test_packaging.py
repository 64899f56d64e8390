"""What is said in two places is said alike: locks, versions, Pythons, workflows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast import __version__

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def locked(name: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Package -> version and hashes."""
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for entry in re.split(r"\n(?=\S)", (ROOT / name).read_text(encoding="utf-8").strip()):
        package, version = re.match(r"([\w.-]+)==(\S+)", entry).groups()  # type: ignore[union-attr]
        found[package] = (version, frozenset(re.findall(r"--hash=(sha256:[0-9a-f]{64})", entry)))
    return found


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-demo.lock"])
def test_a_lock_has_exact_versions_and_hashes_and_no_address(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index" not in text
    assert all(hashes for _, hashes in locked(name).values())


def test_the_demo_runs_on_the_versions_that_are_tested() -> None:
    everything, demo = locked("requirements.lock"), locked("requirements-demo.lock")
    assert {name: everything[name] for name in demo} == demo
    assert {"torch", "open-clip-torch", "scikit-learn", "numpy"} <= set(demo)
    assert not {"pytest", "ruff", "pyright", "ray", "wandb", "duckdb"} & set(demo)


def test_every_requirement_is_locked() -> None:
    def names(requirements: list[str]) -> set[str]:
        found = (re.match(r"[\w.-]+", item) for item in requirements if not item.startswith("holdfast["))
        return {match[0].lower().replace("_", "-") for match in found if match}

    extras = PROJECT["optional-dependencies"]
    assert names(PROJECT["dependencies"]) | names(extras["train"]) <= set(locked("requirements-demo.lock"))
    assert {name for extra in extras.values() for name in names(extra)} <= set(locked("requirements.lock"))


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]


def test_every_python_that_is_claimed_is_tested() -> None:
    claimed = {item.rpartition(" ")[2] for item in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", item)}
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))["jobs"]
    for name in ("light", "pythons"):
        assert set(jobs[name]["strategy"]["matrix"]["python"]) == claimed
    assert f">={min(claimed, key=lambda text: int(text.split('.')[1]))}" == PROJECT["requires-python"]
    assert "--resolution lowest-direct" in jobs["least"]["steps"][-1]["run"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_what_there_is(path: Path) -> None:
    """Targets of the Makefile and extras of pyproject.toml, by name."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    scripts = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    assert set(re.findall(r"^make ([a-z-]+)", scripts, re.MULTILINE)) <= targets
    assert set(re.findall(r"\.\[(\w+)\]'", scripts)) <= set(PROJECT["optional-dependencies"])
