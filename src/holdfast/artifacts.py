"""The run folder, in which stages meet: what is in it by name, and its tables of predictions.

Nothing here imports torch: ``certify`` and ``report`` read a run folder on any machine.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import UserError
from holdfast.files import clear_temporaries, is_temporary, not_writable, read_json, where_instead, write_atomic

if TYPE_CHECKING:  # every command reads files, few read tables: pyarrow is imported by those that do
    import pyarrow as pa

    PREDICTIONS: pa.Schema


LOCK = ".lock"  # held by the one process that writes in a folder (holdfast.locks)


@cache
def _predictions() -> pa.Schema:
    """One row an example: what one model said about it.

    ``loss`` is the cross-entropy over the label space of the task description, ``score`` the probability of the
    predicted class.
    """
    import pyarrow as pa

    kinds = dict.fromkeys(("example_id", "task", "label", "prediction"), pa.string())
    kinds |= dict.fromkeys(("loss", "score"), pa.float64())
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def __getattr__(name: str) -> Any:
    """``PREDICTIONS``, the columns of a table of predictions, made when it is first asked for."""
    if name == "PREDICTIONS":
        return _predictions()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def write_predictions(path: Path, table: pa.Table) -> None:
    """Write a table of predictions as Parquet, after checking its columns, its ids and its numbers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    grouped = [pa.field("group", pa.string())] if "group" in table.column_names else []
    schema = pa.schema([*_predictions(), *grouped])
    table = table.select(schema.names).cast(schema)
    if len(set(table["example_id"].to_pylist())) != len(table):
        raise ValueError("a table of predictions names each example once")
    write_atomic(path, lambda temporary: pq.write_table(table, temporary))


def read_predictions(path: Path) -> pa.Table:
    """Read a table of predictions written by :func:`write_predictions`."""
    import pyarrow.parquet as pq

    schema = _predictions()
    if not path.exists():
        raise UserError(f"{path} does not exist", do="write predictions with `holdfast evaluate`")
    table = pq.read_table(path)
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise UserError(
            f"{path} is not a table of predictions",
            expected=f"columns {', '.join(schema.names)}",
            found=f"without {', '.join(missing)}",
        )
    return table.select(schema.names).cast(schema)


@dataclass(frozen=True)
class RunFolder:
    """What is in a run folder, by name. Stages use these paths and no others."""

    root: Path

    @property
    def config(self) -> Path:
        """The round as it was run, every default written out."""
        return self.root / "round.json"

    @property
    def state(self) -> Path:
        """Status, versions, fingerprints of parent, data and config."""
        return self.root / "run.json"

    @property
    def roles(self) -> Path:
        """Which example serves as what (Parquet: example_id, class, role, source, locator)."""
        return self.root / "roles.parquet"

    @property
    def metrics(self) -> Path:
        """One JSON object a logged step."""
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Training state at a step, enough to go on from there bit for bit."""
        return self.root / "checkpoints"

    @property
    def candidates(self) -> Path:
        """Model folders that the choice is made among."""
        return self.root / "candidates"

    @property
    def settled(self) -> Path:
        """The candidates, and which of them are tested in which order: fixed before sealed images are opened."""
        return self.root / "candidates.json"

    @property
    def tested(self) -> Path:
        """Model folders of the candidates that are tested, until the round is done."""
        return self.root / "tested"

    @property
    def model(self) -> Path:
        """The model that the round hands back."""
        return self.root / "model"

    @property
    def result(self) -> Path:
        """The choice, the per-task table, the verdict."""
        return self.root / "result.json"

    @property
    def certificate(self) -> Path:
        """The certificate, where one was asked for."""
        return self.root / "certificate.json"

    def predictions(self, model: str, role: str) -> Path:
        """Predictions of one model (``old``, ``new`` or a candidate) on the examples of one role."""
        return self.root / "predictions" / f"{model}-{role}.parquet"

    @property
    def origin(self) -> Path:
        """The folder that relative paths of the round's settings begin in."""
        return Path(os.path.normpath(self.root.resolve() / read_json(self.state).get("root", ".")))

    def towards(self, origin: Path) -> str:
        """How ``run.json`` names that folder: relative to the run, so that both can be moved together."""
        return os.path.relpath(origin.resolve(), self.root.resolve())

    @property
    def finished(self) -> bool:
        """Whether everything that the run hands back is in place."""
        return self.result.exists() and self.state.exists() and read_json(self.state).get("status") == "done"

    def clear(self) -> None:
        """Remove what writes that were killed left behind."""
        for folder in (self.root, self.candidates, self.checkpoints, self.tested, self.root / "predictions"):
            clear_temporaries(folder)

    @classmethod
    def check_free(cls, root: Path) -> None:
        """Refuse a folder that holds files; what a kill during the very first write of a run leaves is no file."""
        expected = "a folder that does not exist yet, or an empty one"
        if root.exists() and not root.is_dir():
            raise UserError(f"{root} is a file", expected=expected)
        config = cls(root).config
        for path in root.iterdir() if root.exists() else ():
            if not (path.name == LOCK or is_temporary(path) or (path == config and _is_round(path))):
                raise UserError(
                    f"the run folder {root} is not empty",
                    expected=expected,
                    do=f"choose another with --out{_how_to_resume(cls(root))}",
                )

    @classmethod
    def create(cls, root: Path) -> RunFolder:
        """Make a new run folder; one that holds files already is refused."""
        cls.check_free(root)
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_writable(root, error) from error
        return cls(root)

    @classmethod
    def open(cls, root: Path) -> RunFolder:
        """Open the run folder of a run that was begun."""
        folder = cls(root)
        if folder.state.exists():
            return folder
        if not root.exists():
            raise UserError(
                f"{root} does not exist", expected="a folder that `holdfast develop` made", do=where_instead(root)
            )
        if folder.config.exists() or (root.is_dir() and not any(root.iterdir())):
            raise UserError(f"the run in {root} was stopped before it began", do="start it again as it was started")
        raise UserError(f"{root} is not a run folder", expected="a folder that `holdfast develop` made")


def resume_command(root: Path) -> str:
    """What goes on with a run of ``holdfast develop``."""
    return f"holdfast develop --resume {shlex.quote(str(root))}"


def _how_to_resume(folder: RunFolder) -> str:
    """How to go on with what is in a folder, where that is a run; ``tune`` takes the settings again."""
    if not folder.state.exists():
        return ""
    tuned = _is_round(folder.config) and "objective" in read_json(folder.config)
    how = "the command that began it, with --resume" if tuned else resume_command(folder.root)
    return f", or go on with the run that is in it: {how}"


def _is_round(path: Path) -> bool:
    """Whether a file is the settings of a round that we wrote."""
    try:
        values = read_json(path)
    except UserError:
        return False
    return isinstance(values, dict) and {"seed", "data", "model"} <= values.keys()
