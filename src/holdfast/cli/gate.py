"""What a CI job asks of ``holdfast certify``: a ledger, a claim file, files that other tools read, a signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.certify.claim_file import ClaimFile


@dataclass(frozen=True)
class Outputs:
    """Files that are written beside what is printed."""

    summary: Path | None = None
    junit: Path | None = None
    sarif: Path | None = None
    certificate: Path | None = None
    key: Path | None = None  # that signs the certificate

    def check(self, *, of_run: bool = False) -> None:
        """Whether everything can be written: before a query of a sealed set is spent, and not after it."""
        from holdfast.files import check_writable

        for path in (self.summary, self.junit, self.sarif, self.certificate):
            if path is not None:
                check_writable(path)
        if self.key is None:
            return
        if self.certificate is None and not of_run:
            raise UserError("--sign without a certificate", do="say where it is to be written with --out")
        from holdfast.certify.signing import check_key

        check_key(self.key)

    def write(self, reported: Mapping[str, Any], subject: Path) -> None:
        """The report as Markdown, JUnit XML and SARIF, as far as asked for; ``subject`` is what was tested."""
        from holdfast.files import write_text

        if self.summary is not None:
            from holdfast.report.markdown import certify_markdown

            write_text(self.summary, certify_markdown(reported))
        if self.junit is not None or self.sarif is not None:
            from holdfast.report.ci import junit_xml, sarif_json

            if self.junit is not None:
                write_text(self.junit, junit_xml(reported))
            if self.sarif is not None:
                write_text(self.sarif, sarif_json(reported, subject))

    def sign(self, certificate: Path) -> None:
        """Sign a certificate that was written, where a key is given."""
        if self.key is not None and certificate.exists():
            from holdfast.certify.signing import sign

            sign(certificate, self.key)


def read_claim(path: Path | None, given: Mapping[str, Any]) -> ClaimFile | None:
    """The claim file, where there is one; no option may say again, or otherwise, what it says."""
    if path is None:
        return None
    for option, value in given.items():
        if value:
            name = option.replace("_", "-")
            raise UserError(f"--claim-file and --{name} at once", do=f"leave --{name} out: the claim file says it")
    from holdfast.certify.claim_file import read_claim_file

    return read_claim_file(path)


def certify_files(
    files: Sequence[Path],
    claimed: Mapping[str, Any],
    claim: ClaimFile | None,
    ledger: tuple[Path | None, int | None],
    outputs: Outputs,
    named: Mapping[str, Path],
    source: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Test predictions, under the ledger where a ledger or a budget of queries is given; the report.

    ``source`` are the logs that the predictions were read from, as a certificate tells about them.
    """
    from holdfast.certify.certificate import CLAIM

    if claim is not None:
        claimed = claim.options
    folder, budget = ledger if claim is None else (ledger[0], claim.values.query_budget)
    if claim is not None and folder is not None and budget is None:
        raise UserError(f"--ledger with a claim without a budget: {claim.path}", expected="query_budget in the claim")
    if folder is None and budget is None:
        named = {**named, **({CLAIM: claim.path} if claim else {})}
        return _certify_freely(files, claimed, claim, outputs, named, source, more)
    from holdfast.certify.charged import certify_charged
    from holdfast.certify.ledger import Ledger, default_ledger

    book = Ledger(default_ledger() if folder is None else folder)
    result = certify_charged(files, book, budget or 1, claimed, claim_file=claim, **more)
    _tell_source(result.report, source)
    if outputs.certificate is not None and result.write(outputs.certificate, named):
        outputs.sign(outputs.certificate)
    return result.report


def _certify_freely(
    files: Sequence[Path],
    claimed: Mapping[str, Any],
    claim: ClaimFile | None,
    outputs: Outputs,
    named: Mapping[str, Path],
    source: Mapping[str, Any] | None,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    from holdfast.certify.predictions import certify

    if claim is not None:
        from holdfast.certify.claim_file import read_examples

        claim.check_examples(read_examples(files[0]), str(files[0]))
    result = certify(*files, **claimed, **more)
    _tell_source(result.report, source)
    if outputs.certificate is not None:
        result.write(outputs.certificate, named)
        outputs.sign(outputs.certificate)
    return result.to_json()


def _tell_source(reported: dict[str, Any], source: Mapping[str, Any] | None) -> None:
    if source is not None:
        reported["source"] = dict(source)
