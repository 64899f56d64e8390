"""The certificate: what was claimed, on what evidence, and how anyone can compute it again.

It names every file it rests on with a fingerprint: predictions, and where known the models' weights and the data.
:func:`verify_certificate` reads those files again, counts again, tests again, and compares.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast._version import __version__
from holdfast.certify.claims import Counts, Result, evaluate
from holdfast.certify.flips import flip_report
from holdfast.certify.report import report
from holdfast.certify.settings import PLAIN, Layout, Settings
from holdfast.certify.shape import check_certificate, check_lemma
from holdfast.certify.tables import Paired, read_joined, read_paired
from holdfast.errors import FaultError, UserError, nearest
from holdfast.files import fingerprint_file, fingerprint_json, read_json, where_instead, write_json

FORMAT = "holdfast-certificate/1"
Report = dict[str, Any]
# Parts of a report that certificates of earlier versions and of runs lack.
ADDED_LATER = ("left_out", "input", "unit", "test", "flips")


def select(paired: Paired, settings: Settings) -> tuple[list[Counts], Counts | None]:
    """Counts of the protected tasks, groups pooled, and of the target."""
    counts = set(paired.tasks())
    members = [member for group in settings.groups.values() for member in group]
    named = (set(settings.margins) - set(settings.groups)) | set(members)
    for name in [*sorted(named), *([settings.target] if settings.target else [])]:
        if name not in counts:
            raise UserError(f"the task {name!r} has no images in the predictions", do=nearest(name, counts))
    target = paired.tested(settings.target) if settings.target else None
    single = [paired.tested(name) for name in sorted(named.difference(members))]
    return [*single, *(paired.pooled(name, group) for name, group in settings.groups.items())], target


def full_report(paired: Paired, settings: Settings, result: Result, *, complexity: float, rate: float = 0.5) -> Report:
    """The report on predictions that a person handed in: what was left out and what was noticed included."""
    return {
        **report(result, confidence=settings.confidence, complexity=complexity, rate=rate),
        **about_input(paired, settings),
    }


def about_input(paired: Paired, settings: Settings) -> Report:
    """Flip rates, what was left out of the claim, and what was noticed about the table."""
    return {
        "flips": flip_report(paired, settings.groups),
        "left_out": left_out(paired, settings),
        "input": {**paired.inspection.as_json(), "distinct_rows": settings.distinct_rows},
    }


def left_out(paired: Paired, settings: Settings) -> list[dict[str, Any]]:
    """Tasks of the predictions that the claim is not about, with their images and flips."""
    members = {member for group in settings.groups.values() for member in group}
    tested = {*settings.margins, *members, settings.target}
    return [
        {"task": name, "n": item.n, "gained": item.gained, "lost": item.lost, "difference": item.difference}
        for name, item in paired.counts().items()
        if name not in tested
    ]


def run_test(paired: Paired, settings: Settings, workers: int = 1) -> Result:
    """Count and test."""
    counts, target = select(paired, settings)
    return evaluate(
        counts,
        settings.margins,
        settings.delta,
        claim=settings.claim,
        target=target,
        disjoint=paired.disjoint,
        workers=workers,
    )


def fingerprint_path(path: Path) -> str:
    """Fingerprint of a file, or of all files of a folder with their names."""
    if path.is_file():
        return fingerprint_file(path)
    if not path.is_dir():
        raise UserError(f"{path} does not exist", do=where_instead(path))
    files = sorted(item for item in path.rglob("*") if item.is_file())
    return fingerprint_json({file.relative_to(path).as_posix(): fingerprint_file(file) for file in files})


def write_certificate(
    path: Path,
    settings: Settings,
    reported: Mapping[str, Any],
    files: Mapping[str, Path],
    *,
    identities: Mapping[str, str] | None = None,
    ledger: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the certificate and return it.

    ``files`` names what it rests on: ``predictions`` (one file), or ``predictions of the old model`` and ``predictions
    of the new model``; any further names (weights, data) are checked by fingerprint alone. ``identities`` are
    fingerprints of things that are not at hand as files. Without predictions (a sealed set that is not retired) only
    the one bit can be told.
    """
    folder = path.resolve().parent
    body: dict[str, Any] = {
        "format": FORMAT,
        "holdfast": __version__,
        "settings": {**asdict(settings), "claim": str(settings.claim)},
        "report": dict(reported),
        "files": {
            name: {"path": os.path.relpath(item.resolve(), folder), "fingerprint": fingerprint_path(item)}
            for name, item in files.items()
        },
        "identities": dict(identities or {}),
        "ledger": dict(ledger) if ledger else None,
    }
    certificate = {**body, "fingerprint": fingerprint_json(body)}
    write_json(path, certificate)
    return certificate


OLD_PREDICTIONS, NEW_PREDICTIONS = "predictions of the old model", "predictions of the new model"
CLAIM = "claim"  # what a certificate calls the claim file among its files


CERTIFICATE = "certificate.json"
_WANTED = f"a JSON file of format {FORMAT}"
_NAME_ONE = f"name a run, such as runs/ROUND, or its {CERTIFICATE}"


def read_certificate(path: Path) -> dict[str, Any]:
    """A certificate whose own fingerprint holds, and that says all that a certificate says."""
    if path.name == CERTIFICATE and os.path.isdir(path.parent) and not os.path.exists(path):
        raise UserError(
            f"{path.parent} holds no certificate",
            expected=f"a run that has queried its sealed images, or another folder with a {CERTIFICATE}",
            do="name the run, such as runs/ROUND",
        )
    try:
        certificate = read_json(path)
    except UserError as error:
        if not os.path.isfile(path):
            raise
        raise UserError(f"{path} is not a certificate", expected=_WANTED, found=error.found, do=_NAME_ONE) from error
    if not isinstance(certificate, dict) or certificate.get("format") != FORMAT:
        raise UserError(f"{path} is not a certificate", expected=_WANTED, do=_NAME_ONE)
    body = {name: value for name, value in certificate.items() if name != "fingerprint"}
    try:
        found = fingerprint_json(body)
    except (ValueError, RecursionError) as error:  # not finite, no text, or nested too deeply
        raise UserError(f"{path} is not a certificate", found=str(error).splitlines()[0][:200]) from error
    if found != certificate.get("fingerprint"):
        raise FaultError(
            f"the certificate {path} was changed after it was written",
            expected=str(certificate.get("fingerprint"))[:200],
            found=found,
            do="ask for the original file",
        )
    check_certificate(certificate, path)
    return certificate


def verify_certificate(path: Path) -> dict[str, Any]:
    """Check every fingerprint, compute everything again from the predictions, and compare; the certificate if it holds.

    A changed file or a result that comes out differently is a :class:`FaultError`, a file that is gone a
    :class:`UserError`. What can be checked without a file is the matter of
    :func:`~holdfast.certify.verification.examine`.
    """
    certificate = read_certificate(path)
    files = certified_files(certificate, path)
    for name, item in files.items():
        if not os.path.exists(item):
            raise UserError(
                f"the certificate rests on {item}, which does not exist",
                expected=f"the {name}, at that place beside the certificate",
                do="put the file back where it was when the certificate was written",
            )
        check_file(certificate, name, item)
    compare_again(certificate, path, files)
    return certificate


def certified_files(certificate: Mapping[str, Any], path: Path) -> dict[str, Path]:
    """What a certificate rests on, by name: paths begin where the certificate lies."""
    folder = path.resolve().parent
    return {name: folder / item["path"] for name, item in certificate["files"].items()}


def check_file(certificate: Mapping[str, Any], name: str, path: Path) -> None:
    """A :class:`FaultError` where a file is not the one that the certificate names."""
    expected, found = certificate["files"][name]["fingerprint"], fingerprint_path(path)
    if found != expected:
        raise FaultError(f"the {name} changed since the certificate: {path}", expected=expected, found=found)


def compare_again(certificate: Mapping[str, Any], path: Path, files: Mapping[str, Path]) -> bool:
    """Compute the report again from the predictions among ``files`` and compare; False where there are none."""
    settings = Settings.from_json(certificate["settings"])
    paired = read_evidence(files, settings.labels, settings.layout)
    if paired is None:
        return False
    reported = certificate["report"]
    check_lemma(reported, path)
    result = run_test(paired, settings)
    lemma = reported["lemma_1"]
    again = full_report(paired, settings, result, complexity=lemma["C"], rate=lemma["alpha"])
    again = {name: value for name, value in again.items() if name in reported or name not in ADDED_LATER}
    if reported.get("claim_tested") == result.wording(in_points=False):  # of an earlier version
        again["claim_tested"] = reported["claim_tested"]
    _compare(path, reported, again)
    return True


def read_evidence(files: Mapping[str, Path], labels: Sequence[str], layout: Layout = PLAIN) -> Paired | None:
    """The predictions that a certificate names; None where it names none."""
    if "predictions" in files:
        return read_paired(files["predictions"], labels, layout)
    if OLD_PREDICTIONS in files and NEW_PREDICTIONS in files:
        # A run's own predictions were written from one list of classes; what anybody else wrote is questioned.
        trusted = "roles of the data" in files
        return read_joined(files[OLD_PREDICTIONS], files[NEW_PREDICTIONS], labels, trusted=trusted, layout=layout)
    return None


def _compare(path: Path, reported: Mapping[str, Any], again: Mapping[str, Any]) -> None:
    """Everything told must come out again; numbers to 1e-6, since p-values are bounds to that precision at least."""
    for name, value in again.items():
        if not _same(reported.get(name), value):
            raise FaultError(
                f"{path} does not come out again: {name} is different",
                expected=str(reported.get(name))[:300],
                found=str(value)[:300],
            )


def _same(left: Any, other: Any) -> bool:
    if isinstance(left, dict) and isinstance(other, dict):
        return left.keys() == other.keys() and all(_same(left[key], other[key]) for key in left)
    if isinstance(left, list) and isinstance(other, list):
        return len(left) == len(other) and all(_same(a, b) for a, b in zip(left, other, strict=True))
    if isinstance(left, float | int) and isinstance(other, float | int):
        return left == other or (abs(left) < 1e300 and abs(left - other) <= 1e-6)
    return left == other
