"""One writer at a time in a folder; a dead process keeps nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import UserError
from holdfast.locks import LOCK, one_writer

HOLD = """
import sys, time
from pathlib import Path
from holdfast.locks import one_writer
with one_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
FORK = HOLD.replace(
    "    print(", "    import os\n    child = os.fork() == 0\n    if child: print("
)  # the child says so
FORK = FORK.replace("    sys.stdin.read()", "    time.sleep(600) if child else sys.stdin.read()")


def holder(folder: Path, script: str = HOLD) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_writer_is_told_who_the_first_one_is(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        with pytest.raises(UserError, match=f"process {process.pid} on "), one_writer(tmp_path):
            pass
    finally:
        process.communicate("")
    with one_writer(tmp_path):  # it has ended
        assert (tmp_path / LOCK).exists()
    assert not list(tmp_path.iterdir())


def test_two_writers_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    with one_writer(tmp_path), pytest.raises(UserError, match="in use"), one_writer(tmp_path):
        pass


@pytest.mark.parametrize("script", [HOLD, FORK], ids=["alone", "with a child that lives on"])
def test_a_killed_process_does_not_keep_the_folder(tmp_path: Path, script: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.kill()
    process.wait()
    try:
        assert (tmp_path / LOCK).exists()
        with one_writer(tmp_path):
            pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
