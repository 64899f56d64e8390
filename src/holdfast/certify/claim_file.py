"""The claim file: what will be tested, written down and hashed before any predictions exist.

A certificate holds only if tasks, margins, confidence, the images and how often they may be queried were fixed
beforehand. ``holdfast claim`` writes them to a TOML file; its SHA-256 (of the bytes, as ``sha256sum`` prints it) goes
to wherever nobody can change it later, such as a commit. ``holdfast certify --claim-file`` tests exactly that claim, on
exactly those examples, and the certificate names the hash.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from holdfast.certify.claims import delta_of
from holdfast.certify.ledger import Budget
from holdfast.certify.predictions import settings_for
from holdfast.certify.settings import Settings
from holdfast.certify.tables import read_table
from holdfast.config.base import Config, Many, Positive, parse, read_toml
from holdfast.errors import UserError
from holdfast.files import fingerprint_file, fingerprint_ids, fingerprint_json, write_text

FORMAT = "holdfast-claim/1"


@dataclass(frozen=True)
class Examples:
    """Which examples serve which tasks; an example may serve several."""

    rows: frozenset[tuple[str, str]]  # task, example id

    @property
    def ids(self) -> frozenset[str]:
        """Example ids."""
        return frozenset(identity for _, identity in self.rows)

    @property
    def fingerprint(self) -> str:
        """Of the ids: what the ledger knows the set by."""
        return fingerprint_ids(self.ids)

    @property
    def assignment(self) -> str:
        """Fingerprint of which example serves which task."""
        return fingerprint_json(sorted(self.rows))

    @property
    def tasks(self) -> dict[str, int]:
        """Examples of every task."""
        return dict(sorted(Counter(task for task, _ in self.rows).items()))


def read_examples(path: Path) -> Examples:
    """The columns ``example_id`` and ``task`` of a table: predictions, or what is known before there are any."""
    table = read_table(path)
    names = {name.strip(): name for name in table.column_names}
    missing = [name for name in ("example_id", "task") if name not in names]
    if missing:
        raise UserError(
            f"{path} lacks {'column' if len(missing) == 1 else 'columns'} {', '.join(missing)}",
            expected="example_id and task: a set of examples is known by its ids",
            found=",".join(table.column_names) or "no columns",
        )
    columns = [[_text(value) for value in table[names[name]].to_pylist()] for name in ("task", "example_id")]
    rows = list(zip(*columns, strict=True))
    if not rows or any(not task or not identity for task, identity in rows):
        raise UserError(f"{path} has no rows, or rows without an id or a task", expected="an id and a task in each row")
    if len(set(rows)) != len(rows):
        raise UserError(
            f"{path} names {len(rows) - len(set(rows))} examples of a task more than once", do="keep one row an example"
        )
    return Examples(frozenset(rows))


def _text(value: Any) -> str:
    """As predictions are read: without blanks around, and 3.0 is 3."""
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


class ExamplesConfig(Config):
    """[examples]: which examples the claim is about."""

    count: Positive
    """Different example ids."""
    fingerprint: str
    """Of the ids, sorted; what the ledger knows the set by."""
    assignment: str
    """Fingerprint of which example serves which task."""
    tasks: dict[str, Positive]
    """Examples of every task."""
    table: str | None = None
    """Where the ids were read, relative to this file; lets a refusal count what is missing."""


class ClaimConfig(Config):
    """A claim file."""

    format: Literal["holdfast-claim/1"]
    confidence: float
    claim: str = "all"
    query_budget: Positive | None = None
    target: str | None = None
    labels: Many[str] = ()
    margins: dict[str, float] = Field(min_length=1)
    pools: dict[str, Many[str]] = Field(default_factory=dict[str, tuple[str, ...]])
    examples: ExamplesConfig


@dataclass(frozen=True)
class ClaimFile:
    """A claim as it stands in its file."""

    path: Path
    fingerprint: str  # sha256 of the file's bytes
    values: ClaimConfig

    @property
    def options(self) -> dict[str, Any]:
        """What is claimed, as :func:`holdfast.certify` is asked for it."""
        values = self.values
        pools = {name: list(members) for name, members in values.pools.items()}
        return {
            "target": values.target,
            "margin": None,
            "margins": dict(values.margins),
            "confidence": values.confidence,
            "claim": values.claim,
            "tasks": sorted(name for name in values.margins if name not in pools),
            "pools": pools,
            "labels": list(values.labels),
        }

    @property
    def settings(self) -> Settings:
        """What is tested, at the level that the query budget leaves."""
        return settings_under(sorted(self.values.examples.tasks), self.options, self.values.query_budget)

    def check_examples(self, found: Examples, where: str) -> None:
        """Refuse predictions of other examples than the claim's, with how many there are of which kind."""
        wanted = self.values.examples
        if (found.fingerprint, found.assignment) == (wanted.fingerprint, wanted.assignment):
            return
        raise UserError(
            f"{where} is not about the examples of the claim {self.path}",
            expected=f"{wanted.count} examples: {_counts(wanted.tasks)}",
            found=self._difference(found),
            do="predict exactly the examples that the claim names, or write another claim before you predict others",
        )

    def _difference(self, found: Examples) -> str:
        table = None if self.values.examples.table is None else self.path.resolve().parent / self.values.examples.table
        if table is not None and table.is_file():
            named = read_examples(table)
            if named.assignment == self.values.examples.assignment:
                missing, others = named.ids - found.ids, found.ids - named.ids
                moved = len(found.rows - named.rows) - sum(identity in others for _, identity in found.rows)
                first = "".join(f", such as {identity!r}" for identity in sorted(missing | others)[:1])
                return f"{len(missing)} missing, {len(others)} that it does not name, {moved} in other tasks{first}"
        same = "the same numbers, and other ids" if found.tasks == self.values.examples.tasks else _counts(found.tasks)
        return f"{len(found.ids)} examples: {same}"


def settings_under(present: Sequence[str], options: Mapping[str, Any], query_budget: int | None) -> Settings:
    """What options of ``certify`` claim about the tasks ``present``; under a budget, at the level of one query."""
    names = ("target", "margin", "margins", "confidence", "claim", "tasks", "pools", "labels")
    settings = settings_for(present, *(options[name] for name in names))
    if query_budget is None:
        return settings
    return replace(settings, level=Budget(delta_of(settings.confidence), query_budget).level)


def read_claim_file(path: Path) -> ClaimFile:
    """A claim file, checked."""
    if not path.exists():
        raise UserError(f"{path} does not exist", do="write a claim with `holdfast claim`")
    values = parse(ClaimConfig, read_toml(path), str(path))
    found = ClaimFile(path, fingerprint_file(path), values)
    _ = found.settings  # a claim that could not be tested is refused where it is read
    return found


def write_claim_file(
    path: Path,
    examples: Path,
    *,
    margin: float | None,
    margins: Mapping[str, float],
    confidence: float = 0.95,
    claim: str = "all",
    target: str | None = None,
    tasks: Sequence[str] = (),
    pools: Mapping[str, Sequence[str]] | None = None,
    labels: Sequence[str] = (),
    query_budget: int | None = None,
) -> ClaimFile:
    """Write down a claim about the examples of a table (``example_id, task``); a file that exists is never replaced."""
    if path.exists():
        raise UserError(
            f"{path} exists already", expected="a new file: a claim is written once", do="choose another with --out"
        )
    known = read_examples(examples)
    options = {
        "target": target,
        "margin": margin,
        "margins": margins,
        "confidence": confidence,
        "claim": claim,
        "tasks": tasks,
        "pools": pools,
        "labels": labels,
    }
    settings = settings_under(sorted(known.tasks), options, query_budget)
    table = os.path.relpath(examples.resolve(), path.resolve().parent)
    write_text(path, _toml(settings, known, table, query_budget))
    return read_claim_file(path)


def _toml(settings: Settings, examples: Examples, table: str, query_budget: int | None) -> str:
    lines = [
        "# What is claimed about two models, written before their predictions exist. Do not change it: certificates",
        "# name the SHA-256 of this file. Tested with `holdfast certify OLD NEW --claim-file FILE`.",
        f"format = {_string(FORMAT)}",
        f"confidence = {settings.confidence!r}",
        f"claim = {_string(str(settings.claim))}",
    ]
    if query_budget is not None:
        lines.append(f"query_budget = {query_budget}")
    if settings.target is not None:
        lines.append(f"target = {_string(settings.target)}")
    if settings.labels:
        lines.append(f"labels = [{', '.join(map(_string, settings.labels))}]")
    lines += ["", "[margins]", *(f"{_string(name)} = {float(margin)!r}" for name, margin in settings.margins.items())]
    if settings.groups:
        pools = (f"{_string(name)} = [{', '.join(map(_string, group))}]" for name, group in settings.groups.items())
        lines += ["", "[pools]", *pools]
    lines += [
        "",
        "[examples]",
        f"count = {len(examples.ids)}",
        f"fingerprint = {_string(examples.fingerprint)}",
        f"assignment = {_string(examples.assignment)}",
        f"table = {_string(table)}",
        "",
        "[examples.tasks]",
        *(f"{_string(name)} = {count}" for name, count in examples.tasks.items()),
    ]
    return "\n".join(lines) + "\n"


def _string(text: str) -> str:
    """A TOML string: as JSON has it, but for one character that TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _counts(tasks: Mapping[str, int]) -> str:
    shown = [f"{count} of {name}" for name, count in list(tasks.items())[:8]]
    return ", ".join(shown) + (", …" if len(tasks) > len(shown) else "")
