"""What a certificate must hold before anything of it is used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.certify.claims import Claim, Verdict
from holdfast.errors import UserError
from holdfast.shape import (
    Each,
    Filled,
    Maybe,
    Shape,
    below_one,
    between,
    check_shape,
    count,
    flag,
    number,
    one_of,
    text,
)

_SETTINGS: dict[str, Shape] = {
    "margins": Filled(Each(below_one)),
    "confidence": between(0.0, 1.0),
    "claim": one_of(*Claim),
    "target": Maybe(text),
    "groups": Each(Filled([text])),
    "labels": [text],
    "level": Maybe(between(0.0, 1.0)),
    "distinct_rows": Maybe(flag),
    "layout": Maybe(
        {
            "group": Maybe(text),
            "weight": Maybe(text),
            "score_range": Maybe([number]),
            "largest_unit": Maybe(number),
            "largest_units": Each(number),
            "equal_groups": flag,
        }
    ),
}


def _fingerprint(value: Any) -> bool:
    return text(value) and re.fullmatch("sha256:[0-9a-f]{64}", value) is not None


_CERTIFICATE: dict[str, Shape] = {
    "settings": _SETTINGS,
    "report": {"verdict": one_of(*Verdict), "claim": text, "promise": text},
    "files": Each({"path": text, "fingerprint": text}),
    "ledger": Maybe(
        {
            "set": _fingerprint,
            "entries": [{"number": Maybe(count)}],
            "folder": Maybe(text),
            "head": Maybe({"entries": count, "fingerprint": text}),
        }
    ),
}

_LEMMA = {"lemma_1": {"C": between(0.0, 1e9), "alpha": between(0.0, 1.0)}}


def check_certificate(certificate: Mapping[str, Any], path: Path) -> None:
    """Refuse a certificate of which a part is missing, unknown or something else."""
    check_shape(certificate, _CERTIFICATE, path)
    unknown = sorted(set(certificate["settings"]) - set(_SETTINGS))
    if unknown:
        raise UserError(f"{path} is not a certificate of this version: unknown setting {unknown[0]!r}")


def check_lemma(reported: Mapping[str, Any], path: Path) -> None:
    """The constants of Lemma 1 that a certificate with predictions was made with."""
    check_shape(reported, _LEMMA, path, "report")
