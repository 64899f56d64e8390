"""The retrieval folder: one manifest that every step adds to, and the files between the steps.

The manifest holds no times, no paths of the machine and no order of arrival: the same inputs give the same manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast.artifacts import fingerprint_json, read_json, write_json
from holdfast.errors import UserError

STEPS = ("search", "judge", "fetch", "clean")
FORMAT = 1

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

    def read(self) -> dict[str, Any]:
        """The manifest as it stands; an empty one where nothing was done yet."""
        if not self.manifest.exists():
            return {"format": FORMAT, "steps": {}}
        manifest = read_json(self.manifest)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise UserError(f"{self.manifest} is not a retrieval manifest of this version", expected=f"format {FORMAT}")
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

    def finish(self, name: str, section: dict[str, Any]) -> None:
        """Write a step's section; the steps after it were made from something else and are dropped."""
        manifest = self.read()
        steps: dict[str, Any] = manifest["steps"]
        if steps.get(name) == section:
            return
        kept = {step: steps[step] for step in STEPS[: STEPS.index(name)] if step in steps}
        write_json(self.manifest, {"format": FORMAT, "steps": {**kept, name: section}})


def fingerprint_step(section: dict[str, Any]) -> str:
    """What the next step records as its input."""
    return fingerprint_json(section)
