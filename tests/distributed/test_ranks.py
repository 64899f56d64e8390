"""Two ranks are one rank, to 1e-10 in float64 after 20 steps; a killed rank costs nothing but time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.artifacts import RunFolder
from holdfast.files import read_jsonl
from holdfast.runtime import Runtime
from holdfast.train import checkpoint as checkpoints
from tests.distributed.ranks import METHODS, STEPS, one_rank, run
from tests.processes import ranks

ALONE = Runtime(torch.device("cpu"))
DEFAULT = ["holdfast", "rm"]


def together(
    tmp_path: Path, names: list[str], world: int = 2, folder: Path | None = None, check: bool = True, **options: Any
) -> list[dict[str, dict[str, Tensor]]]:
    """States of every rank after a run of several."""
    where = str(folder) if folder else None
    arguments = (world, str(tmp_path / f"meeting-{world}"), str(tmp_path), names, where, options)
    codes = ranks(one_rank, arguments, world)
    if not check:
        return []
    assert codes == [0] * world
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(world)]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-10, equal_nan=True, msg=key)


def compare(tmp_path: Path, names: list[str], world: int, **options: Any) -> None:
    states = together(tmp_path, names, world, **options)
    for name in names:
        method = run(name, ALONE)
        untouched = {key: value.clone() for key, value in method.old.state_dict().items()}
        state = method.state_dict()
        moved = [(state[f"model.{key}"] - value).abs().max() for key, value in untouched.items() if value.numel()]
        assert max(moved) > 1e-3  # twenty steps that go somewhere
        for on_rank in states:
            assert_same(on_rank[name], state)


def test_two_ranks_are_one_after_twenty_steps(tmp_path: Path) -> None:
    compare(tmp_path, DEFAULT, world=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name not in DEFAULT])
def test_two_ranks_are_one_for_every_method(tmp_path: Path, name: str) -> None:
    compare(tmp_path, [name], world=2)


@pytest.mark.slow
def test_three_ranks_are_one(tmp_path: Path) -> None:
    compare(tmp_path, ["holdfast"], world=3)


def test_a_killed_rank_ends_the_run_with_a_checkpoint_that_one_rank_can_finish(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    together(tmp_path, ["holdfast"], folder=folder.root, check=False, die_after=11)
    message = (tmp_path / "0.txt").read_text()
    assert "another rank was lost after step 11 of 20" in message
    assert "a checkpoint was written after step 11" in message
    assert "--resume RUN" in message
    found = checkpoints.latest(folder.checkpoints, "sha256:test")
    assert found is not None
    assert found.step == 11  # between two regular checkpoints: nothing was lost
    finished = run("holdfast", ALONE, folder.root)
    assert_same(finished.state_dict(), run("holdfast", ALONE).state_dict())
    assert [record["step"] for record in read_jsonl(folder.metrics) if "objective" in record] == [5, 10, 15, STEPS]


@pytest.mark.slow
def test_a_run_begun_alone_goes_on_with_three_ranks(tmp_path: Path) -> None:
    whole = run("holdfast", ALONE)
    folder = RunFolder.create(tmp_path / "run")
    run("holdfast", ALONE, folder.root)
    for path in sorted(folder.checkpoints.glob("step-*.pt"))[1:]:
        path.unlink()
    first = checkpoints.latest(folder.checkpoints, "sha256:test")
    assert first is not None
    assert first.step < STEPS
    for on_rank in together(tmp_path, ["holdfast"], world=3, folder=folder.root):
        assert_same(on_rank["holdfast"], whole.state_dict())
