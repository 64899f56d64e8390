"""The ledger of sealed sets: what was looked at, how often, and when a set is spent.

A sealed set is known by the fingerprint of its example ids. It has a budget of R looks and B passes, fixed at its first
look; each look is tested at

    level = δ / sum over j < B of J^j C(R, j+1)         (B = 1: δ / R)

with at most J candidates a look, since a pass also tells which candidate. Only one bit leaves a look. A look is on disk
before the sealed images are predicted, so that a crash in between counts as a look. The record is only ever appended
to, each entry names the hash of the one before it, and a lock on the file keeps two processes from spending it twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from typing import IO, Any

from holdfast.artifacts import canonical_json, fingerprint_bytes
from holdfast.errors import UndecidedError, UserError


@dataclass(frozen=True)
class Budget:
    """What a sealed set may be used for, fixed before its first look."""

    delta: float = 0.05
    looks: int = 1  # R
    passes: int = 1  # B
    candidates: int = 1  # J, at most this many a look; matters where B > 1

    def __post_init__(self) -> None:
        if not 0.0 < self.delta < 1.0:
            raise UserError(f"the confidence {1 - self.delta:g} is not usable", expected="a number between 0 and 1")
        for name in ("looks", "passes", "candidates"):
            if getattr(self, name) < 1:
                raise UserError(f"a budget of {getattr(self, name)} {name}", expected="at least 1")
        if self.passes > self.looks:
            raise UserError(
                f"a budget of {self.passes} passes in {self.looks} looks", expected="no more passes than looks"
            )

    @property
    def level(self) -> float:
        """Level of each look: δ / sum_{j<B} J^j C(R, j+1)."""
        return self.delta / sum(self.candidates**j * comb(self.looks, j + 1) for j in range(self.passes))


@dataclass(frozen=True)
class Standing:
    """Where a sealed set stands."""

    budget: Budget
    looks: int
    passes: int
    last_passed: bool | None  # of the last look; None: it has no result

    @property
    def retired(self) -> bool:
        """Spent, or passed as often as it may: it may be shown in full, and certifies nothing more."""
        return self.looks >= self.budget.looks or self.passes >= self.budget.passes

    @property
    def looks_left(self) -> int:
        """How many more times it may be looked at."""
        return 0 if self.retired else self.budget.looks - self.looks


class Look:
    """One look at a sealed set, on record. ``close`` writes its one bit."""

    def __init__(self, ledger: Ledger, fingerprint: str, number: int, budget: Budget) -> None:
        self._ledger, self.fingerprint, self.number, self.budget = ledger, fingerprint, number, budget
        self.passed: bool | None = None

    @property
    def level(self) -> float:
        """The level that every task of every candidate is tested at."""
        return self.budget.level

    def close(self, passed: bool, which: str | None = None) -> None:
        """Record the outcome: passed or not, and for a pass which candidate ships. Nothing else may leave the look."""
        if self.passed is not None:
            raise ValueError("a look is closed once")
        self.passed = passed
        self._ledger.record_result(self.fingerprint, self.number, passed, which if passed else None)


class Ledger:
    """Sealed sets of one folder, one append-only file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, fingerprint: str) -> Path:
        """The record of one set."""
        return self.folder / f"{fingerprint.removeprefix('sha256:')}.jsonl"

    def standing(self, fingerprint: str) -> Standing | None:
        """Where a set stands; None when it was never looked at."""
        path = self.path(fingerprint)
        return _standing(_read(path.read_bytes()), path) if path.exists() else None

    def entries(self, fingerprint: str) -> list[dict[str, Any]]:
        """The record of a set, as it was written."""
        path = self.path(fingerprint)
        return [entry for entry in _read(path.read_bytes()) if entry] if path.exists() else []

    @contextmanager
    def look(
        self,
        fingerprint: str,
        budget: Budget,
        *,
        candidates: int = 1,
        tasks: Sequence[str] = (),
        margins: Mapping[str, float] | None = None,
    ) -> Generator[Look, None, None]:
        """Spend one look: it is on disk when the block is entered. A block that is left without ``close`` did not pass.

        Refuses, spending nothing, when the set is retired, when the budget is not the one it was opened with, or when
        there are more candidates than it allows for.
        """
        if candidates > budget.candidates and budget.passes > 1:
            raise UserError(
                f"{candidates} candidates in one look", expected=f"at most {budget.candidates}, as the budget says"
            )
        opened = Look(self, fingerprint, self._record_look(fingerprint, budget, candidates, tasks, margins), budget)
        try:
            yield opened
        finally:
            if opened.passed is None:
                opened.close(False)

    def _record_look(
        self,
        fingerprint: str,
        budget: Budget,
        candidates: int,
        tasks: Sequence[str],
        margins: Mapping[str, float] | None,
    ) -> int:
        with self._locked(fingerprint) as file:
            entries = _read(file.read())
            path = self.path(fingerprint)
            if not any(entry.get("event") == "opened" for entry in entries):
                opened = {"event": "opened", "set": fingerprint, "budget": asdict(budget)}
                entries.append(_append(file, opened, entries))
            standing = _standing(entries, path)
            if standing.retired:
                raise _spent(fingerprint, standing, path)
            if standing.budget != budget:
                raise UserError(
                    f"the sealed set {_short(fingerprint)} was opened with another budget",
                    expected=_describe(standing.budget),
                    found=_describe(budget),
                    do="use the budget that it was opened with, or seal new images",
                )
            look = {
                "event": "look",
                "number": standing.looks + 1,
                "level": budget.level,
                "candidates": candidates,
                "tasks": list(tasks),
                "margins": dict(margins or {}),
            }
            _append(file, look, entries)
            return standing.looks + 1

    def record_result(self, fingerprint: str, number: int, passed: bool, which: str | None) -> None:
        """Append the outcome of a look; used by :meth:`Look.close`."""
        with self._locked(fingerprint) as file:
            entry = {"event": "result", "number": number, "passed": passed, "which": which}
            _append(file, entry, _read(file.read()))

    @contextmanager
    def _locked(self, fingerprint: str) -> Generator[IO[bytes], None, None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.path(fingerprint).open("a+b")
        except OSError as error:
            raise UserError(
                f"the ledger {self.folder} cannot be written",
                found=error.strerror or str(error),
                do="choose a folder that can be written with --ledger; no look was spent",
            ) from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, and by the system after a crash
            file.seek(0)
            yield file


def default_ledger() -> Path:
    """$HOLDFAST_LEDGER, or ``holdfast/ledger`` in the user's data folder: one ledger for all runs of a person."""
    if chosen := os.environ.get("HOLDFAST_LEDGER"):
        return Path(chosen)
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "holdfast" / "ledger"


def _append(file: IO[bytes], entry: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, Any]:
    """Write one entry behind the last and wait for the disk."""
    entry = {
        **entry,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "previous": _digest(before[-1]) if before else "",
    }
    file.seek(0, os.SEEK_END)
    # A line that a crash cut short stays where it is, counted as a look; the next entry begins on a line of its own.
    torn = False
    if end := file.tell():
        file.seek(end - 1)
        torn = file.read(1) != b"\n"
    file.write((b"\n" if torn else b"") + canonical_json(entry).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
    return entry


def _digest(entry: dict[str, Any]) -> str:
    return fingerprint_bytes(canonical_json(entry).encode())


def _read(content: bytes) -> list[dict[str, Any]]:
    """Entries of a record; a line that cannot be read becomes an empty entry, which counts as a look."""
    entries: list[dict[str, Any]] = []
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            entries.append(entry if isinstance(entry, dict) else {})
        except (json.JSONDecodeError, UnicodeDecodeError):
            entries.append({})
    return entries


def _standing(entries: list[dict[str, Any]], path: Path) -> Standing:
    for before, entry in zip([{}, *entries], entries, strict=False):
        if entry and entry.get("previous") != (_digest(before) if before or entry is not entries[0] else ""):
            raise UserError(
                f"the ledger entry {path} was changed",
                expected="a record that is only ever appended to",
                found=f"an entry that does not follow the one before it: {entry.get('event')}",
                do="restore the file, or seal new images",
            )
    budgets = [entry["budget"] for entry in entries if entry.get("event") == "opened"]
    if not budgets:
        raise UserError(f"the ledger entry {path} does not say its budget", do="restore the file, or seal new images")
    results = [entry for entry in entries if entry.get("event") == "result"]
    looks = sum(1 for entry in entries if not entry or entry.get("event") == "look")
    return Standing(
        Budget(**budgets[0]),
        looks,
        sum(1 for entry in results if entry["passed"]),
        results[-1]["passed"] if results and results[-1]["number"] == looks else None,
    )


def _short(fingerprint: str) -> str:
    return fingerprint.removeprefix("sha256:")[:12]


def _describe(budget: Budget) -> str:
    return (
        f"confidence {1 - budget.delta:g}, {budget.looks} looks, {budget.passes} passes, "
        f"{budget.candidates} candidates a look"
    )


def _spent(fingerprint: str, standing: Standing, path: Path) -> UndecidedError:
    how = "passed once already" if standing.passes else "was looked at as often as its budget allows"
    return UndecidedError(
        f"the sealed set {_short(fingerprint)} is spent: it {how}",
        expected=f"at most {standing.budget.looks} looks and {standing.budget.passes} passes",
        found=f"{standing.looks} looks and {standing.passes} passes in {path}",
        do="seal new images; this set may be shown in full, and certifies nothing more",
    )
