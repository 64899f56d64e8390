"""BDD100K: the official images and label files, weather and scene (method section 8).

The official validation images are the test set; the official training images are shared out by role. The authors'
pooled split of a rare class (foggy, tunnel: train and validation together, 40/30/30) is an option.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.config import SourceConfig
from holdfast.data.catalogue import Entry, Listing, Problem, number_of
from holdfast.data.names import printable, readable_name
from holdfast.data.sources.files import find_files, pictures_in
from holdfast.errors import UserError, nearest
from holdfast.files import read_json

UNDEFINED = "undefined"  # the label file's word for an attribute that nobody gave

# Label files by official split; the later release (det_20) comes first where both are there.
LABEL_FILES = {
    "train": ("det_train.json", "bdd100k_labels_images_train.json"),
    "val": ("det_val.json", "bdd100k_labels_images_val.json"),
}
_POOLED_SHARES = (("train", 0.4), ("dev", 0.3))  # the rest is test


@dataclass(frozen=True, slots=True)
class Label:
    """One image of a label file. ``value`` is None where the attribute is absent."""

    name: str
    official: str  # "train" or "val"
    value: str | None


def read_labels(path: Path, attribute: str, official: str) -> list[Label]:
    """The images of one official label file with one of their attributes; boxes are passed over."""
    values: Any = read_json(path)
    frames: Any = values.get("frames") if isinstance(values, dict) else values
    if not isinstance(frames, list) or not all(_is_frame(item, attribute) for item in frames):
        raise UserError(f"{path} is not a BDD100K label file", expected='a list of {"name": …, "attributes": {…}}')
    labels: list[Label] = []
    known: Counter[str] = Counter()
    for frame in frames:
        attributes = frame.get("attributes") or {}
        known.update(attributes.keys())
        value = attributes.get(attribute)
        labels.append(Label(printable(str(frame["name"])), official, None if value is None else printable(str(value))))
    if labels and attribute not in known:
        raise UserError(f"{path} has no attribute {attribute!r}", do=nearest(attribute, known))
    return labels


def _is_frame(value: Any, attribute: str) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("attributes") or {}, dict):
        return False
    texts = (value.get("name", []), (value.get("attributes") or {}).get(attribute))
    return not any(isinstance(text, (list, dict)) for text in texts)


def count_labels(path: Path, attribute: str) -> dict[str, int]:
    """How many images of a label file have each value, the undefined ones among them."""
    return dict(Counter(label.value or UNDEFINED for label in read_labels(path, attribute, "val")).most_common())


def split_labels(labels: Iterable[Label], pooled: Sequence[str]) -> list[tuple[Label, str]]:
    """Every labelled image with its split: official train as it is, official validation as test, pooled classes anew.

    The pooled split, 40/30/30, goes by a hash of the file name: the same on every machine.
    """
    result: list[tuple[Label, str]] = []
    pools: dict[str, list[Label]] = defaultdict(list)
    for label in labels:
        if label.value in pooled:
            pools[str(label.value)].append(label)
        else:
            result.append((label, "train" if label.official == "train" else "test"))
    for pool in pools.values():
        pool.sort(key=lambda label: number_of(label.name, "pool"))
        start = 0
        for split, share in _POOLED_SHARES:
            count = round(share * len(pool))
            result.extend((label, split) for label in pool[start : start + count])
            start += count
        result.extend((label, "test") for label in pool[start:])
    return result


def list_bdd100k(config: SourceConfig, path: Path) -> Listing:
    """The images under ``path`` whose label has the attribute; what does not fit together is counted and reported."""
    if not os.path.isdir(path):
        raise UserError(f"{path} is not a folder", expected="the folder that holds BDD100K's images and labels")
    labels: list[Label] = []
    pictures: dict[tuple[str, str], Path] = {}
    problems: list[Problem] = []
    for official in LABEL_FILES:
        file = _label_file(path, official)
        if file is not None:
            labels += _once(read_labels(file, config.attribute, official), problems)
        pictures |= {(official, picture.name): picture for picture in _pictures(path, official)}
    if not labels:
        raise UserError(
            f"no BDD100K label files under {path}",
            expected=" or ".join(f"labels/{name}" for names in LABEL_FILES.values() for name in names),
        )
    found: list[Label] = []
    for label in labels:
        if label.value is None or label.value == UNDEFINED:
            problems.append(Problem(f"no {config.attribute}", label.name, label.value or "the attribute is absent"))
        elif (label.official, label.name) not in pictures:
            problems.append(Problem("label without image", f"{label.official}/{label.name}"))
        else:
            found.append(label)
    known = {(label.official, label.name) for label in labels}
    problems += [Problem("image without label", readable_name(p)) for key, p in pictures.items() if key not in known]
    if not found:
        raise UserError(
            f"none of the {len(labels)} labels has its image under {path}",
            expected="images/100k/train/*.jpg and images/100k/val/*.jpg",
            do="unpack the official image archive there; `holdfast data LABELS.json` counts a label file alone",
        )
    _check_pooled(config, found)
    rows = split_labels(found, config.pooled)
    files = [pictures[label.official, label.name] for label, _ in rows]
    entries = [Entry(readable_name(f), label.value, None, split) for f, (label, split) in zip(files, rows, strict=True)]
    return Listing(readable_name(path), entries, pictures_in(files), problems)


def _once(labels: list[Label], problems: list[Problem]) -> list[Label]:
    first: dict[str, Label] = {}
    for label in labels:
        if label.name in first:
            problems.append(Problem("labelled twice", label.name, "the first label is used"))
        first.setdefault(label.name, label)
    return list(first.values())


def _check_pooled(config: SourceConfig, labels: list[Label]) -> None:
    known = {str(label.value) for label in labels}
    for name in config.pooled:
        if name not in known:
            raise UserError(f"pooled: no image is {name!r}", do=nearest(name, known))


def _label_file(root: Path, official: str) -> Path | None:
    for name in LABEL_FILES[official]:
        found = find_files(root, name)
        if found:
            return found[0]
    return None


def _pictures(root: Path, official: str) -> list[Path]:
    """``images/100k/train`` of the official archive, wherever under the root it was unpacked."""
    folders = sorted(path for path in root.rglob(official) if path.is_dir() and "labels" not in path.parts)
    return [file for folder in folders for file in sorted(folder.glob("*.jpg"))]
