"""What a model was made with goes with it: no round judges by images that its old model, or an ancestor, has seen."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.artifacts import read_json, read_predictions
from holdfast.cli import app
from holdfast.config import RoundConfig, TuneConfig, parse
from holdfast.data.seen import FILE, Seen, Use
from holdfast.data.survey import survey
from holdfast.data.task import Role
from holdfast.errors import FaultError, UserError
from holdfast.model.folder import images_seen, load_model, save_model
from holdfast.rounds.develop import develop
from holdfast.rounds.tune import tune

ROLES = {"base": 0.3, "dev": 0.2, "sealed": 0.2, "test": 0.1}
CLASSES = ("zero", "one", "eight")


def tune_config(roles: dict[str, float]) -> TuneConfig:
    values = {
        "classes": list(CLASSES),
        "data": {"source": {"kind": "digits"}, "roles": roles},
        "model": {"architecture": "tiny"},
        "train": {"steps": 2, "batch": 8, "images_per_task": 2},
        "evaluate": {"every": 2},
    }
    return parse(TuneConfig, values, "test")


def round_config(roles: dict[str, float], start: str = "base/model", **more: Any) -> RoundConfig:
    values: dict[str, Any] = {
        "task": {"target": "eight", "protected": ["zero", "one"]},
        "data": {"source": {"kind": "digits"}, "roles": roles},
        "model": {"start": start, "head_rank": 2},
        "train": {"steps": 2, "batch": 8, "images_per_task": 2, "learning_rate": 1e-4},
        "evaluate": {"every": 2},
        "certify": {"margin": 0.5, "target_gain": False},
        "candidates": {"interpolation": [1.0]},
    }
    return parse(RoundConfig, {**values, **more}, "test")


def ids(config: RoundConfig, role: Role) -> set[str]:
    found = survey(config.data, config.task, root=Path()).assigned
    return {found.ids[p] for p in found.where(role)}


def test_roles_that_differ_between_tune_and_develop_are_refused_with_counts(tmp_path: Path) -> None:
    """As the documented path allowed it: a base model tuned with the default roles, a round with others."""
    default = {"base": 0.0, "dev": 0.2, "sealed": 0.2, "test": 0.2}
    tune(tune_config(default), tmp_path / "base", tmp_path, quiet=True)
    other = round_config(ROLES)
    trained = ids(round_config(default), Role.TRAIN)
    chosen = ids(round_config(default), Role.DEV)
    with pytest.raises(UserError, match="images that this round would judge by") as refused:
        develop(other, tmp_path / "run", tmp_path, quiet=True)
    words = {Use.TRAINED: (trained, "trained on"), Use.CHOSEN: (chosen, "chosen by")}
    for role, uses in ((Role.DEV, (Use.TRAINED,)), (Role.SEALED, tuple(words)), (Role.TEST, tuple(words))):
        judging = ids(other, role)
        for use in uses:
            seen, how = words[use]
            line = f"{len(judging & seen)} of {len(judging)} {role.value} images were {how}"
            assert (line in str(refused.value.found)) == bool(judging & seen)
    assert ids(other, Role.SEALED) & trained
    assert "[data]" in str(refused.value.do)
    assert not list((tmp_path / "run").glob("*.json"))


def test_the_same_roles_are_fine_and_the_record_is_inherited(tmp_path: Path) -> None:
    tune(tune_config(ROLES), tmp_path / "base", tmp_path, quiet=True)
    base = images_seen(tmp_path / "base" / "model")
    assert base.complete
    config = round_config(ROLES)
    own = survey(config.data, config.task, root=Path()).assigned
    expected = {role: len(own.where(role)) for role in (Role.BASE, Role.DEV, Role.SEALED)}
    assert base.counts() == {
        "trained": expected[Role.BASE], "chosen": expected[Role.DEV], "sealed": expected[Role.SEALED]
    }  # fmt: skip
    result = develop(config, tmp_path / "run", tmp_path, quiet=True)
    assert read_json(result.folder.result)["start_seen"] == base.describe()
    handed_back = images_seen(result.folder.model)
    assert handed_back.counts()["trained"] == expected[Role.BASE] + len(own.where(Role.TRAIN))
    # A second round whose roles are other ones, from the model of the first.
    later = round_config({**ROLES, "base": 0.0, "sealed": 0.4}, "run/model")
    with pytest.raises(UserError, match="were trained on"):
        develop(later, tmp_path / "second", tmp_path, quiet=True)
    # `evaluate` opens nothing that is sealed: in a source that knows no roles the model's record does.
    for model in (tmp_path / "run", tmp_path / "run" / "model", tmp_path / "base"):
        out = tmp_path / "out.parquet"
        run = CliRunner().invoke(app, ["evaluate", str(model), "digits", "--out", str(out), "--json"])
        assert run.exit_code == 0, run.output
        opened = set(read_predictions(out)["example_id"].to_pylist())
        assert not opened & ids(config, Role.SEALED)
        assert opened >= ids(config, Role.DEV)
        assert json.loads(run.stdout)["examples"] == len(opened)
        assert f"sealed image left out: {expected[Role.SEALED]}" in run.stderr


def test_a_model_from_elsewhere_is_unknown(tmp_path: Path) -> None:
    tune(tune_config(ROLES), tmp_path / "base", tmp_path, quiet=True)
    save_model(load_model(tmp_path / "base" / "model"), tmp_path / "elsewhere")
    result = develop(round_config(ROLES, "elsewhere"), tmp_path / "run", tmp_path, quiet=True)
    assert read_json(result.folder.result)["start_seen"] == {"record": "unknown"}
    later = images_seen(result.folder.model)
    assert later.describe()["record"] == "partial"
    assert later.counts()["fitted"] == len(ids(round_config(ROLES), Role.DEV))


def test_a_record_that_is_gone_or_was_changed_is_a_fault(tmp_path: Path) -> None:
    tune(tune_config(ROLES), tmp_path / "base", tmp_path, quiet=True)
    path = tmp_path / "base" / "model" / FILE
    content = path.read_bytes()
    Seen(complete=True).write(path.parent)
    with pytest.raises(FaultError, match="not the one that was written"):
        develop(round_config(ROLES), tmp_path / "run", tmp_path, quiet=True)
    path.unlink()
    with pytest.raises(FaultError, match="gone"):
        images_seen(path.parent)
    path.write_bytes(content)
    assert images_seen(path.parent).counts()["trained"]


def test_uses_over_time() -> None:
    first = Seen.of([("a", "pa", Use.SEALED), ("b", "pb", Use.TRAINED)])
    later = first.and_then(Seen.of([("a", "pa", Use.TRAINED), ("b", "pb", Use.SEALED), ("c", "pc", Use.CHOSEN)]))
    assert later.counts() == {"trained": 2, "chosen": 1}
    assert not first.and_then(Seen()).complete
