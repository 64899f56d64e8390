"""A lineage keeps its history through crashes, copies and other rounds beside it, and shows every changed byte."""

from __future__ import annotations

import html
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from holdfast.artifacts import PREDICTIONS, write_predictions
from holdfast.certify.ledger import Budget, Ledger
from holdfast.certify.sealed import Candidates, ExtraBaseline, certify_candidates
from holdfast.certify.sealed_claim import SealedClaim
from holdfast.certify.settings import Settings
from holdfast.cli import app
from holdfast.errors import FaultError, UserError
from holdfast.files import read_json, write_json
from holdfast.report.page import write_report
from holdfast.report.project import ProjectContent, project_sections, read_project
from holdfast.rounds.project import FIRST, Project, ProjectRound
from holdfast.rounds.verify import difference, verify_project
from tests.rounds.small import add_round, fill, first_model


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project.open(tmp_path / "project", create=True)
    first_model(made)
    return made


def test_rounds_have_parents_and_what_was_gained_is_known(project: Project) -> None:
    first = add_round(project, "fog", target="c")
    two = add_round(project, "rain", target="b")
    side = add_round(project, "snow", parent=first, target="a")
    assert [round_.parent for round_ in project.history()] == [FIRST, first, first]
    assert project.ancestors(side) == [side, first, FIRST]
    assert project.gained(two) == ["c", "b"]
    assert project.find("2").name == project.find("rain").name == two
    with pytest.raises(UserError, match="no round 'rian'"):
        project.find("rian")


def test_a_round_that_skipped_its_training_is_shown_as_such(project: Project) -> None:
    add_round(project, "fog")
    with project.begin("rain", project.resolve(None)) as name:
        folder = project.folder(name)
        fill(folder)
        decided = {"skipped": True, "candidate": "refit", "why": "made up"}
        write_json(folder.result, {**read_json(folder.result), "training": decided})
    project.record(name)
    for title, said in (("fog", False), ("rain", True)):
        out = CliRunner().invoke(app, ["show", title, "-p", str(project.root)], standalone_mode=False).stdout
        assert ("skipped, as refit needs none and is enough: made up" in out) == said
        assert ("training:" in out) == said


def test_a_round_that_kept_the_old_model_stands_for_its_parent(project: Project) -> None:
    first = add_round(project, "fog")
    add_round(project, "rain", kept=True)
    assert project.resolve(None) == first
    assert project.resolve("rain") == first


def test_accuracy_over_rounds(project: Project) -> None:
    add_round(project, target="c", change=0.1)
    add_round(project, kept=True)
    assert project.accuracy()["c"] == pytest.approx([0.8, 0.9, 0.8])
    assert project.accuracy()["a"] == pytest.approx([0.8, 0.79, 0.8])


def test_a_copied_project_is_the_same_project(project: Project, tmp_path: Path) -> None:
    add_round(project)
    shutil.copytree(project.root, tmp_path / "moved")
    shutil.rmtree(project.root)
    moved = Project.open(tmp_path / "moved")
    assert [item.name for item in moved.history()] == ["0001-next"]
    assert verify_project(moved.root).rounds == 1


def test_any_changed_byte_is_found(project: Project) -> None:
    add_round(project)
    with Ledger(project.ledger).query("sha256:ab", Budget(queries=3)) as query:
        query.close(False)
    add_round(project)
    held = verify_project(project.root)
    assert (held.rounds, held.notes) == (2, [])
    files = [path for path in project.root.rglob("*") if path.is_file() and path.name != "lock"]
    assert len(files) > 10
    dice = random.Random(0)
    for path in files:
        before = path.read_bytes()
        place = dice.randrange(len(before))
        path.write_bytes(before[:place] + bytes([before[place] ^ 1]) + before[place + 1 :])
        with pytest.raises((FaultError, UserError)):
            verify_project(project.root)
        path.write_bytes(before)
    verify_project(project.root)


def test_a_missing_file_and_a_missing_line_are_found(project: Project) -> None:
    name = add_round(project)
    lines = project.lineage.read_bytes()
    project.lineage.write_bytes(b"\n".join(lines.split(b"\n")[:1]) + b"\n")
    with pytest.raises(FaultError, match="its end was cut off"):
        verify_project(project.root)
    head = project.record_log.head_path.read_bytes()
    project.record_log.head_path.unlink()  # as in a project of an earlier version
    with pytest.raises(FaultError, match="is finished and is not in"):
        verify_project(project.root)
    project.record_log.head_path.write_bytes(head)
    project.lineage.write_bytes(lines)
    project.folder(name).config.unlink()
    with pytest.raises(FaultError, match="is gone"):
        verify_project(project.root)


def test_a_line_cut_short_is_passed_over_and_the_round_can_be_written_down(project: Project) -> None:
    first = add_round(project)
    with project.begin("next", first) as two:
        fill(project.folder(two))
    with project.lineage.open("ab") as file:
        file.write(b'{"event":"round","round":"0002')
    assert [round_.name for round_ in project.history()] == [first]
    assert project.unfinished() == [two]
    project.record(two)
    assert [round_.name for round_ in project.history()] == [first, two]
    assert verify_project(project.root).rounds == 2


def test_killed_at_random_points_it_stays_readable_and_loses_nothing_that_was_recorded(tmp_path: Path) -> None:
    root = tmp_path / "project"
    dice = random.Random(1)
    reported: list[str] = []
    script = [sys.executable, "-m", "tests.rounds.small", str(root), "400"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    for _ in range(5):
        process = subprocess.Popen(script, stdout=subprocess.PIPE, env=environment, text=True)
        assert process.stdout is not None
        reported.append(json.loads(process.stdout.readline()))
        time.sleep(dice.random() * 0.25)
        process.send_signal(signal.SIGKILL)
        reported += [json.loads(line) for line in process.stdout if line.endswith("\n")]
        process.wait()
        project = Project.open(root)
        names = [item.name for item in project.history()]
        assert set(reported) <= set(names)
        assert len(names) == len(set(names))
        for name in project.unfinished():  # what a person would do: go on with it, or leave it
            if project.folder(name).state.exists() and read_json(project.folder(name).state)["status"] == "done":
                project.record(name)
        verify_project(root)


def test_rounds_at_once_do_not_corrupt_it(tmp_path: Path) -> None:
    root = tmp_path / "project"
    first_model(Project.open(root, create=True))
    script = [sys.executable, "-m", "tests.rounds.small", str(root), "15"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    running = [subprocess.Popen(script, stdout=subprocess.DEVNULL, env=environment) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    history = Project.open(root).history()
    assert sorted(int(item.name[:4]) for item in history) == list(range(1, 46))
    assert verify_project(root).rounds == 45


def predictions(right: np.ndarray, task: str, wrong: str = "other") -> pa.Table:
    n = len(right)
    predictions = [task if item else wrong for item in right]
    return pa.table(
        [[f"{task}{k}" for k in range(n)], [task] * n, [task] * n, predictions, [0.1] * n, [0.9] * n],
        schema=PREDICTIONS,
    )


def test_diff_names_the_images_that_flipped(project: Project) -> None:
    first = add_round(project, target="c")
    folder = project.folder(first)
    write_predictions(folder.predictions("old", "dev"), predictions(np.array([True, True, False]), "a"))
    write_predictions(folder.predictions("x", "dev"), predictions(np.array([True, False, True]), "a"))
    found = difference(project, FIRST, first)
    assert [(flip.example_id, flip.gained) for flip in found.flips] == [("a1", False), ("a2", True)]
    assert found.right == {"a": (2, 2)}
    reported = CliRunner().invoke(app, ["diff", "first", "1", "-p", str(project.root), "--json"], standalone_mode=False)
    assert len(json.loads(reported.stdout)["flips"]) == 2


def test_log_show_and_verify_on_the_command_line(project: Project) -> None:
    add_round(project, "fog")
    runner = CliRunner()
    log = runner.invoke(app, ["log", "-p", str(project.root)], standalone_mode=False).stdout
    assert "0001-fog" in log
    assert "90.0 %" in log
    show = runner.invoke(app, ["show", "fog", "-p", str(project.root)], standalone_mode=False).stdout
    assert "parent:        first" in show
    verify = runner.invoke(app, ["verify", str(project.root)], standalone_mode=False).stdout
    assert "1 round, " in verify


@pytest.mark.parametrize("number", [12, 60])
def test_the_chart_of_a_project_names_every_class(project: Project, number: int) -> None:
    add_round(project, "fog")
    names = [f"class <{place}>" for place in range(number)]
    content = replace(read_project(project.root), accuracy=dict.fromkeys(names, (0.5, 0.6)))
    section = next(section for section in project_sections(content) if section.name == "accuracy")
    key = section.body.partition('class="legend"')[2].partition("<h3>")[0]
    assert all(key.count(f"<span>{html.escape(name)}</span>") == 1 for name in names)


def test_classes_are_compared_within_a_round_and_not_between_images_of_two(project: Project) -> None:
    def round_of(name: str, parent: str, old: dict[str, float], new: dict[str, float]) -> ProjectRound:
        return ProjectRound(name, parent, {"accuracy": {"role": "dev", "old": old, "new": new}})

    rounds = [
        round_of("a", "first", {"horse": 0.875, "dog": 1.0}, {"horse": 0.875, "dog": 0.9}),
        round_of("side", "first", {"horse": 0.5, "dog": 1.0}, {"horse": 0.1, "dog": 1.0}),  # leads elsewhere
        round_of("b", "a", {"horse": 0.714, "dog": 1.0}, {"horse": 0.714, "dog": 1.0}),
    ]
    content = ProjectContent(project, rounds, [], {"horse": [0.875, 0.875, 0.1, 0.714], "dog": [1.0, 0.9, 1.0, 1.0]})
    assert content.change("horse") == 0.0
    assert content.change("dog") == pytest.approx(-0.1)
    assert content.change("cat") is None


def test_the_page_of_a_project_shows_every_class(project: Project) -> None:
    add_round(project, "fog")
    page = write_report(project.root)[0].read_text(encoding="utf-8")
    assert "Accuracy of every class over rounds" in page
    assert verify_project(project.root).notes == []  # the report is no part of the record


# -- against the first model ------------------------------------------------------------------------------------------


def query_sealed(tmp_path: Path, old: int, first: int, new: int, n: int = 200) -> tuple[bool, dict[str, object]]:
    """One task of n images; each model is right on its first so many."""
    tables = [predictions(np.arange(n) < right, "a") for right in (old, first, new)]
    ids = frozenset(tables[0]["example_id"].to_pylist())
    plan = SealedClaim("sha256:cd", {"a": n}, Settings({"a": 0.05}, level=0.05), Budget(), ids)
    further = ExtraBaseline(("a",), lambda: tables[1])
    outcome = certify_candidates(
        plan, Ledger(tmp_path), Candidates({"x": ""}), lambda: tables[0], lambda _: tables[2], further
    )
    return outcome.passed, outcome.reported


def test_losses_that_add_up_over_rounds_fail_against_the_first_model(tmp_path: Path) -> None:
    passed, _ = query_sealed(tmp_path / "a", old=190, first=190, new=189)
    assert passed
    # Against its parent this is the same change; against the first model 9 points are gone.
    passed, reported = query_sealed(tmp_path / "b", old=172, first=190, new=171)
    assert not passed
    against = reported["against_first"]
    assert isinstance(against, dict)
    assert against["tasks"][0]["lost"] == 19


def test_a_class_that_the_first_model_did_not_know_is_not_held_against_it(tmp_path: Path) -> None:
    n = 200
    tables = {right: predictions(np.arange(n) < right, "a") for right in (100, 190)}
    ids = frozenset(tables[100]["example_id"].to_pylist())
    plan = SealedClaim("sha256:ef", {"a": n}, Settings({"a": 0.05}, level=0.05), Budget(), ids)
    further = ExtraBaseline(("b",), lambda: tables[190])
    outcome = certify_candidates(
        plan, Ledger(tmp_path), Candidates({"x": ""}), lambda: tables[100], lambda _: tables[100], further
    )
    assert outcome.passed


def test_a_folder_with_other_things_in_it_does_not_become_a_project(tmp_path: Path) -> None:
    write_json(tmp_path / "something.json", {})
    with pytest.raises(UserError, match="not empty"):
        Project.open(tmp_path, create=True)
