"""Runs that are killed at every write of their last part, in forked children of one process that trains nothing itself.

    python -m tests.faults.forked KIND FOLDER EVERY

prints one JSON object: how many points there are, at how many of them the work was killed, and at which it did not come
to the same end when it went on. KIND is ``develop``, ``project`` or ``certify``; one point in EVERY is tried.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

from holdfast.artifacts import RunFolder
from holdfast.certify.ledger import Ledger
from holdfast.chained import ChainedLog
from holdfast.config import RoundConfig, parse
from holdfast.files import read_json, write_json
from holdfast.model.openclip import load_towers
from holdfast.rounds.certify_run import certify_run
from holdfast.rounds.develop import develop, resume_config
from holdfast.rounds.next_round import develop_in, resume_in
from holdfast.rounds.project import Project
from holdfast.rounds.verify import verify_project
from tests.faults.killer import Killer

ROUND: dict[str, Any] = {
    "task": {"target": "eight", "template": "the digit {}"},
    "data": {
        "source": {"kind": "digits"},
        "constraint_images": 8,
        "target_images": 20,
        "roles": {"dev": 8, "sealed": 60, "test": 8},
    },
    "model": {"architecture": "tiny", "head_rank": 2},
    "train": {"steps": 2, "batch": 8, "images_per_task": 2, "device": "cpu", "log_every": 1},
    "evaluate": {"every": 2},
    "certify": {"margin": 0.99, "target_gain": False},
    "candidates": {"target_bias": [0.0], "interpolation": [0.0, 1.0]},
}
# How fast training was; the optimizer's state; the empty file of a lock, which a process that dies does not hold: one
# that is killed after its last write leaves it, and going on with a finished run changes nothing.
SKIPPED = ("metrics.jsonl", "checkpoints/", ".lock")


def in_child(work: Callable[[], object], kill_at: int = 0, count: Path | None = None) -> int:
    """Run ``work`` in a child that is killed at a point; how it ended. ``count`` is told how many points it passed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            points = Killer(kill_at)
            points.watch()
            work()
            points.counting = False
            if count is not None:
                count.write_text(str(points.passed))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def settings(**certify: Any) -> RoundConfig:
    return parse(RoundConfig, {**ROUND, "certify": {**ROUND["certify"], "ledger": "ledger", **certify}}, "a round")


class Develop:
    """``holdfast develop``, from the end of training to the last file."""

    config = settings()

    def run(self, root: Path) -> Path:
        return root / "run"

    def first(self, root: Path) -> None:
        """Everything, in a new folder."""
        develop(self.config, self.run(root), root, quiet=True)

    def again(self, root: Path) -> None:
        """What a user does after a kill."""
        config, origin = resume_config(self.run(root))
        develop(config, self.run(root), origin, resume=True, quiet=True)

    def ledger(self, root: Path) -> Path:
        return root / "ledger"

    def check(self, root: Path) -> None:
        """What must hold at the end besides the files."""


class InProject(Develop):
    """The same as a round of a project, to the line of its lineage."""

    config = parse(RoundConfig, ROUND, "a round")

    def run(self, root: Path) -> Path:
        return root / "project" / "rounds" / "0001-fog"

    def first(self, root: Path) -> None:
        develop_in(Project.open(root / "project", create=True), self.config, root, title="fog", quiet=True)

    def again(self, root: Path) -> None:
        config, origin = resume_config(self.run(root))
        resume_in(Project.open(root / "project"), self.run(root), config, origin, quiet=True)

    def ledger(self, root: Path) -> Path:
        return root / "project" / "ledger"

    def check(self, root: Path) -> None:
        found = verify_project(root / "project")
        assert (found.rounds, found.certificates, found.notes) == (1, 1, []), found


class CertifyRun(Develop):
    """``holdfast certify RUN`` of a finished run."""

    config = settings(look=False)

    def again(self, root: Path) -> None:
        if not RunFolder(self.run(root)).certificate.exists():
            certify_run(self.run(root))


KINDS: dict[str, Develop] = {"develop": Develop(), "project": InProject(), "certify": CertifyRun()}


def contents(root: Path) -> dict[str, bytes]:
    """Every file of a run that does not depend on the clock."""
    names = {path: path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for path, name in names.items() if not name.startswith(SKIPPED)}


def ledger_events(ledger: Path) -> list[Any]:
    """The ledger's events, without their times."""
    sets = [Ledger(ledger).entries(f"sha256:{path.stem}") for path in sorted(ledger.glob("*.jsonl"))]
    return [[(entry["event"], entry.get("number"), entry.get("passed")) for entry in entries] for entries in sets]


def differences(kind: Develop, whole: Path, parts: Path) -> list[str]:
    """In what a run that was killed and went on differs from one that was not."""
    ours, theirs = contents(kind.run(parts)), contents(kind.run(whole))
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if ledger_events(kind.ledger(parts)) != ledger_events(kind.ledger(whole)):
        different.append(f"ledger: {ledger_events(kind.ledger(parts))}")
    if in_child(lambda: kind.check(parts)) != 0:
        different.append("check")
    return different


def write_head(path: Path) -> None:
    """The head of a log as its entries are now."""
    log = ChainedLog(path)
    head = log.now()
    write_json(log.head_path, {"entries": head.entries, "fingerprint": head.fingerprint})


def tear(ledger: Path) -> None:
    """Cut the last line of the ledger in half, as a crash of a writer that appends would."""
    for path in ledger.glob("*.jsonl"):
        content = path.read_bytes()
        last = content.rstrip(b"\n").rfind(b"\n") + 1
        path.write_bytes(content[: (last + len(content)) // 2])
        write_head(path)  # it is written after the entry: that writer did not come to it


def trained(kind: Develop, folder: Path) -> Path:
    """A run that was killed when its training was over: the last checkpoint is there and nothing else."""
    root = folder / "trained"
    root.mkdir()
    assert in_child(lambda: kind.first(root)) == 0
    if isinstance(kind, CertifyRun):
        return root
    run = RunFolder(kind.run(root))
    for path in (run.result, run.certificate, run.settled, *run.predictions("x", "y").parent.glob("*sealed*")):
        path.unlink(missing_ok=True)
    for path in (run.model, run.tested, kind.ledger(root)):
        shutil.rmtree(path, ignore_errors=True)
    for pattern in ("*@*", "refit*"):
        for path in run.predictions("x", "y").parent.glob(pattern):
            path.unlink()
    state = read_json(run.state)
    run.state.write_text(json.dumps({**state, "status": "training"}))
    if isinstance(kind, InProject):
        project = Project.open(root / "project")
        lines = project.lineage.read_bytes().splitlines(keepends=True)
        project.lineage.write_bytes(b"".join(line for line in lines if b'"event":"first"' in line))
        write_head(project.lineage)
    return root


def main(name: str, folder: Path, every: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    load_towers("tiny", None, seed=0)  # whatever is imported here is not imported again by every child
    load_digits()
    kind = KINDS[name]
    begun = trained(kind, folder)
    whole = folder / "whole"
    shutil.copytree(begun, whole)
    assert in_child(lambda: kind.again(whole), count=folder / "points") == 0
    assert RunFolder(kind.run(whole)).certificate.exists()
    before = contents(kind.run(whole))
    assert in_child(lambda: kind.again(whole)) == 0
    assert contents(kind.run(whole)) == before, "going on with a finished run changed it"
    count = int((folder / "points").read_text())
    failed: dict[str, list[str]] = {}
    tried = 0
    for point in range(1 + (count // 2) % every, count + 1, every):
        killed = folder / "killed"
        shutil.copytree(begun, killed)
        assert in_child(lambda: kind.again(killed), kill_at=point) == -signal.SIGKILL  # noqa: B023
        ended = [entry[-1][0] for entry in ledger_events(kind.ledger(killed)) if entry]
        # A line that its writer saw whole is not torn afterwards.
        for torn in (False, True) if "query" in ended else (False,):
            parts = folder / "parts"
            shutil.copytree(killed, parts)
            if torn:
                tear(kind.ledger(parts))
            tried += 1
            code = in_child(lambda: kind.again(parts))  # noqa: B023
            wrong = differences(kind, whole, parts) if code == 0 else [f"exit {code}"]
            if wrong:
                failed[f"{point}{' torn' if torn else ''}"] = wrong
            shutil.rmtree(parts)
        shutil.rmtree(killed)
    return {"points": count, "tried": tried, "failed": failed}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
