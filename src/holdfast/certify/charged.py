"""Certifying predictions under the ledger: one bit a query, everything once the set is retired.

The set is known by its example ids. The query is on record before anything is counted, at level δ/R of its budget of R;
until the set is retired (passed once, or queried R times) only "passed" or "not passed" is shown. The same two files
tested for the same claim are the same query: they get the same answer again, at no cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.certify.certificate import CLAIM, full_report, run_test, write_certificate
from holdfast.certify.claim_file import ClaimFile, Examples, read_examples, settings_under
from holdfast.certify.claims import Verdict, delta_of
from holdfast.certify.families import image_keys
from holdfast.certify.ledger import Budget, Ledger
from holdfast.certify.predictions import evidence
from holdfast.certify.sealed import ledger_record, one_bit
from holdfast.certify.sealed_claim import SealedClaim, check_possible
from holdfast.certify.settings import Settings, layout_of
from holdfast.certify.tables import Paired
from holdfast.errors import UndecidedError, UserError
from holdfast.files import fingerprint_file, fingerprint_json

_SPENT = "take new images for the next model; what this set shows in full (without --ledger) certifies nothing more"


@dataclass(frozen=True)
class ChargedResult:
    """What may be known after a query."""

    passed: bool
    report: dict[str, Any]  # the one bit, or of a retired set everything
    settings: Settings
    files: dict[str, Path]
    ledger: Ledger
    set: str  # fingerprint of the examples
    number: int  # of the query

    def write(self, path: Path, named: Mapping[str, Path] | None = None) -> bool:
        """After a pass, the certificate, which carries the head of the ledger; without one there is none to write."""
        if not self.passed:
            return False
        record = ledger_record(self.ledger, self.set, self.number, path.resolve().parent)
        results = [entry for entry in self.ledger.entries(self.set) if entry.get("event") == "result"]
        closing = next(entry for entry in results if entry["number"] == self.number)
        record["head"] = {"entries": closing["place"], "fingerprint": closing["fingerprint"]}
        write_certificate(path, self.settings, self.report, {**self.files, **(named or {})}, ledger=record)
        return True


def certify_charged(
    files: Sequence[Path],
    ledger: Ledger,
    query_budget: int,
    claimed: Mapping[str, Any],
    *,
    claim_file: ClaimFile | None = None,
    lemma_constant: float = 0.0,
    workers: int = 1,
) -> ChargedResult:
    """Query the set that two files of predictions (or one with both models) are about.

    ``claimed`` are the options of :func:`holdfast.certify`; with ``claim_file``, those that it says. Bad input, a set
    that is spent and a claim that no outcome could pass are refused before a query is on record.
    """
    examples = read_examples(files[0])
    if claim_file is not None:
        claim_file.check_examples(examples, str(files[0]))
    layout = layout_of(claimed)
    paired, named = evidence(files[0], files[1] if len(files) > 1 else None, claimed["labels"], layout)
    settings = replace(settings_under(paired.tasks(), claimed, query_budget), layout=layout)
    sealed = SealedClaim(
        examples.fingerprint,
        _images(examples, settings),
        settings,
        Budget(delta_of(settings.confidence), query_budget),
        examples.ids,
    )
    identity = _identity(sealed, named)
    passed, number, full = _query(sealed, ledger, identity, paired, lemma_constant, workers)
    standing = ledger.standing(sealed.fingerprint, after=number)
    assert standing is not None
    reported = one_bit(sealed, passed, standing)
    if standing.retired:
        reported = {**full, "verdict": reported["verdict"], "sealed": reported["sealed"]}
    if claim_file is not None:
        named = {**named, CLAIM: claim_file.path}
    return ChargedResult(passed, reported, settings, named, ledger, sealed.fingerprint, number)


def _images(examples: Examples, settings: Settings) -> dict[str, int]:
    """Images of every task of the claim, groups taken together."""
    counts = examples.tasks
    images = {name: sum(counts[member] for member in settings.groups.get(name, [name])) for name in settings.margins}
    return {**images, **({settings.target: counts[settings.target]} if settings.target else {})}


def _identity(sealed: SealedClaim, files: Mapping[str, Path]) -> str:
    """What a query is known by: the claim, and the bytes of the predictions that it is about."""
    predictions = {name: fingerprint_file(path) for name, path in files.items()}
    settings = {**asdict(sealed.settings), "claim": str(sealed.settings.claim)}
    return fingerprint_json(
        {
            "set": sealed.fingerprint,
            "settings": settings,
            "budget": asdict(sealed.budget),
            "predictions": predictions,
        }
    )


def _query(
    sealed: SealedClaim, ledger: Ledger, identity: str, paired: Paired, lemma_constant: float, workers: int
) -> tuple[bool, int, dict[str, Any]]:
    """Passed or not, the number of the query, and the report in full, of which nothing may be shown too early."""
    _check_unspent(sealed, ledger, identity)
    check_possible(sealed)
    try:
        with ledger.query(
            sealed.fingerprint,
            sealed.budget,
            run=identity,
            claim=identity,
            tasks=sealed.tasks,
            margins=sealed.settings.margins,
            images=_keys(sealed),
        ) as query:
            result = run_test(paired, replace(sealed.settings, level=query.level), workers=workers)
            query.close(result.verdict is Verdict.CERTIFIED, "new")
    except UndecidedError as error:  # spent by another process since the check
        raise UserError(error.message, expected=error.expected, found=error.found, do=_SPENT) from error
    full = full_report(paired, sealed.settings, result, complexity=lemma_constant)
    return result.verdict is Verdict.CERTIFIED, query.number, full


def _check_unspent(sealed: SealedClaim, ledger: Ledger, identity: str) -> None:
    """Refuse a spent set before anything is computed, unless this very query is on record."""
    standing = ledger.standing(sealed.fingerprint)
    recorded = any(entry.get("claim") == identity for entry in ledger.entries(sealed.fingerprint))
    if standing is not None and standing.retired and not recorded:
        how = "passed once already" if standing.passes else "was queried as often as its budget allows"
        raise UserError(
            f"these {len(sealed.ids)} examples are spent: their set {how}",
            expected=f"at most {standing.budget.queries} queries, and none after the first pass",
            found=f"{standing.queries} queries and {standing.passes} passes in {ledger.path(sealed.fingerprint)}",
            do=_SPENT,
        )
    found = ledger.check(sealed.fingerprint, sealed.budget, run=identity, resumed=True, images=_keys(sealed))
    if found.left_out:
        raise UserError(
            f"{len(found.left_out)} of these {len(sealed.ids)} examples were queried before, in another set",
            expected="examples that no other query was about; the ledger charges each one, whatever set it is in",
            found=", ".join(f"{count} {reason}" for reason, count in found.counts().items()),
            do="leave them out of both files; no query was spent",
        )


def _keys(sealed: SealedClaim) -> dict[str, tuple[str, ...]]:
    """What the ledger knows the examples by: their ids."""
    return {identity: image_keys(identity) for identity in sealed.ids}
