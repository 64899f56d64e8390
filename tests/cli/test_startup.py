"""What a command imports: nothing heavy where nothing heavy is needed, so that it answers at once.

Modules are counted, never milliseconds; ``benchmarks/startup.py`` measures those.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer.main
from PIL import Image

import holdfast
import holdfast.cli
from holdfast.cli import COMMANDS, app
from tests.certify.helpers import rows, write_csv

RECORDER = """
import atexit, os, sys
atexit.register(lambda: open(os.environ["IMPORTED"], "w").write("\\n".join(sys.modules)))
"""
# The last three are parts of numpy and pyarrow that take as long to import as the rest of them.
HEAVY = ("torch", "torchvision", "open_clip", "timm", "transformers", "pandas", "scipy", "sklearn", "matplotlib")
HEAVY += ("duckdb", "numpy.f2py", "numpy.ma", "pyarrow.compute")
TABLES = ("pyarrow",)
SETTINGS = ("pydantic", "importlib.metadata", "holdfast.config")
ARRAYS = ("numpy",)
# What a round reads of its file and its pictures, and a plan does not; and what pydantic looks for plugins with.
ROUND_ONLY = (
    "holdfast.config.round",
    "holdfast.data.round",
    "holdfast.data.sources.parquet",
    "holdfast.certify.tables",
)
ROUND_ONLY += ("concurrent.futures", "importlib.metadata")
ROUND = """
task.target = "foggy"
data.source = { kind = "folder", path = "pictures" }
data.roles = { dev = 0.2, sealed = 0.4 }
model.architecture = "tiny"
certify.margin = 0.3
"""

Imported = Callable[..., tuple[int, set[str]]]


@pytest.fixture
def imported(tmp_path: Path) -> Imported:
    """Runs ``holdfast`` in a folder; the exit code, and what was imported when it ended."""
    (tmp_path / "recorder").mkdir()
    (tmp_path / "recorder" / "sitecustomize.py").write_text(RECORDER)
    paths = [str(tmp_path / "recorder"), str(Path(holdfast.__file__).parents[1])]
    record = tmp_path / "imported.txt"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "IMPORTED": str(record)}
    environment |= {"HOLDFAST_CACHE": str(tmp_path / "cache")}

    def run(*arguments: str) -> tuple[int, set[str]]:
        command = [sys.executable, "-m", "holdfast", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, set(record.read_text().splitlines())

    return run


def write_predictions(folder: Path) -> None:
    spec = {"clear": (300, 5, 3), "foggy": (60, 20, 1)}
    for model in ("old", "new"):
        write_csv(
            folder / f"{model}.csv",
            [{**row, "prediction": row[model]} for row in rows(spec)],
            "example_id,task,label,prediction",
        )


def write_round(folder: Path) -> None:
    draw = np.random.default_rng(0)
    for name in ("clear", "foggy"):
        (folder / "pictures" / name).mkdir(parents=True)
        for number in range(40):
            pixels = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / name / f"{number}.png")
    (folder / "round.toml").write_text(ROUND)
    (folder / "typo.toml").write_text(ROUND.replace("margin", "margni"))


@pytest.mark.parametrize(
    ("command", "code", "needless"),
    [
        ("--version", 0, (*ARRAYS, *TABLES, "rich", "pydantic")),
        ("--help", 0, (*ARRAYS, *TABLES, *SETTINGS)),
        ("plan --help", 0, (*ARRAYS, *TABLES, *SETTINGS)),
        ("plan --tasks 3 --images 100 --discordance 0.02", 0, (*TABLES, *SETTINGS, "PIL")),
        ("plan round.toml", 0, ("holdfast.model", "PIL.TiffImagePlugin", *TABLES, *ROUND_ONLY)),
        ("develop typo.toml", 2, (*ARRAYS, *TABLES)),
        ("develop missing.toml", 2, (*ARRAYS, *TABLES)),
        ("certify old.csv new.csv --margin 0.05 --out c.json", 0, (*SETTINGS, "PIL")),
        ("verify c.json", 0, (*SETTINGS, "PIL", "rich")),
    ],
)
def test_nothing_is_imported_that_is_not_needed(
    imported: Imported, tmp_path: Path, command: str, code: int, needless: tuple[str, ...]
) -> None:
    write_predictions(tmp_path)
    if "toml" in command:
        write_round(tmp_path)
        imported("plan", "round.toml")  # pictures are decoded once, to know which is which: that is cached
    if "verify" in command:
        assert imported("certify", "old.csv", "new.csv", "--margin", "0.05", "--out", "c.json")[0] == 0
    found = imported(*command.split())
    assert found[0] == code
    assert sorted({*HEAVY, *needless} & found[1]) == []


def test_predictions_in_parquet_import_no_pandas(imported: Imported, tmp_path: Path) -> None:
    import pyarrow.csv
    import pyarrow.parquet as pq

    write_predictions(tmp_path)
    for model in ("old", "new"):
        pq.write_table(pyarrow.csv.read_csv(tmp_path / f"{model}.csv"), tmp_path / f"{model}.parquet")
    code, found = imported("certify", "old.parquet", "new.parquet", "--margin", "0.05", "--out", "c.json")
    assert (code, sorted({"pandas", "scipy", "torch"} & found)) == (0, [])
    code, found = imported("verify", "c.json")
    assert (code, sorted({"pandas", "scipy", "torch"} & found)) == (0, [])


def test_a_command_imports_its_own_module_alone(imported: Imported) -> None:
    _, found = imported("sign", "--help")
    own = {name.removeprefix("holdfast.cli.") for name in found if name.startswith("holdfast.cli.")}
    assert "verify" in own
    assert own <= {"verify", "certify", "options", "gate", "logs", "process", "words"}


def test_help_names_every_command_and_every_command_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    listed = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    assert list(listed) == list(COMMANDS)
    for name in COMMANDS:
        alone = typer.main.get_command(holdfast.cli.build([name]))
        assert list(alone.commands) == [name]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_mistyped_command_is_answered_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tried: Callable[..., None]
) -> None:
    tried("bad inputs")
    monkeypatch.setattr(sys, "argv", ["holdfast", "certfy"])
    with pytest.raises(SystemExit) as ended:
        holdfast.cli.main()
    assert ended.value.code == 2
    assert "certify" in capsys.readouterr().err


def test_completion_offers_every_command() -> None:
    asked = {"_HOLDFAST_COMPLETE": "complete_bash", "COMP_WORDS": "holdfast ", "COMP_CWORD": "1"}
    environment = {**os.environ, **asked, "PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
    script = "import sys; sys.argv = ['holdfast']; from holdfast.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == set(COMMANDS), done.stderr


def test_pyarrow_has_pandas_still_for_whoever_asks() -> None:
    pytest.importorskip("pandas")
    script = """
import sys
from holdfast.cli.process import leave_out_pandas
leave_out_pandas()
import pyarrow as pa
table = pa.table({"a": [1, 2], "b": ["x", None]})
assert "pandas" not in sys.modules
frame = table.to_pandas()
import pandas as pd
assert isinstance(frame, pd.DataFrame)
assert pa.Table.from_pandas(frame, preserve_index=False).to_pydict() == table.to_pydict()
assert pa.array(pd.Series([1, None])).null_count == 1
leave_out_pandas()
assert "pandas" in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_short_command_leaves_its_process_as_it_was() -> None:
    script = """
import gc, sys
from holdfast.cli.process import short_lived
with short_lived():
    assert not gc.isenabled()
    from holdfast.config import TaskConfig
    assert "importlib.metadata" not in sys.modules
assert gc.isenabled()
assert "pydantic.plugin._loader" not in sys.modules
from pydantic import BaseModel
class Later(BaseModel):
    number: int
assert "importlib.metadata" in sys.modules  # plugins are looked for again
print(TaskConfig(target="foggy").target, Later(number=3).number)
gc.disable()
del sys.modules["pydantic.plugin._loader"]
with short_lived():  # a pydantic that wants more of the module
    from pydantic.plugin._loader import PYDANTIC_ENTRY_POINT_GROUP as group, get_plugins
    assert (group, tuple(get_plugins())) == ("pydantic", ())
assert not gc.isenabled()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("foggy 3\n", "")


@pytest.mark.parametrize(
    ("command", "collects"), [("plan", False), ("verify", False), ("develop", True), ("bench", True)]
)
def test_cycles_are_looked_for_where_a_command_takes_its_time(
    monkeypatch: pytest.MonkeyPatch, command: str, collects: bool
) -> None:
    seen: list[bool] = []

    def called(arguments: list[str]) -> Callable[..., int]:
        return lambda **options: seen.append(gc.isenabled()) or 0

    monkeypatch.setattr(holdfast.cli, "_called", called)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # this process goes on
    monkeypatch.setattr(sys, "argv", ["holdfast", command, "nothing"])
    with pytest.raises(SystemExit):
        holdfast.cli.main()
    assert seen == [collects]
    assert gc.isenabled()


def test_how_a_gpu_computes_is_decided_without_openclip_and_torchs_compiler() -> None:
    """A round of other towers never imports them, and the first answer of any round does not wait for the compiler."""
    code = """
import sys, torch
from holdfast.config import TrainConfig
from holdfast.train.compute_mode import speed_of
print(speed_of(TrainConfig(), torch.device("cuda")), *(name for name in sys.argv[1:] if name in sys.modules))
"""
    names = ["open_clip", "torchvision", "timm", "triton", "torch._dynamo"]
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["graphs"]
