"""Run folders of an earlier version, read for one release. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from holdfast.files import read_json

_CANDIDATE = {"held": "bias"}
_RESULT = {"bought_by_margin": "gain_by_margin"}


def read_result_json(path: Path) -> Any:
    """``result.json`` (or ``candidates.json``) under today's keys, whichever version wrote it.

    Names of candidates stay as they were written: the tables of predictions carry them too.
    """
    values = read_json(path)
    if not isinstance(values, dict):
        return values  # whoever reads it says what was expected
    result = _moved(values, _RESULT)
    if isinstance(candidates := result.get("candidates"), list):
        result["candidates"] = [
            _candidate(entry) if isinstance(entry, dict) else entry
            for entry in candidates  # pyright: ignore[reportUnknownVariableType]
        ]
    return result


def _candidate(entry: dict[str, Any]) -> dict[str, Any]:
    moved = _moved(entry, _CANDIDATE)
    as_trained = moved.pop("as_trained", None)
    return moved if as_trained is None else {**moved, "variant": "as-trained" if as_trained else ""}


def former_form(config: Any) -> Any:
    """The settings of a round that began before the published form was one without candidates of other weights.

    They name every key of [method], so that the name of the form can go.
    """
    if not isinstance(config, dict):
        return config  # whoever reads it says what was expected
    values = cast("dict[str, Any]", config)
    method, train = values.get("method"), values.get("train")
    if not isinstance(method, dict) or not isinstance(train, dict) or "rotation" in train:
        return values
    return {**values, "method": {name: value for name, value in method.items() if name != "form"}}  # pyright: ignore[reportUnknownVariableType]


def _moved(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {key if (new := names.get(key, key)) in values else new: value for key, value in values.items()}
