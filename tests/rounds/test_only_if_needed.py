"""Training only where it is needed: the rule, the rounds on both sides of it, and runs that are killed in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast import Round
from holdfast.artifacts import RunFolder
from holdfast.candidates.select import Candidate, WithoutTraining, weigh_training
from holdfast.config import RoundConfig, TuneConfig, parse
from holdfast.errors import UserError
from holdfast.evaluate.metrics import Comparison, TaskChange
from holdfast.files import fingerprint_json, read_json
from holdfast.methods.holdfast import Holdfast
from holdfast.report.page import write_report
from holdfast.rounds import develop as develop_module
from holdfast.rounds.checkpoints import points_of
from holdfast.rounds.develop import develop
from holdfast.rounds.outcome import read_outcome
from holdfast.rounds.result import RoundResult, training_decision
from tests.rounds.test_last_layer import ENDS, REFITS
from tests.rounds.test_quick import command, config

# Random weights take every digit for an eight: the fits teach them the one, and cannot make the eight any better.
TASKS = {
    "one": {"target": "one", "protected": ["zero", "eight"]},
    "eight": {"target": "eight", "protected": ["zero", "one"]},
}
MARGINS = {"a": 0.05, "b": 0.05}


def settings(target: str, *, only_if_needed: bool = True, ledger: str = "ledger", **sections: Any) -> RoundConfig:
    made = config(Path(), task=TASKS[target], train={"only_if_needed": only_if_needed}, **sections)
    return made.model_copy(update={"certify": made.certify.model_copy(update={"ledger": Path(ledger)})})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- the rule --------------------------------------------------------------------------------------------------------


def weighed(
    *,
    reached: int = 80,
    before: int = 50,
    lost: int = 0,
    chance: float | None = 0.9,
    least: float = 0.25,
    gain_level: float | None = None,
) -> WithoutTraining:
    """Of 100 images each: protected classes had 70 and 90, the target is brought from ``before`` to ``reached``."""
    tasks = {
        "a": TaskChange(100, 70, 70 - lost, 0, lost, 1.0, 1.0),
        "b": TaskChange(100, 90, 90, 0, 0, 1.0, 1.0),
        "t": TaskChange(100, before, reached, max(0, reached - before), max(0, before - reached), 1.0, 1.0),
    }
    best = Candidate("step-00000000", 0.0, Comparison("t", tasks), chance=chance)
    return weigh_training(best, MARGINS, least_chance=least, gain_level=gain_level)


@pytest.mark.parametrize(
    ("given", "enough", "why"),
    [
        ({}, True, "t reaches 80.0 %, protected classes have 80.0 % on average"),
        ({"reached": 79}, False, "t reaches 79.0 %, protected classes have 80.0 % on average"),
        ({"chance": None}, True, "t reaches"),
        ({"chance": 0.5}, True, "t reaches"),
        ({"chance": 0.49}, False, "the chance to pass is below 50 %"),
        ({"chance": 0.7, "least": 0.8}, False, "the chance to pass is below 80 %"),
        ({"lost": 5}, True, "t reaches"),
        ({"lost": 6}, False, "a protected class loses more than its margin"),
        ({"before": 90, "reached": 90}, False, "t gains nothing"),
        ({"before": 80, "reached": 82}, True, "t reaches"),
        ({"before": 80, "reached": 82, "gain_level": 0.05}, False, "what t gains on dev images may be chance"),
        ({"before": 80, "reached": 85, "gain_level": 0.05}, True, "t reaches"),
    ],
)
def test_the_rule(given: dict[str, Any], enough: bool, why: str) -> None:
    found = weighed(**given)
    assert found.enough == enough
    assert found.why.startswith(why)


# -- rounds ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RoundResult]:
    """A folder, and in it the run of a round that need not train."""
    root = tmp_path_factory.mktemp("skipped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Holdfast, "prepare", lambda *_: pytest.fail("the method was begun for nothing"))
        return root, develop(settings("one"), root / "run", root, quiet=True)


def test_where_it_is_not_needed_the_round_ends_as_one_without_training(
    skipped: tuple[Path, RoundResult], tmp_path: Path
) -> None:
    root, result = skipped
    assert result.decision.certified
    assert [candidate.name for candidate in result.candidates] == [*REFITS, *ENDS]
    quick = config(tmp_path, task=TASKS["one"], method={"name": "last_layer"})
    expected = develop(quick, tmp_path / "run", tmp_path, quiet=True)
    assert (result.chosen, result.candidates, result.test) == (expected.chosen, expected.candidates, expected.test)
    ours, theirs = contents(root / "run"), contents(tmp_path / "run")
    assert ours.keys() == theirs.keys()
    same = {name for name in ours if name.endswith(("parquet", "safetensors"))} | {"metrics.jsonl"}
    assert {name for name in same if ours[name] != theirs[name]} == set()


def test_the_model_before_any_step_is_one_point_and_not_two() -> None:
    def seen(n: int) -> Comparison:
        return Comparison("t", {"t": TaskChange(n, 0, n // 2, n // 2, 0, 0.0, 0.0)})

    evaluations = [("step-00000000", seen(4)), ("step-00000010", seen(4))]
    for step in ("step-00000000", "step-00000010"):  # without training, and with it
        assert points_of(evaluations, [Candidate(step, 0.0, seen(20))]) == [evaluations[1], ("refit", seen(20))]
    assert points_of(evaluations, [Candidate("step-00000010", 0.5, seen(4))])[0] == evaluations[0]


def test_every_account_says_that_training_was_skipped_and_why(
    skipped: tuple[Path, RoundResult], capsys: pytest.CaptureFixture[str]
) -> None:
    root, result = skipped
    decided = read_json(result.folder.result)["training"]
    assert decided == result.training == training_decision(result.folder)
    why = "one reaches 100.0 %, protected classes have 50.0 % on average"
    assert (decided["skipped"], decided["why"]) == (True, why)
    said = f"skipped, as {decided['candidate']} needs none and is enough: {why}"
    assert read_outcome(result.folder).training == said
    page = write_report(root / "run", root / "report.html")[0].read_text(encoding="utf-8")
    assert page.count(said) >= 2  # beside the figures of training, and in the record
    assert json.loads((root / "report.json").read_text())["training"] == said
    assert "- training: skipped, as " in (root / "report.md").read_text()
    assert command("verify", str(root / "run")) == 0
    assert command("develop", "--resume", str(root / "run"), "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["training"] == decided


def test_where_it_is_needed_the_round_is_the_one_that_trains_always(tmp_path: Path) -> None:
    needed = develop(settings("eight"), tmp_path / "needed", tmp_path, quiet=True)
    assert needed.training is not None
    assert (needed.training["skipped"], needed.training["why"]) == (False, "eight gains nothing")
    other = settings("eight", only_if_needed=False, ledger="other")
    always = develop(other, tmp_path / "always", tmp_path, quiet=True)
    assert always.training is None
    assert any(candidate.is_trained for candidate in needed.candidates)
    assert (needed.candidates, needed.chosen, needed.test) == (always.candidates, always.chosen, always.test)


def test_a_round_by_hand_trains_always(tmp_path: Path) -> None:
    round_ = Round(settings("one", certify={"test_sealed": False}), tmp_path, tmp_path / "run")
    assert round_.trains
    round_.train()
    assert len(round_.evaluations()) == 2


# -- killed and resumed ------------------------------------------------------------------------------------------------


class Stop(Exception):  # noqa: N818 - no error of anybody's
    """Stands in for a kill."""


def stop(*_: object, **__: object) -> None:
    raise Stop


@pytest.mark.parametrize("places", [("train",), ("train", "candidates"), ("candidates", "write_result")])
def test_a_run_killed_after_the_decision_ends_with_the_same_bytes(
    skipped: tuple[Path, RoundResult], tmp_path: Path, places: tuple[str, ...]
) -> None:
    """Once or twice: before the refit is evaluated, before candidates are made, before the result is written."""
    run = tmp_path / "run"
    for number, place in enumerate(places):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Round, place, stop)
            with pytest.raises(Stop):
                develop(settings("one"), run, tmp_path, resume=number > 0, quiet=True)
    assert read_json(RunFolder(run).state)["training"]["skipped"] is True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(develop_module, "without_training", lambda *_: pytest.fail("what is on record was asked again"))
        patch.setattr(Holdfast, "prepare", lambda *_: pytest.fail("the method was begun for nothing"))
        develop(settings("one"), run, tmp_path, resume=True, quiet=True)
    ours, whole = contents(run), contents(skipped[0] / "run")
    assert ours.keys() == whole.keys()
    assert {name for name in ours if ours[name] != whole[name]} == set()


def test_a_run_killed_before_the_decision_makes_it_when_it_goes_on(
    skipped: tuple[Path, RoundResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(develop_module, "without_training", stop)
        with pytest.raises(Stop):
            develop(settings("one"), tmp_path / "run", tmp_path, quiet=True)
    assert training_decision(RunFolder(tmp_path / "run")) is None
    result = develop(settings("one"), tmp_path / "run", tmp_path, resume=True, quiet=True)
    assert result.training == skipped[1].training


def test_a_run_that_began_to_train_goes_on_with_it_whatever_its_chance_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Round, "train", stop)
        with pytest.raises(Stop):
            develop(settings("eight"), tmp_path / "run", tmp_path, quiet=True)
    best = weighed().best
    monkeypatch.setattr(develop_module, "without_training", lambda *_: WithoutTraining(best, True, "made up"))
    result = develop(settings("eight"), tmp_path / "run", tmp_path, resume=True, quiet=True)
    assert any(candidate.is_trained for candidate in result.candidates)


def test_rounds_that_were_begun_before_there_was_the_setting_keep_their_fingerprint(tmp_path: Path) -> None:
    """And one that is to train always is another round to the ledger than one that may not."""
    made = {only: Round(settings("one", only_if_needed=only), tmp_path, tmp_path / str(only)) for only in (False, True)}
    values = made[False].config.model_dump(mode="json")
    for name in ("log_every", "checkpoint_every", "keep_checkpoints", "device", "shard", "only_if_needed"):
        del values["train"][name]
    prepared = made[False].prepared
    former = {"config": values, "data": prepared.assembled.fingerprint, "parent": prepared.parent}
    assert prepared.fingerprint == fingerprint_json(former)
    assert made[True].prepared.fingerprint != prepared.fingerprint


# -- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", ["one", "eight"])
def test_two_ranks_take_the_same_branch(tmp_path: Path, target: str) -> None:
    alone = develop(settings(target, certify={"test_sealed": False}), tmp_path / "alone", tmp_path, quiet=True)
    values = read_json(alone.folder.config)
    script = (
        "import json, sys\nfrom pathlib import Path\nfrom holdfast.config import RoundConfig, parse\n"
        "from holdfast.rounds.develop import develop\nroot = Path(sys.argv[1])\n"
        "config = parse(RoundConfig, json.loads((root / 'round.json').read_text()), 'ROUND')\n"
        "develop(config, root / 'ranks', root, quiet=True)\n"
    )
    (tmp_path / "round.json").write_text(json.dumps(values))
    (tmp_path / "both.py").write_text(script)
    call = ["-m", "torch.distributed.run", "--nproc-per-node=2", str(tmp_path / "both.py"), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *call], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ranks = read_json(RunFolder(tmp_path / "ranks").result)
    assert ranks["training"] == alone.training
    assert [item["name"] for item in ranks["candidates"]] == [candidate.name for candidate in alone.candidates]


# -- the command -----------------------------------------------------------------------------------------------------


ROUND = """
[task]
target = "one"
protected = ["zero", "eight"]
ignored = ["two", "three", "four", "five", "six"]
[data]
source = { kind = "digits", classes = { seven = "six", nine = "six" } }
roles = { dev = 0.2, sealed = 0.3, test = 0.1 }
target_images = 12
constraint_images = 6
leaks = "allow"
[model]
architecture = "tiny"
head_rank = 2
[train]
only_if_needed = true
steps = 4
batch = 8
images_per_task = 2
device = "cpu"
[evaluate]
every = 4
[candidates]
interpolation = [0.0, 1.0]
target_bias = [0.0]
[certify]
margin = 0.9
target_gain = false
ledger = "ledger"
"""


def test_the_command_says_what_it_does_and_train_trains_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ROUND.toml").write_text(ROUND.replace('ledger = "ledger"', 'ledger = "other"'))
    assert command("develop", "ROUND.toml", "--out", "trained", "--train") == 0
    trained = capsys.readouterr()
    said = " ".join(trained.err.split())
    assert "training has little to add: one reaches 100.0 %" in said
    assert "that is enough" not in said
    folder = RunFolder(tmp_path / "trained")
    assert read_json(folder.config)["train"]["only_if_needed"] is False
    result = read_json(folder.result)
    assert result["training"] is None
    assert any(item["step"] == "step-00000004" for item in result["candidates"])
    assert "skipped" not in trained.out
    (tmp_path / "ROUND.toml").write_text(ROUND)
    assert command("develop", "ROUND.toml", "--out", "skipped", "--verbose") == 0
    out, error = capsys.readouterr()
    assert error.count("refitting the target …") == 1
    said = " ".join(error.split())
    assert "that is enough: one reaches 100.0 %" in said
    assert "`--train` trains all the same" in said
    assert "training     skipped, as last-layer" in out
    assert not RunFolder(tmp_path / "skipped").checkpoints.exists()


@pytest.mark.parametrize(
    ("text", "words", "sentences"),
    [
        (ROUND, ("ROUND.toml", "--quick", "--train"), ("--quick trains nothing", "--train, or --quick")),
        (ROUND, ("--resume", "run", "--train"), ("--resume takes the run folder alone",)),
        (
            ROUND.replace("[train]", '[method]\nname = "refit"\n[train]'),
            ("ROUND.toml", "--train"),
            ("method.name = 'refit' trains nothing", "leave out --train"),
        ),
    ],
)
def test_combinations_that_contradict_are_sentences(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    words: tuple[str, ...],
    sentences: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ROUND.toml").write_text(text)
    assert command("develop", *words) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert all(sentence in error for sentence in sentences), error
    assert not (tmp_path / "runs").exists()


def test_views_of_constraint_images_are_no_setting_of_a_base_model() -> None:
    """They did nothing there, without a word. A run's record names the default, and is read."""
    values = {"data": {"source": {"kind": "digits"}}, "model": {"architecture": "tiny"}}
    with pytest.raises(UserError, match="constraint_views is for rounds"):
        parse(TuneConfig, {**values, "train": {"constraint_views": 4}}, "TUNE.toml")
    tuned = parse(TuneConfig, values, "TUNE.toml")
    assert parse(TuneConfig, tuned.model_dump(mode="json"), "the run") == tuned


def test_a_base_model_is_always_trained() -> None:
    values = {
        "data": {"source": {"kind": "digits"}},
        "model": {"architecture": "tiny"},
        "train": {"only_if_needed": True},
    }
    with pytest.raises(UserError, match="only_if_needed is for rounds"):
        parse(TuneConfig, values, "TUNE.toml")
