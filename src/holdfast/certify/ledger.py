"""The ledger of sealed sets: what was queried, how often, and when a set is spent.

A sealed set is known by the fingerprint of its example ids. It has a budget of R queries and B passes, fixed at its
first query; each query is tested at

    level = δ / sum over j < B of J^j C(R, j+1)         (B = 1: δ / R)

with at most J candidates a query, since a pass also tells which candidate. Only one bit leaves a query.

A query is on disk before the sealed images are predicted, and belongs to the claim that it tests: which models, which
tasks, which margins. The test is deterministic, so a query whose process died before its result was on record is made
again, at no cost, and a result on record is the result. A record is a :class:`~holdfast.chained.ChainedLog`: it only
ever grows, each entry names the hash of the one before it, and a lock keeps two processes from spending a set twice.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from typing import Any

from holdfast.chained import ChainedLog, Head
from holdfast.errors import FaultError, UndecidedError, UserError

_QUERY = ("query", "look")  # the second in ledgers of earlier versions


@dataclass(frozen=True)
class Budget:
    """What a sealed set may be used for, fixed before its first query."""

    delta: float = 0.05
    queries: int = 1  # R
    passes: int = 1  # B
    candidates: int = 1  # J, at most this many a query; matters where B > 1

    def __post_init__(self) -> None:
        if not 0.0 < self.delta < 1.0:
            raise UserError(f"the confidence {1 - self.delta:g} is not usable", expected="a number between 0 and 1")
        for name in ("queries", "passes", "candidates"):
            if getattr(self, name) < 1:
                raise UserError(f"a budget of {getattr(self, name)} {name}", expected="at least 1")
        if self.passes > self.queries:
            raise UserError(
                f"a budget of {self.passes} passes in {self.queries} queries", expected="no more passes than queries"
            )

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Budget:
        """As a ledger holds it; ledgers of earlier versions say ``looks``."""
        return cls(**{"queries" if name == "looks" else name: value for name, value in record.items()})

    @property
    def level(self) -> float:
        """Level of each query: δ / sum_{j<B} J^j C(R, j+1)."""
        return self.delta / sum(self.candidates**j * comb(self.queries, j + 1) for j in range(self.passes))


@dataclass(frozen=True)
class Standing:
    """Where a sealed set stands."""

    budget: Budget
    queries: int
    passes: int
    last_passed: bool | None  # of the last query; None: it has no result

    @property
    def retired(self) -> bool:
        """Spent, or passed as often as it may: it may be shown in full, and certifies nothing more."""
        return self.queries >= self.budget.queries or self.passes >= self.budget.passes

    @property
    def queries_left(self) -> int:
        """How many more times it may be queried."""
        return 0 if self.retired else self.budget.queries - self.queries


@dataclass(frozen=True)
class Bit:
    """What a query gave: passed or not, and for a pass which candidate ships."""

    passed: bool
    which: str | None


class Query:
    """One query at a sealed set, on record. ``close`` writes its one bit."""

    def __init__(self, ledger: Ledger, fingerprint: str, number: int, budget: Budget, recorded: Bit | None) -> None:
        self._ledger, self.fingerprint, self.number, self.budget = ledger, fingerprint, number, budget
        self.recorded = recorded  # of an earlier process that asked for the same claim
        self.passed: bool | None = None

    @property
    def level(self) -> float:
        """The level that every task of every candidate is tested at."""
        return self.budget.level

    def close(self, passed: bool, which: str | None = None) -> None:
        """Record the outcome: passed or not, and for a pass which candidate ships. Nothing else may leave the query."""
        if self.passed is not None:
            raise ValueError("a query is closed once")
        found = Bit(passed, which if passed else None)
        if self.recorded is None:
            self._ledger.record_result(self.fingerprint, self.number, found)
        elif self.recorded != found:
            raise FaultError(
                f"query {self.number} at the sealed set {_short(self.fingerprint)} came out otherwise the second time",
                expected=f"{_outcome(self.recorded)}, as the ledger says",
                found=_outcome(found),
                do="finish the run on the kind of machine that it was begun on; nothing was changed",
            )
        self.passed = passed


class Ledger:
    """Sealed sets of one folder, one append-only file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, fingerprint: str) -> Path:
        """The record of one set."""
        return self.folder / f"{fingerprint.removeprefix('sha256:')}.jsonl"

    def standing(self, fingerprint: str, after: int | None = None) -> Standing | None:
        """Where a set stands, or stood ``after`` the query of that number; None when it was never queried."""
        log = self._log(fingerprint)
        return _standing(log, after) if log.entries() or log.unreadable() or log.anchored else None

    def entries(self, fingerprint: str) -> list[dict[str, Any]]:
        """The record of a set, as it was written."""
        return self._log(fingerprint).entries()

    def head(self, fingerprint: str) -> Head:
        """How far the record of a set reaches now: kept in certificates, so that a cut below it is found."""
        return self._log(fingerprint).now()

    def check(self, fingerprint: str, budget: Budget, *, run: str = "", resumed: bool = False) -> None:
        """Refuse beforehand what :meth:`query` would: a spent set, another budget, a folder that cannot be written.

        ``run`` is who asks. A run whose query has no result yet may make it again, and one that is ``resumed`` may come
        back for its result.
        """
        self._check_writable()
        standing = self.standing(fingerprint)
        if standing is None:
            return
        entries = self.entries(fingerprint)
        closed = {entry["number"] for entry in entries if entry.get("event") == "result"}
        mine = [entry["number"] for entry in entries if run and entry.get("run") == run]
        if standing.retired and not any(resumed or number not in closed for number in mine):
            spent = _spent(fingerprint, standing, self.path(fingerprint))
            do = "seal new images, or set [certify] test_sealed = false to choose on dev images, without a certificate"
            raise UserError(spent.message, expected=spent.expected, found=spent.found, do=do)
        _check_budget(fingerprint, standing, budget)

    @contextmanager
    def query(
        self,
        fingerprint: str,
        budget: Budget,
        *,
        run: str = "",
        claim: str = "",
        candidates: int = 1,
        tasks: Sequence[str] = (),
        margins: Mapping[str, float] | None = None,
    ) -> Generator[Query, None, None]:
        """Spend one query: it is on disk when the block is entered. One on record for this ``claim`` is taken up.

        A block that is left without ``close`` leaves the query without a result. Refuses, spending nothing, when the
        set is retired, when the budget is not the one it was opened with, or when there are more candidates than it
        allows
        for.
        """
        if candidates > budget.candidates and budget.passes > 1:
            raise UserError(
                f"{candidates} candidates in one query", expected=f"at most {budget.candidates}, as the budget says"
            )
        record = {"candidates": candidates, "tasks": list(tasks), "margins": dict(margins or {})}
        number, recorded = self._record_query(fingerprint, budget, {"run": run, "claim": claim, **record})
        yield Query(self, fingerprint, number, budget, recorded)

    def _record_query(self, fingerprint: str, budget: Budget, record: dict[str, Any]) -> tuple[int, Bit | None]:
        self._check_writable()
        log = self._log(fingerprint)
        with log.locked():
            entries = log.entries()
            if not any(entry.get("event") == "opened" for entry in entries):
                log.append({"event": "opened", "set": fingerprint, "budget": asdict(budget)})
            standing = _standing(log)
            if (mine := _query_for(record["claim"], entries)) is not None:
                return mine
            if standing.retired:
                raise _spent(fingerprint, standing, log.path)
            _check_budget(fingerprint, standing, budget)
            number = standing.queries + 1
            log.append({"event": "query", "number": number, "level": budget.level, **record})
            return number, None

    def record_result(self, fingerprint: str, number: int, bit: Bit) -> None:
        """Append the outcome of a query; used by :meth:`Query.close`."""
        log = self._log(fingerprint)
        with log.locked():
            log.append({"event": "result", "number": number, "passed": bit.passed, "which": bit.which})

    def _log(self, fingerprint: str) -> ChainedLog:
        return ChainedLog(self.path(fingerprint))

    def _check_writable(self) -> None:
        """Whether the folder can be written, or made; nothing is made yet."""
        found = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not found.is_dir() or not os.access(found, os.W_OK | os.X_OK):
            raise UserError(
                f"the ledger {self.folder} cannot be written",
                found=f"{found} is a file" if not found.is_dir() else f"no permission to write in {found}",
                do="choose a folder that can be written with --ledger or [certify] ledger; no query was spent",
            )


def default_ledger() -> Path:
    """$HOLDFAST_LEDGER, or ``holdfast/ledger`` in the user's data folder: one ledger for all runs of a person."""
    if chosen := os.environ.get("HOLDFAST_LEDGER"):
        return Path(chosen)
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "holdfast" / "ledger"


def _query_for(claim: str, entries: Sequence[Mapping[str, Any]]) -> tuple[int, Bit | None] | None:
    """Number and result (None: there is none yet) of the query that was made for a claim."""
    numbers = [entry["number"] for entry in entries if claim and entry.get("claim") == claim]
    if not numbers:
        return None
    results = [entry for entry in entries if entry.get("event") == "result" and entry["number"] == numbers[-1]]
    return numbers[-1], Bit(results[-1]["passed"], results[-1]["which"]) if results else None


def _standing(log: ChainedLog, after: int | None = None) -> Standing:
    if (broken := log.broken()) is not None:
        raise UserError(
            f"the ledger entry {log.path} was changed",
            expected="a record that is only ever appended to",
            found=broken.reason,
            do="restore the file, or seal new images",
        )
    entries = log.entries()
    budgets = [entry["budget"] for entry in entries if entry.get("event") == "opened"]
    if not budgets:
        raise UserError(
            f"the ledger entry {log.path} does not say its budget", do="restore the file, or seal new images"
        )
    results = [entry for entry in entries if entry.get("event") == "result"]
    queries = log.unreadable() + sum(1 for entry in entries if entry.get("event") in _QUERY)
    if after is not None:
        results, queries = [entry for entry in results if entry["number"] <= after], after
    return Standing(
        Budget.of(budgets[0]),
        queries,
        sum(1 for entry in results if entry["passed"]),
        results[-1]["passed"] if results and results[-1]["number"] == queries else None,
    )


def _check_budget(fingerprint: str, standing: Standing, budget: Budget) -> None:
    if standing.budget != budget:
        raise UserError(
            f"the sealed set {_short(fingerprint)} was opened with another budget",
            expected=_describe(standing.budget),
            found=_describe(budget),
            do="use the budget that it was opened with, or seal new images",
        )


def _outcome(bit: Bit) -> str:
    return f"passed with {bit.which}" if bit.passed else "not passed"


def _short(fingerprint: str) -> str:
    return fingerprint.removeprefix("sha256:")[:12]


def _describe(budget: Budget) -> str:
    return (
        f"confidence {1 - budget.delta:g}, {budget.queries} queries, {budget.passes} passes, "
        f"{budget.candidates} candidates a query"
    )


def _spent(fingerprint: str, standing: Standing, path: Path) -> UndecidedError:
    how = "passed once already" if standing.passes else "was queried as often as its budget allows"
    return UndecidedError(
        f"the sealed set {_short(fingerprint)} is spent: it {how}",
        expected=f"at most {standing.budget.queries} queries and {standing.budget.passes} passes",
        found=f"{standing.queries} queries and {standing.passes} passes in {path}",
        do="seal new images; this set may be shown in full, and certifies nothing more",
    )
