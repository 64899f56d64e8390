"""SIGKILL at random moments of whole commands, in forked children of one process; then the same command again.

    python -m tests.faults.random_kills FOLDER KILLS SEED [KIND ...]

prints one JSON object: by kind, how often it was killed and what went wrong. The same work without a kill says what the
end must be.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_digits

from holdfast.artifacts import RunFolder
from holdfast.config import SourceConfig, TuneConfig, parse
from holdfast.data.pack import pack
from holdfast.model.openclip import load_towers
from holdfast.rounds.tune import tune
from tests.faults.forked import ROUND, CertifyRun, Develop, InProject, differences, in_child


class Whole(Develop):
    """``develop`` from its first write; what a user types again depends on whether the run had begun."""

    def again(self, root: Path) -> None:
        if RunFolder(self.run(root)).state.exists():
            super().again(root)
        else:
            self.first(root)


class WholeInProject(InProject):
    """The same as a round of a project."""

    def again(self, root: Path) -> None:
        if RunFolder(self.run(root)).state.exists():
            super().again(root)
        else:
            self.first(root)


class Tune(Whole):
    """``holdfast tune``."""

    def _tune(self, root: Path, *, resume: bool) -> None:
        values = {"data": ROUND["data"], "model": {"architecture": "tiny"}, "train": {**ROUND["train"], "steps": 6}}
        tune(parse(TuneConfig, values, "a base"), self.run(root), root, resume=resume, quiet=True)

    def first(self, root: Path) -> None:
        self._tune(root, resume=False)

    def again(self, root: Path) -> None:
        self._tune(root, resume=RunFolder(self.run(root)).state.exists())


class Pack(Whole):
    """``holdfast pack`` of a folder of pictures."""

    def first(self, root: Path) -> None:
        photos = root.parent / "photos"
        if not photos.exists():
            _write_pictures(photos)
        pack(SourceConfig(kind="folder", path=photos), self.run(root), size=48)

    def again(self, root: Path) -> None:
        self.first(root)


class Certify(CertifyRun):
    """``holdfast certify RUN``: what went before it is not killed."""

    def prepare(self, root: Path) -> None:
        super().first(root)

    def first(self, root: Path) -> None:
        self.again(root)


KINDS: dict[str, Develop] = {
    "develop": Whole(), "project": WholeInProject(), "tune": Tune(), "pack": Pack(), "certify": Certify(),
}  # fmt: skip


def _write_pictures(folder: Path) -> None:
    values, labels = load_digits(return_X_y=True)
    for number, (image, label) in enumerate(zip(values[:600], labels, strict=False)):
        path = folder / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image.reshape(8, 8) * 15.9).astype("uint8")).resize((64, 64)).save(path)


def killed_after(work: Callable[[], object], seconds: float) -> int:
    """Run ``work`` in a child and kill it after so long; how it ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def try_kind(kind: Develop, folder: Path, kills: int, dice: random.Random) -> dict[str, Any]:
    begun, whole = folder / "begun", folder / "whole"
    begun.mkdir(parents=True)
    if isinstance(kind, Certify):
        assert in_child(lambda: kind.prepare(begun)) == 0
    shutil.copytree(begun, whole)
    start = time.monotonic()
    assert in_child(lambda: kind.first(whole)) == 0
    lasted = time.monotonic() - start
    survived, wrong = 0, []
    while survived + len(wrong) < kills:
        parts = folder / "parts"
        shutil.copytree(begun, parts)
        code = killed_after(lambda: kind.first(parts), dice.uniform(0, lasted))  # noqa: B023
        if code == -signal.SIGKILL:
            code = in_child(lambda: kind.again(parts))  # noqa: B023
            different = [f"exit {code}"] if code else differences(kind, whole, parts)
            survived += not different
            wrong += [different] if different else []
        shutil.rmtree(parts)
    return {"killed": kills, "survived": survived, "wrong": wrong}


def main(folder: Path, kills: int, seed: int, names: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    load_towers("tiny", None, seed=0)
    load_digits()
    dice = random.Random(seed)
    chosen = {name: KINDS[name] for name in names or KINDS}
    return {name: try_kind(kind, folder / name, kills, dice) for name, kind in chosen.items()}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
