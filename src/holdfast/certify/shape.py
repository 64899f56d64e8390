"""What a certificate must hold before anything of it is used: each part there, and of the right kind."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.certify.claims import Claim, Verdict
from holdfast.errors import UserError

Test = Callable[[Any], bool]


def check_shape(certificate: Mapping[str, Any], path: Path) -> None:
    """Refuse a certificate of which a part is missing, unknown or something else."""
    _check(path, "", certificate, _CERTIFICATE)
    _check(path, "settings.", certificate["settings"], _SETTINGS)
    _check(path, "report.", certificate["report"], _REPORT)
    unknown = sorted(set(certificate["settings"]) - set(_SETTINGS))
    if unknown:
        raise UserError(f"{path} is not a certificate of this version: unknown setting {unknown[0]!r}")


def check_lemma(told: Mapping[str, Any], path: Path) -> None:
    """The constants of Lemma 1 that a certificate with predictions was made with."""
    _check(path, "report.", told, {"lemma_1": _table})
    _check(path, "report.lemma_1.", told["lemma_1"], {"C": _number(0.0, 1e9), "alpha": _number(0.0, 1.0)})


def _check(path: Path, where: str, values: Mapping[str, Any], wanted: Mapping[str, Test]) -> None:
    for name, test in wanted.items():
        if name not in values or not test(values[name]):
            found = "it is missing" if name not in values else reprlib.repr(values[name])
            raise UserError(f"{path} is not a certificate: {where}{name} is not what it must be", found=found)


def _number(least: float, most: float, *, below: bool = False) -> Test:
    """A number in [least, most], or in [least, most)."""

    def test(value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and least <= value and (value < most if below else value <= most)

    return test


def _table(value: Any) -> bool:
    return isinstance(value, dict)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _each(test: Test) -> Test:
    return lambda value: isinstance(value, dict) and all(map(test, value.values()))


def _or_none(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _file(value: Any) -> bool:
    return isinstance(value, dict) and _text(value.get("path")) and _text(value.get("fingerprint"))


_CERTIFICATE: dict[str, Test] = {"settings": _table, "report": _table, "files": _each(_file)}
_SETTINGS: dict[str, Test] = {
    "margins": lambda value: _each(_number(0.0, 1.0, below=True))(value) and len(value) > 0,
    "confidence": _number(0.0, 1.0),
    "claim": lambda value: value in list(Claim),
    "target": _or_none(_text),
    "groups": _each(lambda value: _texts(value) and len(value) > 0),
    "labels": _texts,
    "level": _or_none(_number(0.0, 1.0)),
}
_REPORT: dict[str, Test] = {"verdict": lambda value: value in list(Verdict), "claim": _text, "promise": _text}
