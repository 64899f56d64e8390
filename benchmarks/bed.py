"""The test bed's images and their split, which the protocol fixes: docs/appendix/protocol.md.

    python benchmarks/bed.py DATA... --out BED

DATA are the archives (or the folders that they unpack to) intel-scene-64, pacs-128, tiny-imagenet-200-64 and
flickr8k-96, or a folder that holds them; those that are missing are left out. BED then holds the pictures and, for each
set, a table with one line a picture: filepath, label, split, and the hashes of file and pixels. `scenes-seen.csv` is
the same with the constraint images as base images: for old models that have seen them.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import shutil
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from holdfast.data.dedup.leaks import near_duplicates
from holdfast.data.dedup.signatures import SMALL, make_signatures, thumbnail
from holdfast.data.images import open_image, picture_id, to_rgb
from holdfast.files import fingerprint_file

COLUMNS = ("filepath", "label", "split", "example_id", "picture")
TRAINED = ("base", "constraint")  # what a model is made of; all other splits choose or judge
DOMAINS = {"photo": "photo", "art_painting": "painting", "cartoon": "cartoon", "sketch": "sketch"}
SCENES = {"buildings": "buildings", "forest": "a forest", "glacier": "a glacier", "mountain": "a mountain",
          "sea": "the sea", "street": "a street"}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One set of pictures: how its classes are named, and how each class is shared out."""

    name: str  # of its table and of the model folder
    archive: str  # name of the archive without its ending
    target: str = ""  # the class that the study improves, rare in pretraining
    counts: Mapping[str, int | float] = field(default_factory=dict[str, int | float])  # images, or a share, a class
    official: Mapping[str, str] = field(default_factory=dict[str, str])  # top folder -> split; "" is shared out

    def place(self, path: str) -> tuple[str, str]:
        """Label and official split ("" for none) of a picture, from its path in the archive."""
        top, name, *_ = path.split("/")
        if self.name == "pacs":
            article = "an" if name[0] in "aeiou" else "a"
            return f"{DOMAINS[top]}_of_{article}_{name}", ""
        return "" if self.name == "captions" else name, self.official.get(top, "")

    def phrase(self, label: str) -> str:
        """The prompt of a class, as the studies have it."""
        if self.name == "pacs":
            return f"a {label.replace('_', ' ')}"
        return f"a photo of {SCENES[label]}" if self.name == "scenes" else f"a photo of a {label.replace('_', ' ')}"


PARTS = {
    part.name: part
    for part in (
        Part("scenes", "intel-scene-64", "sea", {"base": 300, "dev": 200, "sealed": 690}, {"test": "test"}),
        Part("pacs", "pacs-128", "sketch_of_a_horse", {"base": 0.1, "dev": 0.25, "test": 0.25}),
        Part("tiny", "tiny-imagenet-200-64", "lakeside", {"base": 20, "dev": 20}, {"test": "test"}),
        Part("captions", "flickr8k-96", official={"train": "base", "extra": "base", "val": "dev", "test": "test"}),
    )
}


@dataclass(frozen=True)
class Row:
    """A picture: a line of its set's table."""

    filepath: str
    label: str
    split: str
    example_id: str  # hash of the file
    picture: str  # hash of the decoded pixels


@dataclass(frozen=True)
class _Read:
    row: Row
    thumb: np.ndarray
    small: bool


def read_rows(path: Path) -> list[Row]:
    """A set's table."""
    with path.open(newline="", encoding="utf-8") as file:
        return [Row(**{name: line[name] for name in COLUMNS}) for line in csv.DictReader(file)]


def share_out(rows: Iterable[Row], part: Part) -> list[Row]:
    """A split for each picture that has none: classes one by one, pictures by the hash of their file."""
    classes: dict[str, list[Row]] = defaultdict(list)
    done: list[Row] = []
    for row in rows:
        (done if row.split else classes[row.label]).append(row)
    for label in sorted(classes):
        ranked = sorted(classes[label], key=lambda row: row.example_id)
        splits = [
            split
            for split, count in part.counts.items()
            for _ in range(count if isinstance(count, int) else round(count * len(ranked)))
        ]
        splits += ["constraint"] * (len(ranked) - len(splits))
        done += [replace(row, split=split) for row, split in zip(ranked, splits, strict=False)]
    return done


def without_copies(rows: Sequence[Row]) -> list[Row]:
    """One row a picture: an official test image before others, then by hash; none where the labels disagree."""
    copies: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        copies[row.picture].append(row)
    return [
        min(group, key=lambda row: (row.split != "test", row.split != "dev", row.example_id))
        for group in copies.values()
        if len({row.label for row in group}) == 1
    ]


def split(sources: Sequence[Path], out: Path, parts: Mapping[str, Part] = PARTS) -> dict[str, list[Row]]:
    """Unpack, share out, drop copies, and write the tables."""
    tables: dict[str, list[Row]] = {}
    described: dict[str, _Read] = {}
    for part in parts.values():
        source = _find(sources, part.archive)
        if source is None:
            continue
        folder = out / part.archive
        if not folder.exists():
            _unpack(source, folder)
        read = _read(folder, part)
        described |= {item.row.filepath: item for item in read}
        tables[part.name] = share_out(without_copies([item.row for item in read]), part)
    _drop_leaks(tables, described)
    for name, rows in tables.items():
        rows.sort(key=lambda row: row.filepath)
        _write(out / f"{name}.csv", rows)
    if "scenes" in tables:
        seen = [replace(row, split="base") if row.split == "constraint" else row for row in tables["scenes"]]
        _write(out / "scenes-seen.csv", seen)
    return tables


def _write(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([getattr(row, column) for column in COLUMNS] for row in rows)


def _find(sources: Sequence[Path], name: str) -> Path | None:
    found = [path for given in sources for path in (given, given / name, given / f"{name}.zip") if path.stem == name]
    return next((path for path in found if path.exists()), None)


def _unpack(source: Path, folder: Path) -> None:
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    if source.is_dir():
        shutil.copytree(source, temporary)
    else:
        with zipfile.ZipFile(source) as archive:
            archive.extractall(temporary)
    temporary.rename(folder)


def _read(folder: Path, part: Part) -> list[_Read]:
    """Every picture of a set with its hashes and thumbnail."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))

    def described(file: Path) -> _Read:
        inside = file.relative_to(folder).as_posix()
        content = file.read_bytes()
        image = to_rgb(open_image(content))
        label, official = part.place(inside)
        identity = hashlib.sha256(content).hexdigest()
        row = Row(f"{folder.name}/{inside}", label, official, identity, picture_id(image))
        return _Read(row, thumbnail(image), min(image.size) < SMALL)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(described, files))


def _drop_leaks(tables: dict[str, list[Row]], described: Mapping[str, _Read]) -> None:
    """Leave out what models are made of where it is, in whichever set, a copy of a picture that chooses or judges."""
    rows = [row for table in tables.values() for row in table]
    made, judging = ([row for row in rows if (row.split in TRAINED) == kind] for kind in (True, False))
    if not made or not judging:
        return
    exact = {row.picture for row in judging}
    signatures = [
        make_signatures(
            np.stack([described[row.filepath].thumb for row in group]),
            small=np.array([described[row.filepath].small for row in group]),
        )
        for group in (made, judging)
    ]
    leaked = {made[match.a].filepath for match in near_duplicates(*signatures)}
    leaked |= {row.filepath for row in made if row.picture in exact}
    for name, table in tables.items():
        tables[name] = [row for row in table if row.filepath not in leaked]
    print(f"left out of training as copies of pictures that choose or judge: {len(leaked)}")


def summary(tables: Mapping[str, Sequence[Row]], out: Path) -> str:
    """One line a set: pictures by split, and the fingerprint of its table."""
    splits = ("base", "constraint", "dev", "sealed", "test")
    lines = [f"| set | classes | {' | '.join(splits)} | fewest constraint images | table |", "| --- " * 9 + "|"]
    for name, rows in tables.items():
        counts = Counter(row.split for row in rows)
        per_class = Counter(row.label for row in rows if row.split == "constraint")
        fields = [name, len(per_class), *(counts[split] for split in splits), min(per_class.values(), default=0)]
        short = fingerprint_file(out / f"{name}.csv").removeprefix("sha256:")[:16]
        lines.append(f"| {' | '.join(map(str, fields))} | `{short}` |")
    return "\n".join(lines)


def main() -> None:
    """Share out and say how many pictures there are of what."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    print(summary(split(given.data, given.out), given.out))


if __name__ == "__main__":
    main()
