"""A project: models as a lineage, every round with its parent, its data, its verdict and the bytes it left behind.

    project.json        that this is a project
    first/              the first model, frozen
    rounds/0001-name/   run folders
    rounds/0001-name.json  who its parent is; written before the run begins
    lineage.jsonl       one line a finished round: a ChainedLog
    ledger/             sealed sets

Copying the folder moves the project. A round is begun by making its folder, which only one process can; it is finished
by appending its line under a lock. A kill at any moment leaves a project that can be read: at worst with a round that
is not finished. A round that was killed before it began is taken up by the next one of its name.

Nothing here imports torch: a lineage is read, compared and verified on any machine.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from holdfast.artifacts import LOCK, RunFolder, resume_command
from holdfast.chained import ChainedLog
from holdfast.errors import UserError, nearest
from holdfast.files import (
    fingerprint_bytes,
    fingerprint_file,
    fingerprint_json,
    is_temporary,
    not_writable,
    read_json,
    round_names,
    write_json,
)
from holdfast.locks import in_use, one_writer

FORMAT = "holdfast-project/1"
FIRST = "first"
# Left out of a round's list of files: working state of the training, and what can be made again at any time.
_PASSING = ("checkpoints/",)
_REPORTS = re.compile(r"^report\.(html|md|json)$")


@dataclass(frozen=True)
class ProjectRound:
    """One finished round, as its line says."""

    name: str
    parent: str  # a round's name, or ``first``
    entry: Mapping[str, Any]

    @property
    def target(self) -> str:
        """The class that was to improve."""
        return str(self.entry["target"])

    @property
    def verdict(self) -> str | None:
        """certified, undecided, or None where nothing was sealed or looked at."""
        return self.entry["verdict"]

    @property
    def kept_old(self) -> bool:
        """Whether the parent's model was handed back."""
        return bool(self.entry["kept_old"])

    @property
    def accuracy(self) -> dict[str, float]:
        """Accuracy of every class of the model that was handed back."""
        return dict(self.entry["accuracy"]["new"])

    def change(self, name: str) -> float | None:
        """What the round changed on a class, old and new model on the same images; None where one did not know it."""
        accuracy = self.entry["accuracy"]
        if name not in accuracy["new"] or name not in accuracy["old"]:
            return None
        return float(accuracy["new"][name] - accuracy["old"][name])


class Project:
    """A project folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def open(cls, root: Path, *, create: bool = False) -> Project:
        """Open a project; ``create`` makes one in a folder that is not there yet, or is empty."""
        project = cls(root)
        if not project._file.exists():
            if not create:
                raise UserError(f"{root} is not a project", expected="a folder made by `holdfast develop --project`")
            if root.exists() and any(path for path in root.iterdir() if path.name not in ("rounds", "lock")):
                raise UserError(f"{root} is not empty and no project", do="choose another folder")
            project.rounds.mkdir(parents=True, exist_ok=True)
            with project._locked():
                if not project._file.exists():
                    write_json(project._file, {"format": FORMAT})
        if read_json(project._file).get("format") != FORMAT:
            raise UserError(f"{root} was written by another version", expected=FORMAT)
        return project

    @classmethod
    def around(cls, run: Path) -> Project | None:
        """The project that a run folder belongs to."""
        root = run.resolve().parent.parent
        return cls(root) if run.resolve().parent.name == "rounds" and (root / "project.json").exists() else None

    # -- places -----------------------------------------------------------------------------------------------------

    @property
    def _file(self) -> Path:
        return self.root / "project.json"

    @property
    def lineage(self) -> Path:
        """The record of finished rounds."""
        return self.root / "lineage.jsonl"

    @property
    def rounds(self) -> Path:
        """Where run folders lie."""
        return self.root / "rounds"

    @property
    def ledger(self) -> Path:
        """The ledger of the project's sealed sets."""
        return self.root / "ledger"

    @property
    def first(self) -> Path:
        """The first model."""
        return self.root / FIRST

    def folder(self, name: str) -> RunFolder:
        """The run folder of a round."""
        return RunFolder(self.rounds / name)

    def model(self, name: str) -> Path:
        """The model that a round handed back; of ``first``, the first one."""
        return self.first if name == FIRST else self.folder(name).model

    # -- reading ----------------------------------------------------------------------------------------------------

    def history(self) -> list[ProjectRound]:
        """Finished rounds, in the order in which they were finished."""
        entries = [entry for entry in self.entries() if entry["event"] == "round"]
        return [ProjectRound(entry["round"], entry["parent"], entry) for entry in entries]

    def entries(self) -> list[dict[str, Any]]:
        """Lines of the record as they stand; one that was cut short by a crash is passed over."""
        return [entry for entry in self.record_log.entries() if "event" in entry and "fingerprint" in entry]

    @property
    def record_log(self) -> ChainedLog:
        """The record of finished rounds as a log."""
        return ChainedLog(self.lineage)

    def unfinished(self) -> list[str]:
        """Rounds that were begun and have no line yet."""
        done = {item.name for item in self.history()}
        begun = [path.name for path in sorted(self.rounds.iterdir()) if path.is_dir()] if self.rounds.exists() else []
        return [name for name in begun if name not in done]

    def find(self, name: str) -> ProjectRound:
        """A finished round by its name, its number, or the part behind its number."""
        history = self.history()
        matching = [item for item in history if name in round_names(item.name)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise UserError(f"{name!r} means several rounds", found=", ".join(item.name for item in matching))
        known = [FIRST, *(item.name for item in history)]
        raise UserError(f"{self.root} has no round {name!r}", do=nearest(name, known))

    def resolve(self, name: str | None) -> str:
        """The model that a name stands for: as named, or else what the last round handed back.

        A round that kept the old model stands for its parent: that is the model it handed back.
        """
        history = {item.name: item for item in self.history()}
        if name is None:
            name = next(reversed(history), FIRST)
        found = FIRST if name == FIRST else self.find(name).name
        while found != FIRST and history[found].kept_old:
            found = history[found].parent
        return found

    def parent_of(self, name: str) -> str:
        """The parent of a round, finished or not."""
        return str(read_json(self.rounds / f"{name}.json")["parent"])

    def ancestors(self, name: str) -> list[str]:
        """A round and those before it, the first model last."""
        parents = {item.name: item.parent for item in self.history()}
        line = [name]
        while line[-1] != FIRST:
            line.append(parents[line[-1]])
        return line

    def gained(self, name: str) -> list[str]:
        """Targets of the rounds that a model comes from: what they gained is to be kept."""
        targets = {item.name: item.target for item in self.history() if not item.kept_old}
        return [targets[ancestor] for ancestor in reversed(self.ancestors(name)) if ancestor in targets]

    def accuracy(self) -> dict[str, list[float | None]]:
        """Class -> its accuracy under the first model and after each round; None where it was not judged."""
        history = self.history()
        first: dict[str, float] = {}
        for item in history:
            if item.parent == FIRST:
                first = {**item.entry["accuracy"]["old"], **first}
        names = dict.fromkeys([*first, *(name for item in history for name in item.accuracy)])
        return {name: [first.get(name), *(item.accuracy.get(name) for item in history)] for name in names}

    # -- writing ----------------------------------------------------------------------------------------------------

    @contextmanager
    def begin(self, title: str, parent: str) -> Generator[str]:
        """Take a number for a new round and note its parent; the round's name. Its folder is made, empty, and held.

        A round that was refused before it wrote anything is forgotten again.
        """
        slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40] or "round"
        with ExitStack() as held:
            with self._locked():
                taken = [int(path.name[:4]) for path in self.rounds.iterdir() if re.match(r"\d{4}-", path.name)]
                name = self._never_begun(slug) or f"{max(taken, default=0) + 1:04d}-{slug}"
                # The note comes first: a kill in between leaves a name that the next round takes up.
                write_json(self.rounds / f"{name}.json", {"parent": parent, "time": _now()})
                (self.rounds / name).mkdir(exist_ok=True)
                held.enter_context(one_writer(self.rounds / name))
            try:
                yield name
            finally:
                if not self.folder(name).state.exists():
                    shutil.rmtree(self.rounds / name, ignore_errors=True)
                    (self.rounds / f"{name}.json").unlink(missing_ok=True)

    def _never_begun(self, slug: str) -> str | None:
        """A round of that name whose process died before it wrote its first file."""
        for note in sorted(self.rounds.glob(f"[0-9][0-9][0-9][0-9]-{slug}.json")):
            folder = self.folder(note.stem)
            if not folder.state.exists() and not in_use(folder.root):
                return note.stem
        return None

    def record_first(self) -> None:
        """Write down the bytes of the first model, once."""
        files = list_files(self.first)
        with self._locked():
            if not any(entry["event"] == FIRST for entry in self.entries()):
                self.record_log.append({"event": FIRST, "files": files})

    def record(self, name: str) -> ProjectRound:
        """Write down a finished round: what it was, what came of it, and every byte it left."""
        folder = self.folder(name)
        files = list_files(folder.root)
        note = fingerprint_file(self.rounds / f"{name}.json")
        entry = {"event": "round", "round": name, "parent": self.parent_of(name), **describe(folder), "files": files}
        entry["note"] = note
        with self._locked():
            known = {item.name for item in self.history()}
            if name not in known:
                self.record_log.append({**entry, "ledger": self._ledger_bytes()})
        return self.find(name)

    def _ledger_bytes(self) -> dict[str, Any]:
        """The ledger only grows: its bytes so far must be the beginning of its bytes ever after."""
        found = sorted(self.ledger.glob("*.jsonl")) if self.ledger.exists() else []
        return {
            path.name: {"bytes": len(content), "fingerprint": fingerprint_bytes(content)}
            for path, content in ((path, path.read_bytes()) for path in found)
        }

    @contextmanager
    def _locked(self) -> Generator[IO[bytes], None, None]:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            opened = (self.root / "lock").open("ab")
        except OSError as error:
            raise not_writable(self.root, error) from error
        with opened as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, and by the system after a crash
            yield file


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def list_files(root: Path) -> dict[str, str]:
    """Every file that belongs to a round, with its fingerprint."""
    result: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        passing = name.startswith(_PASSING) or path.name == LOCK or is_temporary(path)
        if path.is_file() and not passing and not _REPORTS.match(name):
            result[name] = fingerprint_file(path)
    return result


def describe(folder: RunFolder) -> dict[str, Any]:
    """What the record says of a finished run."""
    state, result, config = read_json(folder.state), read_json(folder.result), read_json(folder.config)
    if state.get("status") != "done":
        raise UserError(f"the round {folder.root} is not finished", do=f"go on with: {resume_command(folder.root)}")
    role = "test" if result.get("test") else "dev"
    tasks: dict[str, Any] = result[role]["tasks"]
    old = {name: float(item["old_accuracy"]) for name, item in tasks.items()}
    new = {name: float(item["new_accuracy"]) for name, item in tasks.items()}
    # Dev figures of a round that keeps the old model are about the candidate that it did not take.
    kept = bool(result["kept_old"])
    certificate = result.get("certificate") or {}
    return {
        "target": result["target"],
        "protected": result["protected"],
        "verdict": result["verdict"],
        "kept_old": kept,
        "chosen": result["chosen"],
        "reason": result["reason"],
        "against_first": certificate.get("against_first"),
        "accuracy": {"role": role, "old": old, "new": old if kept else new},
        "model": read_json(folder.model / "model.json")["fingerprint"],
        "parent_model": state["parent"],
        "data": state["data"],
        "config": fingerprint_json(config),
        "seed": config.get("seed"),
        "method": (config.get("method") or {}).get("name"),
        "training": result.get("training"),
        "candidates": [item["name"] for item in result["candidates"]],
    }
