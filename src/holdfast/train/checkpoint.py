"""Checkpoints: everything the next step reads.

Weights, moving averages and their flags (buffers of the method), the optimizer, the step. What a step draws and its
random numbers are pure functions of (seed, step), so the step stands for sampler and generator states.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import UserError
from holdfast.files import write_atomic

FORMAT = 1
_NAME = re.compile(r"step-(\d{8})\.pt")


@dataclass(frozen=True)
class Checkpoint:
    """The state between two steps."""

    step: int  # steps done
    method: dict[str, Any]
    optimizer: dict[str, Any]
    metrics_bytes: int  # length of metrics.jsonl at this point
    fingerprint: str  # of config and data: a checkpoint of another run is refused


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write atomically; only then drop all but the newest ``keep``. The last good one is never lost."""
    path = folder / f"step-{checkpoint.step:08d}.pt"
    content = {"format": FORMAT, **checkpoint.__dict__}
    write_atomic(path, lambda temporary: torch.save(content, temporary))
    for old in _all(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name))


def newest(folder: Path) -> int | None:
    """Step of the newest checkpoint there is."""
    names = [_NAME.fullmatch(path.name) for path in _all(folder)]
    return max((int(name[1]) for name in names if name), default=None)


def load(path: Path) -> Checkpoint:
    """Read one checkpoint; a truncated or foreign file is a :class:`UserError`."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile, OSError) as error:
        raise UserError(f"the checkpoint {path} cannot be read", found=str(error).splitlines()[0]) from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise UserError(f"{path} is not a checkpoint of this version", expected=f"format {FORMAT}")
    return Checkpoint(**content)


def latest(folder: Path, fingerprint: str) -> Checkpoint | None:
    """The newest checkpoint that can be read, or None. One of another config or other data is refused."""
    for path in reversed(_all(folder)):
        try:
            checkpoint = load(path)
        except UserError:
            continue  # cut short on its way here; the one before it is whole
        if checkpoint.fingerprint != fingerprint:
            raise UserError(
                f"the checkpoint {path} belongs to another round",
                expected="the same config and the same data",
                do="start a new run with --out, or restore the ROUND.toml and the data this run was begun with",
            )
        return checkpoint
    return None
