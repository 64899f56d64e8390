"""From a STUDY.toml to jobs: every combination once, in its own folder; mistakes found before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.compare.grid import Study, StudyConfig, plan, plan_all, read_study, ready_studies, show
from holdfast.config import parse
from holdfast.errors import UserError
from holdfast.methods.registry import BUILT_IN

ROUND: dict[str, Any] = {
    "task": {"target": "eight"},
    "data": {"source": {"kind": "digits"}},
    "model": {"architecture": "tiny"},
}


def study(root: Path, **values: Any) -> Study:
    given = {"round": ROUND, "methods": [{"name": "rm"}], **values}
    return Study("small", parse(StudyConfig, given, "STUDY.toml"), root, root / "STUDY.toml")


def test_jobs_are_methods_times_sizes_times_settings_times_seeds(tmp_path: Path) -> None:
    methods = [
        {"name": "rm", "label": "RM", "grid": {"alpha": [0.1, 1.0, 10.0]}},
        {"name": "gem", "grid": {"gamma": [0.5, 1.0]}, "set": {"train.batch": 64, "train.learning_rate": 1e-3}},
        {"name": "wise_ft", "of": "RM", "lambdas": [0.5, 0.9]},
    ]
    found = study(tmp_path, methods=methods, sizes=[10, 1000], seeds=[3, 4], grid={"train.learning_rate": [1e-5, 1e-6]})
    jobs = plan(found, tmp_path)
    assert len(jobs) == 2 * 2 * (3 * 2 + 2 + 3 * 2 * 2)
    assert len({job.folder for job in jobs}) == len(jobs)
    assert [label for label, _, _ in found.config.columns] == ["10", "1k"]
    first = jobs[0]
    assert (first.row, first.column, first.seed) == ("RM", "10", 3)
    assert first.setting_text == "learning_rate=1e-05 alpha=0.1"
    assert first.config.method.model_dump()["alpha"] == 0.1
    assert (first.config.data.constraint_images, first.config.seed) == (10, 3)
    gem = [job for job in jobs if job.row == "gem"]
    assert {job.config.train.batch for job in gem} == {64}
    assert {job.config.train.learning_rate for job in gem} == {1e-3}  # what a row sets is no longer varied
    assert all(job.keep_last == (job.row == "RM") for job in jobs)
    wise = [job for job in jobs if job.row == "wise_ft"]
    parents = {job.folder for job in jobs if job.row == "RM"}
    assert {job.parent for job in wise} == parents
    assert {job.position for job in wise} == {0.5, 0.9}


def test_a_changed_study_gets_new_folders_and_logging_does_not(tmp_path: Path) -> None:
    def folder(**train: Any) -> Path:
        return plan(study(tmp_path, round={**ROUND, "train": train}, seeds=[0]), tmp_path)[0].folder

    assert folder(steps=10) != folder(steps=20)
    assert folder(steps=10) == folder(steps=10, log_every=3, device="cpu", checkpoint_every=5)


def test_the_folder_does_not_depend_on_where_the_study_lies(tmp_path: Path) -> None:
    base = {"data": {"source": {"kind": "digits"}}, "model": {"architecture": "tiny"}}
    values = {key: value for key, value in ROUND.items() if key != "model"}
    first, second = (plan(study(tmp_path, round=values, base=base), tmp_path / name)[0] for name in ("a", "b"))
    assert first.folder.relative_to(tmp_path / "a") == second.folder.relative_to(tmp_path / "b")
    assert first.config.model.start == tmp_path / "a" / "base" / "model"


def test_other_columns_than_sizes(tmp_path: Path) -> None:
    found = study(tmp_path, column={"key": "model.head_rank", "values": [0, 32]}, seeds=[0])
    assert [(job.column, job.config.model.head_rank) for job in plan(found, tmp_path)] == [("0", 0), ("32", 32)]
    labelled = study(
        tmp_path,
        column={"key": "data.pairs", "values": [[], [{"kind": "csv", "path": "a.csv"}]], "labels": ["0", "2k"]},
    )
    jobs = plan(labelled, tmp_path)
    assert {(job.column, len(job.config.data.pairs)) for job in jobs} == {("0", 0), ("2k", 1)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"methods": [{"name": "wcl"}]}, "did you mean 'wccl'"),
        ({"methods": [{"name": "rm", "grid": {"alfa": [1.0]}}]}, "did you mean 'alpha'"),
        ({"methods": [{"name": "rm"}, {"name": "rm"}]}, "rm: twice under methods"),
        ({"methods": [{"name": "rm", "grid": {"alpha": []}}]}, "has no values"),
        ({"methods": [{"name": "rm", "of": "rm"}]}, "only wise_ft interpolates"),
        ({"methods": [{"name": "rm"}, {"name": "wise_ft", "of": "flyp"}]}, "no row 'flyp' to interpolate"),
        ({"seeds": []}, "seeds"),
        ({"seeds": [1, 1]}, "1: twice under seeds"),
        ({"sizes": [0]}, "sizes"),
        ({"sizes": [10], "column": {"key": "model.head_rank", "values": [1]}}, "either sizes or"),
        ({"column": {"key": "model.head_rank", "values": [1], "labels": ["a", "b"]}}, "2 labels for 1 values"),
        ({"round": {**ROUND, "seed": 3}}, "round.seed belongs to"),
        ({"round": {**ROUND, "train": {"stepz": 3}}}, "did you mean 'steps'"),
        ({"grid": {"data.source.kind.deep": [1]}}, "which is no table"),
        ({"titel": "x"}, "did you mean 'title'"),
    ],
)
def test_mistakes_are_found_while_planning(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        plan(study(tmp_path, **values), tmp_path)
    assert message in raised.value.text()


def test_a_missing_study_names_the_nearest_ready_one() -> None:
    with pytest.raises(UserError) as raised:
        read_study("bdd100k-fogy")
    assert "did you mean 'bdd100k-foggy'" in raised.value.text()


def test_studies_extend_each_other(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(
        'sizes = [10]\n[round.task]\ntarget = "eight"\n[round.data]\nsource = { kind = "digits" }\n'
        '[round.model]\narchitecture = "tiny"\n[[methods]]\nname = "rm"\n[[methods]]\nname = "der"\n'
    )
    (tmp_path / "two.toml").write_text(
        'extends = "one.toml"\n[round.task]\nignored = ["one"]\n[column]\nkey = "model.head_rank"\nvalues = [1, 2]\n'
        '[[methods]]\nname = "flyp"\n'
    )
    found = read_study(tmp_path / "two.toml")
    assert found.config.round["task"] == {"target": "eight", "ignored": ["one"]}
    assert [entry.name for entry in found.config.methods] == ["flyp"]
    assert [label for label, _, _ in found.config.columns] == ["1", "2"]
    (tmp_path / "loop.toml").write_text('extends = "loop.toml"\n')
    with pytest.raises(UserError, match="extends itself"):
        read_study(tmp_path / "loop.toml")


BELOW = (
    'sizes = [10]\n[grid]\n"train.learning_rate" = [1e-3]\n[round.task]\ntarget = "eight"\n'
    '[round.data]\nsource = { kind = "digits" }\n[round.model]\narchitecture = "tiny"\n'
    '[round.train]\nflip = true\nwarmup_steps = 5\n[[methods]]\nname = "rm"\n'
)


def test_a_study_unsets_keys_of_the_one_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "below.toml").write_text(BELOW)
    (tmp_path / "above.toml").write_text(
        'extends = "below.toml"\nunset = ["sizes", "grid.train.learning_rate", "round.train.flip"]\n'
        "[round.train]\nsteps = 50\n"
    )
    (job, *_) = plan(read_study(tmp_path / "above.toml"), tmp_path)
    assert (job.column, job.setting) == ("all", ())
    assert (job.config.train.flip, job.config.train.warmup_steps, job.config.train.steps) == (False, 5, 50)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "below.toml"\nunset = ["round.train.flipp"]\n', "below.toml has no key 'round.train.flipp'"),
        ('extends = "below.toml"\nunset = ["size"]\n', "did you mean 'sizes'"),
        ('extends = "below.toml"\nunset = "sizes"\n', "unset is no list of keys"),
        ('extends = "below.toml"\nunset = [1]\n', "unset is no list of keys"),
        (BELOW.replace("sizes = [10]", 'unset = ["sizes"]'), "unset without extends"),
    ],
)
def test_a_key_that_cannot_be_unset_is_a_sentence(tmp_path: Path, text: str, message: str, tried: Any) -> None:
    tried("bad inputs")
    (tmp_path / "below.toml").write_text(BELOW)
    (tmp_path / "above.toml").write_text(text)
    with pytest.raises(UserError) as raised:
        read_study(tmp_path / "above.toml")
    assert message in raised.value.text()


PAPER = ("bdd100k-foggy", "bdd100k-overcast", "bdd100k-tunnel", "places365-dressing-room", "two-rounds-foggy")


@pytest.mark.parametrize("name", [*PAPER, *(name for name in ready_studies() if name.startswith("ablation-"))])
def test_the_papers_grids_are_in_its_authors_units(name: str, tmp_path: Path) -> None:
    jobs = plan(read_study(name, tmp_path), tmp_path)
    places = name.startswith("places365")
    tau_0 = 0.01 if places else 0.05
    for job in jobs:
        config = job.config
        if job.row not in ("GEM", "RM") and "RM" not in job.row:
            assert (config.train.warmup_steps, config.train.flip, config.train.rotation) == (500, True, 15.0)
        if config.method.name in ("rm", "holdfast"):
            assert config.method.model_dump()["form"] == "authors"
            assert config.method.retention_scale(tau_0) == tau_0
            assert (config.lambdas, config.candidates.refit_target) == ((1.0,), False)
    betas = {job.config.method.kkt_penalty() for job in jobs if job.config.method.name == "holdfast"}
    # What multiplies the gradient of h_k is 20 (Places365: 100) times less.
    in_our_units = {round(float(beta or 0) * tau_0, 9) for beta in betas}
    assert in_our_units == ({6.0, 10.0, 40.0} if places else {5.0, 10.0, 20.0})
    if name.startswith("bdd100k"):
        of_rm = [job.config.method.model_dump() for job in jobs if job.config.method.name == "rm"]
        assert {round(float(method["alpha"]) * tau_0, 9) for method in of_rm} == {0.005, 0.05, 0.5}


def test_every_ready_study_plans_without_images(tmp_path: Path) -> None:
    counts = {name: len(plan_all(read_study(name, tmp_path), tmp_path / "out")) for name in ready_studies()}
    # 18 + 2 + 6 + 12 + 48 + 12 + 6 settings of the paper's grids, four sizes, five seeds
    assert counts["bdd100k-foggy"] == counts["bdd100k-overcast"] == counts["bdd100k-tunnel"] == 104 * 20
    assert counts["places365-dressing-room"] == (5 + 3) * 2 * 5
    assert counts["two-rounds-foggy"] == 2 * counts["two-rounds-overcast"]
    assert {name for name in counts if name.startswith("ablation-")} == {
        f"ablation-{name}"
        for name in ("constraint-images", "external-data", "heads", "beta-schedule", "sampled-tasks", "head-rank")
    }


def test_the_papers_settings_are_in_the_ready_studies(tmp_path: Path) -> None:
    jobs = plan(read_study("bdd100k-tunnel", tmp_path), tmp_path)
    assert {job.row for job in jobs} == {"FLYP", "WCCL", "GEM", "Co2L", "DER", "RM", "Ours"}
    assert {job.config.method.name for job in jobs} == set(BUILT_IN) - {
        "finetune",
        "cross_entropy",
        "refit",
        "last_layer",
    }
    ours = next(job.config for job in jobs if job.row == "Ours")
    assert (ours.train.steps, ours.train.batch, ours.train.images_per_task) == (24000, 256, 10)
    assert ours.task.protected == ("highway", "residential", "city street", "parking lot")
    gem = {job.config.train.steps for job in jobs if job.row == "GEM"}
    assert gem == {600, 1200, 3000}
    places = plan(read_study("places365-dressing-room", tmp_path), tmp_path)[0].config
    assert (places.train.tasks_per_step, places.train.images_per_task, places.model.class_temperature) == (240, 2, 0.01)


def test_numbers_are_shown_as_the_tables_have_them() -> None:
    assert [show(item) for item in (100, 1000, 4000, 1500, 0.1, 1e-6, "x")] == [
        "100", "1k", "4k", "1500", "0.1", "1e-06", "x",
    ]  # fmt: skip
