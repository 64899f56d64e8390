"""Reading, joining and counting predictions; every fault a sentence."""

import datetime
import os
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.certify.claims import Counts
from holdfast.certify.tables import paired_tables, read_joined, read_paired
from holdfast.errors import UserError
from tests.certify.helpers import predictions, rows, write_csv

SPEC = {"clear": (40, 3, 1), "snowy": (25, 0, 2), "rainy": (10, 1, 0)}
COUNTS = {task: Counts(task, *numbers) for task, numbers in SPEC.items()}


def test_counts_from_csv_and_parquet(tmp_path: Path) -> None:
    table = rows(SPEC)
    paired = read_paired(write_csv(tmp_path / "p.csv", table))
    assert paired.counts() == COUNTS
    assert not paired.disjoint  # nobody said which image is which
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "p.parquet")
    paired = read_paired(tmp_path / "p.parquet")
    assert paired.counts() == COUNTS
    assert paired.disjoint


def test_other_separators_types_and_spaces(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("task\tlabel\told\tnew\n1\t1\t1\t2\n2\t2\t1\t2\n")
    assert read_paired(tmp_path / "t.csv").counts() == {"1": Counts("1", 1, 0, 1), "2": Counts("2", 1, 1, 0)}
    (tmp_path / "s.csv").write_text('task,label,old,new\n"a ","a",a, b\nb,b,b,b\n')
    assert read_paired(tmp_path / "s.csv").counts() == {"a": Counts("a", 1, 0, 1), "b": Counts("b", 1, 0, 0)}
    # whole numbers as floats in one column and integers in another are the same classes
    numbers = {"task": ["x", "x"], "label": [3, 4], "old": [3.0, 3.0], "new": [3, 4]}
    pq.write_table(pa.table(numbers), tmp_path / "n.parquet")
    assert read_paired(tmp_path / "n.parquet").counts() == {"x": Counts("x", 2, 1, 0)}
    dictionary = pa.table({name: pa.array(["a", "b"]).dictionary_encode() for name in ("task", "label", "old", "new")})
    pq.write_table(dictionary, tmp_path / "d.parquet")
    assert read_paired(tmp_path / "d.parquet").tasks() == ["a", "b"]


def test_an_image_that_serves_two_tasks(tmp_path: Path) -> None:
    table = [{**row, "example_id": f"image-{k}"} for task in SPEC for k, row in enumerate(rows({task: SPEC[task]}))]
    paired = read_paired(write_csv(tmp_path / "p.csv", table, "example_id,task,label,old,new"))
    assert paired.counts() == COUNTS
    assert not paired.disjoint


@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_order_of_rows_is_irrelevant_and_two_files_are_as_one(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    table = rows(SPEC)
    generator.shuffle(table)
    whole = read_paired(write_csv(tmp_path / "p.csv", table, "example_id,task,label,old,new"))
    assert whole.counts() == COUNTS
    old = [{**row, "prediction": row["old"]} for row in table]
    new = [{**row, "prediction": row["new"]} for row in table]
    generator.shuffle(new)
    columns = "example_id,task,label,prediction"
    joined = read_joined(write_csv(tmp_path / "o.csv", old, columns), write_csv(tmp_path / "n.csv", new, columns))
    assert joined.counts() == COUNTS
    assert joined.disjoint
    # cut in two and put together again
    cut = generator.randrange(1, len(table))
    first = write_csv(tmp_path / "1.csv", table[:cut]).read_text()
    second = write_csv(tmp_path / "2.csv", table[cut:]).read_text().split("\n", 1)[1]
    (tmp_path / "both.csv").write_text(first + second)
    assert read_paired(tmp_path / "both.csv").counts() == COUNTS


def test_tables_in_memory() -> None:
    table = rows(SPEC)
    assert paired_tables(predictions(table, "old"), predictions(list(reversed(table)), "new")).counts() == COUNTS


BAD = {
    "missing column": ("task,label,old\na,a,a\n", "lacks column new"),
    "misspelt column": ("task,lable,old,new\na,a,a,a\n", "rename 'lable' to 'label'"),
    "no line of names": ("cat,cat,cat,cat\n", "name the columns in the first line"),
    "of one model": ("task,label,prediction\na,a,a\n", "give the files of both"),
    "no rows": ("task,label,old,new\n", "has no rows"),
    "NaN": ("task,label,old,new\na,a,a,NaN\n", "1 empty or NaN cell in column new"),
    "empty": ("task,label,old,new\na,a,a,a\n,a,a,a\n", "the first in data row 2"),
    "unknown label": ("task,label,old,new\na,a,a,a\na,martian,a,a\n", "unknown label martian"),
    "other spelling": (
        "task,label,old,new\npartly cloudy,partly cloudy,Partly_Cloudy,partly cloudy\n",
        "unknown label",
    ),
    "other vocabulary": ("task,label,old,new\nt,1,cat,dog\nt,dog,cat,dog\n", "unknown label 1"),
    "nothing in common": ("task,label,old,new\na,a,1,2\nb,b,2,2\n", "no prediction of the old model"),
    "duplicated id": ("example_id,task,label,old,new\nx,a,a,a,a\nx,a,a,a,a\n", "more than once"),
    "ragged": ("task,label,old,new\na,a\n", "cannot be read"),
    "empty file": ("", "cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tmp_path: Path, name: str) -> None:
    text, message = BAD[name]
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(UserError) as error:
        read_paired(tmp_path / "p.csv")
    assert message in error.value.text()


def test_declared_labels_are_strict(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "p.csv", rows({"clear": (10, 1, 0)}))
    assert read_paired(path, ["clear", "overcast"]).counts()["clear"].gained == 1
    with pytest.raises(UserError, match="unknown label overcast"):
        read_paired(path, ["clear"])


def test_bad_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"task": ["a"], "label": [None], "old": ["a"], "new": ["a"]}), tmp_path / "p.parquet")
    with pytest.raises(UserError, match="empty or NaN"):
        read_paired(tmp_path / "p.parquet")
    nan = pa.table({"task": ["a", "a"], "label": [1.0, float("nan")], "old": [1, 1], "new": [1, 1]})
    pq.write_table(nan, tmp_path / "f.parquet")
    with pytest.raises(UserError, match="column label"):
        read_paired(tmp_path / "f.parquet")
    pq.write_table(pa.table({"task": [["a"]], "label": ["a"], "old": ["a"], "new": ["a"]}), tmp_path / "l.parquet")
    with pytest.raises(UserError, match="holds list"):
        read_paired(tmp_path / "l.parquet")
    (tmp_path / "x.parquet").write_text("not parquet")
    with pytest.raises(UserError, match="cannot be read"):
        read_paired(tmp_path / "x.parquet")
    with pytest.raises(UserError, match="does not exist"):
        read_paired(tmp_path / "none.csv")


def test_files_that_do_not_join(tmp_path: Path) -> None:
    columns = "example_id,task,label,prediction"
    table = [{**row, "prediction": row["old"]} for row in rows({"clear": (5, 0, 0)})]
    old = write_csv(tmp_path / "o.csv", table, columns)
    with pytest.raises(UserError, match="do not join") as error:
        read_joined(old, write_csv(tmp_path / "n.csv", table[1:], columns))
    assert "1 rows only in the first, 0 only in the second" in error.value.text()
    relabelled = [{**row, "label": "overcast"} for row in table]
    with pytest.raises(UserError, match="5 images different labels"):
        read_joined(old, write_csv(tmp_path / "n.csv", relabelled, columns))
    with pytest.raises(UserError, match="more than once"):
        read_joined(old, write_csv(tmp_path / "n.csv", [*table, table[0]], columns))


CSV = {
    "nothing": b"",
    "an empty line": b"\n",
    "names only": b"task,label,old,new\n",
    "no text": b"task,label,old,new\n\xff,a,a,a\n",
    "sixteen bits": "task,label,old,new\na,a,a,a\n".encode("utf-16"),
    "too few cells": b"task,label,old,new\na,a,a\n",
    "too many cells": b"task,label,old,new\na,a,a,a,a\n",
    "a quote that never ends": b'task,label,old,new\n"a,a,a,a\n',
    "a column twice": b"task,label,old,new,new\na,a,a,a,a\n",
    "a column twice, with a space": b"task,label,old,new, new\na,a,a,a,a\n",
    "a line without end": b"x" * 3_000_000,
    "a name without end": b"task,label,old,new," + b"x" * 3_000_000 + b"\na,a,a,a,a\n",
    "JSON": b'{"task": 1}',
    "bytes": bytes(range(256)) * 40,
}


@pytest.mark.parametrize("name", CSV)
def test_tables_that_are_none(name: str, tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("bad inputs")
    (tmp_path / "p.csv").write_bytes(CSV[name])
    (tmp_path / "p.parquet").write_bytes(CSV[name])
    for path in (tmp_path / "p.csv", tmp_path / "p.parquet"):
        with pytest.raises(UserError) as caught:
            read_paired(path)
        assert len(caught.value.text()) < 1500


def test_only_files_are_tables(tmp_path: Path, tried: Callable[..., None]) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    os.mkfifo(tmp_path / "pipe.parquet")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    for name in ("pipe.csv", "pipe.parquet", "zero.csv", "loop.csv", "", "none.csv", "none.csv/x", "x" * 5000):
        tried("bad inputs")
        with pytest.raises(UserError):
            read_paired(tmp_path / name)


def test_columns_of_every_kind_are_read_or_refused(tmp_path: Path, tried: Callable[..., None]) -> None:
    good = pa.array(["a", "b"] * 3)
    kinds = {
        "large strings": (good.cast(pa.large_string()), True),
        "a dictionary": (good.dictionary_encode(), True),
        "whole numbers": (pa.array([1, 2] * 3), False),  # labels of another vocabulary
        "nothing": (pa.nulls(6), False),
        "holes": (pa.array(["a", None] * 3), False),
        "no numbers": (pa.array([1.0, float("nan")] * 3), False),
        "bytes": (pa.array([b"a"] * 6), False),
        "large bytes": (pa.array([b"a"] * 6, pa.large_binary()), False),
        "lists": (pa.array([["a"]] * 6), False),
        "tables": (pa.array([{"a": 1}] * 6), False),
        "times": (pa.array([datetime.datetime(2020, 1, 1)] * 6), False),
        "ages of the universe": (pa.array([2**62] * 6).cast(pa.duration("s")), False),
    }
    for name, (column, fits) in kinds.items():
        tried("bad inputs", 0 if fits else 1)
        table = pa.table({"task": good, "label": column, "old": good, "new": good})
        pq.write_table(table, tmp_path / "p.parquet")
        if fits:
            assert read_paired(tmp_path / "p.parquet").counts()["a"].n == 3
            continue
        with pytest.raises(UserError):
            read_paired(tmp_path / "p.parquet")
        assert name
    pq.write_table(pa.table([good] * 5, names=["task", "task", "label", "old", "new"]), tmp_path / "p.parquet")
    with pytest.raises(UserError):
        read_paired(tmp_path / "p.parquet")
