"""Runs the command line and kills its own process, with SIGKILL, at a chosen write.

    python tests/faults/killer.py N -- pack IN OUT --size 8

Every call in ``EVENTS`` has two points, just before it and just after it; the process dies at the N-th. With N = 0
nothing is killed. Where the command ends by itself, the number of points that were passed is written to the file
that HOLDFAST_KILLER_COUNT names. HOLDFAST_KILLER_AFTER = module.qualname begins to count when that function is first
entered: ``holdfast.rounds.develop.finish``, ``holdfast.data.pack._finish``.

    python tests/faults/killer.py each -- pack IN OUT-{} --size 8 -- pack IN OUT-{} --size 8

does so at every point, with the point's number in place of ``{}``, and then runs the second command to its end. It
prints a line of JSON a point: exit codes and what was printed. Each command runs in a forked process: what they have
in common is imported once (HOLDFAST_KILLER_IMPORT names further modules, separated by commas).
"""

from __future__ import annotations

import importlib
import json
import os
import shutil  # noqa: F401 - it looks at the functions of os when it is imported, and must see the real ones
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

EVENTS = ("replace", "rename", "fsync", "fdatasync", "pwrite", "unlink", "remove", "mkdir", "rmdir", "ftruncate")


class Killer:
    """Counts the points that the process passes and ends it at one of them."""

    def __init__(self, point: int, *, counting: bool = True) -> None:
        self.passed, self.counting = 0, counting
        self._point = point
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Put a point before and after every event. pathlib, shutil and tempfile call them through ``os`` as well."""
        for name in EVENTS:
            setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, event: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._pass()
            result = event(*arguments, **options)
            self._pass()
            return result

        return call

    def _pass(self) -> None:
        with self._lock:
            self.passed += self.counting
            if self.counting and self.passed == self._point:
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()  # nothing more happens, however late the signal arrives

    def count_from(self, name: str) -> None:
        """Count nothing until the function of that name is entered, whoever imported it under whatever name."""
        function = _function(name)
        twin = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        twin.__kwdefaults__ = function.__kwdefaults__

        def begin() -> FunctionType:
            self.counting = True
            return twin

        # Names that were bound to the function already keep it, so its code is what changes. Code brings no values
        # along but defaults, and finds this one by name.
        def entered(*arguments: Any, _begin: Any = None, **options: Any) -> Any:
            return _begin()(*arguments, **options)

        if function.__closure__ is not None:
            raise SystemExit(f"killer: {name} has a closure; name the function that calls it")
        function.__code__ = entered.__code__
        function.__defaults__, function.__kwdefaults__ = None, {"_begin": begin}


def _function(name: str) -> FunctionType:
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
            break
        except ModuleNotFoundError:
            continue
    else:
        raise SystemExit(f"killer: no module in {name}")
    for part in parts[length:]:
        found = getattr(found, part)
    while hasattr(found, "__wrapped__"):  # what a decorator, a context manager among them, was given
        found = found.__wrapped__
    return getattr(found, "__func__", found)


def run(point: int, arguments: list[str]) -> None:
    """Run ``holdfast`` with these arguments and die at the point; ends the process in any case."""
    after = os.environ.get("HOLDFAST_KILLER_AFTER", "")
    killer = Killer(point, counting=not after)
    if after:
        killer.count_from(after)
    from holdfast.cli import main

    sys.argv = ["holdfast", *arguments]
    killer.watch()
    try:
        main()
    finally:
        killer.counting = False
        if count := os.environ.get("HOLDFAST_KILLER_COUNT"):
            Path(count).write_text(str(killer.passed), encoding="utf-8")


def each(broken: list[str], resumed: list[str]) -> Iterator[dict[str, Any]]:
    """Kill the first command at every point, and run the second one to its end afterwards."""
    for module in ("holdfast.cli", *filter(None, os.environ.get("HOLDFAST_KILLER_IMPORT", "").split(","))):
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        count = Path(folder) / "count"
        os.environ["HOLDFAST_KILLER_COUNT"] = str(count)
        code, output = _in_child(0, broken, 0)
        yield {"point": 0, "code": code, "output": output}
        for point in range(1, int(count.read_text(encoding="utf-8")) + 1):
            killed, _ = _in_child(point, broken, point)
            code, output = _in_child(0, resumed, point)
            yield {"point": point, "killed": killed == -signal.SIGKILL, "code": code, "output": output}


def _in_child(point: int, arguments: list[str], number: int) -> tuple[int, str]:
    """Exit code (minus the signal) and output of the command in a process of its own."""
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            try:
                run(point, [argument.replace("{}", str(number)) for argument in arguments])
            except SystemExit as end:
                _leave(end.code if isinstance(end.code, int) else 0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                _leave(1)
            _leave(0)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read().decode("utf-8", "replace")


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """``killer.py N -- COMMAND`` or ``killer.py each -- COMMAND -- COMMAND``."""
    try:
        point, separator, *arguments = sys.argv[1:]
    except ValueError:
        raise SystemExit(__doc__) from None
    if separator != "--":
        raise SystemExit(__doc__)
    if point == "each":
        second = arguments.index("--") if "--" in arguments else len(arguments)
        for line in each(arguments[:second], arguments[second + 1 :] or arguments[:second]):
            print(json.dumps(line), flush=True)
    else:
        run(int(point), arguments)


if __name__ == "__main__":
    main()
