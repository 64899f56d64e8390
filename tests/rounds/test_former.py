"""Finished runs of an earlier version: their result has other keys, and other names of candidates."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.artifacts import RunFolder
from holdfast.cli import tables
from holdfast.config import RoundConfig, parse
from holdfast.files import read_json, write_json
from holdfast.report.content import read_run
from holdfast.report.page import write_report
from holdfast.rounds.former import former_form, read_result_json
from holdfast.rounds.result import candidate_json, read_result
from tests.report.fabricated import made_up_run

BIAS = 1.5


def as_written_before(run: Path) -> RunFolder:
    """Give a run's result the keys and names of an earlier version; its last candidate has a bias."""
    folder = RunFolder.open(run)
    result = read_json(folder.result)
    for entry in result["candidates"]:
        entry["held"] = 0.0
    last = result["candidates"][-1]
    before, last["name"], last["held"] = last["name"], f"{last['name']}-held{BIAS:g}", BIAS
    folder.predictions(before, "dev").rename(folder.predictions(last["name"], "dev"))
    result["order"] = [last["name"] if name == before else name for name in result["order"]]
    result["chosen"] = last["name"] if result["chosen"] == before else result["chosen"]
    result["bought_by_margin"] = result.pop("gain_by_margin")
    result["blocked_by"] = result["protected"][0]
    write_json(folder.result, result)
    return folder


def test_a_candidate_keeps_its_bias_and_stays_the_one_that_shipped(tmp_path: Path) -> None:
    folder = as_written_before(made_up_run(tmp_path / "run"))
    result = read_result(folder)
    assert [candidate.bias for candidate in result.candidates] == [0.0, 0.0, BIAS]
    assert result.decision.shipped is result.candidates[-1]
    assert not result.kept_old
    assert result.decision.order[-1] == result.candidates[-1].name
    assert candidate_json(result.candidates[-1])["bias"] == BIAS
    assert "held" not in candidate_json(result.candidates[-1])


def test_its_page_shows_bias_and_what_a_margin_would_buy(tmp_path: Path) -> None:
    folder = as_written_before(made_up_run(tmp_path / "run"))
    content = read_run(folder.root)
    assert [candidate.bias for candidate in content.candidates] == [0.0, 0.0, BIAS]
    assert content.dev_name.endswith(f"-held{BIAS:g}")
    assert {pair.role for pair in content.pairs} == {"sealed", "dev"}  # found under the name that they were written by
    page = write_report(folder.root, tmp_path / "page.html")[0].read_text(encoding="utf-8")
    assert "What a margin would buy" in page


def test_what_a_margin_would_buy_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = as_written_before(made_up_run(tmp_path / "run", sealed="failed", drop=0.5))
    written = io.StringIO()
    monkeypatch.setattr(tables, "Console", lambda **_: Console(file=written, width=100))
    tables.print_round(read_result(folder), as_json=False, verbose=True)
    assert "what a margin would buy" in written.getvalue()
    margins = read_result_json(folder.result)["gain_by_margin"]
    assert all(f"{item['target_gain'] * 100:+.1f} points" in written.getvalue() for item in margins)


def test_todays_keys_win_and_other_files_pass_through(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"candidates": [{"held": 1, "bias": 2}, "odd"], "gain_by_margin": [], "bought_by_margin": [1]})
    values = read_result_json(path)
    assert values["candidates"][0]["bias"] == 2
    assert values["candidates"][1] == "odd"
    assert values["gain_by_margin"] == []
    write_json(path, [1, 2])
    assert read_result_json(path) == [1, 2]


def test_a_round_in_the_published_form_of_before_is_read_with_its_candidates() -> None:
    """There the form said nothing of candidates: its config.json names a walk that today's form excludes."""
    given = {"task": {"target": "eight"}, "data": {"source": {"kind": "digits"}}, "model": {"architecture": "tiny"}}
    today = parse(RoundConfig, {**given, "method": {"form": "published", "beta": 7.0}}, "ROUND.toml")
    values = today.model_dump(mode="json")
    del values["train"]["rotation"]
    values["candidates"] = RoundConfig.model_fields["candidates"].default.model_dump(mode="json")
    read = parse(RoundConfig, former_form(values), "config.json")
    assert len(read.lambdas) == 5
    assert read.candidates.refit_target
    assert {**read.method.model_dump(), "form": "published"} == today.method.model_dump()
    assert former_form(today.model_dump(mode="json")) == today.model_dump(mode="json")
