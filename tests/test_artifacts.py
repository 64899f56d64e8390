"""Files that survive: a full disk, a kill in the middle, a line cut short."""

from __future__ import annotations

import errno
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.artifacts import PREDICTIONS, RunFolder, read_predictions, write_predictions
from holdfast.errors import UserError
from holdfast.files import (
    fingerprint_ids,
    fingerprint_json,
    read_jsonl,
    read_regular,
    round_names,
    where_instead,
    write_atomic,
    write_json,
)


def table(ids: list[str]) -> pa.Table:
    count = len(ids)
    columns = [ids, ["a"] * count, ["a"] * count, ["b"] * count, [0.5] * count, [0.9] * count]
    return pa.table(columns, schema=PREDICTIONS)


def test_a_full_disk_is_said_so_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"before": 1})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left") as caught:
        write_json(path, {"after": 2})
    assert "untouched" in caught.value.do
    assert path.read_text() == '{\n  "before": 1\n}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]  # no half-written file is left behind


def test_a_file_is_read_to_its_end_and_no_further_than_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "file").write_bytes(b"x" * 1000)
    assert read_regular(tmp_path / "empty", 0) == b""
    assert read_regular(tmp_path / "file", 1000) == b"x" * 1000
    with pytest.raises(OSError, match="larger than 999 bytes"):
        read_regular(tmp_path / "file", 999)
    with pytest.raises(OSError, match="a folder, not a regular file"):
        read_regular(tmp_path, 1000)


@pytest.mark.parametrize("size", [0, 1, 999, 2000])
def test_a_file_that_grows_or_shrinks_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    content = bytes(range(250)) * 4
    (tmp_path / "file").write_bytes(content)
    known = os.stat_result((0o100644, *(0 for _ in range(5)), size, 0, 0, 0))
    monkeypatch.setattr(os, "fstat", lambda handle: known)  # as it was before
    assert read_regular(tmp_path / "file", 2000) == content
    with pytest.raises(OSError, match="larger than 900 bytes"):
        read_regular(tmp_path / "file", 900)


def test_to_read_a_file_takes_its_own_size_in_memory_not_that_of_the_largest(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        read_regular(tmp_path / "file", 256 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_writer_that_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def half(temporary: Path) -> None:
        temporary.write_text("ne")
        raise RuntimeError("killed here")

    with pytest.raises(RuntimeError):
        write_atomic(path, half)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_last_line_cut_short_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [item["step"] for item in read_jsonl(path)] == [1, 2]


def test_predictions_name_each_example_once_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "predictions.parquet"
    write_predictions(path, table(["x", "y"]))
    assert read_predictions(path).equals(table(["x", "y"]))
    with pytest.raises(ValueError, match="once"):
        write_predictions(path, table(["x", "x"]))
    with pytest.raises(UserError, match="does not exist"):
        read_predictions(tmp_path / "nothing.parquet")


def test_fingerprints_do_not_depend_on_order() -> None:
    assert fingerprint_ids(["b", "a"]) == fingerprint_ids(["a", "b"]) != fingerprint_ids(["a"])
    assert fingerprint_json({"a": 1, "b": 2}) == fingerprint_json({"b": 2, "a": 1}) != fingerprint_json({"a": 1})


def test_a_run_folder_is_opened_only_where_a_run_was_begun(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stopped before it began"):  # or so: develop leaves an empty folder then
        RunFolder.open(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        RunFolder.open(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not a run folder"):
        RunFolder.open(tmp_path)
    with pytest.raises(UserError, match="not empty"):
        RunFolder.create(tmp_path)
    with pytest.raises(UserError, match="is a file"):
        RunFolder.create(tmp_path / "file")


@pytest.mark.parametrize(
    ("section", "advice"),
    [
        ({"task": {}}, "go on with the run that is in it: holdfast develop --resume '{run}'"),
        ({"objective": "cross_entropy"}, "go on with the run that is in it: the command that began it, with --resume"),
        (None, "choose another with --out"),
    ],
)
def test_a_run_folder_in_use_is_answered_with_what_goes_on(
    section: dict[str, object] | None, advice: str, tmp_path: Path
) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    (run / "notes.txt").write_text("")
    if section is not None:
        write_json(run / "round.json", {"seed": 0, "data": {}, "model": {}, **section})
        write_json(run / "run.json", {})
    with pytest.raises(UserError) as refused:
        RunFolder.check_free(run)
    assert refused.value.do.endswith(advice.format(run=run))


def test_a_path_that_does_not_exist_is_answered_with_the_one_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of a project go by their short names in `show` and `diff`; in a path they have their folder's."""
    monkeypatch.chdir(tmp_path)
    for name in ("0001-giraffe", "0002-sea", "0012-sea"):
        (tmp_path / "zoo" / "rounds" / name / "model").mkdir(parents=True)
    expected = {
        "zoo/rounds/giraffe": "did you mean zoo/rounds/0001-giraffe?",
        "zoo/rounds/giraffe/model": "did you mean zoo/rounds/0001-giraffe/model?",
        "zoo/giraffe": "did you mean zoo/rounds/0001-giraffe?",
        "zoo/rounds/12": "did you mean zoo/rounds/0012-sea?",
        "zoo/rounds/sea": "did you mean zoo/rounds/0002-sea or zoo/rounds/0012-sea?",
        "zoo/rounds/0001-girafe": "did you mean zoo/rounds/0001-giraffe?",
        "zooo/rounds": "did you mean zoo/rounds?",
        "zoo/rounds/giraffe/modle": "check the path",
        "zoo/rounds/whale": "check the path",
        "zoo": "check the path",  # it is there
        str(tmp_path / "zoo/rounds/giraffe"): f"did you mean {tmp_path}/zoo/rounds/0001-giraffe?",
    }
    assert {path: where_instead(Path(path)) for path in expected} == expected
    assert round_names("0012-sea") == ("0012-sea", "0012", "12", "sea")
    assert round_names("runs") == ("runs",)
    with pytest.raises(UserError) as raised:
        RunFolder.open(Path("zoo/rounds/giraffe"))
    assert raised.value.do == "did you mean zoo/rounds/0001-giraffe?"
