"""A method is one file, inside the package or outside: found by name, entry point or path, and held to what it was."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import cli
from holdfast.compare.grid import Study, StudyConfig, plan
from holdfast.config import MethodConfig, RoundConfig, parse
from holdfast.errors import UserError
from holdfast.files import read_json
from holdfast.methods import rm
from holdfast.methods.registry import BUILT_IN, build_method, find, short_name
from holdfast.rounds.develop import develop
from holdfast.rounds.next_round import rebased
from tests.methods.small import small_data, small_model
from tests.processes import python

BASE: dict[str, Any] = {
    "task": {"target": "eight", "template": "the digit {}"},
    "data": {
        "source": {"kind": "digits"},
        "constraint_images": 4,
        "target_images": 8,
        "roles": {"dev": 4, "sealed": 0.0, "test": 4},
    },
    "model": {"architecture": "tiny", "head_rank": 2},
    "train": {"batch": 8, "images_per_task": 2, "learning_rate": 1e-3, "device": "cpu", "log_every": 1},
    "candidates": {"target_bias": [0.0], "interpolation": [1.0]},
}
OWN = """
from holdfast import Method, MethodConfig, register

class OwnConfig(MethodConfig):
    weight: float = 1.0

@register("own", settings=OwnConfig)
class Own(Method):
    def __init__(self, model, config, steps):
        super().__init__(model)
        self.config = config
"""
RM = Path(rm.__file__)


def settings(root: Path, name: Any, steps: int = 3, **method: Any) -> RoundConfig:
    values = {**BASE, "train": {**BASE["train"], "steps": steps}, "evaluate": {"every": steps}}
    return parse(RoundConfig, {**values, "method": {"name": name, **method}}, "ROUND.toml", root)


def fault(root: Path, name: Any, **method: Any) -> str:
    with pytest.raises(UserError) as caught:
        settings(root, name, **method)
    assert len(caught.value.text()) < 800
    return caught.value.text()


# -- by name ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_method_lies_in_the_file_of_its_name(name: str) -> None:
    registered = find(name)
    assert registered.name == name == registered.settings().name
    assert (
        registered.method.__module__ == registered.settings.__module__ == BUILT_IN[name] == f"holdfast.methods.{name}"
    )
    data = small_data()
    assert type(build_method(small_model(data), registered.settings(), 3)) is registered.method


def test_reading_settings_and_looking_up_names_imports_no_torch() -> None:
    code = (
        "import sys, holdfast, holdfast.config, holdfast.methods, holdfast.methods.registry, holdfast.certify\n"
        "holdfast.register, holdfast.MethodConfig, holdfast.RoundConfig, holdfast.methods.registry.known_names()\n"
        "data = {'task': ['a'] * 300, 'label': ['a'] * 300, 'old': ['a'] * 300, 'new': ['a'] * 300}\n"
        "assert holdfast.certify(data).verdict == 'certified'\n"  # the function, and then the package of its name
        "assert holdfast.certify(data, margin=0.5).to_json()['verdict'] == 'certified'\n"
        "assert holdfast.plan(data, margin=0.02).images_needed > 100\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_that_nobody_has_name_the_nearest(tmp_path: Path, tried: Callable[..., None]) -> None:
    for name, expected in {
        "holdfst": "ROUND.toml: method.name: there is no method 'holdfst'",
        "wcl": "did you mean 'wccl'?",
        "": "known names: co2l",
        "x" * 100_000: "there is no method",
        7: "method.name: Input should be a valid string",
        None: "method.name: Input should be a valid string",
    }.items():
        tried("bad inputs")
        assert expected in fault(tmp_path, name)


def test_settings_belong_to_the_method_of_their_name() -> None:
    with pytest.raises(ValueError, match="are the settings of 'rm', not of 'der'"):
        rm.RmConfig(name="der")
    with pytest.raises(UserError, match="are the settings of no method"):
        build_method(small_model(small_data()), MethodConfig(name="nobody's"), 1)


# -- by path ----------------------------------------------------------------------------------------------------------


def test_a_file_is_found_from_the_folder_of_the_round(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "mine.py").write_text(OWN)
    given = settings(tmp_path, "deep/mine.py", weight=3.0)
    assert (type(given.method).__name__, given.method.name) == ("OwnConfig", "deep/mine.py")
    assert given.method.model_dump()["weight"] == 3.0
    named = settings(tmp_path, "deep/mine.py:own")
    assert type(named.method) is type(given.method)  # executed once
    assert settings(tmp_path / "deep", "../deep/mine.py").method.name == "../deep/mine.py"
    # What a run folder holds has no absolute path in it.
    assert settings(tmp_path, str(tmp_path / "deep" / "mine.py:own")).method.name == "deep/mine.py:own"
    assert parse(RoundConfig, given.model_dump(mode="json"), "round.json", tmp_path) == given
    moved = rebased(given, tmp_path, tmp_path / "projects" / "a")
    assert moved.method.name == "../../deep/mine.py"
    assert parse(RoundConfig, moved.model_dump(mode="json"), "x", tmp_path / "projects" / "a").method == moved.method


def test_a_method_derived_from_a_built_in_one_has_its_settings_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from holdfast import register\nfrom holdfast.methods.holdfast import Holdfast, HoldfastConfig\n"
        "class OwnConfig(HoldfastConfig):\n    weight: float = 1.0\n"
        '@register("own", settings=OwnConfig)\nclass Own(Holdfast): ...\n'
    )
    given = settings(tmp_path, "mine.py", beta=7.0, research={"views": "paired"})
    assert given.method.protected_views() == "paired"
    assert given.trained.head_learning_rate == pytest.approx(30 * given.train.learning_rate)
    published = settings(tmp_path, "mine.py", form="published")
    assert (published.method.name, published.method.kkt_penalty()) == ("mine.py", 200.0)
    assert (published.lambdas, published.candidates.refit_target) == ((1.0,), False)
    assert "did you mean 'views'" in fault(tmp_path, "mine.py", research={"vews": "paired"})


def test_settings_of_a_file_travel_to_another_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    given = settings(tmp_path, "mine.py", weight=3.0)
    assert pickle.loads(pickle.dumps(given)) == given
    code = f"import pickle; print(pickle.loads({pickle.dumps(given)!r}).method.weight)"
    done = python("-c", code, cwd=Path("/"))
    assert done.stdout == "3.0\n", done.stderr


TWO = OWN + OWN.replace("Own", "Other").replace('"own"', '"other"')
BROKEN = {
    "syntax": ("x = (\n", "mine.py, line 1: the file cannot be imported", "SyntaxError"),
    "import": ("import os\nimport nothing_like_it\n", "line 2: the file cannot be imported", "ModuleNotFoundError"),
    "exception": ("def f():\n    raise KeyError('x')\nf()\n", "line 2: the file", "KeyError"),
    "exit": ("import sys\nsys.exit(3)\n", "line 2: the file", "SystemExit: 3"),
    "not utf-8": (b"\xff\xfe\x00", "the file cannot be imported", "found"),
    "null": (b"x = 1\0", "the file cannot be imported", "null byte"),
    "empty": ("", "mine.py registers no method", '@register("NAME", settings=SETTINGS)'),
    "no registration": (OWN.replace('@register("own", settings=OwnConfig)', ""), "registers no method", "Method"),
    "only imported": ("from holdfast.methods.rm import Rm, RmConfig\n", "registers no method", "expected"),
    "two": (TWO, "mine.py registers 2 methods", 'name = "mine.py:own"'),
    "settings no class": (OWN.replace("settings=OwnConfig", "settings={}"), "line 7: the settings of", "found:    {}"),
    "settings no section": (OWN.replace("(MethodConfig)", ""), "are no settings class", "holdfast.config.MethodConfig"),
    "settings the base": (OWN.replace("settings=OwnConfig", "settings=MethodConfig"), "are no settings class", ""),
    "settings of another": (
        "from holdfast.methods.rm import RmConfig as OwnConfig, register\nfrom holdfast import Method\n"
        '@register("own", settings=OwnConfig)\nclass Own(Method): pass\n',
        "RmConfig are the settings of two methods, 'rm' and 'own'",
        "may derive from the other",
    ),
    "one name twice": (TWO.replace('"other"', '"own"'), "two methods of one file are called 'own'", ""),
    "no method": (OWN.replace("(Method):", "(object):"), "the method 'own' is no Method", "holdfast.Method"),
    "a name that is none": (OWN.replace('"own"', '"a b.py"'), "'a b.py' is no name for a method", ""),
    "a number for a name": (OWN.replace('"own"', "7"), "7 is no name for a method", ""),
}  # fmt: skip


@pytest.mark.parametrize("which", BROKEN)
def test_what_is_wrong_with_a_file_is_a_sentence(which: str, tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("bad inputs")
    content, *expected = BROKEN[which]
    (tmp_path / "mine.py").write_bytes(content if isinstance(content, bytes) else content.encode())
    before = {name for name in sys.modules if name.startswith("holdfast_method")}
    text = fault(tmp_path, "mine.py")
    assert text.startswith("ROUND.toml: method.name: ")
    for part in expected:
        assert part in text
    if "line" in text:
        assert {name for name in sys.modules if name.startswith("holdfast_method")} == before


def test_what_is_wrong_with_a_path_is_a_sentence(tmp_path: Path, tried: Callable[..., None]) -> None:
    (tmp_path / "mine.py").write_text(TWO)
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    for name, expected in {
        "gone.py": "there is no file gone.py\n  expected: a Python file that registers a method\n"
        f"  do:       check the path: it begins in {tmp_path}",
        "/nowhere/gone.py": "there is no file /nowhere/gone.py",
        "folder.py": "folder.py cannot be read",
        "pipe.py": "a named pipe",
        "zero.py": "a device",
        "mine.py/x.py": "cannot be read",
        "nul\0.py": "cannot be read",
        "x" * 5000 + ".py": "cannot be read",
        "mine.py:othr": "mine.py registers no method 'othr'\n  do:       did you mean 'other'?",
        "mine.py:": "there is no method 'mine.py:'",
    }.items():
        tried("bad inputs")
        assert expected in fault(tmp_path, name)


def test_mistakes_in_the_settings_of_a_file_are_told_as_those_of_any_section(
    tmp_path: Path, tried: Callable[..., None]
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    tried("bad inputs", 3)
    assert "unknown key 'method.wight'\n  do:       did you mean 'weight'?" in fault(tmp_path, "mine.py", wight=1.0)
    assert "method.weight: Input should be a valid number" in fault(tmp_path, "mine.py", weight="1")
    assert "unknown key 'method.sha256'" in fault(tmp_path, "rm", sha256="x")


def test_the_command_line_says_so_and_begins_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tried: Callable[..., None]
) -> None:
    tried("bad inputs")
    (tmp_path / "mine.py").write_text("import nothing_like_it\n")
    toml = '[task]\ntarget = "eight"\n[data]\nsource = { kind = "digits" }\n[model]\narchitecture = "tiny"\n'
    (tmp_path / "ROUND.toml").write_text(f'{toml}[method]\nname = "mine.py"\n')
    code, error = call(monkeypatch, capsys, "develop", str(tmp_path / "ROUND.toml"), "--out", str(tmp_path / "run"))
    assert code == 2
    assert "mine.py, line 1: the file cannot be imported" in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["holdfast", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0), capsys.readouterr().err


# -- entry points -----------------------------------------------------------------------------------------------------


def install(site: Path, package: str, entries: dict[str, str]) -> None:
    """What pip leaves of a package: its entry points."""
    folder = site / f"{package}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "\n".join(f"{name} = {value}" for name, value in entries.items())
    (folder / "entry_points.txt").write_text(f"[holdfast.methods]\n{lines}\n")


def test_installed_packages_bring_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Callable[..., None]
) -> None:
    site = tmp_path / "site"
    entries = {"own": "theirs_of_a_test:Own", "gone": "nothing_like_it:X", "other": "theirs_of_a_test"}
    install(site, "theirs", entries)
    (site / "theirs_of_a_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(site))
    given = settings(tmp_path, "own", weight=2.0)
    assert (given.method.name, given.method.model_dump()["weight"]) == ("own", 2.0)
    assert parse(RoundConfig, given.model_dump(mode="json"), "x") == given
    assert pickle.loads(pickle.dumps(given)) == given
    assert study(tmp_path, [{"name": "own"}])[0].row == "own"
    tried("bad inputs", 5)
    with pytest.raises(UserError, match="the method in theirs_of_a_test:Own was changed since this run began"):
        settings(tmp_path, "own", sha256="of another version")
    assert "theirs_of_a_test registers no method 'other'" in fault(tmp_path, "other")
    assert "cannot be imported from nothing_like_it:X" in fault(tmp_path, "gone")
    assert "did you mean 'other'" in fault(tmp_path, "othr")
    install(site, "more", {"own": "elsewhere:Own"})
    assert "several installed packages have a method 'own'" in fault(tmp_path, "own")


# -- in a study -------------------------------------------------------------------------------------------------------


def study(root: Path, methods: list[dict[str, Any]]) -> list[Any]:
    shared = {name: BASE[name] for name in ("task", "data", "model")}
    config = parse(StudyConfig, {"round": shared, "seeds": [0], "methods": methods}, "STUDY.toml")
    return plan(Study("small", config, root, root / "STUDY.toml"), root / "out")


def test_a_study_takes_files_and_another_content_is_another_job(tmp_path: Path, tried: Callable[..., None]) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    rows = [{"name": "mine.py", "grid": {"weight": [1.0, 2.0]}}, {"name": "rm"}]
    jobs = study(tmp_path, rows)
    assert [(job.row, job.setting_text) for job in jobs] == [("mine", "weight=1"), ("mine", "weight=2"), ("rm", "")]
    (tmp_path / "mine.py").write_text(OWN + "\n")
    again = study(tmp_path, rows)
    assert [job.folder == other.folder for job, other in zip(jobs, again, strict=True)] == [False, False, True]
    assert short_name("a/b.py:lwf") == "lwf"
    for name, expected in {"gone.py": "there is no file gone.py", "rmm": "did you mean 'rm'?"}.items():
        tried("bad inputs")
        with pytest.raises(UserError) as caught:
            study(tmp_path, [{"name": name}])
        assert expected in caught.value.text()


# -- the same bits ----------------------------------------------------------------------------------------------------


def weights(run: Path) -> dict[str, bytes]:
    names = ("candidates/step-00000003/model.safetensors", "model/model.safetensors", "predictions/old-dev.parquet")
    return {name: (run / name).read_bytes() for name in names}


def test_a_file_outside_gives_the_bits_of_the_same_class_built_in(tmp_path: Path) -> None:
    shutil.copy(RM, tmp_path / "mine.py")
    develop(settings(tmp_path, "rm", alpha=3.0), tmp_path / "inside", tmp_path, quiet=True)
    develop(settings(tmp_path, "mine.py", alpha=3.0), tmp_path / "outside", tmp_path, quiet=True)
    assert weights(tmp_path / "inside") == weights(tmp_path / "outside")
    written = read_json(tmp_path / "outside" / "round.json")["method"]
    assert written["name"] == "mine.py"
    assert len(written["sha256"]) == 64
    assert "sha256" not in read_json(tmp_path / "inside" / "round.json")["method"]


MORTAL = """

import os, signal

def dying(method, batch, steps=[], forward=Rm.forward):
    steps.append(batch)
    if len(steps) == int(os.environ.get("DIE_AT", 0)):
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(method, batch)

Rm.forward = dying
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits_and_refuses_a_changed_file(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tried: Callable[..., None],
) -> None:
    method, run = tmp_path / "mine.py", tmp_path / "run"
    source = RM.read_text() + MORTAL
    method.write_text(source)
    (tmp_path / "round.toml").write_text(TOML)
    develop_file = [sys.executable, "-m", "holdfast", "develop", str(tmp_path / "round.toml"), "-q", "--anyway"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = subprocess.run([*develop_file, "--out", str(tmp_path / "whole")], env=environment, check=False)
    assert whole.returncode in (0, 4)
    tried("signals")
    killed = subprocess.run([*develop_file, "--out", str(run)], env={**environment, "DIE_AT": "6"}, check=False)
    assert killed.returncode == -9
    assert (run / "checkpoints" / "step-00000004.pt").exists()

    method.write_text(source + "# another line\n")
    tried("bad inputs")
    code, error = call(monkeypatch, capsys, "develop", "--resume", str(run), "-q")
    assert code == 2
    assert "the method in mine.py was changed since this run began" in error
    assert "put it back as it was" in error

    method.write_text(source)
    resumed = [sys.executable, "-m", "holdfast", "develop", "--resume", str(run), "-q"]
    assert subprocess.run(resumed, env=environment, check=False).returncode == whole.returncode
    for name in ("model/model.safetensors", "candidates/step-00000008/model.safetensors", "result.json"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


TOML = """
[task]
target = "eight"
template = "the digit {}"
[data]
source = { kind = "digits" }
constraint_images = 4
target_images = 8
roles = { dev = 4, sealed = 0.0, test = 4 }
[model]
architecture = "tiny"
head_rank = 2
[method]
name = "mine.py"
[train]
steps = 8
batch = 8
images_per_task = 2
learning_rate = 1e-3
log_every = 1
checkpoint_every = 2
device = "cpu"
[evaluate]
every = 8
[candidates]
interpolation = [1.0]
target_bias = [0.0]
"""
