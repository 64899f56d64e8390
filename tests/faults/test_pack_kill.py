"""`holdfast pack`: killed at every one of its writes, a full disk at every one, several of them at once."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import SourceConfig
from holdfast.data.pack import pack
from holdfast.data.sources.store import BLOCK, open_store
from holdfast.errors import UserError
from holdfast.locks import LOCK
from tests.data.pictures import write_folder
from tests.faults.killer import EVENTS

KILLER = Path(__file__).with_name("killer.py")
FILES = ("index.arrow", "pixels.bin", "store.json", "thumbs.bin")
Tried = Callable[..., None]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks of pictures."""
    return write_folder(tmp_path_factory.mktemp("pictures"), {"cat": BLOCK, "owl": 4})


@pytest.fixture(scope="module")
def whole(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a store whose writing nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    pack(SourceConfig(path=pictures), out, size=8)
    return contents(out)


def contents(store: Path) -> dict[str, bytes]:
    """Every file in the folder but the lock's, which a kill may leave and which means nothing."""
    return {path.name: path.read_bytes() for path in store.iterdir() if path.name != LOCK}


def command(pictures: Path, out: Path) -> list[str]:
    return ["pack", str(pictures), str(out), "--size", "8", "--workers", "1"]


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_kill_at_every_write_costs_nothing(
    pictures: Path, whole: dict[str, bytes], tmp_path: Path, tried: Tried
) -> None:
    words = command(pictures, tmp_path / "out-{}")
    modules = "holdfast.data.pack,holdfast.data.sources,pandas"  # pyarrow imports pandas when it is first used
    killer = start(str(KILLER), "each", "--", *words, HOLDFAST_KILLER_IMPORT=modules)
    output, error = killer.communicate()
    assert killer.returncode == 0, error
    unbroken, *lines = [json.loads(line) for line in output.splitlines()]
    assert unbroken["code"] == 0, unbroken["output"]
    assert len(lines) > 50  # two points an event: plan, two blocks, index, header, what is removed
    for line in lines:
        assert line["killed"], line
        assert line["code"] == 0, line
        assert contents(tmp_path / f"out-{line['point']}") == whole, line
    assert set(whole) == set(FILES)
    tried("signals", len(lines))


def test_a_kill_after_the_header_leaves_a_store_that_opens(
    pictures: Path, whole: dict[str, bytes], tmp_path: Path, tried: Tried
) -> None:
    """Between the header and the removal of plan and journal, found by the killer's own start of counting."""
    out = tmp_path / "out"
    killer = start(
        str(KILLER), "1", "--", *command(pictures, out), HOLDFAST_KILLER_AFTER="holdfast.data.pack._clean_up"
    )
    killer.communicate()
    assert killer.returncode == -signal.SIGKILL
    assert {"plan.json", "journal.jsonl", *FILES} <= {path.name for path in out.iterdir()}
    open_store(out).verify()
    pack(SourceConfig(path=pictures), out, size=8)
    assert contents(out) == whole
    tried("signals")


def test_a_kill_during_the_very_first_write(pictures: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / LOCK).write_text("{}")
    (out / ".plan.json.0abc_12x.tmp").write_text('{"form')
    pack(SourceConfig(path=pictures), out, size=8)
    assert contents(out) == whole


def test_somebody_elses_folder_is_not_touched(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".draft.tmp").write_text("mine, too")
    with pytest.raises(UserError, match="not empty"):
        pack(SourceConfig(path=pictures), tmp_path, size=8)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", ".draft.tmp"}


HOLD = """
import sys
from pathlib import Path
from holdfast.config import SourceConfig
from holdfast.data.pack import pack

def wait(done, total):
    print("writing", flush=True)
    sys.stdin.readline()

pack(SourceConfig(path=Path(sys.argv[1])), Path(sys.argv[2]), size=8, workers=1, progress=wait)
"""


def test_the_second_writer_is_told_of_the_first(
    pictures: Path, whole: dict[str, bytes], tmp_path: Path, tried: Tried
) -> None:
    out = tmp_path / "out"
    first = start("-c", HOLD, str(pictures), str(out))
    assert first.stdout is not None
    assert first.stdout.readline() == "writing\n"
    second = start("-m", "holdfast", *command(pictures, out))
    _, error = second.communicate()
    assert second.returncode == 2
    assert f"process {first.pid} on " in error
    assert "Traceback" not in error
    _, error = first.communicate("\n" * 9)
    assert first.returncode == 0, error
    assert contents(out) == whole
    tried("faults")


def test_four_at_once_end_in_one_store(pictures: Path, whole: dict[str, bytes], tmp_path: Path, tried: Tried) -> None:
    out = tmp_path / "out"
    processes = [start("-m", "holdfast", *command(pictures, out)) for _ in range(4)]
    ended = [(process.communicate()[1], process.returncode) for process in processes]
    assert {code for _, code in ended} <= {0, 2}
    assert 0 in {code for _, code in ended}
    for error, code in ended:
        assert ("in use by another process" in error) == (code == 2), error
        assert "Traceback" not in error
    assert contents(out) == whole
    tried("faults", 4)


def test_a_full_disk_at_every_write(
    pictures: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Tried
) -> None:
    """One sentence, and the same command goes on from there once there is space."""
    writes = [name for name in EVENTS if name not in ("unlink", "remove", "rmdir")]  # those need no space
    counted, failing = 0, 0

    def limited(event: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal counted
            counted += 1
            if counted >= failing > 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return event(*arguments, **options)

        return call

    def write(out: Path, fail_at: int) -> None:
        nonlocal counted, failing
        counted, failing = 0, fail_at
        with monkeypatch.context() as patched:
            for name in writes:
                patched.setattr(os, name, limited(getattr(os, name)))
            pack(SourceConfig(path=pictures), out, size=8)

    write(tmp_path / "unbroken", 0)
    total = counted
    assert total > 20
    for point in range(1, total + 1):
        out = tmp_path / f"out-{point}"
        with pytest.raises(UserError, match="No space left on device"):
            write(out, point)
        pack(SourceConfig(path=pictures), out, size=8)
        assert contents(out) == whole, point
    tried("faults", total)


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "[]",
        '{"ids": []}',
        '{"block": 0}',
        '{"block": [], "ids": []}',
        '{"block": 0, "ids": ["x"], "small": [], "bad": {}, "digest": "sha256:0"}',
        '{"block": 0, "ids": null, "small": [], "bad": {}, "digest": "sha256:0"}',
        '{"block": 7, "ids": [], "small": [], "bad": {}, "digest": "sha256:0"}',
        '{"block": 1, "ids": [null, "a", "b", "c"], "small": [], "bad": [], "digest": "sha256:0"}',
        '{"block": 1, "ids": [null, "a", "b", "c"], "small": [9], "bad": {"0": "why"}, "digest": "sha256:0"}',
        "[" * 100_000,
        "\udcff",
    ],
)
def test_a_journal_that_is_no_journal(pictures: Path, tmp_path: Path, line: str, tried: Tried) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(SourceConfig(path=pictures), tmp_path / "out", size=8, progress=stop)
    (tmp_path / "out" / "journal.jsonl").write_bytes(line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(UserError, match="is broken"):
        pack(SourceConfig(path=pictures), tmp_path / "out", size=8)
    tried("bad inputs")
