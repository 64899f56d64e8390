"""``holdfast claim``, ``sign`` and ``verify``: what comes before and after a certificate."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.certify import check_decided
from holdfast.cli.options import Confidence, Json, Margins, QueryBudget, margins_of, names_of, pools_of
from holdfast.errors import Exit


def claim(
    examples: Annotated[
        Path, typer.Argument(metavar="EXAMPLES", help="CSV or Parquet with example_id,task: the held-out images.")
    ],
    out: Annotated[Path, typer.Option(help="The claim file; one that exists is not replaced.")] = Path("claim.toml"),
    margin: Margins = None,
    confidence: Confidence = None,
    target: Annotated[str | None, typer.Option(help="Claim also that this task improved; it is not protected.")] = None,
    kind: Annotated[str, typer.Option("--claim", help="all, each, bounds or devsafety, as for certify.")] = "all",
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="Protected tasks. Default: all but the target.")
    ] = None,
    pool: Annotated[
        list[str] | None, typer.Option(metavar="NAME=A,B", help="Claim about a group of tasks as a whole.")
    ] = None,
    labels: Annotated[str | None, typer.Option(metavar="A,B", help="All labels there are; others are refused.")] = None,
    query_budget: QueryBudget = None,
    as_json: Json = False,
) -> int:
    """Write down what will be claimed, before any predictions exist: a TOML file, and its SHA-256.

    Commit the file. `holdfast certify OLD NEW --claim-file FILE` tests exactly it, on exactly these images; the
    certificate names its hash, and `holdfast verify` compares them.
    """
    from holdfast.certify.claim_file import write_claim_file
    from holdfast.cli.verdicts import print_json

    default, single = margins_of(margin)
    written = write_claim_file(
        out,
        examples,
        margin=default,
        margins=single,
        confidence=0.95 if confidence is None else confidence,
        claim=kind,
        target=target,
        tasks=names_of(tasks),
        pools=pools_of(pool or []),
        labels=names_of(labels),
        query_budget=query_budget,
    )
    found = written.values.examples
    if as_json:
        print_json({"claim_file": str(out), "sha256": written.fingerprint[7:], "examples": found.count})
    else:
        print(f"{out}: {len(written.values.margins)} tasks, {found.count} examples")
        print(f"sha256 {written.fingerprint[7:]}")
        print("commit it before you predict; then: holdfast certify OLD NEW --claim-file", out)
    return int(Exit.DONE)


def sign(
    certificate: Annotated[Path, typer.Argument(metavar="CERTIFICATE", help="A certificate, or a run that holds one.")],
    key: Annotated[Path, typer.Option(help="Private SSH key, or a public one that ssh-agent holds.")],
) -> int:
    """Sign a certificate with an SSH key. The signature lies beside it, in CERTIFICATE.sig."""
    from holdfast.certify.certificate import read_certificate
    from holdfast.certify.signing import sign as make

    path = certificate / "certificate.json" if certificate.is_dir() else certificate
    read_certificate(path)  # nothing else is signed
    print(make(path, key))
    return int(Exit.DONE)


def verify(
    certificate: Annotated[
        Path, typer.Argument(metavar="CERTIFICATE", help="A certificate, a run that holds one, or a project.")
    ],
    ledger: Annotated[
        Path | None, typer.Option(help="Ledger that it was issued under. Default: the one it names, or yours.")
    ] = None,
    signers: Annotated[
        Path | None, typer.Option(help="It must be signed by one of these: lines of a name and a public SSH key.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Check a certificate: fingerprints, the verdict computed again, the claim file, the ledger, the signature.

    Says what it could check and what it could not. Exit code: 0 it holds, everything that it rests on was checked;
    4 nothing contradicts it, and something was not at hand; 3 something was changed, or the signature is none; 2 bad
    input. Of a project: every byte of every round, the ledger, and all certificates.
    """
    if (certificate / "project.json").exists():
        from holdfast.cli.lineage import verify_project
        from holdfast.cli.options import refuse_ignored

        refuse_ignored("a project", {"ledger": ledger, "signers": signers}, "a project has its own ledger")
        return verify_project(certificate, as_json)
    from holdfast.certify.verification import examine
    from holdfast.cli.process import leave_out_pandas

    leave_out_pandas()
    path = certificate / "certificate.json" if certificate.is_dir() else certificate
    check_decided(certificate)
    found = examine(path, ledgers=[] if ledger is None else [ledger], signers=signers)
    if as_json:
        from holdfast.cli.verdicts import print_json

        print_json(found.to_json())
        return int(Exit.DONE if found.holds else Exit.UNDECIDED)
    verdict = found.certificate["report"]["verdict"]
    print(
        f"the certificate holds: verdict {verdict}"
        if found.holds
        else f"not fully checked: nothing contradicts the verdict {verdict}, and not all of its evidence is at hand"
    )
    for check in found.checks:
        _say(f"  {'checked    ' if check.checked else 'not checked'}  {check.what}: {check.detail}", " " * 15)
    _say(f"promise: {found.certificate['report']['promise']}")
    return int(Exit.DONE if found.holds else Exit.UNDECIDED)


def _say(text: str, indent: str = "") -> None:
    """A line; broken between words where people read it, whole where a program does. Paths and hashes stay whole."""
    if sys.stdout.isatty():
        columns = min(shutil.get_terminal_size().columns, 120)
        lines = textwrap.wrap(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(lines)
    print(text)
