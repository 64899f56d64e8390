"""Python in processes of its own that begin with torch and holdfast imported: forked from a server, not started anew.

A start costs seconds of imports, and some tests need a dozen. What these processes do, how they are killed and what
they leave behind is as real as in a process that was started. Tests of what is imported start their own.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

_IMPORTED = (
    "holdfast.cli.develop",
    "holdfast.cli.retrieve",
    "holdfast.data.retrieve.fetch",
    "holdfast.model.openclip_towers",
    "holdfast.report.page",
    "holdfast.rounds.develop",
)
_context = get_context("forkserver")
_context.set_forkserver_preload(list(_IMPORTED))


class Forked:
    """``python WORDS`` (``-m MODULE``, ``-c CODE`` or a script), running; what it prints goes to files."""

    def __init__(self, *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-process-")
        arguments = ([str(word) for word in words], str(cwd or Path.cwd()), dict(env or os.environ), self._folder.name)
        self._process = _context.Process(target=_python, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        """Until it ends, however long it takes."""
        self._process.join()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def printed(self) -> tuple[str, str]:
        """What it has written to stdout and stderr by now."""
        names = ("stdout", "stderr")
        paths = [Path(self._folder.name) / name for name in names]
        out, err = (path.read_text(errors="replace") if path.exists() else "" for path in paths)
        return out, err

    def communicate(self) -> tuple[str, str]:
        """All that it wrote, once it has ended."""
        self.wait()
        return self.printed()


def python(*words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Any:
    """``subprocess.run([sys.executable, *words], capture_output=True, text=True)``."""
    process = Forked(*words, cwd=cwd, env=env)
    out, err = process.communicate()
    return subprocess.CompletedProcess(list(words), process.wait(), out, err)


def ranks(function: Callable[..., None], arguments: tuple[Any, ...], count: int) -> list[int | None]:
    """Run ``function(rank, *arguments)`` in so many processes, to the end of all; their exit codes."""
    running = [_context.Process(target=function, args=(rank, *arguments)) for rank in range(count)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    return [process.exitcode for process in running]


def _python(words: list[str], cwd: str, environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    for output in (sys.stdout, sys.stderr):
        output.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    kind, *rest = words
    if kind == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        module, *rest = rest
        sys.argv = [module, *rest]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
