"""Flip rates in the report of `certify`: a naive count, and nothing of a sealed set before it is retired."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.report.markdown import certify_markdown
from tests.certify.helpers import rows, write_csv, write_pair
from tests.certify.test_cli import Shell

NAMES = ("negative_flip_rate", "positive_flip_rate", "relative_negative_flip_rate")


def naive(old: np.ndarray, new: np.ndarray) -> dict[str, float]:
    """The definitions word by word, row by row."""
    pairs = list(zip(old.tolist(), new.tolist(), strict=True))
    negative = sum(before and not now for before, now in pairs) / len(pairs)
    positive = sum(now and not before for before, now in pairs) / len(pairs)
    error_old, error_new = 1 - sum(old.tolist()) / len(pairs), 1 - sum(new.tolist()) / len(pairs)
    return dict(zip(NAMES, (negative, positive, negative / ((1 - error_old) * error_new)), strict=True))


def test_rates_are_those_of_a_naive_count_on_a_random_table() -> None:
    random = np.random.default_rng(3)
    task = random.choice(["a", "b", "c"], 900)
    old, new = random.random(900) < 0.9, random.random(900) < 0.85
    table = {
        "example_id": [str(k) for k in range(900)],
        "task": task.tolist(),
        "old_correct": old.tolist(),
        "new_correct": new.tolist(),
    }
    result = holdfast.certify(table, margin=0.2, target="c", pools={"both": ["a", "b"]}).to_json()
    flips = result["flips"]
    assert flips["examples"] == 900
    assert {name: flips[name] for name in NAMES} == pytest.approx(naive(old, new))
    assert set(flips["tasks"]) == {"a", "b", "c", "both"}
    for name, members in {"a": ["a"], "c": ["c"], "both": ["a", "b"]}.items():
        here = np.isin(task, members)
        found = {key: flips["tasks"][name][key] for key in NAMES}
        assert found == pytest.approx(naive(old[here], new[here]))
    markdown = certify_markdown(result)
    assert f"negative flip rate {flips['negative_flip_rate'] * 100:.2f} %" in markdown
    assert f"| {flips['tasks']['c']['relative_negative_flip_rate']:.3f} |" in markdown


def test_a_pool_counts_an_image_once_and_scores_do_not_flip() -> None:
    shared = {
        "example_id": ["1", "1", "2", "3"],
        "task": ["a", "b", "a", "b"],
        "old_correct": [True, True, True, False],
        "new_correct": [False, False, True, True],
    }
    flips = holdfast.certify(shared, margin=0.5, pools={"both": ["a", "b"]}).to_json()["flips"]
    assert (flips["tasks"]["both"]["examples"], flips["examples"]) == (3, 4)
    assert flips["tasks"]["both"]["negative_flip_rate"] == pytest.approx(1 / 3)
    scores = {"example_id": ["1", "2"], "task": ["a", "a"], "old_score": [0.5, 0.4], "new_score": [0.6, 0.3]}
    reported = holdfast.certify(scores, margin=0.5).to_json()
    assert reported["flips"] is None
    assert "relative NFR" not in certify_markdown(reported)


def test_a_certificate_keeps_them_and_verify_computes_them_again(shell: Shell, tmp_path: Path) -> None:
    table = write_csv(tmp_path / "p.csv", rows({"clear": (500, 5, 3)}), "example_id,task,label,old,new")
    assert shell("certify", "--predictions", table, "--margin", "0.02", "--out", tmp_path / "c.json") == 0
    held = json.loads((tmp_path / "c.json").read_text())
    assert held["report"]["flips"]["negative_flip_rate"] == 3 / 500
    assert shell("verify", tmp_path / "c.json") == 0


def test_a_sealed_set_shows_none_of_it_before_it_is_retired(shell: Shell, tmp_path: Path) -> None:
    summary = tmp_path / "s.md"
    for query, retired in ((0, False), (1, True)):
        files = write_pair(tmp_path, {"clear": (500, 5, 60 + query)}, str(query))
        words = ("--ledger", tmp_path / "L", "--query-budget", 2, "--summary", summary, "--json")
        assert shell("certify", *files, "--margin", "0.02", *words) == 4
        assert shell.json["sealed"]["retired"] == retired
        assert ("flips" in shell.json) == retired
        for text in (shell.out, summary.read_text()):
            assert ("flip" in text) == retired
