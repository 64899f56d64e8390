"""One step of retrieval, killed at its first event, at its second, and so on; each time the same step is run again.

    python killing.py STEP FOLDER WORK ARGUMENT

An event is a write (half of it reaches the file), a file that is created, moved, cut short or removed, a folder that is
made or removed, a wait for the disk. FOLDER is what the step starts from. Prints how many kills there were, and how the
folder that a killed step and its repetition leave differs from the one that an unbroken step leaves.
"""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb  # noqa: F401 - these are imported when first used: here once, not in each of the children
import numpy as np
import pyarrow.compute
import pyarrow.dataset  # noqa: F401

from holdfast.data.retrieve.clean import clean
from holdfast.data.retrieve.download import FetchLimits
from holdfast.data.retrieve.endpoint import EndpointConfig
from holdfast.data.retrieve.fetch import fetch
from holdfast.data.retrieve.images import ImageLimits
from holdfast.data.retrieve.img2dataset import adopt
from holdfast.data.retrieve.judge import judge_by_endpoint, judge_by_similarity, judge_none
from holdfast.data.retrieve.question import Question
from holdfast.data.retrieve.search import SearchQuery, search
from holdfast.data.retrieve.similarity import SimilarityConfig
from holdfast.data.retrieve.words import Words

_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod"}
_LIMITS = {"concurrency": 1, "connect_seconds": 300.0, "total_seconds": 300.0, "allow_private": True}


def _endpoint(out: Path, address: str) -> None:
    config = EndpointConfig(address, "m", concurrency=1, timeout_seconds=300.0)
    judge_by_endpoint(out, Question("strict", "fog"), config)


def _letters(texts: Any) -> np.ndarray:
    return np.array([[text.count(letter) + 0.01 for letter in "fogsunx"] for text in texts])


STEPS: dict[str, Callable[[Path, str], object]] = {
    "search": lambda out, source: search(source, SearchQuery(Words("fog")), out, threads=1),
    "judge": _endpoint,
    "judge-none": lambda out, _: judge_none(out),
    "judge-similarity": lambda out, _: judge_by_similarity(out, SimilarityConfig.of("fog"), _letters, "letters"),
    "fetch": lambda out, _: fetch(out, FetchLimits(**_LIMITS)),
    "fetch-restart": lambda out, _: fetch(
        out, FetchLimits(**_LIMITS, image=ImageLimits(longest_side=32)), restart=True
    ),
    "adopt": lambda out, source: adopt(Path(source), out, FetchLimits(**_LIMITS)),
    "clean": lambda out, _: clean(out, []),
}


class Killer:
    """Counts events below a folder, and ends this process at one of them as a power cut would."""

    def __init__(self, folder: Path, at: int) -> None:
        self._folder, self._at, self._count = str(folder), at, 0
        self._real_open, self._real_fsync = io.open, os.fsync
        io.open, os.fsync = self._open, self._fsync
        sys.addaudithook(self._audit)

    def event(self, before: Callable[[], object] = lambda: None) -> None:
        """One more; ``before`` is what still happens at the last."""
        if self._count == self._at:
            before()
            os.kill(os.getpid(), signal.SIGKILL)
        self._count += 1

    def _audit(self, name: str, given: tuple[Any, ...]) -> None:
        if name in _CHANGES and isinstance(given[0], str | bytes | os.PathLike):
            path = os.fsdecode(given[0])
            if path.startswith(self._folder) or not os.path.isabs(path):  # rmtree names files below an open folder
                self.event()

    def _fsync(self, handle: int) -> None:
        self.event()
        self._real_fsync(handle)

    def _open(self, path: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        below = isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._folder)
        if not below or not set(mode) & set("wax+"):
            return self._real_open(path, mode, *given, **named)
        self.event()
        return Writer(self._real_open(path, mode, *given, **named), self)


class Writer:
    """A file of which a kill leaves half a write."""

    def __init__(self, file: Any, killer: Killer) -> None:
        self._file, self._killer = file, killer

    def write(self, content: Any) -> int:
        def half() -> None:
            self._file.write(content[: len(content) // 2])
            self._file.flush()

        self._killer.event(half)
        return self._file.write(content)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def in_child(work: Callable[[], object]) -> int:
    """The exit status of a forked process that does ``work``; minus the signal that ended it."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder. Of the cache of answers, which only grows, the whole lines count."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    if (cache := "judge/answers.jsonl") in found:
        lines = (line for line in found[cache].splitlines() if line.startswith(b"{") and line.endswith(b"}"))
        found[cache] = b"\n".join(sorted(set(lines)))
    return found


def claims_too_much(out: Path, step: str, whole: dict[str, bytes]) -> bool:
    """Whether the manifest of a killed step calls it done while a file that belongs to it is not as it should be."""
    manifest = out / "manifest.json"
    name = step.partition("-")[0]
    if name != "clean" or not manifest.exists() or name not in json.loads(manifest.read_bytes())["steps"]:
        return False
    found = tree(out)
    return any(found.get(path) != content for path, content in whole.items() if path.startswith(f"{name}/"))


def main(step: str, base: Path, work: Path, argument: str) -> dict[str, Any]:
    run = STEPS[step]
    gc.freeze()  # children share what is here already

    def fresh(name: str) -> Path:
        out = work / name
        if base.exists():
            shutil.copytree(base, out)
        return out

    unbroken = fresh("unbroken")
    assert in_child(lambda: run(unbroken, argument)) == 0
    whole = tree(unbroken)
    problems: list[str] = []
    for kills in itertools.count():
        out = fresh(f"killed-{kills}")

        def broken(out: Path = out, kills: int = kills) -> None:
            Killer(out, kills)
            run(out, argument)

        status = in_child(broken)
        if status == 0:
            break
        if status != -signal.SIGKILL:
            problems.append(f"kill {kills}: the step itself failed with {status}")
        if claims_too_much(out, step, whole):
            problems.append(f"kill {kills}: the manifest claims what is not there")
        if in_child(lambda out=out: run(out, argument)) != 0:
            problems.append(f"kill {kills}: the second run failed")
        found = tree(out)
        differing = sorted(path for path in found.keys() | whole.keys() if found.get(path) != whole.get(path))
        if differing:
            problems.append(f"kill {kills}: {differing} differ")
        shutil.rmtree(out)
    return {"kills": kills, "problems": problems}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])))
