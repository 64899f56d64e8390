"""A run that is begun, stopped, begun again, moved or shared: nothing is lost, and no look is spent for nothing."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_digits

from holdfast import cli
from holdfast.artifacts import RunFolder
from holdfast.certify.ledger import Ledger
from holdfast.config import RoundConfig, TuneConfig, parse
from holdfast.errors import Interrupted, UserError
from holdfast.files import read_json, write_json
from holdfast.locks import one_writer
from holdfast.report.content import read_run
from holdfast.rounds import decide as decide_module
from holdfast.rounds import develop as develop_module
from holdfast.rounds.certify_run import certify_run
from holdfast.rounds.develop import develop, resume_config
from holdfast.rounds.next_round import develop_in
from holdfast.rounds.project import Project
from holdfast.rounds.tune import tune
from holdfast.rounds.verify import verify_project

ROLES = {"dev": 8, "sealed": 60, "test": 8}
ROUND: dict[str, Any] = {
    "task": {"target": "eight", "template": "the digit {}"},
    "data": {
        "source": {"path": "photos"},
        "constraint_images": 8,
        "target_images": 20,
        "roles": ROLES,
        "leaks": "allow",  # sklearn's digits are 8 px: the small ones look alike
    },
    "model": {"architecture": "tiny", "head_rank": 2},
    "train": {"steps": 2, "batch": 8, "images_per_task": 2, "device": "cpu", "log_every": 1},
    "evaluate": {"every": 2},
    "certify": {
        "margin": 0.99,
        "target_gain": False,
        "ledger": "ledger",
    },
    "candidates": {"target_bias": [0.0], "interpolation": [0.0, 1.0]},
}
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    folder = tmp_path_factory.mktemp("source") / "photos"
    values, labels = load_digits(return_X_y=True)
    for number, (image, label) in enumerate(zip(values, labels, strict=True)):
        if int(label) in (0, 1, 8):
            path = folder / NAMES[int(label)] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image.reshape(8, 8) * 15.9).astype("uint8")).resize((32, 32)).save(path)
    return folder


@pytest.fixture
def root(photos: Path, tmp_path: Path) -> Path:
    shutil.copytree(photos, tmp_path / "photos")
    return tmp_path


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that is certified."""
    root = tmp_path_factory.mktemp("finished")
    shutil.copytree(photos, root / "photos")
    result = develop(settings(), root / "run", root, quiet=True)
    assert result.decision.certified
    return root


def settings(**sections: Any) -> RoundConfig:
    values = {name: {**value, **sections.get(name, {})} for name, value in ROUND.items()}
    return parse(RoundConfig, values, "a round")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def queries(root: Path, ledger: str = "ledger") -> int:
    found = list((root / ledger).glob("*.jsonl")) if (root / ledger).exists() else []
    standings = [Ledger(root / ledger).standing(f"sha256:{path.stem}") for path in found]
    return sum(standing.queries for standing in standings if standing is not None)


class Stop(Exception):  # noqa: N818 - no error of anybody's
    """Stands in for a kill where the writes before it matter and those after it do not."""


@pytest.fixture
def stop_before_the_query(monkeypatch: pytest.MonkeyPatch) -> Generator[pytest.MonkeyPatch]:
    def stop(*_: object, **__: object) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr("holdfast.rounds.round.decide", stop)
        yield patch


# -- a finished run ---------------------------------------------------------------------------------------------------


def call(*words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["holdfast", *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    return int(stopped.value.code or 0)


def test_going_on_with_a_finished_run_changes_no_byte(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, before = finished / "run", contents(finished)
    assert call("develop", "--resume", str(run)) == 0
    out, error = capsys.readouterr()
    assert "is finished already; nothing was changed" in error
    assert "certified" in out
    assert contents(finished) == before
    assert call("verify", str(run)) == 0
    config, root = resume_config(run)
    again = develop(config, run, root, resume=True, quiet=True)
    assert again.decision.certified
    assert contents(finished) == before


def test_a_finished_run_keeps_its_exit_code(root: Path) -> None:
    config = settings(certify={"margin": 0.001})
    assert develop(config, root / "run", root, quiet=True).kept_old
    before = contents(root / "run")
    assert call("develop", "--resume", str(root / "run"), "-q") == 4
    assert contents(root / "run") == before


def test_a_run_whose_last_line_is_missing_is_finished_without_its_data(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    state = read_json(run / "run.json")
    write_json(run / "run.json", {**state, "status": "training"})
    (run / ".result.json.abc.tmp").write_text("half")
    config, root = resume_config(run)
    assert develop(config, run, root, resume=True, quiet=True).decision.certified
    assert contents(run) == contents(finished / "run")


def test_tune_says_that_it_is_finished_and_how_it_goes_on(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = root / "TUNE.toml"
    toml.write_text(
        '[data]\nsource = { path = "photos" }\nleaks = "allow"\nroles = { dev = 8, sealed = 60, test = 8 }\n'
        '[model]\narchitecture = "tiny"\n[train]\nsteps = 2\nbatch = 8\nimages_per_task = 2\ndevice = "cpu"\n'
    )
    words = ("tune", str(toml), "--out", str(root / "base"))
    assert call(*words, "-q") == 0
    before = contents(root / "base")
    assert read_json(root / "base" / "run.json")["root"] == ".."
    assert call(*words, "--resume", "-q") == 0
    assert "is finished already" in capsys.readouterr().err
    assert contents(root / "base") == before


def test_an_interrupted_tune_names_its_own_command(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(
        TuneConfig,
        {"data": ROUND["data"], "model": {"architecture": "tiny"}, "train": ROUND["train"]},
        "a base",
    )

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.rounds.tune.save_model", interrupt)
    with pytest.raises(Interrupted, match=r"go on with: holdfast tune T\.toml --resume"):
        tune(config, root / "base", root, quiet=True, command="holdfast tune T.toml --resume")
    monkeypatch.undo()
    assert tune(config, root / "base", root, resume=True, quiet=True).model.exists()


# -- looks ------------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_a_look_costs_nothing(root: Path, monkeypatch: pytest.MonkeyPatch, finished: Path) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.certify.sealed.select", interrupt)
    with pytest.raises(Interrupted, match=f"holdfast develop --resume {root / 'run'}"):
        develop(settings(), root / "run", root, quiet=True)
    assert queries(root) == 1
    monkeypatch.undo()
    config, origin = resume_config(root / "run")
    assert develop(config, root / "run", origin, resume=True, quiet=True).decision.certified
    assert queries(root) == 1
    ours, whole = contents(root / "run"), contents(finished / "run")
    for name in ("result.json", "certificate.json", "model/model.safetensors", "roles.parquet", "run.json"):
        assert ours[name] == whole[name], name


@pytest.mark.parametrize("damage", ["unreadable", "gone", "folder"])
def test_sealed_pictures_that_cannot_be_read_cost_no_look(
    root: Path, stop_before_the_query: pytest.MonkeyPatch, damage: str, tried: Callable[..., None]
) -> None:
    config = settings(data={"bad_image_limit": 0.2})
    with pytest.raises(Stop):
        develop(config, root / "run", root, quiet=True)
    stop_before_the_query.undo()
    roles = pq.read_table(root / "run" / "roles.parquet").to_pylist()
    victim = root / next(row["locator"] for row in roles if row["role"] == "sealed")
    before = victim.read_bytes()
    # The catalogue is read before the sealed pictures are: they go in between.
    opened = decide_module.check_budget

    def spoil(*arguments: Any) -> None:
        opened(*arguments)
        if damage == "unreadable":
            victim.write_bytes(before[:40])
        elif damage == "gone":
            victim.unlink()
        else:
            (root / "photos").rename(root / "elsewhere")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(develop_module, "check_budget", spoil)
        with pytest.raises(UserError, match="cannot be read"):
            develop(config, root / "run", root, resume=True, quiet=True)
    assert queries(root) == 0
    if damage == "folder":
        (root / "elsewhere").rename(root / "photos")
    victim.write_bytes(before)
    assert develop(config, root / "run", root, resume=True, quiet=True).decision.certified
    tried("faults")


def test_a_spent_set_is_known_before_anything_is_trained(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    root = tmp_path / "copy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.rounds.round.train", lambda *_: pytest.fail("trained for nothing"))
        patch.setattr("holdfast.rounds.prepare.load_start", lambda *_: pytest.fail("loaded for nothing"))
        with pytest.raises(UserError, match="is spent"):
            develop(settings(train={"steps": 3}), root / "other", root, quiet=True)
        with pytest.raises(UserError, match="another budget"):
            develop(
                settings(certify={"query_budget": 2, "ledger": str(_open_ledger(root))}),
                root / "other",
                root,
                quiet=True,
            )
        (root / "file").write_text("")
        with pytest.raises(UserError, match="cannot be written"):
            develop(settings(certify={"ledger": "file"}), root / "other", root, quiet=True)
    assert not any((root / "other").iterdir())


def _open_ledger(root: Path) -> Path:
    """A ledger in which the round's set is open, with a budget of three looks."""
    from holdfast.certify.ledger import Budget

    roles = pq.read_table(root / "run" / "roles.parquet").to_pylist()
    from holdfast.files import fingerprint_ids

    sealed = fingerprint_ids(row["example_id"] for row in roles if row["role"] == "sealed")
    with Ledger(root / "open").query(sealed, Budget(queries=3)) as query:
        query.close(False)
    return root / "open"


def test_certify_run_takes_up_a_look_without_a_result(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    develop(settings(certify={"look": False}), root / "run", root, quiet=True)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("holdfast.certify.sealed.retained", full)
    with pytest.raises(OSError, match="No space"):
        certify_run(root / "run")
    monkeypatch.undo()
    assert queries(root) == 1
    assert certify_run(root / "run")["verdict"] == "certified"
    assert queries(root) == 1


def test_certify_run_computes_nothing_that_only_training_needs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    develop(settings(certify={"look": False}), root / "run", root, quiet=True)
    monkeypatch.setattr("holdfast.rounds.prepare.begin_method", lambda *_: pytest.fail("old losses for nothing"))
    assert certify_run(root / "run")["verdict"] == "certified"


# -- folders ----------------------------------------------------------------------------------------------------------


def test_two_runs_in_one_folder_are_told_of_each_other(root: Path) -> None:
    with one_writer(root / "run"), pytest.raises(UserError, match=f"process {os.getpid()}"):
        develop(settings(), root / "run", root, quiet=True)
    assert develop(settings(), root / "run", root, quiet=True).decision.certified
    with one_writer(root / "run"):  # a finished run is read, whoever writes there
        config, origin = resume_config(root / "run")
        assert develop(config, root / "run", origin, resume=True).decision.certified


def test_what_a_kill_in_the_first_write_leaves_is_taken_up(root: Path, finished: Path) -> None:
    run = root / "run"
    run.mkdir()
    (run / ".round.json.x.tmp").write_text('{"half')
    (run / ".lock").write_text("")
    shutil.copy(finished / "run" / "round.json", run / "round.json")
    with pytest.raises(UserError, match="start it again"):
        RunFolder.open(run)
    assert develop(settings(), run, root, quiet=True).decision.certified
    assert contents(run).keys() == contents(finished / "run").keys()


def test_a_file_of_somebody_else_is_left_alone(root: Path) -> None:
    run = root / "run"
    run.mkdir()
    (run / "round.json").write_text('{"mine": 1}')
    with pytest.raises(UserError, match="not empty"):
        develop(settings(), run, root, quiet=True)
    assert contents(run) == {"round.json": b'{"mine": 1}'}


def test_a_run_can_be_moved_with_its_data(
    root: Path, stop_before_the_query: pytest.MonkeyPatch, finished: Path
) -> None:
    with pytest.raises(Stop):
        develop(settings(), root / "run", root, quiet=True)
    stop_before_the_query.undo()
    moved = root.parent / "moved"
    shutil.move(root, moved)
    try:
        config, origin = resume_config(moved / "run")
        assert origin == moved
        assert develop(config, moved / "run", origin, resume=True, quiet=True).decision.certified
        ours, whole = contents(moved / "run"), contents(finished / "run")
        assert {name for name in ours if ours[name] != whole.get(name)} <= {"metrics.jsonl"} | {
            name for name in ours if name.startswith("checkpoints/")
        }
        assert call("verify", str(moved / "run")) == 0
    finally:
        shutil.rmtree(moved)


def test_locators_are_relative_wherever_the_round_is_started_from(finished: Path) -> None:
    rows = pq.read_table(finished / "run" / "roles.parquet").to_pylist()
    assert all(row["locator"].startswith("photos/") and row["source"] == "photos" for row in rows)
    text = "".join(content.decode("latin-1") for name, content in contents(finished / "run").items() if "json" in name)
    assert str(finished) not in text


def test_a_project_can_be_moved_between_its_rounds(root: Path) -> None:
    values = {**ROUND, "certify": {**ROUND["certify"]}}
    del values["certify"]["ledger"]
    config = parse(RoundConfig, values, "a round")
    project = Project.open(root / "project", create=True)
    assert develop_in(project, config, root, title="fog", quiet=True).decision.certified
    assert str(root) not in (root / "project" / "rounds" / "0001-fog" / "round.json").read_text()
    moved = root.parent / "moved project"
    shutil.move(root, moved)
    try:
        assert verify_project(moved / "project").certificates == 1
        assert call("develop", "--resume", str(moved / "project" / "rounds" / "0001-fog"), "-q") == 0
    finally:
        shutil.rmtree(moved)


def test_a_round_of_a_project_that_is_refused_leaves_nothing(root: Path) -> None:
    values = {**ROUND, "certify": {"ledger": "file"}}
    (root / "file").write_text("")
    project = Project.open(root / "project", create=True)
    with pytest.raises(UserError, match="cannot be written"):
        develop_in(project, parse(RoundConfig, values, "a round"), root, title="fog", quiet=True)
    assert not list(project.rounds.iterdir())
    assert project.unfinished() == []


def test_a_round_that_was_killed_before_it_began_is_taken_up(root: Path) -> None:
    project = Project.open(root / "project", create=True)
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom holdfast.rounds.project import Project\n"
        "with Project(Path(sys.argv[1])).begin('fog', 'first'): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(project.root)], check=False).returncode == 9
    assert project.unfinished() == ["0001-fog"]
    with project.begin("fog", "first") as name, project.begin("fog", "first") as other:
        assert (name, other) == ("0001-fog", "0002-fog")  # the first one is held now


# -- disks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(6))
def test_a_full_disk_after_training_is_one_sentence_and_nothing_is_lost(
    root: Path, stop_before_the_query: pytest.MonkeyPatch, finished: Path, place: int, tried: Callable[..., None]
) -> None:
    with pytest.raises(Stop):
        develop(settings(), root / "run", root, quiet=True)
    stop_before_the_query.undo()
    calls, fsync = 0, os.fsync

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 5 + 4 * place:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left"):
            develop(settings(), root / "run", root, resume=True, quiet=True)
    assert queries(root) <= 1
    assert develop(settings(), root / "run", root, resume=True, quiet=True).decision.certified
    assert queries(root) == 1
    ours, whole = contents(root / "run"), contents(finished / "run")
    assert ours.keys() == whole.keys()
    assert ours["certificate.json"] == whole["certificate.json"]
    tried("faults")


def test_a_sealed_file_that_was_never_a_picture_stops_a_round_before_it_is_trained(root: Path) -> None:
    for number, victim in enumerate(sorted((root / "photos").rglob("*.png"))[:12]):
        victim.write_bytes(f"no picture {number}".encode())  # other bytes, other roles: some of them are sealed
    config = settings(data={"bad_image_limit": 0.5})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.rounds.round.train", lambda *_: pytest.fail("trained for nothing"))
        with pytest.raises(UserError, match=r"sealed pictures cannot be read\n.*\n  found: .*no picture in a known"):
            develop(config, root / "run", root, quiet=True)
    assert queries(root) == 0
    assert not any((root / "run").iterdir())  # and may be begun again there


@pytest.mark.parametrize("budget", [1, 2])
def test_a_retired_set_that_did_not_pass_shows_which_images_were_lost(root: Path, budget: int) -> None:
    config = settings(certify={"query_budget": budget, "margin": 0.3})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.certify.sealed.retained", lambda *_: False)
        result = develop(config, root / "run", root, quiet=True)
    assert (result.kept_old, result.decision.verdict) == (True, "undecided")
    assert not (root / "run" / "certificate.json").exists()
    kept = [(root / "run" / "predictions" / f"{name}-sealed.parquet").exists() for name in ("old", "new")]
    assert kept == [budget == 1] * 2  # a set that may be queried again stays sealed
    shown = {pair.role for pair in read_run(root / "run").pairs}
    assert shown == ({"sealed", "dev"} if budget == 1 else {"dev"})
