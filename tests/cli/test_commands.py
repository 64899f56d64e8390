"""Commands as a newcomer types them: exit codes, messages, nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from holdfast import cli
from holdfast._version import __version__

ROUND = """
[task]
target = "eight"
[data]
source = { kind = "digits" }
[model]
architecture = "tiny"
[train]
device = "cpu"
"""


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["holdfast", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out, error = capsys.readouterr()
    return int(stopped.value.code or 0), out, error


@pytest.fixture
def holdfast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *words: call(monkeypatch, capsys, *words)


def test_version_and_help(holdfast: Any) -> None:
    assert holdfast("--version") == (0, f"holdfast {__version__}\n", "")
    code, out, _ = holdfast("--help")
    assert code == 0
    for name in ("init", "develop", "tune", "certify", "plan", "verify", "evaluate", "export", "data", "pack", "leaks"):
        assert name in out


def test_unknown_commands_and_options_are_the_users_mistake(holdfast: Any) -> None:
    code, _, error = holdfast("develp")
    assert code == 2
    assert "develp" in error
    code, _, error = holdfast("develop", "--sed", "3")
    assert code == 2
    assert "--seed" in error


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("[train]", "[train]\nstpes = 3"), "did you mean 'steps'?"),
        (("[train]", "[train]\nsteps = 0"), "greater than 0"),
        (("[train]", "[train]\nbatch = -4"), "greater than or equal to 2"),
        (('target = "eight"', 'target = "eigth"'), "did you mean 'eight'?"),
        (('target = "eight"', 'target = "eight"\nprotected = ["one", "eight"]'), "one or the other"),
        (('target = "eight"', 'target = "eight"\nprotected = ["one", "one"]'), "listed twice"),
        (('target = "eight"', 'target = "eight"\nignored = ["ten"]'), "has no images"),
        (('target = "eight"', 'target = "eight"\ntemplate = "a digit"'), "placeholder {}"),
        (('device = "cpu"', 'device = "cuda"'), "CUDA was asked for"),
        (('device = "cpu"', 'device = "tpu"'), "auto, cpu, cuda"),
        (('architecture = "tiny"', 'architecture = "ViT-B-61"'), "ViT-B-16"),
        (('architecture = "tiny"', 'start = "nowhere"'), "does not exist yet"),
        (("[train]", "[certify]\nmargin = 1.5\n[train]"), "must lie in [0, 1)"),
        (("[train]", "[method]\nname = 'holdfst'\n[train]"), "holdfast"),
        (("[train]", "[train]\nsteps = true"), "train.steps: Input should be a valid integer"),
        (("[train]", '[train]\nsteps = "40"'), "found: '40'"),
        (("[train]", "[candidates]\ntarget_bias = [nan]\n[train]"), "target_bias.0: Input should be a finite number"),
        (("[train]", "[certify]\nconfidence = 0.9999999999999\n[train]"), "from 0.5 to 0.99999999"),
        (("[train]", "[certify]\nquery_budget = 100000000\n[train]"), "fewer queries"),
        (('architecture = "tiny"', 'architecture = "tiny"\nhead_rank = 1000000000'), "at most 32"),
        (('architecture = "tiny"', 'architecture = "tiny"\nfreeze = "towers"\nhead_rank = 0'), "nothing to train"),
        (
            ('architecture = "tiny"', 'architecture = "tiny"\nfreeze = "towers"\n[method]\nname = "flyp"'),
            "nothing to train",
        ),
        (('target = "eight"', 'target = "eight"\ntemplate = []'), "template is empty"),
        (("[train]", "[train]\n" + "x." * 100 + "x = 1"), "nested too deeply"),
    ],
)
def test_a_mistake_in_the_round_is_explained(
    holdfast: Any, tmp_path: Path, change: tuple[str, str], expected: str, tried: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried("bad inputs")
    monkeypatch.setenv("HOLDFAST_LEDGER", str(tmp_path / "ledger"))
    path = tmp_path / "ROUND.toml"
    path.write_text(ROUND.replace(*change))
    code, out, error = holdfast("develop", str(path), "--anyway", "--out", str(tmp_path / "run"))
    assert code == 2, error
    assert expected in " ".join(error.split())
    assert "Traceback" not in out + error
    assert not [path for path in (tmp_path / "run").glob("*") if path.name != ".lock"]  # the folder can be used again


def test_a_run_folder_that_is_not_empty_is_refused(holdfast: Any, tmp_path: Path) -> None:
    path, run = tmp_path / "ROUND.toml", tmp_path / "run"
    path.write_text(ROUND)
    run.mkdir()
    (run / "precious.txt").write_text("mine")
    code, _, error = holdfast("develop", str(path), "--out", str(run))
    assert code == 2
    assert "--resume" not in error  # there is no run to go on with
    assert (run / "precious.txt").read_text() == "mine"


def test_a_round_that_will_probably_prove_nothing_is_not_trained(
    holdfast: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Any
) -> None:
    tried("bad inputs")
    ledger = tmp_path / "ledger"
    monkeypatch.setenv("HOLDFAST_LEDGER", str(ledger))
    path, run = tmp_path / "ROUND.toml", tmp_path / "run"
    path.write_text(ROUND)
    code, out, error = holdfast("develop", str(path), "--out", str(run), "--steps", "2", "--json")
    assert code == 2
    assert out == ""
    opening, _, refusal = error.partition("error: ")
    assert 2 <= len(opening.splitlines()) <= 5
    assert all(len(line) <= 80 for line in opening.splitlines())
    assert "plan: a chance of <1 %" in opening
    words = " ".join(refusal.split())
    for part in ("would probably prove nothing", "at least 50 %", "--anyway` goes on", "no query was spent", "more of"):
        assert part in words, part
    assert not [item for item in run.glob("*") if item.name != ".lock"]
    assert not ledger.exists()
    code, _, error = holdfast("develop", str(path), "--out", str(run), "--steps", "2", "--anyway", "--quiet")
    assert code in (0, 4), error
    assert "plan:" not in error
    # What was begun is gone on with, whatever its chance.
    assert holdfast("develop", "--resume", str(run), "--quiet")[0] == code


@pytest.mark.parametrize("section", ["[data.roles]\nsealed = 0.0\n", "[certify]\ntest_sealed = false\n"])
def test_a_round_that_tests_no_sealed_images_needs_no_chance(
    holdfast: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    monkeypatch.setenv("HOLDFAST_LEDGER", str(tmp_path / "ledger"))
    path = tmp_path / "ROUND.toml"
    path.write_text(ROUND + section)
    code, _, error = holdfast("develop", str(path), "--out", str(tmp_path / "run"), "--steps", "2")
    assert code in (0, 4), error
    assert "plan:" not in error


def test_init_writes_a_round_that_parses(holdfast: Any, tmp_path: Path) -> None:
    from holdfast.config import RoundConfig, parse, read_toml

    path = tmp_path / "ROUND.toml"
    code, out, _ = holdfast("init", "digits", "--target", "eight", "--model", "tiny", "--out", str(path))
    assert code == 0
    assert "10 classes" in out
    assert parse(RoundConfig, read_toml(path), str(path)).task.target == "eight"
    assert holdfast("init", "digits", "--model", "tiny", "--out", str(path))[0] == 2  # never overwritten


def test_a_folder_that_cannot_be_written_is_said_so(holdfast: Any, tmp_path: Path) -> None:
    path = tmp_path / "ROUND.toml"
    path.write_text(ROUND)
    code, _, error = holdfast("develop", str(path), "--out", "/proc/holdfast-run")
    assert code == 2
    assert "cannot write" in error


def test_the_papers_form_is_a_switch(holdfast: Any, tmp_path: Path) -> None:
    from holdfast.artifacts import RunFolder
    from holdfast.files import read_json

    path = tmp_path / "ROUND.toml"
    text = ROUND.replace("[train]", "[method]\nbeta = 5.0\n[train]")
    path.write_text(text)
    run = tmp_path / "run"
    options = ("--steps", "2", "--form", "authors", "--anyway", "--quiet")
    code, _, error = holdfast("develop", str(path), "--out", str(run), *options)
    assert code in (0, 4), error
    config = read_json(RunFolder.open(run).config)
    method = config["method"]
    assert (method["form"], method["beta"], method["distill_weight"], method["research"]["views"]) == (
        "authors",
        5.0,
        0.0,
        "mismatched",
    )
    assert config["candidates"]["interpolation"] == [1.0]
    assert (config["train"]["steps"], config["train"]["rotation"]) == (2, 15.0)
    (candidate,) = read_json(RunFolder.open(run).result)["candidates"]
    assert (candidate["lambda"], candidate["bias"]) == (1.0, 0.0)
    assert holdfast("develop", "--resume", str(run), "--quiet")[0] == code  # what a run folder says is no contradiction


def test_a_form_that_a_method_has_not_and_the_option_that_is_gone_are_sentences(
    holdfast: Any, tmp_path: Path, tried: Any
) -> None:
    path = tmp_path / "ROUND.toml"
    path.write_text(ROUND.replace("[train]", '[method]\nname = "finetune"\n[train]'))
    for options, sentences in (
        (("--form", "published"), ('method.name = "finetune"', "leave out --form")),
        (("--as-published",), ("--as-published is gone", '[method] form = "published"', "--form published")),
        (("--form", "papers"), ("'papers' is not one of", "authors")),
        (("--quick", "--form", "authors"), ("--quick trains nothing",)),
        (("--quick", "--train"), ("--quick trains nothing", "leave out --form, --steps and --train, or --quick")),
    ):
        tried("bad inputs")
        code, _, error = holdfast("develop", str(path), "--out", str(tmp_path / "other"), *options)
        assert code == 2
        assert all(sentence in " ".join(error.split()) for sentence in sentences), error
    assert not (tmp_path / "other").exists()


LONG = "x" * 5000
NOWHERE = ("/dev/zero", "/dev/null", LONG, "", "none")


@pytest.mark.parametrize(
    "words",
    [
        *(("develop", item) for item in NOWHERE),
        *(("tune", item) for item in NOWHERE),
        *(("bench", item) for item in NOWHERE),
        *(("compare", item) for item in NOWHERE),
        *(("verify", item) for item in NOWHERE),
        *(("report", item) for item in NOWHERE),
        *(("certify", item) for item in NOWHERE),
        *(("diagnose", item) for item in NOWHERE),
        *(("export", item, "out") for item in NOWHERE),
        *(("evaluate", item, "digits") for item in NOWHERE),
        *(("track", item, "--to", "tensorboard") for item in NOWHERE),
        ("compare", "digits", "--jobs", "0"),
        ("bench", "--shape", "tny"),
        ("bench", "--shape", "tiny", "--steps", "0"),
        ("bench", "--shape", "tiny", "--device", "tpu"),
        ("track", "run", "--to", "tensorboard", "--register", "name"),
        ("diagnose", "run", "--memory", "inf"),
        ("diagnose", "run", "--memory", "nan"),
        ("diagnose", "run", "--beta", "inf"),
        ("diagnose", "run", "--beta", "nan"),
        ("diagnose", "run", "--images", "0"),
        ("evaluate", "model", "digits", "--batch-size", "0"),
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_paths_and_numbers_that_cannot_be_used_are_a_sentence(
    words: tuple[str, ...], holdfast: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Any
) -> None:
    tried("bad inputs")
    monkeypatch.chdir(tmp_path)
    code, out, error = holdfast(*words)
    assert code == 2, error
    assert "Traceback" not in out + error
    assert len(error.strip().splitlines()) in range(1, 8)


@pytest.mark.parametrize(
    ("words", "expected"),
    {
        "plan photos": ("photos is a folder", "name the file; for a folder of images `holdfast init` writes one"),
        "develop photos": ("photos is a folder", "a TOML file, such as ROUND.toml"),
        "develop TUNE.toml": ("TUNE.toml holds the settings of `holdfast tune`", "or name the round's file"),
        "plan TUNE.toml": ("TUNE.toml holds the settings of `holdfast tune`", "expected: a ROUND.toml"),
        "tune ROUND.toml": ("ROUND.toml is a round", "run it with `holdfast develop ROUND.toml`"),
        "verify ROUND.toml": ("ROUND.toml is not a certificate", "name a run, such as runs/ROUND"),
        "verify photos": ("photos holds no certificate", "name the run, such as runs/ROUND"),
        "report ROUND.toml": ("ROUND.toml is not a folder", "name the folder, such as runs/ROUND"),
        "report photos": ("photos is neither a run", "name the folder, such as runs/ROUND"),
        "report nothing": ("nothing does not exist", "name the folder, such as runs/ROUND"),
        "evaluate cones photos": ("the model cones does not exist", "did you mean `conse`?"),
        "init photos --target cat --model tiny": ("no classes", "name the folder whose subfolders are the classes"),
    }.items(),
)
def test_a_file_of_another_kind_is_called_what_it_is(
    words: str, expected: tuple[str, ...], holdfast: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "photos" / "1.png")
    if not words.startswith("init"):
        (tmp_path / "ROUND.toml").write_text(ROUND)
    (tmp_path / "TUNE.toml" if "TUNE" in words else tmp_path / "other.toml").write_text('objective = "cross_entropy"\n')
    code, _, error = holdfast(*words.split())
    assert code == 2
    for part in expected:
        assert part in error
