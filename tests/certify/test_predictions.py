"""``holdfast.certify`` and ``holdfast.plan``: files, frames and dicts give what the command line gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import holdfast
from holdfast import cli
from holdfast.certify.certificate import verify_certificate
from holdfast.certify.claims import Verdict
from holdfast.certify.predictions import certify
from holdfast.errors import UserError

ROWS = {
    "task": ["a"] * 300 + ["b"] * 300 + ["t"] * 100,
    "label": ["x"] * 700,
    "old": ["x"] * 290 + ["y"] * 10 + ["x"] * 280 + ["y"] * 20 + ["x"] * 20 + ["y"] * 80,
    "new": ["x"] * 288 + ["y"] * 12 + ["x"] * 285 + ["y"] * 15 + ["x"] * 60 + ["y"] * 40,
}


def one_model(name: str) -> dict[str, list[str]]:
    ids = [str(number) for number in range(700)]
    return {"example_id": ids, "task": ROWS["task"], "label": ROWS["label"], "prediction": ROWS[name]}


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr("sys.argv", ["holdfast", *words, "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    return json.loads(capsys.readouterr().out)


def test_every_kind_of_table_gives_what_the_command_line_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old.csv", tmp_path / "new.parquet"
    pd.DataFrame(one_model("old")).to_csv(old, index=False)
    pd.DataFrame(one_model("new")).to_parquet(new)
    words = ("certify", "--old", str(old), "--new", str(new), "--target", "t", "--margin", "0.05", "--margin", "b=0.1")
    expected = printed(capsys, monkeypatch, *words)
    shuffled = pd.DataFrame(one_model("new")).sample(frac=1.0, random_state=3)
    for left, right in (
        (old, new),
        (str(old), str(new)),
        (pd.DataFrame(one_model("old")), shuffled),
        (pl.DataFrame(one_model("old")), pa.table(one_model("new"))),
        (old, one_model("new")),
    ):
        result = certify(left, right, target="t", margin=0.05, margins={"b": 0.1})
        assert result.to_json() == expected
    assert result.verdict is Verdict.CERTIFIED
    assert result.certified
    assert set(result.tasks) == {"a", "b"}
    assert (result.tasks["b"].counts.gained, result.tasks["b"].margin) == (5, 0.1)
    assert result.target is not None
    assert result.target.verdict is Verdict.CERTIFIED
    alone = certify(pd.DataFrame(ROWS), target="t", margin=0.05, margins={"b": 0.1})
    assert alone.verdict == "certified"
    pooled = certify(ROWS, target="t", pools={"both": ["a", "b"]}, margin=0.05, distinct_rows=True)
    assert pooled.tasks["both"].counts.n == 600


def test_a_certificate_rests_on_files(tmp_path: Path, tried: Callable[..., None]) -> None:
    table = tmp_path / "both.csv"
    pd.DataFrame({"example_id": range(700), **ROWS}).to_csv(table, index=False)
    certify(table, target="t", margin=0.05).write(tmp_path / "certificate.json", {"data": table})
    assert verify_certificate(tmp_path / "certificate.json")["report"]["verdict"] == "certified"
    tried("bad inputs")
    with pytest.raises(UserError, match="these predictions are in memory"):
        certify(ROWS, target="t", margin=0.05).write(tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()


@pytest.mark.parametrize(
    ("table", "options", "expected"),
    [
        (7, {}, "are no table"),
        ({"task": ["a"], "label": ["x", "y"]}, {}, "cannot be read as a table"),
        ({"task": ["a"]}, {}, "lacks columns label, old, new"),
        ({**ROWS, "new": [None, *ROWS["new"][1:]]}, {}, "1 empty or NaN cell in column new"),
        (ROWS, {"claim": "al"}, "there is no claim 'al'"),
        (ROWS, {"target": "z"}, "the task 'z' has no images here"),
        (ROWS, {"margin": 2.0}, "the margin 2 of a is not usable"),
        (ROWS, {"margin": None}, "no margin is given for a, b, t"),
        (ROWS, {"margins": {"z": 0.1}}, "a margin is given for 'z'"),
        (ROWS, {"confidence": 1.5}, "confidence"),
        (ROWS, {"pools": {"a": ["b"]}}, "a task has that name"),
        (ROWS, {"pools": {"p": []}}, "no name, or no tasks"),
        (ROWS, {"tasks": ["t"], "target": "t"}, "a task has two parts"),
        (ROWS, {"lemma_constant": float("nan")}, "Lemma 1"),
        ("nowhere.csv", {}, "nowhere.csv does not exist"),
    ],
)
def test_mistakes_are_sentences(table: Any, options: Any, expected: str, tried: Callable[..., None]) -> None:
    tried("bad inputs")
    with pytest.raises(UserError) as caught:
        certify(table, **options)
    assert expected in caught.value.text()


def test_a_plan_is_that_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tried: Callable[..., None]
) -> None:
    table = tmp_path / "both.csv"
    pd.DataFrame(ROWS).to_csv(table, index=False)
    found = holdfast.plan(ROWS, target="t", margin=0.05, images=200)
    words = ("--predictions", str(table), "--target", "t", "--margin", "0.05", "--images", "200")
    assert found.to_json() == printed(capsys, monkeypatch, "plan", *words)
    assert set(found.tasks) == {"a", "b"}
    assert found.images_needed == max(item["per_task"] for item in found.tasks.values())
    assert found.best_margin is not None
    assert holdfast.plan(discordance=0.02, margin=0.02, tasks=5).best_margin is None
    tried("bad inputs")
    with pytest.raises(UserError, match="how often do the models differ"):
        holdfast.plan(margin=0.02)
