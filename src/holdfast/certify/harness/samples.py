"""What the readers share: samples, the choice of a metric, fields of a document, JSON that others wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import UserError, nearest
from holdfast.files import read_regular

LARGEST_JSON = 4 << 30  # bytes of a file that is read as a whole
LARGEST_LINE = 256 << 20  # characters of a line of JSON lines


@dataclass(frozen=True)
class Sample:
    """The score of one model on one document (or repetition, or box) of a task."""

    task: str
    identity: str  # the same for both models, each once a task
    score: float
    group: str | None = None  # what it was drawn with
    document: str = ""  # fingerprint of question and answer, where the identity is none: it must not differ
    prompt: str = ""  # fingerprint of what the model was shown: it may differ, with a warning


@dataclass
class Log:
    """The samples of one model, and what was noticed while reading them."""

    samples: dict[tuple[str, str], Sample] = field(default_factory=dict[tuple[str, str], Sample])
    metrics: dict[str, str] = field(default_factory=dict[str, str])  # by task
    warnings: list[str] = field(default_factory=list[str])
    group: str = "group"  # what a group is, in a word: the name of its column

    def add(self, sample: Sample) -> bool:
        """Keep a sample; False where the task has that identity already."""
        key = (sample.task, sample.identity)
        if key in self.samples:
            return False
        self.samples[key] = sample
        return True

    def tasks(self) -> set[str]:
        """Names."""
        return {task for task, _ in self.samples}


@dataclass(frozen=True)
class Asked:
    """What the user chose."""

    metrics: Mapping[str, str]  # by task; "" is that of all others
    task_field: str | None = None
    group_field: str | None = None

    def metric(self, task: str) -> str | None:
        """The metric of a task, where the user names one."""
        return self.metrics.get(task, self.metrics.get(""))

    def task(self, benchmark: str, document: Any, where: str) -> str:
        """The benchmark, or a part of it that a field of the document names."""
        if self.task_field is None:
            return benchmark
        return f"{benchmark}/{look_up(document, self.task_field, where)}"

    def group(self, document: Any, where: str) -> str | None:
        """The value of the field that groups documents."""
        return None if self.group_field is None else look_up(document, self.group_field, where)


def look_up(document: Any, path: str, where: str) -> str:
    """A field of a document, ``a.b`` for one inside another, as text."""
    value = document
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            known = [str(key) for key in value] if isinstance(value, Mapping) else []
            raise UserError(f"{where} has no field {path!r}", do=nearest(name, known))
        value = value[name]
    if not isinstance(value, str | int | float | bool) or str(value).strip() == "":
        raise UserError(
            f"the field {path!r} of {where} names nothing", expected="a text or a number", found=repr(value)[:100]
        )
    return str(value)


def chosen_metric(
    wanted: str | None, known: Sequence[str], preferred: Sequence[str], task: str, where: str | Path
) -> str:
    """The metric that the user names, the only one, or the first of those that are preferred."""
    if wanted is not None:
        if wanted not in known:
            raise UserError(f"{task} has no metric {wanted!r} ({where})", do=nearest(wanted, known))
        return wanted
    if len(known) == 1:
        return known[0]
    for name in preferred:
        if name in known:
            return name
    raise UserError(
        f"which metric of {task}?",
        expected="one that was fixed before the models were compared",
        found=", ".join(known[:20]) or f"none in {where}",
        do=f"name it: --metric {task}={known[0] if known else 'NAME'}",
    )


def fingerprint(*parts: Any) -> str:
    """A short fingerprint of what a sample asks."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_json_file(path: Path, expected: str) -> Any:
    """A JSON file that another tool wrote."""
    try:
        return json.loads(read_regular(path, LARGEST_JSON))
    except OSError as error:
        raise UserError(f"{path} cannot be read", found=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON", expected=expected, found=str(error)[:200]) from error


def json_lines(path: Path, expected: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number and the object of every line of a file."""
    if not path.is_file():
        raise UserError(f"{path} is not a file", expected=expected)
    try:
        with path.open(encoding="utf-8") as file:
            number = 0
            while line := file.readline(LARGEST_LINE):
                number += 1
                if line.strip():
                    yield number, _object(line, f"{path}, line {number},", expected)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8", expected=expected, found=str(error)[:200]) from error


def _object(line: str, where: str, expected: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        do = "the log was cut while it was written: run the evaluation again"
        raise UserError(f"{where} is not JSON", expected=expected, found=str(error)[:200], do=do) from error
    if not isinstance(value, dict):
        raise UserError(f"{where} is no object", expected=expected, found=type(value).__name__)
    return value


def number_of(value: Any, what: str, where: str) -> float:
    """A score: a number, or true and false."""
    if isinstance(value, bool | int | float) and float(value) == float(value):
        return float(value)
    raise UserError(
        f"{what} of {where} is no score",
        expected="a number for each sample, such as 0 or 1",
        found=repr(value)[:100],
        do="choose another metric with --metric: one that averages over samples (no perplexity, no corpus score)",
    )
