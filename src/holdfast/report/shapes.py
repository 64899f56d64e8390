"""What the files of a run and of a study must hold for a page to be made of them; the rest of them is free."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast.artifacts import read_predictions
from holdfast.certify.claims import Verdict
from holdfast.errors import UserError
from holdfast.files import canonical_json, read_json, read_jsonl
from holdfast.rounds.former import read_result_json
from holdfast.shape import (
    Each,
    Filled,
    Maybe,
    Shape,
    anything,
    below_one,
    between,
    check_shape,
    count,
    flag,
    number,
    one_of,
    text,
)

_SHARE = between(0.0, 1.0)
_COMPARISON = {
    "tasks": Filled(
        Each(
            {
                "examples": between(1, 1e12),
                "old_accuracy": _SHARE,
                "new_accuracy": _SHARE,
                "gained": count,
                "lost": count,
                "old_loss": number,
                "new_loss": number,
            }
        )
    )
}
_ROW: dict[str, Shape] = {"task": text, "n": between(1, 1e12), "margin": below_one}
_TESTED: dict[str, Shape] = {
    **_ROW,
    "gained": count,
    "lost": count,
    "difference": number,
    "simultaneous_lower_bound": number,
    "p_value": _SHARE,
    "p_adjusted": _SHARE,
    "verdict": one_of(*Verdict),
    "needed": Maybe(count),
}
# Told of sealed images: one bit, or everything where their set is retired.
_BIT: dict[str, Shape] = {
    "verdict": one_of(*Verdict),
    "tasks": [_ROW],
    "sealed": Maybe({"retired": Maybe(flag), "set": Maybe(text), "looks": Maybe(count), "queries": Maybe(count)}),
}
_FULL: dict[str, Shape] = {**_BIT, "level": _SHARE, "tasks": Filled([_TESTED]), "target": Maybe(_TESTED)}
_CONFIG: dict[str, Shape] = {
    "seed": Maybe(number),
    "task": {"target": text, "protected": Maybe([text])},
    "method": Maybe({"name": Maybe(text)}),
}
_STATE: dict[str, Shape] = {
    "root": Maybe(text),
    "version": Maybe(text),
    "parent": Maybe(text),
    "data": Maybe(text),
    "fingerprint": Maybe(text),
    "counts": Maybe(Each(count)),
    "problems": Maybe([Each(anything)]),
}
_RESULT: dict[str, Shape] = {
    "target": text,
    "protected": Filled([text]),
    "kept_old": flag,
    "chosen": Maybe(text),
    "verdict": Maybe(text),
    "reason": text,
    "order": [text],
    "candidates": Filled(
        [
            {
                "name": text,
                "step": text,
                "lambda": number,
                "bias": Maybe(number),
                "chance": Maybe(_SHARE),
                "expected_gain": Maybe(number),
                "dev": _COMPARISON,
            }
        ]
    ),
    "test": Maybe(_COMPARISON),
    "frontier": Maybe([{"candidate": text, "target_gain": number, "dev_safety": number, "worst_task": text}]),
    "gain_by_margin": Maybe([{"margin": number, "target_gain": number}]),
    "blocked_by": Maybe(text),
    "training": Maybe({"skipped": flag, "candidate": text, "why": text}),
}
_LOGGED: dict[str, Shape] = {
    "step": count,
    "evaluation": Maybe({"dev_safety": number, "target_gain": number}),
    **{name: Maybe(Each(Maybe(number))) for name in ("h", "u", "weight")},
}


def read_run_config(path: Path) -> Mapping[str, Any]:
    """``round.json``."""
    config = read_json(path)
    check_shape(config, _CONFIG, path)
    return config


def read_run_state(path: Path) -> Mapping[str, Any]:
    """``run.json``."""
    state = read_json(path)
    check_shape(state, _STATE, path)
    return state


def read_run_result(path: Path) -> Mapping[str, Any]:
    """``result.json``; every comparison in it is about all classes of the round."""
    result = read_result_json(path)
    check_shape(result, _RESULT, path)
    reported = result.get("certificate")
    if reported is not None:
        check_reported(reported, path)
    classes = {*result["protected"], result["target"]}
    compared = [*(item["dev"] for item in result["candidates"]), *([result["test"]] if result.get("test") else [])]
    for item in compared:
        changes = item["tasks"].values()
        if set(item["tasks"]) != classes or any(task["gained"] + task["lost"] > task["examples"] for task in changes):
            raise UserError(f"{path}: a comparison is not about the classes of the round, or counts more than there is")
    return result


def check_reported(reported: Any, path: Path) -> None:
    """The report of a certificate: one bit, or in full."""
    full = isinstance(reported, dict) and "devsafety" in reported
    shape = _FULL if full else _BIT
    check_shape(
        reported, {**shape, "target": anything} if full and isinstance(reported.get("target"), str) else shape, path
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """``metrics.jsonl``; none where there is no such file."""
    if not path.exists():
        return []
    try:
        records = list(read_jsonl(path))
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path} cannot be read", found=(str(error).splitlines() or [repr(error)])[0][:200]) from error
    check_shape(records, [_LOGGED], path)
    return records


def read_shown_predictions(path: Path) -> pa.Table:
    """A table of predictions that a page shows."""
    try:
        return read_predictions(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read", found=(str(error).splitlines() or [repr(error)])[0][:200]) from error


def _mean_and_spread(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(number, value))


def _writable(value: Any) -> bool:
    """Something that can be written as JSON again: a card repeats it."""
    try:
        canonical_json(value).encode()
    except (ValueError, RecursionError):
        return False
    return True


_SCORED: dict[str, Shape] = {
    "retention_ratio": _SHARE,
    "target_gain": _mean_and_spread,
    "dev_safety": _mean_and_spread,
    "target_accuracy": Maybe(_mean_and_spread),
    "base_accuracy": Maybe(number),
    **{f"{sign}_flip_rate": Maybe(_mean_and_spread) for sign in ("negative", "positive", "relative_negative")},
    "seeds": count,
}
_STUDY: dict[str, Shape] = {"title": Maybe(text), "round": {"task": {"target": text}}}
_CHOSEN: Shape = [{"row": text, "column": text, "setting": _writable, "test": Maybe(_SCORED)}]
_JOB = ("row", "column", "setting", "seed", "status", "dev_safety", "target_gain", "seconds", "error")


def read_study_config(path: Path) -> Mapping[str, Any]:
    """``study.json``."""
    config = read_json(path)
    check_shape(config, _STUDY, path)
    return config


def read_chosen(path: Path) -> list[dict[str, Any]]:
    """``chosen.json``; nothing where there is no such file."""
    chosen = read_json(path) if path.exists() else []
    check_shape(chosen, _CHOSEN, path)
    return chosen


def read_csv(path: Path) -> list[list[str]]:
    """The lines of a CSV file that `holdfast compare` wrote, the names of its columns first."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.reader(file))
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} cannot be read", found=str(error)[:200]) from error


def read_jobs(path: Path) -> list[dict[str, str]]:
    """``jobs.csv``, a table a job; nothing where there is no such file."""
    lines = read_csv(path) if path.exists() else []
    if not lines:
        return []
    names, *rows = lines
    missing = [name for name in _JOB if name not in names]
    if missing or any(len(row) != len(names) for row in rows):
        raise UserError(f"{path} is not a list of jobs", expected=f"columns {', '.join(_JOB)}")
    return [dict(zip(names, row, strict=True)) for row in rows]
