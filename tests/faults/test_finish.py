"""SIGKILL at the writes between the end of training and the last file: what was proven is there after --resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import python


def killed(kind: str, folder: Path, every: int) -> dict[str, object]:
    done = python("-m", "tests.faults.forked", kind, folder, every)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("kind", "every"), [("develop", 43), pytest.param("project", 39, marks=pytest.mark.slow), ("certify", 29)]
)
def test_a_kill_at_some_writes_comes_to_the_same_end(
    kind: str, every: int, tmp_path: Path, tried: Callable[..., None]
) -> None:
    found = killed(kind, tmp_path, every)
    assert found["failed"] == {}
    assert int(str(found["tried"])) >= 2, found
    tried("signals", int(str(found["tried"])))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["develop", "project", "certify"])
def test_a_kill_at_every_write_comes_to_the_same_end(kind: str, tmp_path: Path, tried: Callable[..., None]) -> None:
    found = killed(kind, tmp_path, every=1)
    print(f"{kind}: {found['points']} points, {found['tried']} kills, {len(dict(found['failed']))} not survived")  # type: ignore[call-overload]
    assert found["failed"] == {}
    assert int(str(found["points"])) >= 12, found
    tried("signals", int(str(found["tried"])))
