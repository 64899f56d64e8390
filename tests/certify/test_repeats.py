"""A file pasted ten times is no more evidence; ids, statements about rows, and columns that are not used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from holdfast.certify.certificate import verify_certificate
from holdfast.certify.claims import Counts
from holdfast.certify.predictions import certify, certify_sequentially
from holdfast.certify.repeats import repeated
from holdfast.certify.tables import paired_table
from holdfast.errors import UserError


def table(n: int = 60, seed: int = 0, classes: int = 3) -> pd.DataFrame:
    """Random answers, most of them right."""
    draw = np.random.default_rng(seed)
    names = np.array([f"class {k}" for k in range(classes)])
    label = draw.integers(0, classes, n)
    answers = {
        model: names[np.where(draw.random(n) < 0.9, label, draw.integers(0, classes, n))] for model in ("old", "new")
    }
    return pd.DataFrame({"task": names[label], "label": names[label], **answers})


def test_a_file_pasted_ten_times_is_refused(tmp_path: Path, tried: Callable[..., None]) -> None:
    """Today's answer was `certified`; in order, shuffled, and with row numbers that make copies look different."""
    once = table()
    pasted = pd.concat([once] * 10, ignore_index=True)
    numbered = pasted.reset_index()
    shuffled = pasted.sample(frac=1.0, random_state=1)
    assert certify(once, margin=0.2).report["input"]["repeated_rows"] is None
    for frame in (pasted, shuffled, numbered):
        for run in (certify, certify_sequentially):
            tried("bad inputs")
            with pytest.raises(UserError, match="rows repeat: ") as caught:
                run(frame, margin=0.2)
            assert "10 times" in caught.value.text()
    stated = certify(pasted, margin=0.2, distinct_rows=True)
    assert stated.settings.distinct_rows
    assert "60 rows, 10 times one after another" in stated.report["input"]["repeated_rows"]
    # With ids of their own the copies are a warning, not more: ids are the user's word.
    named = certify(pasted.assign(example_id=range(600)), margin=0.2)
    assert any("apart from their ids, rows repeat" in warning for warning in named.report["input"]["warnings"])


def test_the_rule_in_numbers() -> None:
    def rule(codes: list[int], other: bool = False) -> str | None:
        return repeated(np.array(codes), other)

    assert rule([0, 1, 0, 1]) == "the same 2 rows, 2 times one after another"
    assert rule([0, 1, 2, 0, 1, 2, 0, 1, 2]) == "the same 3 rows, 3 times one after another"
    assert rule([0, 0, 1, 1, 2, 2]) is None  # sorted, few kinds: images alike, for all that anybody knows
    assert (
        rule([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5]) == "each of the 6 different rows occurs a multiple of 2 times"
    )
    assert rule([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5]) is None
    assert rule([0] * 100) is None
    assert rule([0, 1, 2, 3, 3]) is None
    assert rule([0, 1, 2, 3, 3], other=True) == "1 of 5 rows equal an earlier row in every column"
    assert rule([0, 0, 0, 1, 1], other=True) is None  # such as a column `split` that is the same for all


def test_tables_of_real_size_are_not_suspected() -> None:
    """Random tables without ids; the rule's own bound is 1.7 % for six kinds of rows."""
    suspected = sum(
        paired_table(pa.Table.from_pandas(table(n, seed, classes))).inspection.repeats is not None
        for seed in range(100)
        for n, classes in ((200, 3), (300, 5))
    )
    assert suspected <= 8  # 200 draws; about half a per cent of them are expected


def test_scores_and_paths_tell_copies_from_images(tried: Callable[..., None]) -> None:
    scored = table().assign(score=np.random.default_rng(5).random(60))
    assert paired_table(pa.Table.from_pandas(scored)).inspection.repeats is None
    some_twice = pd.concat([scored, scored[:7]])
    tried("bad inputs")
    with pytest.raises(UserError, match="7 of 67 rows equal an earlier row in every column"):
        certify(some_twice, margin=0.2)


def test_a_written_certificate_needs_ids_or_a_statement(tmp_path: Path, tried: Callable[..., None]) -> None:
    path, out = tmp_path / "p.csv", tmp_path / "c.json"
    table(400).to_csv(path, index=False)
    tried("bad inputs")
    with pytest.raises(UserError, match="needs example ids"):
        certify(path, margin=0.2).write(out)
    assert not out.exists()
    certify(path, margin=0.2, distinct_rows=True).write(out)
    held = verify_certificate(out)
    assert held["settings"]["distinct_rows"]
    assert held["report"]["input"]["distinct_rows"]
    table(400).assign(example_id=range(400)).to_csv(path, index=False)
    certify(path, margin=0.2).write(out)
    assert not verify_certificate(out)["settings"]["distinct_rows"]
    tried("bad inputs")
    with pytest.raises(UserError, match="--distinct-rows and example ids at once"):
        certify(path, margin=0.2, distinct_rows=True)


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        *(
            (name, "group")
            for name in ("video", "patient_id", "subjectID", "Scene", "documents", "session", "user name")
        ),
        *((name, "weight") for name in ("weight", "sample_weight", "classWeights")),
        *((name, None) for name in ("score", "path", "loss", "split", "width", "superuser_score", "weighted")),
    ],
)
def test_columns_that_look_like_a_group_or_a_weight_are_named(column: str, kind: str | None, tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    frame = table(100).assign(example_id=range(100)).assign(**{column: [f"{k // 10}" for k in range(100)]})
    frame.to_csv(path, index=False)
    noticed = certify(path, margin=0.2).report["input"]
    assert noticed["unused_columns"] == [column]
    named = [warning for warning in noticed["warnings"] if f"not used: {column}." in warning]
    assert len(named) == (kind is not None)
    assert kind != "group" or "independent" in named[0]
    # A group of one row each, and a weight that is the same for all, change nothing.
    harmless = [str(k) for k in range(100)] if kind == "group" else ["1"] * 100
    frame.assign(**{column: harmless}).to_csv(path, index=False)
    assert not [warning for warning in certify(path, margin=0.2).report["input"]["warnings"] if "not used" in warning]
    certify(path, margin=0.2).write(tmp_path / "c.json")
    assert verify_certificate(tmp_path / "c.json")["report"]["input"]["unused_columns"] == [column]


# -- pools and tasks --------------------------------------------------------------------------------------------------


def shared(outcomes: dict[str, list[tuple[int, int]]], offset: dict[str, int]) -> dict[str, list[Any]]:
    """Tasks whose images are numbered from ``offset`` on: equal numbers are one image that serves both."""
    rows = [
        (f"image-{offset[task] + k}", task, old, new)
        for task, pairs in outcomes.items()
        for k, (old, new) in enumerate(pairs)
    ]
    return dict(
        zip(("example_id", "task", "old_correct", "new_correct"), map(list, zip(*rows, strict=True)), strict=True)
    )


def test_a_pool_counts_an_image_once(tried: Callable[..., None]) -> None:
    pairs = [(1, 1)] * 30 + [(0, 1)] * 4 + [(1, 0)] * 2 + [(0, 0)] * 4
    both = shared({"a": pairs, "b": pairs}, {"a": 0, "b": 0})
    pooled = certify(both, pools={"both": ["a", "b"]}, margin=0.2).tasks["both"].counts
    assert pooled == Counts("both", 40, 4, 2, ("a", "b"))  # and not 80, 8, 4
    half = shared({"a": pairs, "b": pairs[30:]}, {"a": 0, "b": 30})
    assert certify(half, pools={"both": ["a", "b"]}, margin=0.2).tasks["both"].counts.n == 40
    apart = shared({"a": pairs, "b": pairs}, {"a": 0, "b": 100})
    assert certify(apart, pools={"both": ["a", "b"]}, margin=0.2).tasks["both"].counts.n == 80
    tried("bad inputs", 2)
    mixed = shared({"a": pairs, "b": pairs[::-1]}, {"a": 0, "b": 0})
    with pytest.raises(UserError, match="in the pool both 20 images have different outcomes"):
        certify(mixed, pools={"both": ["a", "b"]}, margin=0.2)
    del both["example_id"]
    with pytest.raises(UserError, match="a pool, which counts an image once, needs example ids"):
        certify({**both, "score": list(range(80))}, pools={"both": ["a", "b"]}, margin=0.2)


def test_what_tasks_leaves_out_is_recorded(tmp_path: Path) -> None:
    pairs = [(1, 1)] * 190 + [(0, 1)] * 4 + [(1, 0)] * 2 + [(0, 0)] * 4
    rows = shared({"a": pairs, "b": [(1, 0)] * 30, "c": pairs}, {"a": 0, "b": 1000, "c": 2000})
    path = tmp_path / "p.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    result = certify(path, tasks=["a"], target="c", margin=0.05)
    assert result.report["left_out"] == [{"task": "b", "n": 30, "gained": 0, "lost": 30, "difference": -1.0}]
    result.write(tmp_path / "c.json")
    assert verify_certificate(tmp_path / "c.json")["report"]["left_out"][0]["task"] == "b"
    assert certify(path, tasks=["a", "b"], target="c", margin=0.05).report["left_out"] == []
    assert certify(path, pools={"x": ["a", "b"]}, margin=0.05).report["left_out"] == []
    # A certificate that hides what was left out does not come out again.
    held = json.loads((tmp_path / "c.json").read_text())
    from tests.certify.test_certificate import refingerprinted

    held["report"]["left_out"] = []
    (tmp_path / "c.json").write_text(json.dumps(refingerprinted(held)))
    with pytest.raises(Exception, match="left_out is different"):
        verify_certificate(tmp_path / "c.json")
