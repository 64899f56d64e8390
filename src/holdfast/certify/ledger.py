"""The ledger of sealed images: what was queried, how often, and when images are spent.

Images are charged, not sets: sets that share an image are of one family (:mod:`holdfast.certify.families`), known by
the fingerprint of the set that opened it. A family has a budget of R queries and B passes, fixed at its first query;
each query is tested at

    level = δ / sum over j < B of J^j C(R, j+1)         (B = 1: δ / R)

with at most J candidates a query, since a pass also tells which candidate. Only one bit leaves a query.

A query is on disk before the sealed images are predicted, and belongs to the claim that it tests: which models, which
tasks, which margins. The test is deterministic, so a query whose process died before its result was on record is made
again, at no cost, and a result on record is the result. A record is a :class:`~holdfast.chained.ChainedLog`: it only
ever grows, each entry names the hash of the one before it, and a lock keeps two processes from spending a set twice.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import comb
from pathlib import Path
from typing import Any

from holdfast.certify.families import Admitted, Family, Images, admit, family_of, readmitted, record_of
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
    """Sealed images of one folder: one append-only file a family."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, fingerprint: str) -> Path:
        """The record of a set: its own file, or that of the family that it was queried in."""
        own = self.folder / f"{fingerprint.removeprefix('sha256:')}.jsonl"
        if own.exists():
            return own
        return next((log.path for log in self._logs() if fingerprint in _sets(log.entries())), own)

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

    def families(self) -> list[Family]:
        """The families on record."""
        found: list[Family] = []
        for log in self._logs():
            entries = log.entries()
            if entries or log.unreadable() or log.anchored:
                standing = _standing(log)
                found.append(family_of(_name(log), entries, standing.retired, standing.passes))
        return found

    def admit(self, fingerprint: str, images: Images, *, claim: str = "") -> Admitted:
        """Which of ``images`` (id -> keys) a query may be about now; of a claim on record those that it was about."""
        recorded = self._recorded(claim)
        if recorded is not None:
            return readmitted(recorded[1], images, _name(recorded[0]))
        return admit(fingerprint, images, self.families())

    def check(
        self,
        fingerprint: str,
        budget: Budget,
        *,
        run: str = "",
        resumed: bool = False,
        images: Images | None = None,
        to_query: bool = True,
    ) -> Admitted:
        """Refuse beforehand what :meth:`query` would: spent images, another budget, a folder that cannot be written.

        Without ``images`` the set alone is asked about. ``run`` is who asks. A run whose query has no result yet may
        make it again, and one that is ``resumed`` may come back for its result. Where no query is to follow
        (``to_query=False``) the folder is read alone, without a lock, and need not be writable.
        """
        if to_query:
            self._check_writable()
        else:
            self._check_readable()
        images = _set_alone(fingerprint) if images is None else images
        mine = self._query_of(run, resumed)
        if mine is not None:
            log, entry = mine
            _check_budget(_name(log), _standing(log), budget)
            return readmitted(entry, images, _name(log))
        found = admit(fingerprint, images, self.families())
        if not found.ids:
            spent = self._spent(fingerprint, images)
            do = "seal new images, or set [certify] test_sealed = false to choose on dev images, without a certificate"
            raise UserError(spent.message, expected=spent.expected, found=spent.found, do=do)
        if found.family is not None:
            _check_budget(found.family, _standing(self._log(found.family)), budget)
        return found

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
        images: Images | None = None,
        admitted: Admitted | None = None,
    ) -> Generator[Query, None, None]:
        """Spend one query: it is on disk when the block is entered. One on record for this ``claim`` is taken up.

        ``images`` (id -> keys) are those of the set; ``admitted`` says which of them the query is about, as
        :meth:`admit` found them. A block that is left without ``close`` leaves the query without a result. Refuses,
        spending nothing, when images are spent, when the budget is not the one their family was opened with, or when
        there are more candidates than it allows for.
        """
        if candidates > budget.candidates and budget.passes > 1:
            raise UserError(
                f"{candidates} candidates in one query", expected=f"at most {budget.candidates}, as the budget says"
            )
        record = {"candidates": candidates, "tasks": list(tasks), "margins": dict(margins or {})}
        asked = _Asked(fingerprint, images, admitted)
        family, number, recorded = self._record_query(asked, budget, {"run": run, "claim": claim, **record})
        yield Query(self, family, number, budget, recorded)

    def _record_query(self, asked: _Asked, budget: Budget, record: dict[str, Any]) -> tuple[str, int, Bit | None]:
        """Family and number of the query, and its result where it has one."""
        self._check_writable()
        # One process at a time: two that open families side by side would not see the images that they share.
        with ChainedLog(self.folder / "lock").locked():
            if (recorded := self._recorded(record["claim"])) is not None:
                log, entry = recorded
                _standing(log)
                return _name(log), entry["number"], _result(log, entry["number"])
            images = _set_alone(asked.fingerprint) if asked.images is None else asked.images
            found = admit(asked.fingerprint, images, self.families())
            if not found.ids:
                raise self._spent(asked.fingerprint, images)
            if found.ids != (frozenset(images) if asked.admitted is None else asked.admitted.ids):
                raise _queried_meanwhile(len(images) - len(found.ids), len(images))
            log = self._log(found.family or asked.fingerprint)
            with log.locked():
                if not any(entry.get("event") == "opened" for entry in log.entries()):
                    log.append({"event": "opened", "set": asked.fingerprint, "budget": asdict(budget)})
                standing = _standing(log)
                _check_budget(_name(log), standing, budget)
                number = standing.queries + 1
                if asked.images is not None:
                    known = family_of(_name(log), log.entries(), standing.retired, standing.passes).keys
                    record = {**record, **record_of(asked.fingerprint, asked.images, found, known)}
                log.append({"event": "query", "number": number, "level": budget.level, **record})
                return _name(log), number, None

    def _recorded(self, claim: str) -> tuple[ChainedLog, dict[str, Any]] | None:
        """The query that was made for a claim."""
        if claim:
            for log in self._logs():
                for entry in reversed(log.entries()):
                    if entry.get("event") in _QUERY and entry.get("claim") == claim:
                        return log, entry
        return None

    def _query_of(self, run: str, resumed: bool) -> tuple[ChainedLog, dict[str, Any]] | None:
        """The last query of a run that it may make again: one without a result, or any where the run is resumed."""
        found: tuple[ChainedLog, dict[str, Any]] | None = None
        for log in self._logs() if run else ():
            for entry in log.entries():
                mine = entry.get("event") in _QUERY and entry.get("run") == run
                if mine and (resumed or _result(log, entry["number"]) is None):
                    found = (log, entry)
        return found

    def _spent(self, fingerprint: str, images: Images) -> UndecidedError:
        """The error of a set of which no image is left, with the family that most of them are in."""
        families = [family for family in self.families() if family.retired]
        family = max(families, key=lambda item: len(item.overlap(fingerprint, images)))
        return _spent(fingerprint, _standing(self._log(family.fingerprint)), self.path(family.fingerprint))

    def record_result(self, fingerprint: str, number: int, bit: Bit) -> None:
        """Append the outcome of a query; used by :meth:`Query.close`."""
        log = self._log(fingerprint)
        with log.locked():
            log.append({"event": "result", "number": number, "passed": bit.passed, "which": bit.which})

    def _log(self, fingerprint: str) -> ChainedLog:
        return ChainedLog(self.path(fingerprint))

    def _logs(self) -> Iterator[ChainedLog]:
        if self.folder.is_dir():
            self._check_readable()  # a pattern matches nothing in a folder that cannot be read
            yield from (ChainedLog(path) for path in sorted(self.folder.glob("*.jsonl")))

    def _check_readable(self) -> None:
        """Whether the folder can be read; one that is not there is an empty ledger, one that is closed is not."""
        try:
            os.stat(os.path.join(self.folder, "."))  # through the folder: to read its files it must let us in
            os.listdir(self.folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(
                f"the ledger {self.folder} cannot be read",
                found=error.strerror or str(error),
                do="have it opened to you, or choose another folder with --ledger or [certify] ledger",
            ) from error

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


@dataclass(frozen=True)
class _Asked:
    """A set that is asked about; without images the set alone is known."""

    fingerprint: str
    images: Images | None
    admitted: Admitted | None


def _set_alone(fingerprint: str) -> Images:
    """A set whose images are not known stands for one image."""
    return {fingerprint: ()}


def _name(log: ChainedLog) -> str:
    return f"sha256:{log.path.stem}"


def _sets(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    """Fingerprints of the sets that a family was asked about."""
    return {str(entry[name]) for entry in entries for name in ("set", "asked") if name in entry}


def _result(log: ChainedLog, number: int) -> Bit | None:
    """The result of a query; None: there is none yet."""
    results = [entry for entry in log.entries() if entry.get("event") == "result" and entry["number"] == number]
    return Bit(results[-1]["passed"], results[-1]["which"]) if results else None


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
    """J counts where B > 1 alone: elsewhere the level is the same for any, and another version may make more."""
    same = replace(standing.budget, candidates=budget.candidates) if budget.passes == 1 else standing.budget
    if same != budget:
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


def _queried_meanwhile(count: int, total: int) -> UndecidedError:
    return UndecidedError(
        f"{count} of {total} sealed images may not be queried any more",
        expected="images that no other query was about since this one was prepared",
        do="run it again; no query was spent, and images that are spent are left out",
    )


def _spent(fingerprint: str, standing: Standing, path: Path) -> UndecidedError:
    how = "passed once already" if standing.passes else "was queried as often as its budget allows"
    return UndecidedError(
        f"the sealed set {_short(fingerprint)} is spent: it {how}",
        expected=f"at most {standing.budget.queries} queries and {standing.budget.passes} passes",
        found=f"{standing.queries} queries and {standing.passes} passes in {path}",
        do="seal new images; this set may be shown in full, and certifies nothing more",
    )


# Of an entry of the ledger: what differs from run to run, and the images, which the ledger itself holds.
_NOT_KEPT = ("time", "previous", "place", "fingerprint", "added", "left")


def entries_until(entries: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    """The ledger up to a query, without times and hashes: a run that was resumed has the certificate of a whole one."""
    return [
        {name: value for name, value in entry.items() if name not in _NOT_KEPT}
        for entry in entries
        if entry.get("number", 0) <= number
    ]
