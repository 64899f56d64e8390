"""One writer at a time in a folder: a run, a packed store, a retrieval."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO

from holdfast.artifacts import LOCK
from holdfast.errors import UserError
from holdfast.files import not_writable

_HELD: set[IO[bytes]] = set()


@contextmanager
def one_writer(folder: Path) -> Generator[None]:
    """Hold ``folder`` for writing; a :class:`UserError` names the process that holds it already.

    The system releases the lock of a process that dies, however it dies; the file that is left behind means nothing.
    """
    path = folder / LOCK
    file = _acquire(path)
    _HELD.add(file)
    try:
        with suppress(OSError):  # a full disk: it is held all the same, and nobody can be told by whom
            path.write_text(json.dumps(_myself()), encoding="utf-8")
        yield
    finally:
        _HELD.discard(file)
        path.unlink(missing_ok=True)  # while it is held: whoever comes next makes a new one
        file.close()


def in_use(folder: Path) -> bool:
    """Whether a process holds ``folder`` right now."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _acquire(path: Path) -> IO[bytes]:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("ab")
        except OSError as error:
            raise not_writable(path.parent, error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(file, path):
                return file
            file.close()  # the one before us took its file along when it ended: the next try finds a new one
        except BlockingIOError:
            file.close()
            raise _in_use(path) from None
        except OSError as error:
            file.close()
            raise not_writable(path.parent, error) from error


def _same_file(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _myself() -> dict[str, str | int]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        # The subcommand alone: options may hold what is nobody's business.
        "command": " ".join([Path(sys.argv[0]).name, *takewhile(str.isalpha, sys.argv[1:3])]),
    }


def _in_use(path: Path) -> UserError:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        found = f"process {holder['pid']} on {holder['host']} since {holder['since']}: {holder['command']}"
    except (OSError, ValueError, KeyError, TypeError):  # it is writing those lines, or removing them, right now
        found = "another process"
    return UserError(
        f"{path.parent} is in use by another process",
        expected="one process at a time that writes there",
        found=found,
        do="wait until it has ended, or stop it; nothing was changed",
    )


def _let_go() -> None:
    """A forked child has the lock's file open, too, and would keep the lock of a parent that died."""
    for file in _HELD:
        file.close()
    _HELD.clear()


os.register_at_fork(after_in_child=_let_go)
