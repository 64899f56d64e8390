"""Whether a model may carry the alias that serving asks for.

It may where a certificate names exactly its files, says ``certified`` and holds: every fingerprint fits and the verdict
was computed again from the predictions. The word ``certified`` in a result proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.certify.certificate import fingerprint_path
from holdfast.certify.verification import Verification, examine
from holdfast.errors import FaultError, UserError
from holdfast.files import read_json
from holdfast.report.content import RunContent

NEW_MODEL = "new model"  # what certificates call the weights that they are about


@dataclass(frozen=True)
class Evidence:
    """Where to look, and whose word counts, when a certificate is verified."""

    ledger: Path | None = None
    signers: Path | None = None

    def examine(self, certificate: Path) -> Verification:
        """A certificate that nothing contradicts; anything else is a :class:`FaultError`."""
        return examine(certificate, ledgers=[] if self.ledger is None else [self.ledger], signers=self.signers)


@dataclass(frozen=True)
class Promotion:
    """A model, and whether it may be promoted."""

    model: Path  # a folder or a file
    files: str  # fingerprint of its bytes, as certificates name it
    verdict: str | None
    refused: str  # why it may not be promoted; empty where it may
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def allowed(self) -> bool:
        """Whether a certificate that holds is about exactly this model."""
        return not self.refused

    @property
    def tags(self) -> dict[str, str]:
        """What a registry keeps beside a version."""
        return {
            "holdfast.verdict": self.verdict or "none",
            "holdfast.fingerprint": str(self.metadata["fingerprint"]),
            "holdfast.files": self.files,
        }


def promotion_of_run(content: RunContent, evidence: Evidence) -> Promotion:
    """The model that a run hands back."""
    folder = content.folder
    if not folder.model.is_dir():
        raise UserError(f"the run {folder.root} holds no model", expected=str(folder.model))
    files, certificate = fingerprint_path(folder.model), None
    if content.verdict == "certified" and not folder.certificate.exists():
        raise UserError(
            f"{folder.result} says certified, and there is no certificate to verify",
            expected=str(folder.certificate),
            do="put it back, or query the sealed images with: holdfast certify RUN",
        )
    if content.kept_old:
        refused = f"the old model was kept, verdict {content.verdict or 'none'}"
    elif content.verdict != "certified":
        refused = f"verdict {content.verdict or 'none'}"
    else:
        found = evidence.examine(folder.certificate)
        certificate, refused = found.certificate["fingerprint"], _refused(found, folder.certificate, files)
    metadata = {
        "verdict": content.verdict,
        "fingerprint": _fingerprint(folder.model, files),
        "files": files,
        "certificate": certificate,
        "margins": content.margins,
        "confidence": content.confidence,
        "target": content.target,
        "target_gain": (content.test or content.dev).target_gain,
    }
    return Promotion(folder.model, files, content.verdict, refused, metadata)


def promotion_of_certificate(path: Path, model: Path | None, evidence: Evidence) -> Promotion:
    """The model that a certificate names, where it lies now (by default, where it lay when it was certified)."""
    found = evidence.examine(path)
    named = found.certificate["files"].get(NEW_MODEL)
    if named is None:
        raise UserError(
            f"{path} names no model",
            expected="a certificate that names the fingerprint of the new model",
            do="certify with --new-model MODEL --out CERTIFICATE",
        )
    place = model or path.resolve().parent / named["path"]
    if not place.exists():
        raise UserError(f"{place} does not exist", do="say where the certified model is with --model")
    files, reported = fingerprint_path(place), found.certificate["report"]
    if files != named["fingerprint"]:
        raise another_model(place, path, named["fingerprint"], files)
    settings, target = found.certificate["settings"], reported.get("target")
    metadata = {
        "verdict": reported["verdict"],
        "fingerprint": _fingerprint(place, files),
        "files": files,
        "certificate": found.certificate["fingerprint"],
        "margins": settings["margins"],
        "confidence": settings["confidence"],
        "target": settings["target"],
        "target_gain": target.get("difference") if isinstance(target, Mapping) else None,
    }
    return Promotion(place, files, reported["verdict"], _refused(found, path, files), metadata)


def _refused(found: Verification, path: Path, files: str) -> str:
    """Why a certificate does not promote the model with these files; empty where it does."""
    named = found.certificate["files"].get(NEW_MODEL)
    if named is None:
        return "its certificate names no model"
    if named["fingerprint"] != files:
        raise another_model(path.parent, path, named["fingerprint"], files)
    verdict = found.certificate["report"]["verdict"]
    if verdict != "certified":
        return f"verdict {verdict}"
    # The model is at hand, wherever it lay when it was certified.
    open_checks = [item for item in found.checks if item.needed and not item.checked and item.what != NEW_MODEL]
    return (
        f"the certificate is not fully checked: {open_checks[0].what}: {open_checks[0].detail}" if open_checks else ""
    )


def another_model(model: Path, certificate: Path, expected: str, found: str) -> FaultError:
    """The error for a model that a certificate does not name."""
    return FaultError(
        f"{model} is not the model that {certificate} is about",
        expected=expected,
        found=found,
        do="register the very files that were certified",
    )


def _fingerprint(model: Path, files: str) -> str:
    """Of what a model computes, where it says so; of its bytes otherwise."""
    description = model / "model.json"
    if not description.is_file():
        return files
    values = read_json(description)
    return str(values.get("fingerprint", files)) if isinstance(values, Mapping) else files


def check_alias(alias: str) -> str:
    """An alias that registries take, and that no registry gives to whatever is newest."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", alias) or alias.lower() == "latest" or re.fullmatch(r"[vV]\d+", alias):
        raise UserError(
            f"{alias!r} cannot be the alias of a certified model",
            expected="letters, digits, _ and -; not `latest` and not a version such as `v3`, which registries give",
            do="leave --alias out, or use a name such as `certified`",
        )
    return alias
