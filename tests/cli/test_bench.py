"""`holdfast bench` as a newcomer types it, on a round of real digits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.train import bench
from tests.cli.test_commands import holdfast as holdfast  # noqa: PLC0414 - a fixture

ROUND = """
[task]
target = "eight"
[data]
source = { kind = "digits" }
constraint_images = 20
[model]
architecture = "tiny"
[train]
device = "cpu"
batch = 16
images_per_task = 2
log_every = 1000
"""


@pytest.fixture
def round_file(tmp_path: Path) -> Path:
    path = tmp_path / "ROUND.toml"
    path.write_text(ROUND)
    return path


def figures(holdfast: Any, path: Path, *changes: tuple[str, str]) -> dict[str, Any]:
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    other = path.with_name("OTHER.toml")
    other.write_text(text)
    code, out, error = holdfast("bench", str(other), "--steps", "4", "--json")
    assert (code, error) == (0, "")
    return json.loads(out)


def test_a_round_is_timed_and_nothing_is_left_behind(holdfast: Any, round_file: Path) -> None:
    code, out, error = holdfast("bench", str(round_file), "--steps", "4")
    assert (code, error) == (0, "")
    for row in ("step", "images", "arithmetic", "memory", "loader", "forward", "backward", "optimizer", "logging"):
        assert re.search(rf"^│ {row} ", out, re.MULTILINE), row
    assert re.search(r"[\d.]+ GFLOP a step, \d+ % of this device's", out)
    assert re.search(r"memory +│ [\d.]+ GiB at most by the whole process", out)
    assert [path.name for path in round_file.parent.iterdir()] == ["ROUND.toml"]


@pytest.mark.parametrize("shape", [False, True])
def test_parts_of_a_recorded_step_are_taken_from_launched_ones(
    holdfast: Any, round_file: Path, monkeypatch: pytest.MonkeyPatch, shape: bool
) -> None:
    """As on a GPU, where a recorded step is one piece; here a run says so unless it was told not to record."""
    asked: list[str] = []

    def measured(method: Any, data: Any, plan: Any, runtime: Any, *, steps: int) -> bench.Figures:
        asked.append(plan.config.speed)
        found = measure(method, data, plan, runtime, steps=steps, warm_up=1)
        whole = {"loader": 1.0, "step": 30.0, "logging": 1.0}
        return found if plan.config.speed == "compiled" else replace(found, parts=whole)

    measure = bench.measure
    monkeypatch.setattr(bench, "measure", measured)
    what = ["--shape", "tiny", "--device", "cpu"] if shape else [str(round_file)]
    code, out, error = holdfast("bench", *what, "--steps", "2")
    assert (code, error) == (0, "")
    assert asked == ["auto", "compiled"]
    rows = re.findall(r"^│ (\w+) ", out, re.MULTILINE)
    assert rows[-5:] == ["recorded", "logging", "forward", "backward", "optimizer"]


def test_figures_agree_with_each_other(holdfast: Any, round_file: Path) -> None:
    found = figures(holdfast, round_file)
    assert found["steps"] == 4  # and not a thousand, as often as the round logs
    assert found["images_per_second"] == pytest.approx(1000 * (16 + 2 * 9) / found["milliseconds"])
    assert sum(found["parts"].values()) == pytest.approx(found["milliseconds"], rel=0.2)
    assert found["share"] == pytest.approx(found["teraflop"] / (found["milliseconds"] / 1000) / found["matrix_rate"])
    assert 0 < found["share"] < 1
    assert found["first_step_seconds"] > 0
    assert 0.1 < found["memory_gib"] < 50


def test_arithmetic_is_that_of_what_a_method_looks_at(holdfast: Any, round_file: Path) -> None:
    everything = figures(holdfast, round_file)
    linear = figures(holdfast, round_file, ("[train]", '[method]\nname = "der"\n[train]'))
    # 8 target pairs and 18 constraint images a step; the 8 negatives and all texts have no part.
    assert linear["images_per_second"] == pytest.approx(1000 * (8 + 18) / linear["milliseconds"])
    assert linear["teraflop"] < everything["teraflop"] * 26 / 34
    frozen = (
        ("[train]", '[method.research]\nviews = "clean"\n[train]\naugment = false'),
        ('"tiny"', '"tiny"\nfreeze = "towers"'),
    )
    assert figures(holdfast, round_file, *frozen)["teraflop"] == 0  # towers were asked once, before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "do:       write a round with `holdfast init`"),
        (("ROUND.toml", "--shape", "tiny"), "either a ROUND.toml or --shape"),
        (("ROUND.toml", "--paired"), "views = 'paired' under [method.research]"),
        (("MISSING.toml",), "MISSING.toml does not exist"),
        (("--shape", "tny"), "did you mean 'tiny'?"),
        (("ROUND.toml", "--device", "gpu"), "auto, cpu, cuda or cuda:N"),
    ],
)
def test_mistakes_are_explained(
    holdfast: Any, round_file: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(round_file.parent)
    code, _, error = holdfast("bench", *words)
    assert code == 2
    assert expected in error
    assert "Traceback" not in error
