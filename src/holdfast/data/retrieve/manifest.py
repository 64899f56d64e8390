"""The retrieval folder: one manifest that every step adds to, and the files between the steps.

The manifest holds no times, no paths of the machine and no order of arrival: the same inputs give the same manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.errors import UserError
from holdfast.files import clear_temporaries, fingerprint_file, fingerprint_json, read_json, write_json
from holdfast.locks import one_writer

Note = Callable[[str], None]  # what a person should know, and what stops nothing

STEPS = ("search", "judge", "fetch", "clean")
FORMAT = 1

# What a step's section must hold for the others to read it.
_SECTIONS = {
    "search": {"request": str, "query": dict, "counts": dict, "hashes": dict},
    "judge": {"input": str, "counts": dict, "hashes": dict},
    "fetch": {"input": str, "counts": dict, "hashes": dict},
    "clean": {"input": str, "counts": dict, "hashes": dict},
}

# Rows between search, judge and fetch. `file` and `row` say where in the metadata a row stands.
ROWS = pa.schema(
    [
        pa.field("file", pa.int32(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("url", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("license", pa.string()),
    ]
)

# The folders that this thread is writing in: a command that runs several steps holds its folder from end to end.
_WRITING: ContextVar[frozenset[Path]] = ContextVar("writing", default=frozenset())


@dataclass(frozen=True)
class RetrievalFolder:
    """What is in a retrieval folder, by name."""

    root: Path

    @property
    def manifest(self) -> Path:
        """Query, engine, counts and hashes of every step done so far."""
        return self.root / "manifest.json"

    @property
    def found(self) -> Path:
        """Rows that contain the words (Parquet)."""
        return self.root / "search" / "found.parquet"

    @property
    def negatives(self) -> Path:
        """Random rows that contain none of them, in the order in which they are to be used (Parquet)."""
        return self.root / "search" / "negatives.parquet"

    @property
    def judged(self) -> Path:
        """The found rows with verdict, score and reason (Parquet)."""
        return self.root / "judge" / "judged.parquet"

    @property
    def answers(self) -> Path:
        """Every answer paid for (JSON lines): nothing is asked twice."""
        return self.root / "judge" / "answers.jsonl"

    @property
    def fetched(self) -> Path:
        """Shards, their tables and the journal of the downloads under way."""
        return self.root / "fetch"

    @property
    def cleaned(self) -> Path:
        """Images, pairs and shards that are left in the end, and the list of those that are not."""
        return self.root / "clean"

    @contextmanager
    def writing(self, after: str | None = None) -> Generator[RetrievalFolder]:
        """Nobody else writes in the folder inside the block; what killed writers left half done is cleared away.

        ``after`` names a step that must have been done: where it was not, nothing is touched.
        """
        if after is not None:
            self.need(after)
        root, held = self.root.resolve(), _WRITING.get()
        if root in held:
            yield self
            return
        new = not self.root.exists()
        try:
            with one_writer(self.root):
                token = _WRITING.set(held | {root})
                try:
                    for folder in (self.root, self.found.parent, self.judged.parent, self.fetched, self.cleaned):
                        clear_temporaries(folder)
                    yield self
                finally:
                    _WRITING.reset(token)
        finally:
            if new:
                with suppress(OSError):
                    self.root.rmdir()  # goes only where nothing came of it

    def read(self) -> dict[str, Any]:
        """The manifest as it stands; an empty one where nothing was done yet."""
        try:
            if not self.manifest.exists():
                return {"format": FORMAT, "steps": {}}
            manifest = read_json(self.manifest)
        except OSError as error:  # a name that is too long, a folder that may not be entered
            raise UserError(f"{self.root} cannot be read", found=error.strerror or str(error)) from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not _well_formed(manifest):
            raise UserError(
                f"{self.manifest} is not a retrieval manifest of this version",
                expected=f"format {FORMAT}, as `holdfast retrieve` writes it",
                do="take another folder, or remove the manifest and run `holdfast retrieve search` again",
            )
        return manifest

    def step(self, name: str) -> dict[str, Any] | None:
        """The manifest's section of one step, or None."""
        return self.read()["steps"].get(name)

    def need(self, name: str) -> dict[str, Any]:
        """The section of a step that must have been done before."""
        section = self.step(name)
        if section is None:
            raise UserError(
                f"{self.root} holds no finished {name} step",
                expected=f"a folder in which `holdfast retrieve {name}` was run",
                found="nothing" if not self.root.exists() else ", ".join(self.read()["steps"]) or "no step",
                do=f"run `holdfast retrieve {name}` first",
            )
        return section

    def rows(self, step: str, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """The table ``name`` that a finished step left, if it is still the one that its section tells of.

        It is another when that step was run anew and stopped halfway.
        """
        path = {"found": self.found, "negatives": self.negatives, "judged": self.judged}[name]
        expected = self.need(step)["hashes"].get(name)
        try:
            if path.is_file() and fingerprint_file(path) == expected:
                return pq.read_table(path, columns=columns)
        except (OSError, pa.ArrowException) as error:
            raise _not_as_left(path, step, str(error).splitlines()[0][:200]) from error
        raise _not_as_left(path, step, "another file" if path.is_file() else "no file")

    def reopen(self, name: str) -> None:
        """Forget that a step, and those after it, were done: before files that it left are touched."""
        steps: dict[str, Any] = self.read()["steps"]
        if name in steps:
            kept = {step: steps[step] for step in STEPS[: STEPS.index(name)] if step in steps}
            write_json(self.manifest, {"format": FORMAT, "steps": kept})

    def finish(self, name: str, section: dict[str, Any]) -> None:
        """Write a step's section; the steps after it were made from something else and are dropped."""
        manifest = self.read()
        steps: dict[str, Any] = manifest["steps"]
        if steps.get(name) == section:
            return
        kept = {step: steps[step] for step in STEPS[: STEPS.index(name)] if step in steps}
        write_json(self.manifest, {"format": FORMAT, "steps": {**kept, name: section}})


def _well_formed(manifest: dict[str, Any]) -> bool:
    steps = manifest.get("steps")
    if not isinstance(steps, dict) or not all(_is_section(name, section) for name, section in steps.items()):
        return False
    query = steps["search"]["query"] if "search" in steps else {"about": "", "ratio": 0}
    return isinstance(query.get("about"), str) and type(query.get("ratio")) is int


def _is_section(name: str, section: Any) -> bool:
    needed = _SECTIONS.get(name)
    return (
        needed is not None
        and isinstance(section, dict)
        and all(isinstance(section.get(key), kind) for key, kind in needed.items())
    )


def _not_as_left(path: Path, step: str, found: str) -> UserError:
    return UserError(
        f"{path} is not as `holdfast retrieve {step}` left it",
        found=found,
        do=f"run `holdfast retrieve {step}` again",
    )


def fingerprint_step(section: dict[str, Any]) -> str:
    """What the next step records as its input."""
    return fingerprint_json(section)
