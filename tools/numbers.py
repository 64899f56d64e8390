"""The size and shape of the code: ``python tools/numbers.py [COMMIT ...]`` prints one column for each commit.

Lines and modules of the package, settings of a round, how many modules a module imports (fan-out) and is imported by
(fan-in), runs of six lines that stand in more than one place, and seconds to import. Without a commit: this tree.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def modules(package: Path) -> dict[str, ast.Module]:
    """Dotted name -> tree of every module."""
    found: dict[str, ast.Module] = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(name: str, tree: ast.Module, known: set[str]) -> set[str]:
    """Modules of the package that a module imports, inside functions too."""
    asked: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            asked |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            asked |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return (asked & known) - {name, "holdfast"}


def settings(trees: dict[str, ast.Module]) -> int:
    """Fields of the settings classes: annotated names in classes whose name ends in Config."""
    return sum(
        isinstance(node, ast.AnnAssign)
        for tree in trees.values()
        for kind in ast.walk(tree)
        if isinstance(kind, ast.ClassDef) and kind.name.endswith("Config")
        for node in kind.body
    )


def measure(root: Path) -> dict[str, str]:
    """The figures of one tree."""
    package = root / "src" / "holdfast"
    trees = modules(package)
    edges = {name: imports(name, tree, set(trees)) for name, tree in trees.items()}
    fan_in = Counter(target for targets in edges.values() for target in targets)
    widest, most = max(edges.items(), key=lambda edge: len(edge[1])), fan_in.most_common(1)[0]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in package.rglob("*.py")}
    longest = max(lines, key=lambda path: lines[path])
    benchmarks = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (root / "benchmarks").glob("*.py"))
    results = sum(path.stat().st_size for path in (root / "benchmarks" / "results").glob("*"))
    return {
        "lines of the package": f"{sum(lines.values()):,}",
        "modules": str(len(trees)),
        "longest module": f"{lines[longest]} ({longest.relative_to(package)})",
        "settings": str(settings(trees)),
        "largest fan-out": f"{len(widest[1])} ({widest[0].removeprefix('holdfast.')})",
        "largest fan-in": f"{most[1]} ({most[0].removeprefix('holdfast.')})",
        "mean fan-out": f"{sum(map(len, edges.values())) / len(edges):.1f}",
        "repeated runs of six lines": _duplicates(package),
        "lines of benchmarks": f"{benchmarks:,}",
        "results files, kB": f"{results / 1000:,.0f}",
        "README lines": str(len((root / "README.md").read_text(encoding="utf-8").splitlines())),
        "seconds to import holdfast": _seconds(root, "import holdfast"),
        "seconds to import the command line": _seconds(root, "import holdfast.cli"),
    }


def _duplicates(package: Path) -> str:
    """Runs of six lines of code that stand in more than one place."""
    places: Counter[tuple[str, ...]] = Counter()
    for path in package.rglob("*.py"):
        stripped = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
        code = [line for line in stripped if line and not line.startswith(("#", "from ", "import ", '"""'))]
        places.update({tuple(code[start : start + 6]) for start in range(len(code) - 5)})
    return str(sum(count > 1 for count in places.values()))


def _seconds(root: Path, statement: str) -> str:
    code = f"import time; began = time.perf_counter(); {statement}; print(time.perf_counter() - began)"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root / 'src')!r}); {code}"]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(3)]
    return f"{min(map(float, runs)):.2f}"


def main(commits: list[str]) -> None:
    """Print the table."""
    columns = {"working tree": measure(ROOT)} if not commits else {}
    for commit in commits:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
            columns[commit] = measure(Path(folder))
    print(f"| | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}")
    for row in next(iter(columns.values())):
        print(f"| {row} | {' | '.join(column[row] for column in columns.values())} |")


if __name__ == "__main__":
    main(sys.argv[1:])
