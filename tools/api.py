"""The API reference, from signatures and docstrings alone: ``python tools/api.py`` writes docs/reference/api.md.

Nothing is imported: the source is parsed. ``--check`` fails where the file is not what it would be written as.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "holdfast"
OUT = ROOT / "docs" / "reference" / "api.md"
# Beside the names that `import holdfast` offers: modules that people build on.
MODULES = (
    ("methods/base.py", "The contract of a method"),
    ("config/method.py", "Settings of a method"),
    ("model/towers.py", "The contract of a two-tower model"),
    ("certify/exact/score_test.py", "The exact paired test"),
    ("certify/claims.py", "Claims and verdicts"),
    ("certify/exact/power.py", "Planner"),
    ("certify/ledger.py", "Ledger of sealed sets"),
    ("certify/harness/__init__.py", "Logs of other tools"),
    ("certify/policy.py", "Policies of gates"),
    ("integrations/settings.py", "Retention in other loops"),
    ("integrations/transformers.py", "The Trainer of transformers"),
    ("integrations/trl.py", "TRL"),
    ("integrations/lightning.py", "Lightning"),
    ("evaluate/metrics.py", "Measures of two models"),
    ("files.py", "Files on disk"),
    ("artifacts.py", "The run folder and its tables"),
    ("rounds/project.py", "Projects"),
    ("report/page.py", "The report"),
    ("report/tracked.py", "What trackers are fed with"),
    ("report/trackers.py", "Trackers"),
)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_names() -> dict[str, str]:
    """Name -> module, as ``holdfast/__init__.py`` says."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_HOME":
            return dict(ast.literal_eval(node.value))
    raise SystemExit("holdfast/__init__.py has no _HOME")


def definitions(path: Path) -> dict[str, Definition]:
    """Public functions and classes of a module, in their order."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool = False) -> str:
    """``name(arguments) -> result``, without self."""
    arguments = node.args
    if method and arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments = ast.arguments(
            posonlyargs=arguments.posonlyargs,
            args=arguments.args[1:],
            vararg=arguments.vararg,
            kwonlyargs=arguments.kwonlyargs,
            kw_defaults=arguments.kw_defaults,
            kwarg=arguments.kwarg,
            defaults=arguments.defaults,
        )
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{node.name}({ast.unparse(arguments)}){result}"


def describe(node: Definition, level: int) -> list[str]:
    """A definition with its docstring; of a class its fields and public methods, too."""
    text = ast.get_docstring(node) or ""
    head = "#" * level
    if not isinstance(node, ast.ClassDef):
        return [f"{head} `{node.name}`", "", "```text", signature(node), "```", "", text, ""]
    lines = [f"{head} `{node.name}`", "", text, ""]
    members: list[str] = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_"):
            members.append(f"- `{item.target.id}: {ast.unparse(item.annotation)}`")
        elif isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            first = (ast.get_docstring(item) or "").split("\n\n")[0].replace("\n", " ")
            is_property = any(isinstance(item, ast.Name) and item.id == "property" for item in item.decorator_list)
            shown = item.name if is_property else signature(item, method=True)
            members.append(f"- `{shown}`: {first}")
    return [*lines, *members, *([""] if members else [])]


def reference() -> str:
    """The whole page."""
    lines = ["# API reference", "", "Written by `python tools/api.py` from signatures and docstrings.", ""]
    lines += ["## `import holdfast`", ""]
    for name, module in sorted(public_names().items()):
        path = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
        lines += describe(definitions(path)[name], 3)
    for file, title in MODULES:
        path = PACKAGE / file
        module = "holdfast." + file.removesuffix(".py").replace("/", ".")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines += [f"## {title}: `{module}`", "", ast.get_docstring(tree) or "", ""]
        for node in definitions(path).values():
            lines += describe(node, 3)
    text = "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.strip() + "\n"


def main() -> int:
    """Write the page, or with ``--check`` compare it."""
    text = reference()
    if "--check" in sys.argv[1:]:
        same = OUT.exists() and OUT.read_text(encoding="utf-8") == text
        if not same:
            print("docs/reference/api.md is not up to date: run python tools/api.py")
        return 0 if same else 1
    OUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
