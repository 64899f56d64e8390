"""`Round` by hand is what `develop` does, and a study of what ships is the same once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast.compare.run
import holdfast.rounds.develop
import holdfast.rounds.round
from holdfast import Round, develop
from holdfast.artifacts import RunFolder
from holdfast.candidates.select import Candidate
from holdfast.compare.grid import Study, StudyConfig, plan
from holdfast.compare.pool import run_here
from holdfast.compare.records import JobFolder, read_comparison
from holdfast.compare.study import run_study
from holdfast.config import RoundConfig, parse
from holdfast.files import read_json
from holdfast.model.folder import load_model, model_fingerprint
from holdfast.rounds.prepare import inherit

ROUND: dict[str, Any] = {
    "task": {"target": "eight", "protected": ["zero", "one"], "ignored": ["two", "three", "four", "five", "six"]},
    "data": {
        "source": {"kind": "digits", "classes": {"seven": "six", "nine": "six"}},
        "roles": {"dev": 0.2, "sealed": 0.3, "test": 0.1},
        "target_images": 12,
        "constraint_images": 6,
        "leaks": "allow",
    },
    "model": {"architecture": "tiny", "head_rank": 2},
    "train": {"steps": 4, "batch": 8, "images_per_task": 2, "learning_rate": 1e-3, "device": "cpu"},
    "evaluate": {"every": 2},
    "candidates": {"interpolation": [0.0, 1.0], "target_bias": [0.0, 1.0]},
    "certify": {"margin": 0.9, "target_gain": False},
}


def config(root: Path, name: str) -> RoundConfig:
    certify = {**ROUND["certify"], "ledger": str(root / f"ledger-{name}")}
    return parse(RoundConfig, {**ROUND, "certify": certify}, "ROUND")


def test_by_hand_it_ends_as_develop_does(tmp_path: Path) -> None:
    expected = develop(config(tmp_path, "a"), tmp_path / "run", tmp_path, quiet=True)
    assert expected.decision.verdict == "certified"
    round_ = Round(config(tmp_path, "b"), tmp_path, tmp_path / "hand")
    round_.train()
    candidates = round_.candidates()
    assert [candidate.name for candidate in candidates] == [candidate.name for candidate in expected.candidates]
    decision = round_.decide(candidates)
    assert decision.verdict == "certified"
    assert decision.shipped is not None
    assert decision.shipped.name == expected.chosen
    handed_back = load_model(RunFolder(tmp_path / "run").model)
    assert model_fingerprint(round_.model(decision.shipped)) == model_fingerprint(handed_back)
    test = round_.score_test(round_.model(decision.shipped))
    assert test == expected.test
    # A second call finds the decision's candidates on disk and the query in the ledger: nothing is spent twice.
    again = round_.decide()
    assert (again.verdict, again.shipped and again.shipped.name) == ("certified", expected.chosen)


@pytest.mark.parametrize("best", ["step-00000002", "step-00000004"])
def test_candidates_lead_to_the_best_checkpoint_and_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: str
) -> None:
    monkeypatch.setattr(Round, "best_checkpoint", lambda self: best)
    round_ = Round(config(tmp_path, "a"), tmp_path, tmp_path / "run")
    round_.train()
    made = round_.candidates()
    steps = list(dict.fromkeys([best, "step-00000004"]))
    moved = [
        f"{step}{kind}@1{bias}"
        for step in steps
        for kind in ("", "-as-trained", "-last-layer")
        for bias in ("", "-bias1")
    ]
    fitted = [f"last-layer-constrained@1{bias}" for bias in ("", "-bias1")]
    assert [candidate.name for candidate in made] == ["refit", "refit-bias1", *moved, *fitted]
    assert made[0].step == best  # a study records it as the job's
    # What a query pays for where all of them may be tested: no fewer than there can be.
    assert round_.config.candidates.largest_number == 18
    assert len(made) <= round_.config.candidates.largest_number


def test_a_candidate_is_made_from_its_own_checkpoint(tmp_path: Path) -> None:
    round_ = Round(config(tmp_path, "a"), tmp_path, tmp_path / "run")
    round_.train()
    names = sorted(path.name for path in round_.folder.candidates.iterdir())
    assert names == ["step-00000002", "step-00000004"]
    unchanged = round_.compare(round_.old_dev, round_.old_dev)
    fingerprints = {name: model_fingerprint(round_.model(Candidate(name, 1.0, unchanged))) for name in names}
    assert len(set(fingerprints.values())) == 2
    again = Round(config(tmp_path, "a"), tmp_path, round_.folder, begun=True)
    for name in reversed(names):  # asked for in another order, each is still the model of its own checkpoint
        assert model_fingerprint(again.model(Candidate(name, 1.0, unchanged))) == fingerprints[name]


def test_a_round_reads_what_it_inherits_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[RoundConfig] = []

    def counted(given: RoundConfig, root: Path) -> RoundConfig:
        reads.append(given)
        return inherit(given, root)

    for module in (holdfast.rounds.develop, holdfast.rounds.round, holdfast.compare.run):
        monkeypatch.setattr(module, "inherit", counted, raising=False)
    develop(config(tmp_path, "a"), tmp_path / "run", tmp_path, quiet=True)
    assert len(reads) == 1


def test_without_a_folder_it_works_in_a_temporary_one(tmp_path: Path) -> None:
    values = {**ROUND, "certify": {"test_sealed": False}}
    round_ = Round(parse(RoundConfig, values, "ROUND"), tmp_path)
    round_.train()
    assert len(round_.evaluations()) == 2
    assert round_.decide().verdict is None
    assert list(tmp_path.iterdir()) == []


def test_a_study_can_compare_what_ships(tmp_path: Path) -> None:
    expected = develop(config(tmp_path, "a"), tmp_path / "run", tmp_path, quiet=True)
    values = {"seeds": [0], "result": "shipped", "round": ROUND, "methods": [{"name": "holdfast"}, {"name": "rm"}]}
    study = Study("ships", parse(StudyConfig, values, "STUDY.toml"), tmp_path, tmp_path / "STUDY.toml")
    result = run_study(study, tmp_path / "out", run_here, lambda text: None, figures=False)
    assert result.failed == []
    job = plan(study, tmp_path / "out")[0]
    record = JobFolder(job.folder).read()
    assert (record.verdict, record.shipped) == ("certified", expected.chosen)
    assert expected.test is not None
    assert read_comparison(JobFolder(job.folder).test) == expected.test
    chosen = read_json(tmp_path / "out" / "chosen.json")
    assert next((entry["row"], entry["shipped"], entry["certified"]) for entry in chosen) == ("holdfast", 1, 1)
    link = tmp_path / "out" / "chosen" / "holdfast-all" / "model.safetensors"
    assert link.exists()
    assert model_fingerprint(load_model(link.parent)) == model_fingerprint(
        load_model(RunFolder(tmp_path / "run").model)
    )
