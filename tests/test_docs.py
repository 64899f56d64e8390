"""What the documentation says can be typed in: commands exist with their options, marked blocks run, snippets compile.

A fenced ``console`` block behind ``<!-- run -->`` is executed, line by line behind ``$``, in a folder of its own for
each page; ``<!-- run slow -->`` does so in the slow tests, ``exit 0 or 4`` names the codes that are right. A block
behind ``<!-- file NAME -->`` is written to that file first.
"""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main

from holdfast.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*?) -->\n)?```(?P<kind>\w*)\n(?P<body>.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Block:
    mark: str
    kind: str
    body: str


def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(one["mark"] or "", one["kind"], one["body"]) for one in found]


def commands(body: str) -> list[list[str]]:
    """Lines that start with ``$ holdfast`` (or ``holdfast``), without comments."""
    lines = [line.removeprefix("$ ") for line in body.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("holdfast ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists_with_its_options(page: Path) -> None:
    group = typer.main.get_command(app)
    for block in blocks(page):
        for words in commands(block.body) if block.kind in ("console", "", "bash", "sh") else []:
            command, rest = group, words[1:]
            while rest and hasattr(command, "commands") and rest[0] in command.commands:
                command, rest = command.commands[rest[0]], rest[1:]
            assert command is not group, f"{page.name}: there is no command {' '.join(words)}"
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            used = [word.partition("=")[0] for word in rest if re.match(r"--?[a-zA-Z]", word)]
            unknown = [word for word in used if word not in {*known, "--help"}]
            assert not unknown, f"{page.name}: {' '.join(words)}: {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_snippets_compile_and_import_what_is_there(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.kind == "python" and "no check" not in block.mark:
            compile(block.body, page.name, "exec")
            exec(compile(imports_of(block.body), page.name, "exec"), {})


def imports_of(body: str) -> str:
    return "\n".join(
        ast.unparse(node) for node in ast.parse(body).body if isinstance(node, ast.Import | ast.ImportFrom)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for aim in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in aim:
            assert (page.parent / aim).exists(), f"{page.name}: {aim}"


def run_page(page: Path, folder: Path, *, slow: bool) -> int:
    """Run the marked blocks of a page in their order; how many commands were run."""
    holdfast = shutil.which("holdfast", path=str(Path(sys.executable).parent))
    assert holdfast is not None
    count = 0
    for block in blocks(page):
        if block.mark.startswith("file "):
            (folder / block.mark.removeprefix("file ").strip()).write_text(block.body, encoding="utf-8")
        if not block.mark.startswith("run") or ("slow" in block.mark and not slow):
            continue
        right = [int(one) for one in re.findall(r"\d+", block.mark)] or [0]
        for words in commands(block.body):
            done = subprocess.run([holdfast, *words[1:]], cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode in right, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
            count += 1
    return count


def test_quick_commands_of_the_pages_run(tmp_path: Path) -> None:
    assert sum(run_page(page, tmp_path, slow=False) for page in PAGES) >= 1


@pytest.mark.slow
def test_the_tutorial_runs_from_beginning_to_end(tmp_path: Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    names = {0: "zero", 3: "three", 5: "five", 8: "eight"}
    for number, (value, label) in enumerate(zip(values, labels, strict=True)):
        if int(label) in names:
            path = tmp_path / "photos" / names[int(label)] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            # As small as they are: enlarged, many digits would be near copies of each other, and refused.
            Image.fromarray((value.reshape(8, 8) * 15.9).astype("uint8")).save(path)
    assert run_page(ROOT / "docs" / "tutorial.md", tmp_path, slow=True) == 6
    page = (tmp_path / "runs" / "eight" / "report.html").read_text(encoding="utf-8")
    assert "data:image/" in page


def test_the_api_reference_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "api.py"), "--check"], check=False)
    assert done.returncode == 0, "run python tools/api.py"
