"""What ``holdfast compare`` says of a study that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_commands import call

STUDY = """
seeds = [0, 1]
sizes = [6]
[round.task]
target = "eight"
[round.data]
source = { kind = "folder", path = "pictures" }
[round.model]
architecture = "tiny"
[round.train]
steps = 2
batch = 8
[round.certify]
margin = 0.1
[[methods]]
name = "rm"
[[methods]]
name = "flyp"
"""


def test_what_stops_every_job_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four jobs, none of which finds its pictures."""
    (tmp_path / "STUDY.toml").write_text(STUDY, encoding="utf-8")
    words = ("compare", str(tmp_path / "STUDY.toml"), "--out", str(tmp_path / "out"), "--quiet")
    code, printed, _ = call(monkeypatch, capsys, *words)
    assert code != 0
    assert "4 jobs, 4 failed" in printed
    assert printed.count("failed: ") == 1
    assert "and 3 more, for the same reason" in printed
