"""Settings under their former names, read for one release: what was written for an earlier version still works."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from holdfast.errors import RenamedSetting

# Former key -> key. Of [method] these are holdfast's own.
_MOVED = {
    "certify.walk_back": "candidates.interpolation",
    "certify.fit_target": "candidates.refit_target",
    "certify.hold_back": "candidates.target_bias",
    "certify.bolder": "candidates.test_more_candidates",
    "certify.looks": "certify.query_budget",
    "certify.look": "certify.test_sealed",
    "train.momentum": "train.ema_weight",
}
_MOVED_OF_HOLDFAST = {
    "method.margin": "method.target_logit_margin",
    "method.lift": "method.label_boost",
    "method.distil": "method.distill_weight",
    "method.contrast": "method.contrastive_weight",
    "method.head_rate": "method.head_lr_multiplier",
    "method.slack": "method.research.tightening",
    "method.reserve": "method.research.required_improvement",
    "method.dual_rate": "method.research.dual_rate",
    "method.views": "method.research.views",
    "method.constraint": "method.research.constraint",
    "method.beta_schedule": "method.research.beta_schedule",
}

# Command and option that are gone -> what does the same today.
REMOVED_OPTIONS = {
    ("develop", "--as-published"): 'set [method] form = "published", or give --form published: it keeps the values '
    "that the file gives, and tests the checkpoint as it was trained",
}


def upgraded(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values of a round under today's names, and a hint for each that had another."""
    result, hints = copy.deepcopy(dict(values)), list[str]()
    method = result.get("method")
    of_holdfast = isinstance(method, dict) and method.get("name", "holdfast") == "holdfast"
    for old, new in {**_MOVED, **(_MOVED_OF_HOLDFAST if of_holdfast else {})}.items():
        if _move(result, old.split("."), new.split(".")):
            hints.append(f"{_shown(old)} is now {_shown(new)}")
    train = result.get("train")
    if isinstance(train, dict):
        hints += _speed(train)
    return result, hints


def current(key: str) -> str:
    """Today's name of a dotted key (``certify.walk_back`` -> ``candidates.interpolation``)."""
    return _MOVED.get(key) or _MOVED_OF_HOLDFAST.get(key) or key


def hint(where: str, hints: list[str]) -> None:
    """Say what was renamed: on the command line a line each, in Python a warning."""
    for text in hints:
        warnings.warn(f"{where}: {text}; the former name is read for one more release", RenamedSetting, stacklevel=4)


def _move(values: dict[str, Any], old: list[str], new: list[str]) -> bool:
    section = values.get(old[0])
    if not isinstance(section, dict) or old[-1] not in section:
        return False
    place = values
    for name in new[:-1]:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            return False
    if new[-1] in place:
        return False  # both are given: the former one is an unknown key
    place[new[-1]] = section.pop(old[-1])
    return True


def _speed(train: dict[str, Any]) -> list[str]:
    """train.towers, compile and graphs were three settings for what is one."""
    former = [name for name in ("towers", "compile", "graphs") if name in train]
    if not former or "speed" in train:
        return []
    towers, compiled, graphs = (train.pop(name, default) for name, default in _FORMER_SPEED.items())
    if towers == "plain":
        train["speed"] = "plain"
    elif compiled is False:
        train["speed"] = "fast"
    elif graphs is False:
        train["speed"] = "compiled"
    else:
        train["speed"] = "graphs" if graphs is True else "fast" if towers == "fast" else "auto"
    return [f"{', '.join(_shown(f'train.{name}') for name in former)}: now [train] speed = {train['speed']!r}"]


_FORMER_SPEED: dict[str, Any] = {"towers": "auto", "compile": True, "graphs": "auto"}


def _shown(key: str) -> str:
    section, _, name = key.rpartition(".")
    return f"[{section}] {name}"
