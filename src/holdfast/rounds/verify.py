"""Looking at a lineage: what flipped between two of its models, and whether any byte of it changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from holdfast.artifacts import RunFolder, read_predictions, resume_command
from holdfast.certify.certificate import read_certificate
from holdfast.certify.ledger import Ledger
from holdfast.certify.verification import examine
from holdfast.chained import ChainedLog
from holdfast.errors import FaultError, UserError
from holdfast.files import fingerprint_bytes, fingerprint_file, read_json
from holdfast.rounds.project import FIRST, Project, list_files


@dataclass(frozen=True)
class Flip:
    """An image on which two models differ in being right."""

    example_id: str
    label: str
    before: str
    after: str
    gained: bool
    locator: str


@dataclass(frozen=True)
class Difference:
    """Two models of a lineage on the images that both were judged by."""

    before: str
    after: str
    examples: dict[str, int]  # by class
    right: dict[str, tuple[int, int]]  # by class: before, after
    flips: list[Flip]

    def change(self, name: str) -> float:
        """Change of a class's accuracy."""
        before, after = self.right[name]
        return (after - before) / self.examples[name]

    @property
    def classes(self) -> list[str]:
        """Classes, worst change first."""
        return sorted(self.examples, key=lambda name: (self.change(name), name))


def difference(project: Project, before: str, after: str) -> Difference:
    """What flipped from one model to another, on dev images and those of retired sets."""
    older, newer = project.resolve(before), project.resolve(after)
    old, new = _predicted(project, older), _predicted(project, newer)
    common = sorted(old.keys() & new.keys())
    if not common:
        raise UserError(
            f"{older} and {newer} were not judged by the same images", do="compare rounds over the same data"
        )
    examples: dict[str, int] = {}
    right: dict[str, tuple[int, int]] = {}
    flips: list[Flip] = []
    places = _places(project, older, newer)
    for identity in common:
        label, earlier = old[identity]
        now = new[identity][1]
        examples[label] = examples.get(label, 0) + 1
        was, is_ = earlier == label, now == label
        before_right, after_right = right.get(label, (0, 0))
        right[label] = (before_right + was, after_right + is_)
        if was != is_:
            flips.append(Flip(identity, label, earlier, now, is_, places.get(identity, "")))
    flips.sort(key=lambda flip: (flip.gained, flip.label, flip.locator))
    return Difference(older, newer, examples, right, flips)


def _predicted(project: Project, name: str) -> dict[str, tuple[str, str]]:
    """Label and prediction of every image that a model was judged by and that may be shown."""
    if name != FIRST:
        folder = project.folder(name)
        result = read_json(folder.result)
        which = "old" if result["kept_old"] else str(result["chosen"])
        return _table(folder, which, "new", bool(_retired(result)) and not result["kept_old"])
    for child in project.history():
        if child.parent == FIRST:
            folder = project.folder(child.name)
            return _table(folder, "old", "old", bool(_retired(read_json(folder.result))))
    raise UserError("no round has judged the first model yet", do="run a round first")


def _retired(result: Mapping[str, Any]) -> bool:
    return bool(((result.get("certificate") or {}).get("sealed") or {}).get("retired"))


def _table(folder: RunFolder, dev: str, sealed: str, retired: bool) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    paths = [folder.predictions(dev, "dev"), *([folder.predictions(sealed, "sealed")] if retired else [])]
    for path in paths:
        if path.exists():
            table = read_predictions(path)
            columns = (table[name].to_pylist() for name in ("example_id", "label", "prediction"))
            found.update({identity: (label, predicted) for identity, label, predicted in zip(*columns, strict=True)})
    return found


def _places(project: Project, *names: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        path = project.folder(name).roles
        if name != FIRST and path.exists():
            table = pq.read_table(path, columns=["example_id", "locator"])
            found.update(zip(table["example_id"].to_pylist(), table["locator"].to_pylist(), strict=True))
    return found


@dataclass(frozen=True)
class Checked:
    """What a check of a project went through."""

    rounds: int
    files: int
    certificates: int
    notes: list[str]
    not_checked: list[str]  # what certificates rest on and was not at hand: nothing "holds" without it


def verify_project(root: Path) -> Checked:
    """Check the chain of the record, every file of every round, the ledger and all certificates.

    Any change is a :class:`FaultError`. Rounds that are not finished, files that were added, and records of earlier
    versions, whose end could be cut without a trace, are noted.
    """
    project = Project.open(root)
    entries = project.entries()
    _check_chain(project)
    files, certificates = 0, 0
    not_checked: list[str] = []
    notes = [f"{name} is not finished" for name in project.unfinished()]
    for name in project.unfinished():
        _finished_without_a_line(project, name)
    for entry in entries:
        base = project.first if entry["event"] == FIRST else project.rounds / entry["round"]
        files += len(entry["files"])
        if "note" in entry:
            list(_check_files(project.rounds, {f"{entry['round']}.json": entry["note"]}, added=False))
        notes += list(_check_files(base, entry["files"]))
        _check_ledger(project, entry.get("ledger") or {})
        certificate = base / "certificate.json"
        if certificate.exists():
            not_checked += _check_certificate(project, base.name, certificate)
            certificates += 1
    notes += _shared_seals(project)
    notes += _check_records(project)
    return Checked(sum(item["event"] == "round" for item in entries), files, certificates, notes, not_checked)


def _check_certificate(project: Project, name: str, path: Path) -> Iterator[str]:
    """Compute a certificate again; what it rests on and is not at hand."""
    record = read_certificate(path).get("ledger") or {}
    own = bool(record) and Ledger(project.ledger).path(record["set"]).exists()
    for check in examine(path, ledgers=[project.ledger] if own else []).checks:
        if check.needed and not check.checked:
            yield f"{name}, {check.what}: {check.detail}"


def _check_records(project: Project) -> Iterator[str]:
    """Every record of the ledger follows its chain and reaches its head; those without a head are named."""
    logs = [ChainedLog(path) for path in sorted(project.ledger.glob("*.jsonl"))] if project.ledger.exists() else []
    for log in logs:
        if (broken := log.broken()) is not None:
            raise FaultError(
                f"the ledger entry {log.path} was changed",
                expected="a record that is only ever appended to",
                found=broken.reason,
                do="restore the file and its .head",
            )
    for log in (project.record_log, *logs):
        if not log.anchored:
            yield f"{log.path.name} has no head (of an earlier version): a cut at its end would not show"


def _shared_seals(project: Project) -> list[str]:
    """Sealed sets that are different sets, and still share images: one query of the first tells about the second."""
    sets: dict[str, frozenset[str]] = {}
    notes: list[str] = []
    for item in project.history():
        path = project.folder(item.name).roles
        if not path.exists():
            continue
        table = pq.read_table(path, columns=["example_id", "role"]).to_pylist()
        mine = frozenset(row["example_id"] for row in table if row["role"] == "sealed")
        for name, other in sets.items():
            if mine & other and mine != other:
                notes.append(f"{item.name} and {name} share {len(mine & other)} sealed images in two different sets")
        sets[item.name] = mine
    return notes


def _finished_without_a_line(project: Project, name: str) -> None:
    """A run that is done, and whose line is missing: it was cut off, or the process died in the last moment."""
    folder = project.folder(name)
    if folder.state.exists() and read_json(folder.state).get("status") == "done":
        raise FaultError(
            f"the round {name} is finished and is not in {project.lineage.name}",
            expected="a line for every finished round",
            do=f"if its process was killed at the very end: {resume_command(folder.root)}",
        )


def _check_chain(project: Project) -> None:
    broken = project.record_log.broken()
    if broken is not None:
        raise FaultError(
            f"{project.lineage} was changed",
            expected="a record that is only ever appended to",
            found=f"at the line of {broken.entry.get('round', FIRST)}: {broken.reason}",
            do="restore the file and its .head",
        )


def _check_files(base: Path, expected: Mapping[str, str], added: bool = True) -> Iterator[str]:
    for name, fingerprint in expected.items():
        path = base / name
        if not path.exists():
            raise FaultError(f"{path} is gone", expected=fingerprint, do="restore the file")
        found = fingerprint_file(path)
        if found != fingerprint:
            raise FaultError(f"{path} was changed", expected=fingerprint, found=found, do="restore the file")
    for name in sorted(list_files(base).keys() - expected.keys()) if added else ():
        yield f"{base.name}/{name} was added after the round"


def _check_ledger(project: Project, expected: Mapping[str, Any]) -> None:
    for name, reported in expected.items():
        path = project.ledger / name
        content = path.read_bytes()[: reported["bytes"]] if path.exists() else b""
        if fingerprint_bytes(content) != reported["fingerprint"]:
            raise FaultError(
                f"the ledger entry {path} was changed",
                expected="a record that is only ever appended to",
                do="restore the file",
            )
