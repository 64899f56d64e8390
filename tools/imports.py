"""Imports go leftwards only: data -> model -> objective -> ... -> report; the command line is on top of everything.

``python tools/imports.py`` prints every import that goes the wrong way and fails if there is one.
"""

from __future__ import annotations

import ast
import sys
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
OPTIONAL = ("kernels",)
MAY_USE = {"kernels": ("data", "model")}
BELOW = (
    "_version",
    "errors",
    "shape",
    "artifacts",
    "chained",
    "locks",
    "config",
    "runtime",
)  # every room may use these
# The one way up: a round names its method, whose settings lie in its own file. They are looked up inside functions.
LOOKUP = {"config": "holdfast.methods.registry"}
# Tables of predictions in, verdicts out: these rooms work on any machine, from any framework.
NO_TORCH = ("certify", "report")
PACKAGE = Path(__file__).resolve().parents[1] / "src" / "holdfast"


def room_of(module: str) -> str:
    """``holdfast.data.round`` -> ``data``."""
    return module.split(".")[1] if "." in module else ""


def at_import(tree: ast.Module) -> set[int]:
    """Lines of imports that run when the module is imported, and not when a function is called."""
    deferred = {
        node.lineno
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)} - deferred


def imported(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and name of every module that is imported, inside functions too."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.lineno, node.module)]
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def faults(path: Path) -> list[str]:
    """What is wrong with one file's imports."""
    here = path.relative_to(PACKAGE)
    room = here.parts[0].removesuffix(".py")
    result: list[str] = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    early = at_import(tree)
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
    wrong = sorted({fault for path in sorted(PACKAGE.rglob("*.py")) for fault in faults(path)})
    for fault in wrong:
        print(fault)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
