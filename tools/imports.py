"""Imports go leftwards only: data -> model -> objective -> ... -> report; the command line is on top of everything.

``python tools/imports.py`` prints every import that goes the wrong way and fails if there is one. It also follows what
runs when a module of the light installation is imported, from module to module: it may end in the standard library and
in the base dependencies of pyproject.toml, and nowhere else.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOMS = (
    "data",
    "model",
    "objective",
    "methods",
    "train",
    "evaluate",
    "certify",
    "candidates",
    "rounds",
    "compare",
    "report",
    "cli",
)
# May be left out of an installation: whoever uses it imports it inside a function and can do without.
OPTIONAL = ("kernels", "integrations")
MAY_USE = {"kernels": ("data", "model"), "integrations": ("data", "objective")}
BELOW = (
    "_version",
    "errors",
    "shape",
    "files",
    "artifacts",
    "chained",
    "locks",
    "shared",
    "stages",
    "config",
    "runtime",
)  # every room may use these
# The one way up: a round names its method, whose settings lie in its own file. They are looked up inside functions.
LOOKUP = {"config": "holdfast.methods.registry"}
# Tables of predictions in, verdicts out: these rooms work on any machine, from any framework.
NO_TORCH = ("certify", "report")
# What `pip install holdfast` runs without extras: these rooms, the start of the command line, and these modules.
LIGHT = (
    *NO_TORCH,
    "__init__",
    "cli.__init__",
    "cli.verdicts",
    "candidates.select",
    "rounds.outcome",
    "rounds.project",
    "rounds.verify",
    "data.sources",
    "data.init_round",
)
IMPORTED_AS = {"pillow": "PIL"}  # distributions whose package has another name
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "holdfast"


def room_of(module: str) -> str:
    """``holdfast.data.round`` -> ``data``."""
    return module.split(".")[1] if "." in module else ""


def at_import(statements: Iterable[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run when the module is imported: not those inside functions, nor those for the type checker."""
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.If) and ast.unparse(statement.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from at_import(statement.orelse)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "orelse", "finalbody"):
                yield from at_import(getattr(statement, block, ()))
            for branch in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                yield from at_import(branch.body)


def named(node: ast.AST) -> list[str]:
    """The modules that a statement may import."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def imported(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and name of every module that is imported, inside functions too."""
    return [(getattr(node, "lineno", 0), name) for node in ast.walk(tree) for name in named(node)]


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def file_of(module: str, package: Path) -> Path | None:
    """The file of a module of ours; None for a name that is none (a function, a class)."""
    parts = module.split(".")[1:]
    places = (package.joinpath(*parts).with_suffix(".py") if parts else None, package.joinpath(*parts, "__init__.py"))
    return next((place for place in places if place is not None and place.is_file()), None)


def reached(module: str, package: Path = PACKAGE) -> dict[str, tuple[str, ...]]:
    """What runs when a module of ours is imported: every module and package, with the way there."""
    ways: dict[str, tuple[str, ...]] = {}
    waiting = [(module, ())]
    while waiting:
        name, way = waiting.pop()
        if name in ways:
            continue
        ours = name.split(".")[0] == "holdfast"
        file = file_of(name, package) if ours else None
        if ours and file is None:
            continue
        ways[name] = way = (*way, name)
        if file is not None:
            parents = [name.rpartition(".")[0]] if "." in name else []
            found = [target for node in at_import(parsed(file).body) for target in named(node)]
            waiting += [(target if target.startswith("holdfast") else target.split(".")[0], way) for target in found]
            waiting += [(parent, way) for parent in parents]
    return ways


def base_packages(pyproject: Path = ROOT / "pyproject.toml") -> set[str]:
    """What an installation without extras may import, beside the standard library."""
    requirements = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    names = [re.split(r"[^A-Za-z0-9_.-]", item, maxsplit=1)[0] for item in requirements]
    return {IMPORTED_AS.get(name, name) for name in names}


def heavy(package: Path = PACKAGE) -> list[str]:
    """Modules of the light installation that need more than its dependencies, and how they come to it."""
    files = {path for name in LIGHT for path in _files(name, package)}
    allowed = {"holdfast", *base_packages(), *sys.stdlib_module_names}
    result: list[str] = []
    for path in sorted(files):
        parts = path.relative_to(package).with_suffix("").parts
        module = ".".join(("holdfast", *(part for part in parts if part != "__init__")))
        for name, way in reached(module, package).items():
            if name.split(".")[0] not in allowed:
                where = path.relative_to(package)
                result.append(f"{where}: needs {name}, which is not a base dependency: {' -> '.join(way)}")
    return result


def _files(name: str, package: Path) -> list[Path]:
    """The files of a room, or of one module."""
    path = package.joinpath(*name.split("."))
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def faults(path: Path) -> list[str]:
    """What is wrong with one file's imports."""
    here = path.relative_to(PACKAGE)
    room = here.parts[0].removesuffix(".py")
    result: list[str] = []
    tree = parsed(path)
    early = {node.lineno for node in at_import(tree.body)}
    for line, module in imported(tree):
        top = module.split(".")[0]
        if top in ("torch", "torchvision", "open_clip") and room in NO_TORCH:
            result.append(f"{here}:{line}: {room} must not import {top}")
        if top != "holdfast":
            continue
        target = room_of(module)
        if room in ROOMS and target in ROOMS and ROOMS.index(target) > ROOMS.index(room):
            result.append(f"{here}:{line}: {room} must not import {target}, which is to its right")
        if target in OPTIONAL and room != target and line in early:
            result.append(f"{here}:{line}: {target} is optional; import it inside the function that uses it")
        if room in MAY_USE and target in ROOMS and target not in MAY_USE[room]:
            result.append(f"{here}:{line}: {room} may use {' and '.join(MAY_USE[room])}, not {target}")
        looked_up = line not in early and f"{module}.".startswith(f"{LOOKUP.get(room)}.")
        if room in BELOW and target in ROOMS and not looked_up:
            result.append(f"{here}:{line}: {room} is below all rooms and must not import {target}")
    return result


def main() -> int:
    """Check the whole package."""
    wrong = sorted({fault for path in sorted(PACKAGE.rglob("*.py")) for fault in faults(path)} | set(heavy()))
    for fault in wrong:
        print(fault)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
