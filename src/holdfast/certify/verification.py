"""What ``holdfast verify`` finds out about a certificate: what it could check, and what it could not.

Anything that contradicts the certificate is a :class:`FaultError`. What is left is told apart: a certificate *holds*
only where its verdict was computed again from the predictions and everything else that it names was at hand too. A
file, a ledger or a claim that is not at hand is "not checked", which is no pass.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.certify.certificate import (
    CLAIM,
    NEW_PREDICTIONS,
    OLD_PREDICTIONS,
    certified_files,
    check_file,
    compare_again,
    read_certificate,
)
from holdfast.certify.ledger import Ledger, default_ledger, entries_until
from holdfast.certify.signing import check_signature, signature_path
from holdfast.chained import ChainedLog, Head
from holdfast.errors import FaultError, UserError

if TYPE_CHECKING:
    from holdfast.certify.claim_file import ClaimFile

PREDICTIONS = ("predictions", OLD_PREDICTIONS, NEW_PREDICTIONS)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    what: str
    checked: bool
    detail: str
    needed: bool = True  # whether the certificate rests on it: without it nothing "holds"


@dataclass(frozen=True)
class Verification:
    """A certificate that nothing contradicts, and how much of it was checked."""

    certificate: dict[str, Any]
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        """Whether everything that the certificate rests on was checked."""
        return all(check.checked for check in self.checks if check.needed)

    def to_json(self) -> dict[str, Any]:
        """What ``verify --json`` prints; ``holds`` is null where something was not checked."""
        return {
            "holds": True if self.holds else None,
            "verdict": self.certificate["report"]["verdict"],
            "claim": self.certificate["report"]["claim"],
            "checked": [{"what": check.what, "found": check.detail} for check in self.checks if check.checked],
            "not_checked": [{"what": check.what, "why": check.detail} for check in self.checks if not check.checked],
            "files": self.certificate["files"],
        }


def examine(path: Path, *, ledgers: Sequence[Path] = (), signers: Path | None = None) -> Verification:
    """Check whatever is at hand of a certificate.

    ``ledgers`` are folders to look for its ledger in, before the one that it names and the user's own. With ``signers``
    it must be signed by one of them.
    """
    certificate = read_certificate(path)
    signature = _signature(path, signers)
    files = certified_files(certificate, path)
    at_hand = {name: item for name, item in files.items() if os.path.exists(item)}
    for name, item in at_hand.items():
        check_file(certificate, name, item)
    checks = [
        Check("the certificate's own fingerprint", True, "it fits; whoever rewrites the whole file can make it fit"),
        signature,
        *(_file(name, item, name in at_hand) for name, item in files.items()),
        _verdict(certificate, path, files, at_hand),
        _claim(certificate, files, at_hand),
        _ledger(certificate, path, ledgers),
    ]
    return Verification(certificate, tuple(checks))


def _signature(path: Path, signers: Path | None) -> Check:
    if signers is not None:
        return Check("signature", True, f"by {check_signature(path, signers)}")
    if signature_path(path).exists():
        return Check("signature", False, "it is signed; say whose signature counts with --signers FILE", needed=False)
    return Check("signature", False, "it is not signed, so nobody vouches for it", needed=False)


def _file(name: str, path: Path, at_hand: bool) -> Check:
    return Check(name, at_hand, "unchanged" if at_hand else f"{path} is not there")


def _verdict(
    certificate: Mapping[str, Any], path: Path, files: Mapping[str, Path], at_hand: Mapping[str, Path]
) -> Check:
    what = f"verdict {certificate['report']['verdict']}"
    if not any(name in files for name in PREDICTIONS):
        return Check(what, False, "the certificate names no predictions to compute it again from")
    if any(name in files and name not in at_hand for name in PREDICTIONS):
        return Check(what, False, "the predictions are not at hand")
    if not compare_again(certificate, path, at_hand):
        return Check(what, False, "the certificate names the predictions of one model only")
    return Check(what, True, "computed again from the predictions, with every number of the report")


def _claim(certificate: Mapping[str, Any], files: Mapping[str, Path], at_hand: Mapping[str, Path]) -> Check:
    """Whether what was tested is what was written down beforehand."""
    what = "what was fixed beforehand"
    if CLAIM not in files:
        return Check(what, False, "there is no claim file, so nothing shows that the margins came first", needed=False)
    if CLAIM not in at_hand:
        return Check(what, False, "the claim file is not at hand")
    from holdfast.certify.claim_file import read_claim_file, read_examples

    claim = read_claim_file(files[CLAIM])
    _check_settings(claim, certificate["settings"])
    table = next((at_hand[name] for name in PREDICTIONS if name in at_hand), None)
    if table is None:
        return Check(what, False, "its settings are those of the claim file; its examples could not be compared")
    try:
        claim.check_examples(read_examples(table), str(table))
    except UserError as error:
        raise FaultError(error.message, expected=error.expected, found=error.found) from error
    return Check(what, True, f"settings and examples are those of {claim.path.name}, {claim.fingerprint}")


def _check_settings(claim: ClaimFile, tested: Mapping[str, Any]) -> None:
    settings = claim.settings
    wanted = {
        "margins": settings.margins,
        "confidence": settings.confidence,
        "claim": str(settings.claim),
        "target": settings.target,
        "groups": settings.groups,
        "labels": settings.labels,
        "level": settings.level,
    }
    for name, value in wanted.items():
        if tested.get(name) != value:
            raise FaultError(
                f"the certificate tests another claim than {claim.path}: {name} is different",
                expected=str(value)[:300],
                found=str(tested.get(name))[:300],
            )


def _ledger(certificate: Mapping[str, Any], path: Path, given: Sequence[Path]) -> Check:
    """Whether the ledger still has what the certificate says it had: a cut, or another record, is a fault."""
    record = certificate.get("ledger")
    if not record:
        return Check("ledger", False, "none was used: nothing limits how often these images were tried", needed=False)
    places = [*given, *([path.resolve().parent / record["folder"]] if record.get("folder") else []), default_ledger()]
    found = next((folder for folder in places if _is_recorded(Ledger(folder), record["set"])), None)
    if found is None and given:
        raise FaultError(
            f"the ledger {given[0]} has no record of the set that the certificate is about",
            expected=f"a record of {record['set']}",
        )
    if found is None:
        return Check("ledger", False, "the record of its set is not at hand; say where it is with --ledger DIR")
    entries = check_record(Ledger(found), record)
    note = "" if ChainedLog(Ledger(found).path(record["set"])).anchored else "; without a head, of an earlier version"
    return Check("ledger", True, f"{entries} entries, none missing or changed{note}")


def _is_recorded(ledger: Ledger, fingerprint: str) -> bool:
    log = ChainedLog(ledger.path(fingerprint))
    return log.path.exists() or log.head_path.exists()


def check_record(ledger: Ledger, record: Mapping[str, Any]) -> int:
    """Compare the record of a set with what a certificate keeps of it; how many entries it has now."""
    try:
        ledger.standing(record["set"])  # the chain and its head
    except UserError as error:
        raise FaultError(error.message, expected=error.expected, found=error.found, do=error.do) from error
    entries = ledger.entries(record["set"])
    last = max((entry.get("number", 0) for entry in record["entries"]), default=0)
    missing = None
    if record.get("head"):
        missing = Head(int(record["head"]["entries"]), record["head"]["fingerprint"]).missing_in(entries)
    if missing is None and entries_until(entries, last) != entries_until(record["entries"], last):
        missing = f"its entries up to query {last} are not those that the certificate keeps"
    if missing is not None:
        raise FaultError(
            f"the ledger {ledger.path(record['set'])} is not the one that the certificate was issued under",
            expected="a record that is only ever appended to",
            found=missing,
            do="restore the file and its .head",
        )
    return len(entries)
