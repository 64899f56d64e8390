"""The chained log: whole at every moment, one appender at a time, and a change anywhere shows."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.chained import ChainedLog
from holdfast.errors import UserError
from holdfast.files import canonical_json, fingerprint_bytes


def filled(path: Path, count: int = 3) -> ChainedLog:
    log = ChainedLog(path)
    with log.locked():
        for number in range(count):
            log.append({"event": "note", "number": number})
    return log


def test_entries_come_back_in_order_and_name_the_one_before(tmp_path: Path) -> None:
    log = filled(tmp_path / "log.jsonl")
    assert [entry["number"] for entry in log.entries()] == [0, 1, 2]
    assert log.entries()[0]["previous"] == ""
    assert log.entries()[2]["previous"] == log.entries()[1]["fingerprint"]
    assert log.broken() is None
    assert log.unreadable() == 0


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_changed_entry_is_found(tmp_path: Path, place: int) -> None:
    log = filled(tmp_path / "log.jsonl")
    lines = log.path.read_text().splitlines()
    lines[place] = lines[place].replace(f'"number":{place}', '"number":9')
    log.path.write_text("\n".join(lines) + "\n")
    assert log.broken() is not None


def test_a_removed_entry_is_found(tmp_path: Path) -> None:
    log = filled(tmp_path / "log.jsonl")
    lines = log.path.read_text().splitlines()
    log.path.write_text("\n".join([lines[0], lines[2]]) + "\n")
    assert log.broken() is not None


@pytest.mark.parametrize("length", [1, 20, -1])
def test_a_torn_end_is_passed_over_and_the_next_entry_follows_the_last_whole_one(tmp_path: Path, length: int) -> None:
    log = filled(tmp_path / "log.jsonl", 2)
    line = canonical_json({"event": "note", "number": 2}).encode()
    before = log.path.read_bytes()
    log.path.write_bytes(before + line[:length])
    assert len(log.entries()) == 2
    with log.locked():
        log.append({"event": "note", "number": 3})
    assert log.path.read_bytes().startswith(before + line[:length] + b"\n")  # nothing that was there is rewritten
    assert [entry["number"] for entry in log.entries()] == [0, 1, 3]
    assert log.broken() is None
    assert log.unreadable() == 0


def test_an_unreadable_whole_line_is_counted_and_shows_where_it_was_an_entry(tmp_path: Path) -> None:
    log = filled(tmp_path / "log.jsonl", 2)
    lines = log.path.read_text().splitlines()
    log.path.write_text("\n".join([lines[0], lines[1][:-4]]) + "\n")
    assert log.unreadable() == 1
    log.path.write_text("\n".join([lines[0][:-4], lines[1]]) + "\n")
    assert log.broken() is not None


def test_logs_of_earlier_versions_are_read_on(tmp_path: Path) -> None:
    """Entries without their own hash; a torn line was named by the hash of nothing."""
    first = {"event": "opened", "previous": ""}
    second = {"event": "look", "previous": fingerprint_bytes(b"{}")}
    log = ChainedLog(tmp_path / "log.jsonl")
    log.path.write_text(canonical_json(first) + '\n{"event":"lo\n' + canonical_json(second) + "\n")
    assert log.broken() is None
    assert log.unreadable() == 1
    with log.locked():
        log.append({"event": "result"})
    assert log.broken() is None
    assert [entry["event"] for entry in log.entries()] == ["opened", "look", "result"]


def test_forty_racing_appends_are_all_there(tmp_path: Path) -> None:
    log = ChainedLog(tmp_path / "log.jsonl")

    def add(number: int) -> None:
        with log.locked():
            log.append({"number": number})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(40)))
    assert sorted(entry["number"] for entry in log.entries()) == list(range(40))
    assert log.broken() is None


def test_the_lock_lasts_to_the_end_of_the_block_though_an_append_replaces_the_file(tmp_path: Path) -> None:
    """Else a second process appends between the new log and its head, and finds a log that was "changed"."""
    log = ChainedLog(tmp_path / "log.jsonl")

    def free() -> bool:
        with log.path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    with log.locked():
        assert not free()
        for number in range(3):
            log.append({"number": number})
            assert not free()
    assert free()
    with log.locked():
        log.head_path.unlink()
        with pytest.raises(UserError, match="is gone"):
            log.append({"number": 3})
    assert free()


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = filled(tmp_path / "log.jsonl")
    before = log.path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with log.locked():
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left"):
            log.append({"event": "note"})
    assert log.path.read_bytes() == before
    assert json.loads(before.splitlines()[-1])["number"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "log.jsonl.head"]


# -- the head: what the chain alone cannot show -----------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_log_that_was_cut_at_its_end_is_found(tmp_path: Path, kept: int, tried: Callable[..., None]) -> None:
    tried("faults")
    log = filled(tmp_path / "log.jsonl")
    lines = log.path.read_text().splitlines(keepends=True)
    log.path.write_text("".join(lines[:kept]))
    broken = log.broken()
    assert broken is not None
    assert "cut off" in broken.reason
    with log.locked(), pytest.raises(UserError, match="nothing is appended"):
        log.append({"event": "note"})
    log.path.write_text("".join(lines))
    assert log.broken() is None


def test_a_last_entry_written_anew_with_a_hash_that_fits_is_found(tmp_path: Path) -> None:
    log = filled(tmp_path / "log.jsonl")
    lines = log.path.read_text().splitlines()
    entry = json.loads(lines[-1])
    body = {name: value for name, value in entry.items() if name != "fingerprint"} | {"number": 9}
    forged = canonical_json({**body, "fingerprint": fingerprint_bytes(canonical_json(body).encode())})
    log.path.write_text("\n".join([*lines[:-1], forged]) + "\n")
    broken = log.broken()
    assert broken is not None
    assert "not the one that was written" in broken.reason


@pytest.mark.parametrize(
    "content", [None, b"", b"{}", b"[1]", b"\xff", b'{"entries":"x","fingerprint":""}', b"[" * 4000]
)
def test_a_head_that_is_gone_or_unreadable_is_found(
    tmp_path: Path, content: bytes | None, tried: Callable[..., None]
) -> None:
    tried("faults")
    log = filled(tmp_path / "log.jsonl")
    log.head_path.unlink() if content is None else log.head_path.write_bytes(content)
    assert log.broken() is not None


def test_a_kill_between_an_entry_and_its_head_is_no_fault(tmp_path: Path, tried: Callable[..., None]) -> None:
    for count in (1, 2, 3):
        tried("faults")
        log = filled(tmp_path / f"log{count}.jsonl", count)
        head = log.head_path.read_bytes()
        with log.locked():
            log.append({"event": "note", "number": count})
        log.head_path.write_bytes(head)  # as it was before that append
        assert log.broken() is None
        with log.locked():
            log.append({"event": "note", "number": count + 1})
        assert log.broken() is None
        assert log.head() == log.now()
    first = filled(tmp_path / "first.jsonl", 1)
    first.head_path.unlink()
    assert first.broken() is None


def test_a_log_of_an_earlier_version_has_no_head_until_the_next_entry(tmp_path: Path) -> None:
    log = ChainedLog(tmp_path / "log.jsonl")
    log.path.write_text(canonical_json({"event": "opened", "previous": ""}) + "\n")
    assert not log.anchored
    assert log.broken() is None
    with log.locked():
        log.append({"event": "look"})
    assert log.anchored
    lines = log.path.read_text().splitlines(keepends=True)
    log.path.write_text(lines[0])
    assert log.broken() is not None


def test_reading_beside_somebody_who_appends_finds_no_fault(tmp_path: Path) -> None:
    log = filled(tmp_path / "log.jsonl", 1)
    with ThreadPoolExecutor(1) as pool:

        def add() -> None:
            for number in range(30):
                with log.locked():
                    log.append({"number": number})

        done = pool.submit(add)
        while not done.done():
            assert log.broken() is None
        done.result()
    assert log.broken() is None


@pytest.mark.parametrize("killed", ["entry", "head"])
def test_what_a_kill_in_the_middle_of_a_write_leaves_is_removed_by_the_next(tmp_path: Path, killed: str) -> None:
    """A process that dies while the file that takes the log's place, or the head's, is on its way."""
    path = tmp_path / "log.jsonl"
    filled(path, 2)
    name = path.name if killed == "entry" else f"{path.name}.head"
    child = os.fork()
    if not child:
        os.replace = lambda old, new: os._exit(9) if Path(new).name == name else os.rename(old, new)
        with ChainedLog(path).locked():
            ChainedLog(path).append({"event": "note", "number": 2})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = [item.name for item in tmp_path.iterdir() if item.name.endswith(".tmp")]
    assert [item.startswith(f".{name}.") for item in left] == [True]
    other = tmp_path / ".other.jsonl.abc.tmp"  # of a log that somebody else may be writing
    other.touch()
    log = ChainedLog(path)
    assert log.entries()  # whoever reads removes nothing: a writer may be at work
    assert (tmp_path / left[0]).exists()
    with log.locked():
        assert not (tmp_path / left[0]).exists()
    assert other.exists()
    assert log.broken() is None
    (tmp_path / left[0]).touch()
    ChainedLog(path).append({"event": "note", "number": 3})  # under a lock of its owner's, as a lineage is
    assert sorted(item.name for item in tmp_path.iterdir()) == [other.name, "log.jsonl", "log.jsonl.head"]


def test_a_leftover_that_may_not_be_removed_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that many write each may remove what is his own; a query whose result is lost would be spent."""
    log = filled(tmp_path / "log.jsonl", 1)
    left = tmp_path / ".log.jsonl.abc.tmp"
    left.touch()
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path == left:
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    with log.locked():
        log.append({"event": "note", "number": 1})
    assert len(log.entries()) == 2
    assert left.exists()
