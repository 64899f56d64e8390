"""The refit alone, as a method of its own; and a round whose sealed set is not worth a query."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import Round, cli
from holdfast.artifacts import RunFolder, read_predictions
from holdfast.config import RoundConfig, parse
from holdfast.errors import UserError
from holdfast.files import read_json, read_jsonl
from holdfast.methods.holdfast import Holdfast
from holdfast.model.folder import load_model, model_fingerprint
from holdfast.rounds.develop import develop
from holdfast.rounds.outcome import read_outcome
from tests.rounds.test_round import ROUND


def command(*words: str) -> int:
    """The exit code of the command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["holdfast", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)


def config(root: Path, **sections: dict[str, Any]) -> RoundConfig:
    values = {**ROUND, **{name: {**ROUND.get(name, {}), **given} for name, given in sections.items()}}
    values["certify"] = {**values["certify"], "ledger": str(root / "ledger")}
    return parse(RoundConfig, values, "ROUND")


def test_a_quick_round_is_the_refit_of_a_trained_one(tmp_path: Path) -> None:
    quick = develop(config(tmp_path, method={"name": "refit"}), tmp_path / "quick", tmp_path, quiet=True)
    assert [candidate.name for candidate in quick.candidates] == ["refit", "refit-bias1"]
    assert [entry["step"] for entry in read_jsonl(quick.folder.metrics)] == [0]
    whole = develop(config(tmp_path, certify={"test_sealed": False}), tmp_path / "whole", tmp_path, quiet=True)
    refits = {item.name: item.dev for item in whole.candidates if item.lam == 0}
    assert refits == {item.name: item.dev for item in quick.candidates}
    assert quick.chosen in refits
    assert read_outcome(quick.folder).training == ""  # there is nothing to compare it with


def test_the_refit_answers_before_the_method_looks_at_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the method's old losses come from kernels that are compiled first, which takes seconds."""
    happened: list[str] = []
    prepare = Holdfast.prepare

    def noted(method: Holdfast, *given: Any) -> None:
        happened.append("prepared")
        prepare(method, *given)

    monkeypatch.setattr(Holdfast, "prepare", noted)
    develop(
        config(tmp_path, certify={"test_sealed": False}),
        tmp_path / "run",
        tmp_path,
        quiet=True,
        show_refit=lambda _: happened.append("answered"),
    )
    assert happened == ["answered", "prepared"]


def test_what_needs_no_training_is_said_before_training_and_costs_no_other_bits(tmp_path: Path) -> None:
    shown: list[Any] = []
    plain = develop(config(tmp_path, certify={"test_sealed": False}), tmp_path / "plain", tmp_path, quiet=True)
    told = develop(
        config(tmp_path, certify={"test_sealed": False}),
        tmp_path / "told",
        tmp_path,
        quiet=True,
        show_refit=shown.append,
    )
    assert [item.best.is_trained for item in shown] == [False]
    assert read_json(told.folder.result) == read_json(plain.folder.result)
    assert model_fingerprint(load_model(told.folder.model)) == model_fingerprint(load_model(plain.folder.model))


def test_images_are_counted_out_of_fold_and_the_record_says_that_they_taught(tmp_path: Path) -> None:
    """Random weights have seen nothing: training images count too. In the next round they do not: its old model has."""
    counts: list[dict[str, int]] = []
    for name, folds, model in (("first", 5, {}), ("plain", 0, {}), ("next", 5, {"start": "first/model"})):
        given = config(tmp_path, method={"name": "refit"}, candidates={"folds": folds}, certify={"test_sealed": False})
        given = given.model_copy(update={"model": given.model.model_copy(update=model)}) if model else given
        round_ = Round(given, tmp_path, tmp_path / name)
        round_.train()
        decision = round_.decide()
        round_.write_result(decision)
        dev = round_.settled()[0].dev
        counts.append({task: change.examples for task, change in dev.tasks.items()})
        seen = read_json(round_.folder.model / "model.json")["seen"]
        assert seen.get("fitted" if folds else "chosen") == len(round_.data.dev)
        table = read_predictions(round_.folder.predictions("refit", "dev"))
        assert tuple(table["example_id"].to_pylist()) == round_.data.dev.ids
    first, plain, later = counts
    data = round_.data
    own = {name: int((data.dev.labels == k).sum()) for k, name in enumerate(data.tasks.classes)}
    assert later == plain == own
    taught = {name: int((data.constraint.labels == k).sum()) for k, name in enumerate(data.tasks.protected)}
    assert {name: first[name] - own[name] for name in taught} == taught
    assert first[data.tasks.target] == own[data.tasks.target] + len(set(data.target.ids))


def test_the_models_of_another_checkpoint_are_not_those_of_the_first(tmp_path: Path) -> None:
    round_ = Round(config(tmp_path, certify={"test_sealed": False}), tmp_path, tmp_path / "run")
    round_.train()
    first, last = (round_.maker.towards(f"step-0000000{step}").at(1.0) for step in (2, 4))
    assert model_fingerprint(first) != model_fingerprint(last)


def test_a_poor_chance_leaves_the_sealed_set_unspent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random weights, and a margin of nothing: no candidate has a chance unless all classes learn."""
    given = config(tmp_path, certify={"margin": 0.001}, candidates={"last_layer": False})
    result = develop(given, tmp_path / "run", tmp_path, quiet=True)
    assert (result.kept_old, result.decision.verdict, result.decision.order) == (True, "undecided", ())
    assert "stays unspent" in result.decision.reason
    assert list((tmp_path / "ledger").glob("*.jsonl")) == []
    for _ in range(2):  # nothing else happens the second time
        capsys.readouterr()
        assert command("develop", "--resume", str(tmp_path / "run")) == 4
        assert "unspent" in capsys.readouterr().out


def test_refit_needs_the_refit_and_quick_trains_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="refit_target"):
        config(tmp_path, method={"name": "refit"}, candidates={"refit_target": False, "interpolation": [1.0]})
    (tmp_path / "ROUND.toml").write_text(
        '[task]\ntarget = "eight"\n[data]\nsource = { kind = "digits" }\n[model]\narchitecture = "tiny"\n'
    )
    assert command("develop", str(tmp_path / "ROUND.toml"), "--quick", "--steps", "3") == 2
    assert not RunFolder(tmp_path / "run").state.exists()


def test_a_quick_round_says_once_that_it_refits_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refit is evaluated first and is a candidate later: one piece of work, and two lines before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ROUND.toml").write_text(
        '[task]\ntarget = "one"\nprotected = ["zero"]\n'
        'ignored = ["two", "three", "four", "five", "six", "seven", "eight", "nine"]\n'
        '[data]\nsource = { kind = "digits" }\nroles = { dev = 0.3 }\nleaks = "allow"\n'
        '[model]\narchitecture = "tiny"\n[train]\ndevice = "cpu"\n'
    )
    command("develop", "ROUND.toml", "--quick", "--anyway", "--verbose")
    assert capsys.readouterr().err.count("refitting the target …") == 1
