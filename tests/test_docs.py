"""What the documentation says can be typed in: commands exist with their options, marked blocks run, snippets compile.

A fenced ``console`` block behind ``<!-- run -->`` is executed, line by line behind ``$``, in a folder of its own for
each page; ``<!-- run slow -->`` does so in the slow tests, ``exit 0 or 4`` names the codes that are right. A block
behind ``<!-- file NAME -->`` is written to that file first.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer.main

from holdfast.cli import app
from holdfast.config import Config, RoundConfig, SourceConfig, TuneConfig
from holdfast.config.renamed import _MOVED, _MOVED_OF_HOLDFAST, upgraded  # pyright: ignore[reportPrivateUsage]
from holdfast.methods.registry import BUILT_IN, find

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
WEATHER = {0: "clear", 3: "rainy", 5: "snowy", 8: "foggy"}
TUTORIAL = DOCS / "tutorial" / "first-round.md"
# The pages that name former settings: what they are called now is their subject.
OF_FORMER_NAMES = (DOCS / "reference" / "renamed.md",)
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*?) -->\n)?```(?P<kind>\w*)\n(?P<body>.*?)```", re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@dataclass(frozen=True)
class Block:
    mark: str
    kind: str
    body: str


def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(block["mark"] or "", block["kind"], block["body"]) for block in found]


def commands(body: str) -> list[list[str]]:
    """Lines that start with ``$ holdfast`` (or ``holdfast``), without comments."""
    lines = [line.removeprefix("$ ") for line in body.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("holdfast ")]


@each_page
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


@each_page
def test_python_snippets_compile_and_import_what_is_there(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.kind == "python" and "no check" not in block.mark:
            compile(block.body, page.name, "exec")
            exec(compile(imports_of(block.body), page.name, "exec"), {})


def imports_of(body: str) -> str:
    return "\n".join(
        ast.unparse(node) for node in ast.parse(body).body if isinstance(node, ast.Import | ast.ImportFrom)
    )


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for aim in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in aim:
            assert (page.parent / aim).exists(), f"{page.name}: {aim}"


# -- settings ------------------------------------------------------------------------------------------------------


def configs_in(model: type[Config]) -> list[type[Config]]:
    """A config class and those of its sections."""
    fields = [field.annotation for field in model.model_fields.values()]
    inner = [kind for kind in fields if isinstance(kind, type) and issubclass(kind, Config)]
    return [model, *(found for kind in inner for found in configs_in(kind))]


def test_every_setting_is_documented() -> None:
    files = [RoundConfig, TuneConfig, SourceConfig, *(find(name).settings for name in BUILT_IN)]
    sections = {"method", *(name for config in (RoundConfig, TuneConfig) for name in config.model_fields)}
    settings = {name for file in files for config in configs_in(file) for name in config.model_fields}
    text = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    meanings = dict(re.findall(r"^\| `(\w+)` \| .*? \| .*? \| (.*?) \|$", text, re.MULTILINE))
    assert settings - sections - {"name", "research", "roles"} <= meanings.keys()
    assert [name for name, meaning in meanings.items() if not meaning.strip()] == []


def distinctive(key: str) -> str:
    """A pattern of a former key: dotted, and alone in backticks where the bare word cannot mean anything else."""
    section, _, name = key.partition(".")
    patterns = [rf"\b{section}\.{name}\b(?!\.(md|py|toml))", rf"\[{section}\] {name}\b"]
    if name not in STILL_IN_USE:
        patterns.append(rf"(?<!`)`{name}( = [^`]*)?`(?!`)")
    return "|".join(patterns)


# Former names that are also today's names of something else.
STILL_IN_USE = {"margin", "views", "constraint", "beta_schedule", "dual_rate", "towers", "compile", "graphs"}
FORMER = [*_MOVED, *_MOVED_OF_HOLDFAST, "train.towers", "train.compile", "train.graphs"]


@each_page
def test_no_former_name_of_a_setting(page: Path) -> None:
    if page in OF_FORMER_NAMES:
        return
    text = page.read_text(encoding="utf-8")
    found = [key for key in FORMER if re.search(distinctive(key), text)]
    assert found == [], f"{name_of(page)}: see docs/reference/renamed.md"


def test_former_names_are_recognised() -> None:
    text = (DOCS / "reference" / "renamed.md").read_text(encoding="utf-8")
    assert [key for key in FORMER if not re.search(distinctive(key), text)] == []


@each_page
def test_toml_blocks_have_todays_settings(page: Path) -> None:
    for block in blocks(page):
        if block.kind == "toml":
            assert upgraded(tomllib.loads(block.body))[1] == [], page.name


# -- README and CONTRIBUTING ---------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_the_readme_snippet_trains_and_retains() -> None:
    (snippet,) = (block.body for block in blocks(ROOT / "README.md") if block.kind == "python")
    torch.manual_seed(0)
    model, old_model = torch.nn.Linear(4, 5), torch.nn.Linear(4, 5)
    old_model.load_state_dict(model.state_dict())
    images, labels = torch.randn(40, 4), torch.arange(40) % 5

    def per_example_loss(network: torch.nn.Module, pictures: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(network(pictures), right, reduction="none")

    names: dict[str, Any] = {
        "model": model,
        "old_model": old_model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "batches": [(images, labels, labels)] * 30,
        "per_example_loss": per_example_loss,
        "my_loss": lambda network: network(images)[:, 0].square().mean(),
    }
    exec(compile(snippet, "README.md", "exec"), names)
    assert not torch.equal(model.weight, old_model.weight)
    assert names["kept"].h.shape == (5,)


def walked() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([a-z0-9_/]+\.py)` \|", text.partition("## One round")[2], re.MULTILINE)


def test_the_walk_through_a_round_names_each_module_once() -> None:
    modules = walked()
    assert len(modules) > 50
    assert len(modules) == len(set(modules))
    assert [module for module in modules if not (ROOT / "src" / "holdfast" / module).exists()] == []


# Run in a process of its own: every module of holdfast by its first call, once all of them are imported.
WALK = """
import importlib, pkgutil, sys, threading
from pathlib import Path
import holdfast
for module in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
folder, entered = str(Path(holdfast.__file__).parent) + "/", {}
def enter(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(folder) and code.co_flags & 2:  # a function's body
        entered.setdefault(code.co_filename.removeprefix(folder))
threading.setprofile(enter)
sys.setprofile(enter)
for words in (["develop", "ROUND.toml", "--out", "runs/foggy", "--quiet", "--train"], ["report", "runs/foggy"]):
    sys.argv = ["holdfast", *words]
    try:
        holdfast.cli.main()
    except SystemExit:
        pass
sys.setprofile(None)
Path("entered.txt").write_text("\\n".join(entered))
"""


def _sure(text: str) -> str:
    """A round that is certified, whatever a few steps have found: the walk is that of a certified round."""
    if "least_chance" in text:
        return text
    head, section, claim = text.partition("[certify]")
    claim = re.sub(r"^target_gain = .*\n", "", claim, flags=re.MULTILINE)
    claim = re.sub(r"^(?!confidence)(.+) = [\d.]+$", r"\1 = 0.9", claim, flags=re.MULTILINE)
    return f"{head}[candidates]\nleast_chance = 0.0\n\n{section}\ntarget_gain = false\n#{claim}"


@pytest.mark.slow
def test_the_walk_through_a_round_is_that_of_a_round(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
    plain = "from holdfast.cli import main; main()"
    steps = (
        (plain, "init", "photos", "--target", "foggy", "--model", "tiny"),
        (plain, "tune", "TUNE.toml", "--out", "base", "--quiet"),
        (WALK,),
    )
    for code, *words in steps:
        subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, check=True, capture_output=True)
        for file in (tmp_path / "TUNE.toml", tmp_path / "ROUND.toml"):
            text = re.sub(r"^steps = \d+", "steps = 10", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            text = re.sub(r"^every = \d+", "every = 5", text, flags=re.MULTILINE)
            file.write_text(_sure(text) if file.name == "ROUND.toml" else text, encoding="utf-8")
    entered = (tmp_path / "entered.txt").read_text(encoding="utf-8").split()
    # Advice and its exit code where undecided, a certificate where not.
    by_verdict = ("certify/exact/power.py", "certify/shape.py", "errors.py")
    entered, listed = ([module for module in modules if module not in by_verdict] for modules in (entered, walked()))
    assert entered == listed, "adapt CONTRIBUTING.md"


# -- commands that are run -----------------------------------------------------------------------------------------


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
        right = [int(code) for code in re.findall(r"\d+", block.mark)] or [0]
        for words in commands(block.body):
            done = subprocess.run([holdfast, *words[1:]], cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode in right, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
            count += 1
    return count


def test_quick_commands_of_the_pages_run(tmp_path: Path) -> None:
    (tmp_path / "docs").symlink_to(DOCS)
    assert sum(run_page(page, tmp_path, slow=False) for page in PAGES) >= 2


def write_photos(folder: Path, names: Mapping[int, str] = WEATHER, most: int = 1000) -> None:
    """Four digits under the names of other things, at most so many of each."""
    from PIL import Image
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    for number, (value, label) in enumerate(zip(values, labels, strict=True)):
        if int(label) in names and (labels[:number] == label).sum() < most:
            path = folder / names[int(label)] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            # As small as they are: enlarged, many digits would be near copies of each other, and refused.
            Image.fromarray((value.reshape(8, 8) * 15.9).astype("uint8")).save(path)


@pytest.mark.slow
def test_the_tutorial_runs_from_beginning_to_end(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", {0: "dog", 3: "guitar", 5: "house", 8: "giraffe"}, 40)
    assert run_page(TUTORIAL, tmp_path, slow=True) == 9
    page = (tmp_path / "runs" / "giraffe" / "report.html").read_text(encoding="utf-8")
    assert "data:image/" in page
    assert (tmp_path / "deploy" / "holdfast.json").exists()


# -- pages that tools write, and the site --------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["api.py", "reference.py"])
def test_written_pages_are_up_to_date(tool: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools" / tool), "--check"], check=False)
    assert done.returncode == 0, f"run python tools/{tool}"


def site_tool() -> ModuleType:
    found = importlib.util.spec_from_file_location("tools_docs", ROOT / "tools" / "docs.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


def test_links_into_the_documentation_lead_somewhere() -> None:
    assert site_tool().beside_faults() == []


def test_broken_links_and_foreign_assets_are_found(tmp_path: Path) -> None:
    page = (
        '<h2 id="here"></h2><a href="#here"></a><a href="b.html#there"></a><a href="c.html"></a><a href="b.html"></a>'
    )
    (tmp_path / "a.html").write_text(page + '<script src="https://example.org/x.js"></script><img src="gone.png">')
    (tmp_path / "b.html").write_text("<p>")
    assert site_tool().site_faults(tmp_path) == [
        "a.html loads https://example.org/x.js",
        "a.html: b.html#there has no such anchor",
        "a.html: c.html does not exist",
        "a.html: gone.png does not exist",
    ]
