"""The certificate alone is light: without torch and its kin, what needs none of them works, and the rest says so."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.extras import EXTRAS
from tests.certify.helpers import rows, write_csv
from tests.report.fabricated import made_up_run

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "torchvision", "open_clip", "transformers", "safetensors", "sklearn", "matplotlib", "duckdb", "ray")
BLOCKER = f"import sys\nfor name in {HEAVY!r}:\n    sys.modules[name] = None\n"
SPEC = {"clear": (500, 5, 3), "snowy": (400, 4, 1), "foggy": (60, 20, 1)}
NEEDS_TORCH = ("develop round.toml", "demo", "tune tune.toml", "evaluate a b", "export a b", "bench", "diagnose run")
ROUND = """
task.target = "eight"
data.source.kind = "digits"
model.architecture = "tiny"
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def light(tmp_path: Path) -> Run:
    """Runs Python in a folder, where importing torch and its kin fails as if they were not installed."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(BLOCKER)
    paths = [str(tmp_path / "blocked"), str(Path(holdfast.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


def predictions(folder: Path) -> None:
    columns = "example_id,task,label,prediction"
    for model in ("old", "new"):
        write_csv(folder / f"{model}.csv", [{**row, "prediction": row[model]} for row in rows(SPEC)], columns)


def test_certify_plan_verify_and_help(light: Run, tmp_path: Path) -> None:
    predictions(tmp_path)
    done = light("-m", "holdfast", "certify", "old.csv", "new.csv", "--margin", "0.02", "--out", "c.json", "--json")
    assert done.returncode == 0, done.stderr
    assert {row["task"]: row["n"] for row in json.loads(done.stdout)["tasks"]} == {k: v[0] for k, v in SPEC.items()}
    done = light("-m", "holdfast", "plan", "--discordance", "0.02", "--margin", "0.02", "--json")
    assert json.loads(done.stdout)["per_task"] > 100, done.stderr
    done = light("-m", "holdfast", "verify", "c.json")
    assert done.returncode == 0, done.stderr
    assert "the certificate holds" in done.stdout
    for option in ("--help", "--version"):
        assert light("-m", "holdfast", option).returncode == 0


def test_the_same_from_python(light: Run, tmp_path: Path) -> None:
    predictions(tmp_path)
    script = """
import json
import holdfast
from holdfast import certify, plan
first = certify("old.csv", "new.csv", margin=0.02, target="foggy")
from holdfast import certify as again  # by now a package of that name is imported, too
import holdfast.certify.tables
assert again("old.csv", "new.csv", margin=0.02, target="foggy") == first == holdfast.certify(
    "old.csv", "new.csv", margin=0.02, target="foggy")
print(json.dumps([first.verdict, plan(discordance=0.02, margin=0.02).images_needed]))
"""
    done = light("-c", script)
    assert done.returncode == 0, done.stderr
    verdict, images = json.loads(done.stdout)
    assert verdict == "certified"
    assert images == holdfast.plan(discordance=0.02, margin=0.02).images_needed


def test_a_report_of_a_run(light: Run, tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", source=tmp_path / "pictures")
    done = light("-m", "holdfast", "report", run)
    assert done.returncode == 0, done.stderr
    assert "fog" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["log", "show 1", "diff first 1"])
def test_the_history_of_a_project_reads_its_files_alone(light: Run, tmp_path: Path, command: str) -> None:
    done = light("-m", "holdfast", *command.split(), "--project", tmp_path)
    assert done.returncode == 2
    assert "needs" not in done.stderr
    assert "project" in done.stderr


def test_a_source_is_looked_at(light: Run, tmp_path: Path) -> None:
    made_up_run(tmp_path / "run", source=tmp_path / "pictures")
    done = light("-m", "holdfast", "init", "pictures")
    assert done.returncode == 2
    assert "which model is to be improved?" in done.stderr
    target = next(item.name for item in (tmp_path / "pictures").iterdir() if item.is_dir())
    done = light("-m", "holdfast", "init", "pictures", "--target", target, "--model", "tiny")
    assert done.returncode == 0, done.stderr
    done = light("-m", "holdfast", "data", "pictures", "--json")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", NEEDS_TORCH)
def test_what_needs_more_says_so_in_a_sentence(
    light: Run, tried: Callable[..., None], tmp_path: Path, command: str
) -> None:
    tried("bad inputs")
    (tmp_path / "round.toml").write_text(ROUND)  # a mistake in it would be told first, which needs no torch
    done = light("-m", "holdfast", *command.split())
    assert done.returncode == 2
    sentence = f"error: holdfast {command.split(maxsplit=1)[0]} needs PyTorch; do: pip install 'holdfast[train]'\n"
    assert (done.stdout, done.stderr) == ("", sentence)


def test_another_missing_package_is_our_failure(light: Run, tmp_path: Path) -> None:
    (tmp_path / "blocked" / "sitecustomize.py").write_text("import sys\nsys.modules['pyarrow'] = None\n")
    predictions(tmp_path)
    done = light("-m", "holdfast", "certify", "old.csv", "new.csv", "--margin", "0.02")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_every_extra_that_a_message_names_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {extra for _, extra in EXTRAS.values()} <= set(project["optional-dependencies"])
    assert not [item for item in project["dependencies"] if item.startswith(("torch", "open_clip", "scikit"))]


# -- tools/imports.py -------------------------------------------------------------------------------------------------


def imports_tool():
    spec = importlib.util.spec_from_file_location("imports_tool", ROOT / "tools" / "imports.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copied(folder: Path) -> Path:
    package = folder / "holdfast"
    shutil.copytree(Path(holdfast.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


@pytest.mark.parametrize(
    ("file", "added", "found"),
    [
        ("evaluate/metrics.py", "import torch", True),  # by way of report and candidates
        ("candidates/__init__.py", "from holdfast.candidates import refit", True),  # a parent package
        ("certify/claims.py", "try:\n    import sklearn\nexcept ImportError:\n    pass", True),
        ("certify/claims.py", "class A:\n    from torch import Tensor", True),
        ("certify/claims.py", "def later():\n    import torch", False),
        ("certify/claims.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False),
        ("certify/claims.py", "import scipy.stats", False),
    ],
)
def test_the_way_to_a_heavy_package_is_found(tmp_path: Path, file: str, added: str, found: bool) -> None:
    package, tool = copied(tmp_path), imports_tool()
    assert tool.heavy(package) == []
    tool.parsed.cache_clear()
    path = package / file
    path.write_text(path.read_text(encoding="utf-8") + "\n" + added + "\n", encoding="utf-8")
    faults = tool.heavy(package)
    assert bool(faults) == found
    if found:
        assert any(file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") in fault for fault in faults)


# -- a real installation ----------------------------------------------------------------------------------------------


def uv() -> str:
    found = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("uv is not installed")
    return found


def environment_of(folder: Path) -> Path:
    """A new virtual environment; its Python."""
    subprocess.run([uv(), "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    return folder / "bin" / "python"


def source_copy(folder: Path) -> Path:
    folder.mkdir()
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
def test_a_wheel_without_extras_certifies(tmp_path: Path) -> None:
    source = source_copy(tmp_path / "source")
    subprocess.run([uv(), "build", "--quiet", "--wheel", "--out-dir", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "holdfast/report/html/page.html" in zipfile.ZipFile(wheel).namelist()
    python = environment_of(tmp_path / "venv")
    subprocess.run([uv(), "pip", "install", "--quiet", "--python", str(python), str(wheel)], check=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    predictions(tmp_path)
    command = [python.with_name("holdfast"), "certify", "old.csv", "new.csv", "--margin", "0.02", "--target", "foggy"]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "✓ certified" in done.stdout
    done = subprocess.run(
        [python.with_name("holdfast"), "demo"], cwd=tmp_path, env=clean, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        2,
        "error: holdfast demo needs PyTorch; do: pip install 'holdfast[train]'\n",
    )


@pytest.mark.slow
def test_a_cpu_build_of_torch_that_is_installed_already_is_kept(tmp_path: Path) -> None:
    """`holdfast[train]` asks for no CUDA package by itself: torch+cpu first, and nothing of NVIDIA's comes after it."""
    python = environment_of(tmp_path / "venv")
    for name, version in (("torch", "2.9.0+cpu"), ("torchvision", "0.24.0+cpu")):
        wheel = tmp_path / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            info = f"{name}-{version}.dist-info"
            archive.writestr(f"{name}/__init__.py", "")
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        subprocess.run(
            [uv(), "pip", "install", "--quiet", "--python", str(python), "--no-deps", str(wheel)], check=True
        )
    wanted = f"holdfast[train] @ {source_copy(tmp_path / 'source').as_uri()}"
    done = subprocess.run(
        [uv(), "pip", "install", "--dry-run", "--python", str(python), wanted],
        capture_output=True,
        text=True,
        check=True,
    )
    named = done.stderr.lower()
    assert "+ open-clip-torch" in named
    for package in ("+ torch=", "+ torchvision=", "nvidia", "triton", "cuda"):
        assert package not in named
