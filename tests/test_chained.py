"""The chained log: whole at every moment, one appender at a time, and a change anywhere shows."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.artifacts import canonical_json, fingerprint_bytes
from holdfast.chained import ChainedLog
from holdfast.errors import UserError


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
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
