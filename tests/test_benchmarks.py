"""Every benchmark can be started: it says what it does, and what it imports exists."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_says_what_a_benchmark_does(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", [str(script.parent), str(ROOT), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage:")
    first_line = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").splitlines()[0]
    assert re.sub(r"\s+", " ", first_line) in re.sub(r"\s+", " ", shown)


def own_imports(path: Path) -> list[tuple[str, str]]:
    """(module, name) of everything a file takes from this repository, also inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("holdfast", "benchmarks")
        for alias in node.names
    ]


def defines(module: str, name: str) -> bool:
    """Whether a module has a name, from its source: what needs a GPU cannot be imported everywhere."""
    base = (ROOT / "src" if module.startswith("holdfast") else ROOT).joinpath(*module.split("."))
    if (base / f"{name}.py").exists() or (base / name).is_dir():
        return True
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not file.exists():
        return False
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and module == "holdfast":
            names = [node.value]  # the public names are imported on first use
        if name in names:
            return True
    return False


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_exists(script: Path) -> None:
    assert [f"{module}.{name}" for module, name in own_imports(script) if not defines(module, name)] == []
